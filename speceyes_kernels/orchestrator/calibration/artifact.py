"""The calibration artifact: one JSON file that funnel and server load."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...decision import confidence
from .kinds import KINDS

FORMAT = 1


class ArtifactError(ValueError):
    """A file that is no artifact, or one that does not fit what is running."""


@dataclass(frozen=True)
class KindThreshold:
    """Of one kind. ``score`` in the pool's units; inf accepts nothing."""

    score: float
    bound: float | None = None  # upper bound of P(wrong | judged tool-free, accepted)
    accepted: int = 0
    rows: int = 0
    note: str = ""
    needed: int | None = None  # accepted rows with which half the allowed risk passes with probability .9

    def tau(self, pool: str, alpha: float = 0.6) -> float:
        """The same threshold as a confidence, for reading; decisions compare scores."""
        return 1.0 if math.isinf(self.score) else float(confidence(self.score, alpha, pool=pool))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Artifact:
    """What was calibrated, on what, and the thresholds.

    Parameters
    ----------
    large, small : str
        Names of the models.
    k, form, pool, strict, span, source
        The score as it was taken; see ``ScoreRequest`` and ``Scores`` of the orchestrator.
    thresholds : mapping of kind to KindThreshold
        A kind that is not in it has ``pooled``, if that is given and nothing is guaranteed; else it accepts nothing.
    pooled : KindThreshold or None
        For kinds that calibration never saw.
    objective : str
        How the thresholds were chosen; "guarantee" for a bound.
    epsilon, delta, assumption
        Of the guarantee; None without.
    data_hash : str
        Of the rows' table.
    contents, pictures : sequences of str
        Hashes of the rows' queries and pictures: a report refuses rows of either.
    wording : mapping of str to str or None, optional
        What was asked: `WordingSettings.texts`; None (a table, or a file from before this was kept): the library's own.
    curve, samples
        Risk-coverage points; sorted scores a kind, for the drift watch.
    """

    large: str
    small: str
    k: int
    form: str
    pool: str
    strict: bool
    span: str
    source: str
    thresholds: Mapping[str, KindThreshold]
    objective: str
    data_hash: str
    pooled: KindThreshold | None = None
    epsilon: float | None = None
    delta: float | None = None
    assumption: str | None = None
    contents: Sequence[str] = ()
    pictures: Sequence[str] = ()
    curve: Sequence[Sequence[float]] = ()
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    wording: Mapping[str, str | None] | None = None

    @property
    def guaranteed(self) -> bool:
        return self.epsilon is not None

    def threshold(self, kind: str) -> float:
        """In score units; inf accepts nothing."""
        if kind in self.thresholds:
            return self.thresholds[kind].score
        return self.pooled.score if self.pooled is not None and not self.guaranteed else math.inf

    def differences(
        self, *, large: str | None = None, small: str | None = None, k: int | None = None, form: str | None = None
    ) -> list[str]:
        """Where what is running is not what was calibrated, in words; empty when it fits."""
        running = {"large": large, "small": small, "k": k, "form": form}
        return [
            f"{name}: calibrated with {getattr(self, name)!r}, running with {value!r}"
            for name, value in running.items()
            if value is not None and value != getattr(self, name)
        ]

    def overlap(self, contents: Sequence[str], pictures: Sequence[str]) -> tuple[int, int]:
        """How many of these queries, and of these pictures, were calibrated on."""
        return len(set(contents) & set(self.contents)), len(set(pictures) & set(self.pictures))


def save_artifact(artifact: Artifact, path: str | Path) -> None:
    """Replaces the file in one step: a crash leaves the old one whole."""
    path = Path(path)
    data = {"format": FORMAT, **asdict(artifact)}
    for threshold in (*data["thresholds"].values(), *([data["pooled"]] if data["pooled"] else [])):
        alone = KindThreshold(**threshold)
        threshold["tau"] = None if math.isinf(alone.score) else alone.tau(artifact.pool)
        threshold["score"] = None if math.isinf(alone.score) else alone.score  # JSON has no infinity
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_artifact(path: str | Path) -> Artifact:
    """
    Raises
    ------
    ArtifactError
        Not an artifact, another format, or a field that cannot be.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path}: not a calibration artifact ({error}); make one with `speceyes calibrate`") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise ArtifactError(f"{path}: format: expected {FORMAT}, got {found!r}; make it anew with `speceyes calibrate`")
    del data["format"]
    try:
        data["thresholds"] = {kind: _threshold(kind, value) for kind, value in data["thresholds"].items()}
        if data.get("pooled") is not None:
            data["pooled"] = _threshold("pooled", data["pooled"])
        artifact = Artifact(**data)
        if not isinstance(artifact.wording, (dict, type(None))):
            raise ValueError(f"wording: expected texts by key, got {artifact.wording!r}")
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ArtifactError(f"{path}: damaged: {error}") from error
    for kind in artifact.thresholds:
        if kind not in KINDS:
            raise ArtifactError(f"{path}: thresholds: expected kinds among {', '.join(KINDS)}, got {kind!r}")
    return artifact


def _threshold(kind: str, value: dict) -> KindThreshold:
    value = {**value}
    value.pop("tau", None)
    score = value.pop("score")
    if score is not None and (isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score)):
        raise ValueError(f"thresholds: {kind}: score: expected a finite number or null, got {score!r}")
    return KindThreshold(math.inf if score is None else float(score), **value)
