"""Scored rows with labels: what thresholds are chosen on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .kinds import KINDS, Kind

ScoreKey = tuple[str, int]  # pool, k


class TableError(ValueError):
    """Rows that thresholds cannot be chosen on; the message says which and why."""


@dataclass(frozen=True)
class Row:
    """One query: what the draft scored, and whether draft and base were right.

    Parameters
    ----------
    id, content : str
        The query's id and the hash of its text, options (in any order) and pictures.
    picture : str
        Hash of its pictures; for text queries the content. Rows that share it are dependent.
    kind : str
        Of :data:`KINDS`.
    tool_free : bool
        Judged answerable without tools. Other rows are never accepted.
    scores : mapping of (pool, k) to float
        Pooled scores of the draft. Missing, NaN or -inf: never accepted.
    right, base_right : bool
        Draft and base answer against the gold answer. None: the base's answer is not known; objectives refuse such rows, a
        guarantee does not need it.
    judge_s, draft_s, base_s : float
        Seconds of the three.
    """

    id: str
    content: str
    picture: str
    kind: Kind
    tool_free: bool
    scores: Mapping[ScoreKey, float]
    right: bool
    base_right: bool | None = None
    judge_s: float = 0.0
    draft_s: float = 0.0
    base_s: float = 0.0
    meta: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TableError(f"row {self.id!r}: kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        for name in ("judge_s", "draft_s", "base_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise TableError(f"row {self.id!r}: {name}: expected seconds >= 0, got {value!r}")
        for key, value in self.scores.items():
            if value == math.inf:
                raise TableError(f"row {self.id!r}: score {key}: expected a finite number or -inf, got inf")

    def to_json(self) -> str:
        row = asdict(self)
        row["scores"] = {f"{pool}@{k}": _plain(v) for (pool, k), v in self.scores.items()}
        return json.dumps(row, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        row = json.loads(line)
        scores: dict[ScoreKey, float] = {}
        for name, value in row.pop("scores").items():
            pool, _, k = name.rpartition("@")
            scores[pool, int(k)] = -math.inf if value is None else float(value)
        return cls(scores=scores, **row)


def _plain(score: float) -> float | None:
    return score if math.isfinite(score) else None


class Table(Sequence[Row]):
    """Rows as columns. Every id once, every row with the same score keys or none of them.

    Raises
    ------
    TableError
        An id twice.
    """

    def __init__(self, rows: Iterable[Row]):
        self._rows = tuple(rows)
        seen: set[str] = set()
        for row in self._rows:
            if row.id in seen:
                raise TableError(f"rows: id {row.id!r} occurs twice; every query counts once")
            seen.add(row.id)
        self.kinds = np.array([r.kind for r in self._rows], dtype=object)
        self.tool_free = np.array([r.tool_free for r in self._rows], dtype=bool)
        self.right = np.array([r.right for r in self._rows], dtype=bool)
        self.base_right = np.array([bool(r.base_right) for r in self._rows], dtype=bool)
        self.base_known = np.array([r.base_right is not None for r in self._rows], dtype=bool)
        self.judge_s, self.draft_s, self.base_s = (
            np.array([getattr(r, name) for r in self._rows], dtype=np.float64)
            for name in ("judge_s", "draft_s", "base_s")
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return Table(self._rows[at]) if isinstance(at, slice) else self._rows[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def keys(self) -> tuple[ScoreKey, ...]:
        """(pool, k) that any row has a score for, in order of first occurrence."""
        return tuple(dict.fromkeys(key for row in self._rows for key in row.scores))

    def scores(self, pool: str, k: int) -> np.ndarray:
        """float64 [rows]; -inf where a row has none. KeyError-free: a table without the key is refused by name."""
        if self._rows and (pool, k) not in self.keys():
            raise TableError(f"pool {pool!r}, k {k}: no row has this score; there are {self._named_keys()}")
        values = np.array([r.scores.get((pool, k), -math.inf) for r in self._rows], dtype=np.float64)
        return np.where(np.isnan(values), -math.inf, values)

    def _named_keys(self) -> str:
        return ", ".join(f"{pool} at k = {k}" for pool, k in self.keys()) or "none"

    @property
    def hash(self) -> str:
        """SHA-256 of the rows, whatever their order."""
        lines = sorted(row.to_json() for row in self._rows)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def where(self, mask: np.ndarray) -> Table:
        return Table(row for row, keep in zip(self._rows, mask, strict=True) if keep)

    def save(self, path: str | Path) -> None:
        """One JSON object a line."""
        Path(path).write_text("".join(row.to_json() + "\n" for row in self._rows), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Table:
        rows = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                rows.append(Row.from_json(line))
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                raise TableError(f"{path}, line {number}: not a scored row ({type(error).__name__}: {error})") from error
        return cls(rows)


def in_calibration_split(picture: str, share: float = 0.1, seed: int = 0) -> bool:
    """Whether queries on this picture calibrate: all questions on a picture fall on one side.

    Parameters
    ----------
    picture : str
        The picture's hash (of text queries: the content's).
    share : float
        Expected share of pictures in the calibration split.
    """
    if not 0 < share < 1:
        raise ValueError(f"share: expected a share between 0 and 1, got {share!r}")
    return hashed_share(f"{seed}\0{picture}") < share


def hashed_share(text: str) -> float:
    """Uniform in [0, 1), the same for a text in every process."""
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 11) * 2.0**-53
