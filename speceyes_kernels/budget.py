"""How many draft tokens of each request a step verifies: :func:`allocate_budget` and the cost of a step."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal

import numpy as np
import torch

from . import _checks, _native, budget_reference

#: What a token costs below the arithmetic intensity, in empty steps: filling a step up to 256 tokens makes it 1/16
#: longer. An assumption, kept small so that it only keeps hopeless drafts out; :meth:`CostModel.observe` replaces it.
DEFAULT_SLOPE = 1.0 / 4096
#: Tokens a step from which an A100 is bound by arithmetic (AgentSpec, arXiv 2608.24004).
DEFAULT_INTENSITY = 256.0

_MAX_TOKENS = 2**31 - 1


def _as_count(value: object, name: str, low: int = 0) -> int:
    if type(value) is int and low <= value <= _MAX_TOKENS:
        return value
    count = _checks.as_int(value, name, f"an int in {low}..{_MAX_TOKENS}")
    if not low <= count <= _MAX_TOKENS:
        raise ValueError(f"{name}: expected an int in {low}..{_MAX_TOKENS}, got {count}")
    return count


def _as_number(value: object, name: str, low: float, high: float) -> float:
    number = _checks.as_number(value, name, f"a number in [{low:g}, {high:g}]")
    if not low <= number <= high:
        raise ValueError(f"{name}: expected a number in [{low:g}, {high:g}], got {number!r}")
    return number


class CostModel:
    """Modelled time of a step over ``n`` tokens: ``T(n) = max(1, n / intensity) + slope * n``, in empty steps.

    Parameters
    ----------
    intensity : float
        Tokens a step from which arithmetic, not memory, bounds it. 256 on an A100 (AgentSpec, arXiv 2608.24004).
    slope : float
        Cost of a token below that, in empty steps. The default, 1/4096, is an assumption (see `DEFAULT_SLOPE`) that
        holds until step times have been observed.

    Notes
    -----
    :meth:`observe` fits the slope to measured times. Steps of about equal size share a bucket, of which the last 15
    times are kept; buckets with 5 times or more give their medians, and the slope is the weighted median of the slopes
    between all pairs of those (Theil-Sen; weight: how far apart they lie), so that a third of all times may be
    outliers. Steps above ``intensity`` are not fitted.
    """

    _KEPT, _NEEDED, _REFIT = 15, 5, 32

    def __init__(self, intensity: float = DEFAULT_INTENSITY, slope: float = DEFAULT_SLOPE) -> None:
        self.intensity = _as_number(intensity, "intensity", 1, 1e9)
        self._slope = _as_number(slope, "slope", 0, 1e3)
        self._seconds: float | None = None
        self._buckets: dict[int, deque[tuple[int, float]]] = {}
        self._new = 0

    def __repr__(self) -> str:
        return f"CostModel(intensity={self.intensity:g}, slope={self.slope:.3g})"

    @property
    def slope(self) -> float:
        """Cost of a token below ``intensity``, in empty steps: given, or fitted."""
        if self._new >= self._REFIT:
            self._fit()
        return self._slope

    @property
    def seconds(self) -> float | None:
        """Fitted time of an empty step in seconds; None before there is a fit."""
        if self._new >= self._REFIT:
            self._fit()
        return self._seconds

    def time(self, tokens: int) -> float:
        """T(tokens), in empty steps."""
        return budget_reference.step_time(_as_count(tokens, "tokens"), self.intensity, self.slope)

    def free_tokens(self, plain_tokens: int) -> int:
        """M(b) = max(0, intensity - b): draft tokens that a step of ``plain_tokens`` has room for."""
        return budget_reference.free_tokens(_as_count(plain_tokens, "plain_tokens"), self.intensity)

    def observe(self, tokens: int, seconds: float) -> None:
        """Adds a measured step.

        Parameters
        ----------
        tokens : int
            All tokens of the step: plain, prefill and draft tokens.
        seconds : float
            Its time.

        Raises
        ------
        ValueError
            No token, or a time that is not positive and finite.
        """
        tokens = _as_count(tokens, "tokens", 1)
        seconds = _checks.as_number(seconds, "seconds", "a number above 0")
        if not 0 < seconds < math.inf:
            raise ValueError(f"seconds: expected a finite number above 0, got {seconds!r}")
        if tokens > self.intensity:
            return
        bucket = tokens if tokens < 16 else 16 + int(4 * math.log2(tokens / 16))
        self._buckets.setdefault(bucket, deque(maxlen=self._KEPT)).append((tokens, seconds))
        self._new += 1

    def _fit(self) -> None:
        self._new = 0
        kept = [np.median(np.asarray(b), axis=0) for b in self._buckets.values() if len(b) >= self._NEEDED]
        if len(kept) < 2:
            return
        tokens, seconds = np.asarray(kept).T
        if tokens.max() - tokens.min() < max(8, tokens.min()):  # too close together to tell a slope
            return
        i, j = np.triu_indices(len(kept), 1)
        apart = np.abs(tokens[j] - tokens[i])
        far = apart > 0
        slopes = (seconds[j] - seconds[i])[far] / (tokens[j] - tokens[i])[far]
        order = np.argsort(slopes)
        weight = np.cumsum(apart[far][order])
        slope = max(0.0, float(slopes[order][np.searchsorted(weight, weight[-1] / 2)]))
        # A step cannot cost less than nothing: where tokens explain all of the time, an empty step is a thousandth.
        empty = max(float(np.median(seconds - slope * tokens)), 1e-3 * float(np.median(seconds)))
        self._seconds, self._slope = empty, slope / empty


def _array(value: Any, name: str, dtype: type, shape: tuple[int | None, ...]) -> np.ndarray:
    """A C-contiguous array of ``dtype`` from a numpy array, a CPU tensor or nested lists of numbers."""
    if isinstance(value, torch.Tensor) and not value.is_cpu:
        raise ValueError(f"{name}: expected a tensor on cpu, got {_checks.describe(value)}; call .cpu() first")
    array = _checks.as_array(value, name)
    wanted = "floats" if dtype is np.float32 else "integers"
    kinds = "fiu" if dtype is np.float32 else "iu"
    if array.dtype.kind not in kinds and array.size:
        raise TypeError(f"{name}: expected {wanted}, got an array of {array.dtype}")
    if array.ndim != len(shape) or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True)):
        text = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected an array of shape ({text}), got {array.shape}")
    if dtype is np.int32 and array.size and (array.min() < 0 or array.max() > _MAX_TOKENS):
        raise ValueError(f"{name}: expected values in 0..{_MAX_TOKENS}, got {array.min()}..{array.max()}")
    return np.ascontiguousarray(array, dtype=dtype)


def _check_survival(survival: np.ndarray, lengths: np.ndarray) -> None:
    rows, width = survival.shape
    if lengths.size and int(lengths.max()) > width:
        row = int(lengths.argmax())
        raise ValueError(f"lengths: expected at most {width} (columns of survival), got {lengths[row]} in row {row}")
    used = np.arange(width) < lengths[:, None]
    before = np.concatenate([np.ones((rows, min(width, 1)), np.float32), survival[:, :-1]], axis=1)
    wrong = used & ~((survival >= 0) & (survival <= before))  # NaN is wrong too
    if wrong.any():
        row, position = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"survival: expected probabilities in [0, 1] that do not rise along a row, got {survival[row, position]} "
            f"after {before[row, position]} in row {row} at position {position}; multiply per-token probabilities up"
        )


def allocate_budget(
    survival: Any = None,
    lengths: Any = None,
    *,
    policy: Literal["survival", "agentspec"] = "survival",
    plain_tokens: int | None = None,
    token_budget: int | None = None,
    cost: CostModel | None = None,
    min_survival: float = 0.0,
    found: Any = None,
    agreeing: Any = None,
    prefix_lengths: Any = None,
    alpha: float = 4096.0,
    gmin: float = 0.1,
    form: Literal["equation", "algorithm"] = "equation",
    backend: Literal["auto", "cpu", "reference"] = "auto",
) -> np.ndarray:
    """Chooses how many draft tokens of each request the next step verifies.

    Every row is a request that decodes one token in this step; requests without a draft are rows of length 0. Inputs
    are numpy arrays, CPU tensors or lists.

    Parameters
    ----------
    survival : array, optional
        float32 [B, L]: probability that draft positions 0..i of a row are all accepted; does not rise along a row.
        Any drafter's: the running product of its per-token probabilities. Needed by ``policy="survival"``.
    lengths : array, optional
        int32 [B]: draft tokens there are. None: L for every row.
    policy : str
        ``"survival"`` takes the batch's best positions (ties: earlier position, then lower row) as long as the modelled
        goodput ``(B + sum of survival) / T(b + D)`` rises; that is its maximum over all choices. ``"agentspec"`` is the
        rule of AgentSpec (arXiv 2608.24004): confidence ``g = c/n p(n)``, batch budget ``B_t = floor(alpha / B)``,
        ``L = max(prefix, floor(B_t g / sum g))``.
    plain_tokens : int, optional
        b: tokens of the step without drafts, those of prefills included. None: B.
    token_budget : int, optional
        Most draft tokens of the batch. None: M(b) = max(0, intensity - b). When given, the step counts as free up to
        ``b + token_budget``: positions are then refused for ``min_survival`` and the slope's price only.
    cost : CostModel, optional
        None: ``CostModel()``.
    min_survival : float
        ``"survival"`` drafts no position below.
    found, agreeing, prefix_lengths : array, optional
        int32 [B], for ``"agentspec"``: candidate continuations found (n), how many of them start with the most frequent
        prefix (c), and that prefix's length. The prefix is at most as long as the draft (``lengths``).
    alpha, gmin : float
        Of ``"agentspec"``: draft tokens of a batch times its size, and the confidence in a lone candidate. The paper
        names no values; these defaults are ours.
    form : str
        ``"equation"``: p(n) = gmin + (1 - gmin)(1 - e^(1-n)), the paper's Equation 1. ``"algorithm"``: e^-n in place of
        e^(1-n), its Algorithm 2.
    backend : str
        ``"cpu"`` (C++), ``"reference"`` (plain Python, the same to the token) or ``"auto"``: cpu.

    Returns
    -------
    numpy.ndarray
        int32 [B]: draft tokens to verify, at most ``lengths``.

    Raises
    ------
    TypeError, ValueError
        Wrong types or shapes, survival that rises or leaves [0, 1], a negative or too long length, ``agreeing`` above
        ``found``, parameters out of range, an argument that the policy needs but lacks.
    BackendUnavailable
        ``"auto"`` or ``"cpu"`` without the native extension.

    Notes
    -----
    ``"agentspec"`` is made safe: rows that found nothing and batches whose g are all 0 get no draft; L never exceeds
    the draft's own length; while the sum exceeds ``min(B_t, token_budget or M(b))``, the row with the least g (ties:
    the higher row) loses its last token.
    """
    if policy not in ("survival", "agentspec"):
        raise ValueError(f"policy: expected 'survival' or 'agentspec', got {policy!r}")
    if backend not in ("auto", "cpu", "reference"):
        raise ValueError(f"backend: expected 'auto', 'cpu' or 'reference', got {backend!r}")
    cost = CostModel() if cost is None else cost
    if not isinstance(cost, CostModel):
        raise TypeError(f"cost: expected a CostModel, got {_checks.describe(cost)}")
    budget = None if token_budget is None else _as_count(token_budget, "token_budget")
    min_survival = _as_number(min_survival, "min_survival", 0, 1)
    native = -1 if budget is None else budget

    if policy == "survival":
        if survival is None:
            raise ValueError("survival: policy 'survival' needs it, got None")
        chance = _array(survival, "survival", np.float32, (None, None))
        rows, width = chance.shape
        length = np.full(rows, width, np.int32) if lengths is None else _array(lengths, "lengths", np.int32, (rows,))
        _check_survival(chance, length)
        plain = rows if plain_tokens is None else _as_count(plain_tokens, "plain_tokens")
        lowest = float(np.float32(min_survival))
        if backend == "reference":
            usable = [row[:n].tolist() for row, n in zip(chance, length.tolist(), strict=True)]
            drafted = budget_reference.allocate_survival(usable, plain, budget, cost.intensity, cost.slope, lowest)
            return np.asarray(drafted, np.int32)
        _native.load()
        out = np.empty(rows, np.int32)
        torch.ops.speceyes.budget_survival(
            torch.from_numpy(chance), torch.from_numpy(length), plain, native, cost.intensity, cost.slope, lowest,
            torch.from_numpy(out),
        )  # fmt: skip
        return out

    given = {"found": found, "agreeing": agreeing, "prefix_lengths": prefix_lengths, "lengths": lengths}
    for name, value in given.items():
        if value is None:
            raise ValueError(f"{name}: policy 'agentspec' needs it, got None")
    rows = _array(found, "found", np.int32, (None,)).shape[0]
    table = {name: _array(value, name, np.int32, (rows,)) for name, value in given.items()}
    for low, high in (("agreeing", "found"), ("prefix_lengths", "lengths")):
        wrong = np.flatnonzero(table[low] > table[high])
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"{low}: expected at most {high}, got {table[low][row]} above {table[high][row]} in row {row}"
            )
    alpha, gmin = _as_number(alpha, "alpha", 0, 1e14), _as_number(gmin, "gmin", 0, 1)
    if form not in ("equation", "algorithm"):
        raise ValueError(f"form: expected 'equation' or 'algorithm', got {form!r}")
    plain = rows if plain_tokens is None else _as_count(plain_tokens, "plain_tokens")
    if backend == "reference":
        n, c, prefix, length_list = (table[k].tolist() for k in ("found", "agreeing", "prefix_lengths", "lengths"))
        drafted = budget_reference.allocate_agentspec(
            n, c, prefix, length_list, plain, budget, cost.intensity, alpha, gmin, form
        )
        return np.asarray(drafted, np.int32)
    _native.load()
    out = np.empty(rows, np.int32)
    torch.ops.speceyes.budget_agentspec(
        *(torch.from_numpy(table[name]) for name in ("found", "agreeing", "prefix_lengths", "lengths")),
        plain, native, cost.intensity, alpha, gmin, form == "algorithm", torch.from_numpy(out),
    )  # fmt: skip
    return out
