"""The lookup's CUDA kernels under the shim, in lockstep with the CPU's draft cache (`lookup_ops.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .build import CSRC, DRAFTING, HERE, Patch, build, patched_sources
from .client import Buffer, Device


def lookup_driver(mode: str = "plain", patches: tuple[Patch, ...] = ()) -> Path:
    """Driver with the lookup's kernels and a draft cache; `patches` plants faults in a copy of the kernels' sources."""
    folder = patched_sources(patches, DRAFTING)
    return build(
        [folder / "lookup_cuda.cu"],
        mode=mode,
        folders=(folder, CSRC) if folder == DRAFTING else (folder, DRAFTING, CSRC),
        host=(HERE / "lookup_host.cpp",),
        host_folders=(DRAFTING,),
    )


class Proposed(NamedTuple):
    """One side's drafts: tokens [proposals, rows, most], lengths [proposals, rows], survival as tokens."""

    tokens: np.ndarray
    lengths: np.ndarray
    survival: np.ndarray


@dataclass
class Script:
    """What happens to both caches, in order."""

    steps: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    proposals: int = 0
    most_live: int = 0

    def _text(self, tokens: Sequence[int]) -> tuple[int, int]:
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        return begin, len(self.tokens)

    def start(self, request: int, prompt: Sequence[int], agent: int = 1, query: int = 1) -> None:
        self.steps.append((0, request, *self._text(prompt), agent, query))
        self.live.append(request)
        self.most_live = max(self.most_live, len(self.live))

    def extend(self, request: int, tokens: Sequence[int]) -> None:
        self.steps.append((1, request, *self._text(tokens), 0, 0))

    def stop(self, request: int) -> None:
        self.steps.append((2, request, 0, 0, 0, 0))
        self.live.remove(request)

    def forget(self, agent: int, query: int) -> None:
        self.steps.append((3, 0, 0, 0, agent, query))

    def propose(self, caps: tuple[int, int] = (0, 0), prefill: int = 0) -> None:
        """Drafts for all live requests; row b's cap is (caps[0] + b caps[1]) % (most + 1), `most` where caps[1] is 0."""
        if self.live:
            self.steps.append((4, 0, caps[0], caps[1], prefill, 0))
            self.proposals += 1


def run(
    device: Device,
    script: Script,
    *,
    max_tokens: int = 1 << 16,
    max_depth: int = 64,
    strict: bool = False,
    counts: bool = True,
    levels: int = 15,
    most: int = 8,
    budget: int | None = None,
    policy: bool = True,
    min_survival: float = 0.0,
    intensity: float = 256.0,
    slope: float = 1 / 4096,
    stale: bool = False,
    settled: bool = True,
) -> tuple[Proposed, Proposed]:
    """The script on both; what the CPU and what the device proposed. `budget` None: by the cost model."""
    rows, n = max(script.most_live, 1), max(script.proposals, 1)
    scalars = [max_tokens, max_depth, strict, counts, levels, most, -2 if not policy else -1 if budget is None else budget,
               min_survival, intensity, slope, stale, rows, settled]  # fmt: skip
    outputs = []
    for side in ("host", "device"):
        outputs += [
            Buffer(f"{side} tokens", np.full((n, rows, most), -7, np.int32), output=True),
            Buffer(f"{side} lengths", np.zeros((n, rows), np.int32), output=True),
            Buffer(f"{side} survival", np.full((n, rows, most), -7, np.float32), output=True),
        ]
    got = device.call("lookup.run", scalars, [
        Buffer("script", np.array(script.steps, np.int64)),
        Buffer("text", np.array(script.tokens or [0], np.int32)),
        *outputs,
        Buffer("done", np.zeros(1, np.int64), output=True),
    ])  # fmt: skip
    assert int(got[6][0]) == script.proposals
    return Proposed(*got[:3]), Proposed(*got[3:6])


def differences(host: Proposed, device: Proposed) -> list[str]:
    """Where the drafts are not the same tokens with the same bits of survival; empty when they are."""
    found = []
    for k, row in zip(*np.nonzero(host.lengths != device.lengths), strict=True):
        found.append(f"proposal {k}, row {row}: {device.lengths[k, row]} tokens, expected {host.lengths[k, row]}")
    kept = np.arange(host.tokens.shape[2]) < np.minimum(host.lengths, device.lengths)[..., None]
    for name in ("tokens", "survival"):
        a, b = (np.where(kept, getattr(side, name).view(np.int32), 0) for side in (host, device))
        for k, row, i in zip(*np.nonzero(a != b), strict=True):
            found.append(f"proposal {k}, row {row}, position {i}: {name} differ")
    return found
