"""The law of an engine's step: how long one takes with so many requests running."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class StepLaw:
    """Seconds of a step that decodes ``running`` requests and prefills ``prompt`` tokens.

    ``base + per_request * running + per_prompt_token * prompt``. A request of n output tokens takes n steps; a prefill
    holds up every request that runs beside it.
    """

    base: float
    per_request: float = 0.0
    per_prompt_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("base", "per_request", "per_prompt_token"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected seconds >= 0, got {value!r}")
        if self.base + self.per_request == 0:
            raise ValueError("base, per_request: expected a step to take time, got 0 for both")

    def step(self, running: float, prompt: float = 0.0) -> float:
        return self.base + self.per_request * running + self.per_prompt_token * prompt

    def service(self, prompt_tokens: float, output_tokens: float, running: float = 1.0) -> float:
        """Seconds of one request whose steps have ``running`` requests on average, other prefills apart."""
        return output_tokens * self.step(running) + self.per_prompt_token * prompt_tokens


@dataclass(frozen=True)
class Served:
    """One served request: tokens, seconds from its first step to its last, mean number running beside and with it.

    ``beside``: prompt tokens of others that were prefilled meanwhile, where that is known; else what they cost is in the other
    coefficients.
    """

    prompt_tokens: float
    output_tokens: int
    service_s: float
    running: float = 1.0
    beside: float = 0.0


def fit_step_law(records: Sequence[Served], expected: Sequence[float] | None = None) -> tuple[StepLaw, float]:
    """Least squares of relative errors with no negative coefficient.

    Parameters
    ----------
    records : sequence of Served
    expected : sequence of float, optional
        Seconds of each used record that errors are relative to; default the measured ones, which pulls a fit of noisy seconds
        down.

    Returns
    -------
    StepLaw
        What the records cannot tell apart is put into ``base``: ``running`` that never varies, prompts that do not.
    float
        Median of |predicted - measured| / measured on the same records.

    Raises
    ------
    ValueError
        Fewer than three records with output and time.
    """
    from scipy.optimize import nnls

    used = [r for r in records if r.output_tokens > 0 and r.service_s > 0]
    if len(used) < 3:
        raise ValueError(f"records: expected at least 3 requests with output tokens and seconds, got {len(used)}")
    columns = np.array(
        [[r.output_tokens, r.output_tokens * r.running, r.prompt_tokens + r.beside] for r in used], dtype=np.float64
    )
    seconds = np.array([r.service_s for r in used])
    unit = seconds if expected is None else np.asarray(expected, dtype=np.float64)
    relative = columns / unit[:, None]
    scale = np.linalg.norm(relative, axis=0)
    known = scale > 0
    # Columns that are multiples of the first tell nothing of their own.
    for i in (1, 2):
        if known[i]:
            cosine = relative[:, 0] @ relative[:, i] / (scale[0] * scale[i])
            known[i] = cosine < 1 - 1e-9
    weights = np.zeros(3)
    weights[known], _ = nnls(relative[:, known] / scale[known], seconds / unit)
    weights[known] /= scale[known]
    if weights[0] + weights[1] == 0:
        weights[0] = float(np.median(seconds / columns[:, 0]))
        weights[2] = 0.0
    law = StepLaw(*(float(w) for w in weights))
    return law, float(np.median(np.abs(columns @ weights - seconds) / seconds))


def fit_crowded_law(records: Sequence[Served], rounds: int = 12) -> tuple[StepLaw, float]:
    """As `fit_step_law`, for a server whose prefills hold up all that run beside them.

    While a request is in, each of the others is replaced by a new one as often as a request ends at that load, and each
    brings a prompt. How long one stays at a load is the law's to say, so the two are found in turns.
    """
    used = [r for r in records if r.output_tokens > 0 and r.service_s > 0]
    law, error = fit_step_law(records)
    prompt = sum(r.prompt_tokens for r in used) / len(used)
    tokens = sum(r.output_tokens for r in used) / len(used)

    def crowded(record: Served) -> Served:
        # By the law's seconds, not the measured ones: those hold the very noise that is to be explained.
        own, usual = (
            n * law.step(record.running) + law.per_prompt_token * p
            for n, p in ((record.output_tokens, record.prompt_tokens), (tokens, prompt))
        )
        return replace(record, beside=max(0.0, record.running - 1) * prompt * own / usual)

    for _ in range(rounds):
        fuller = [crowded(record) for record in used]
        expected = [
            r.output_tokens * law.step(r.running) + law.per_prompt_token * (r.prompt_tokens + r.beside) for r in fuller
        ]
        law, error = fit_step_law(fuller, expected)
    return law, error
