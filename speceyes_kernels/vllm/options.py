"""Options of one request, as they arrive in ``extra_args["speceyes"]`` (HTTP: ``vllm_xargs``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._schemas import POOL_IDS
from ..decision import score_for_confidence

KEY = "speceyes"
MAX_K = 256
_FIELDS = ("k", "pools", "tau", "strict", "reject_early", "token_scores")


class GateOptionError(ValueError):
    """A bad option; ``field`` is its dotted name, e.g. ``speceyes.tau``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class GateOptions:
    """What a request asks of the gate (see ``docs/vllm_gate.md`` for every field)."""

    k: int = 64
    pools: tuple[str, ...] = tuple(POOL_IDS)
    tau: float | None = None
    strict: bool = True
    reject_early: bool = False
    token_scores: bool = False

    @property
    def min_threshold(self) -> float:
        """Score of the min pool that stands for ``tau``; -inf without early rejection, where nothing is under it."""
        return score_for_confidence(self.tau) if self.reject_early and self.tau is not None else float("-inf")


def _bool(field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):  # vllm_xargs has no booleans
        return bool(value)
    raise GateOptionError(field, f"expected true or false, got {value!r}")


def _pools(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    known = ", ".join(POOL_IDS)
    if not isinstance(names, Sequence) or not names:
        raise GateOptionError(f"{KEY}.pools", f"expected one or more names among {known}, got {value!r}")
    for name in names:
        if not isinstance(name, str) or name not in POOL_IDS:
            raise GateOptionError(f"{KEY}.pools", f"expected names among {known}, got {name!r}")
    if len(set(names)) != len(names):
        raise GateOptionError(f"{KEY}.pools", f"expected every name once, got {list(names)!r}")
    return tuple(names)


def parse_options(value: Any) -> GateOptions | None:
    """Parses the value of ``extra_args["speceyes"]``.

    Parameters
    ----------
    value : None, bool, 0, 1, dict, str or GateOptions
        None, False and 0: not opted in. True and 1: the defaults. A string is read as JSON.

    Returns
    -------
    GateOptions or None

    Raises
    ------
    GateOptionError
        Naming the field.
    """
    if value is None:
        return None
    if isinstance(value, GateOptions):  # built by hand: nothing has checked it
        value = asdict(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # a few thousand brackets are enough for the second
            raise GateOptionError(KEY, f'expected JSON such as {{"tau": 0.98}}, got {value[:200]!r}') from None
        if value is None:
            return None
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return GateOptions() if value else None
    if not isinstance(value, dict):
        raise GateOptionError(KEY, f"expected an object of {', '.join(_FIELDS)}, or 1 (defaults), got {value!r}")
    for name in value:
        if name not in _FIELDS:
            raise GateOptionError(f"{KEY}.{name}", f"unknown option; expected one of {', '.join(_FIELDS)}")
    given: dict[str, Any] = {}
    if "k" in value:
        k = value["k"]
        if isinstance(k, bool) or not isinstance(k, int) or not 2 <= k <= MAX_K:
            raise GateOptionError(f"{KEY}.k", f"expected an integer in 2..{MAX_K}, got {k!r}")
        given["k"] = k
    if "pools" in value:
        given["pools"] = _pools(value["pools"])
    if value.get("tau") is not None:
        tau = value["tau"]
        if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0.0 < tau < 1.0:
            raise GateOptionError(f"{KEY}.tau", f"expected a confidence in (0, 1), got {tau!r}")
        given["tau"] = float(tau)
    for name in ("strict", "reject_early", "token_scores"):
        if name in value:
            given[name] = _bool(f"{KEY}.{name}", value[name])
    options = GateOptions(**given)
    if options.reject_early and options.tau is None:
        raise GateOptionError(f"{KEY}.tau", "expected a confidence in (0, 1) because reject_early is set, got none")
    if options.reject_early and options.pools[0] != "min":
        raise GateOptionError(
            f"{KEY}.reject_early",
            f"expected 'min' as the first of pools, got {options.pools[0]!r}: only the minimum never rises, so only it "
            "can be decided before the answer ends",
        )
    return options


def check_early(ignore_eos: Any, structured: bool, allowed: Sequence[int] | None, eos: int | None) -> None:
    """Raises GateOptionError where no EOS could end a rejected request."""
    field = f"{KEY}.reject_early"
    if ignore_eos:
        raise GateOptionError(field, "expected ignore_eos=False, since an EOS ends a rejected request; got True")
    if structured:
        raise GateOptionError(field, "expected no structured outputs: their grammar forbids the early EOS")
    if allowed is not None and eos is not None and eos not in allowed:
        raise GateOptionError(field, f"expected EOS ({eos}) among allowed_token_ids, since it ends a rejected request")


def options_of(params: Any) -> GateOptions | None:
    """Options of a ``SamplingParams``, checked against its other fields; None when it has not opted in."""
    extra = params.extra_args
    if not extra or KEY not in extra:
        return None
    options = parse_options(extra[KEY])
    if options is not None and options.reject_early:
        structured = params.structured_outputs is not None
        check_early(params.ignore_eos, structured, params.allowed_token_ids, params.eos_token_id)
    return options


def gate_options(
    *,
    k: int = 64,
    pools: str | Sequence[str] = tuple(POOL_IDS),
    tau: float | None = None,
    strict: bool = True,
    reject_early: bool = False,
    token_scores: bool = False,
    as_json: bool = False,
) -> dict[str, Any] | str:
    """The value for ``extra_args["speceyes"]``, checked; ``as_json=True`` gives the string that ``vllm_xargs`` takes.

    Examples
    --------
    >>> SamplingParams(extra_args={"speceyes": gate_options(tau=0.98)})  # doctest: +SKIP
    """
    value: dict[str, Any] = {
        "k": k, "pools": [pools] if isinstance(pools, str) else list(pools), "tau": tau, "strict": strict,
        "reject_early": reject_early, "token_scores": token_scores,
    }  # fmt: skip
    parse_options(value)
    return json.dumps(value) if as_json else value
