"""The library's CUDA launchers under the shim: torch tensors in and out, arguments as in `separability_cuda.h`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speceyes_kernels._schemas import POOL_IDS

from .build import CSRC, HERE, Patch, build, patched_sources
from .client import Buffer, Device

DTYPE_IDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ALL_POOLS = tuple(POOL_IDS)


def separability_driver(
    mode: str = "plain", patches: tuple[Patch, ...] = (), dtypes: tuple[str, ...] = ("f32", "f16", "bf16")
) -> Path:
    """Driver with the library's kernels for `dtypes`; `patches` plants faults in a copy of their sources."""
    folder = patched_sources(patches)
    names = ["separability_cuda.cu", *(f"separability_cuda_{dtype}.cu" for dtype in dtypes)]
    sources = [*(folder / name for name in names), HERE / "separability_ops.cpp", HERE / "separability_stubs.cpp"]
    defines = tuple(f"SIMT_WITH_{dtype.upper()}" for dtype in dtypes)
    return build(sources, mode=mode, folders=(folder,) if folder == CSRC else (folder, CSRC), defines=defines)


class Rows(NamedTuple):
    """Everything that `rows_cuda` can write, one entry a row (`records` [N, 2], `values` [N, k])."""

    top1: Tensor
    argmax: Tensor
    mean: Tensor
    std: Tensor
    lse: Tensor
    count: Tensor
    score: Tensor
    records: Tensor
    values: Tensor


class State(NamedTuple):
    """Streaming pools: see docs/separability.md."""

    sums: Tensor
    mins: Tensor
    counts: Tensor
    scores: Tensor

    @staticmethod
    def fresh(slots: int, max_tokens: int = 0) -> State:
        return State(
            torch.zeros(slots, 2, dtype=torch.float64),
            torch.full((slots, 2), float("inf")),
            torch.zeros(slots, 2, dtype=torch.int32),
            torch.full((slots, max_tokens), 7.0),
        )


class Query(NamedTuple):
    """Which pools to write."""

    pools: Sequence[str] = ALL_POOLS
    bottom_share: float = 0.2
    bottom_ceil: bool = False

    def scalars(self) -> list[float]:
        ids = [POOL_IDS[p] for p in self.pools]
        return [self.bottom_share, self.bottom_ceil, len(ids), *ids]


def _raw(x: Tensor) -> np.ndarray:
    """The memory that a tensor's elements span, gaps included, and nothing else."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    flat = torch.as_strided(x, (span,), (1,), x.storage_offset())
    if x.element_size() == 2:
        flat = flat.view(torch.int16)
    return flat.numpy()


def _input(name: str, x: Tensor | None) -> Buffer:
    if x is None:
        return Buffer(name, None)
    return Buffer(name, _raw(x), shift=x.storage_offset() * x.element_size() % 256)


def _flags(name: str, x: Tensor | None) -> Buffer:
    return _input(name, None if x is None else x.to(torch.uint8).contiguous())


class Separability:
    """The CUDA backend on a driver; all methods take contiguous CPU tensors but for `logits`."""

    def __init__(self, device: Device, *, multiprocessors: int = 4, guarded: bool = False) -> None:
        self.device = device
        self.guarded = guarded
        self.multiprocessors = multiprocessors

    def _workspace(self, rows: int, vocab: int) -> Buffer:
        (size,) = self.device.call(
            "separability.workspace_bytes", [rows, vocab], [Buffer("bytes", np.zeros(1, np.int64), output=True)]
        )
        junk = np.random.default_rng(rows + vocab).integers(0, 256, int(size[0]), dtype=np.uint8)
        return Buffer("workspace", junk, output=True)

    def _call(self, op: str, scalars: Sequence[float], buffers: Sequence[Buffer]) -> dict[str, Tensor]:
        outputs = self.device.call(op, scalars, buffers)
        names = [b.name for b in buffers if b.output and b.array is not None]
        return {name: torch.from_numpy(value) for name, value in zip(names, outputs, strict=True)}

    @staticmethod
    def _row_buffers(n: int, k: int, names: Sequence[str] | None) -> list[Buffer]:
        shapes = {
            "top1": ((n,), np.float32), "argmax": ((n,), np.int64), "mean": ((n,), np.float32),
            "std": ((n,), np.float32), "lse": ((n,), np.float32), "count": ((n,), np.int32),
            "score": ((n,), np.float32), "records": ((n, 2), np.float32), "values": ((n, k), np.float32),
        }  # fmt: skip
        # 77: whatever a kernel leaves unwritten is seen.
        return [
            Buffer(name, np.full(shape, 77, dtype) if names is None or name in names else None, output=True)
            for name, (shape, dtype) in shapes.items()
        ]

    def rows(
        self,
        logits: Tensor,
        k: int = 64,
        *,
        vocab: int | None = None,
        include_top1: bool = False,
        eps: float = 1e-6,
        min_competitors: int = 8,
        argmax_offset: int = 0,
        want: Sequence[str] | None = None,
        slots: Tensor | None = None,
        accepted: Tensor | None = None,
        state: State | None = None,
        cu: Tensor | None = None,
        mask: Tensor | None = None,
        query: Query | None = None,
    ) -> tuple[Rows, State | None, Tensor | None]:
        """`rows_cuda`: row statistics, and the state or the answers' pools when a job is given."""
        n, v = logits.shape[0], logits.shape[1] if vocab is None else vocab
        scalars = [DTYPE_IDS[logits.dtype], n, v, logits.stride(0), logits.stride(1), k, include_top1, eps,
                   min_competitors, argmax_offset, self.multiprocessors]  # fmt: skip
        source = replace(_input("logits", logits), guarded=self.guarded)
        buffers = [source, *self._row_buffers(n, k, want), self._workspace(n, v)]
        if state is not None:
            assert slots is not None
            scalars += [1, slots.dtype == torch.int64, state.sums.shape[0], state.scores.shape[1]]
            buffers += [_input("slots", slots), _flags("accepted", accepted), *self._state_buffers(state)]
        elif query is not None:
            assert cu is not None
            answers = cu.numel() - 1
            scalars += [2, cu.dtype == torch.int64, answers, *query.scalars()]
            pooled = np.full((len(query.pools), answers), 77, np.float32)
            buffers += [_input("cu", cu), _flags("mask", mask), Buffer("out", pooled, output=True)]
        else:
            scalars.append(0)
        got = self._call("separability.rows", scalars, buffers)
        rows = Rows(*(got.get(name, torch.empty(0)) for name in Rows._fields))
        return rows, self._state_of(got) if state is not None else None, got.get("out")

    @staticmethod
    def _state_buffers(state: State, output: bool = True) -> list[Buffer]:
        buffers = []
        for name, x in zip(("state.sums", "state.mins", "state.counts", "state.scores"), state, strict=True):
            empty = name == "state.scores" and x.numel() == 0
            buffers.append(Buffer(name, None if empty else x.numpy(), output=output))
        return buffers

    @staticmethod
    def _state_of(got: dict[str, Tensor]) -> State:
        sums = got["state.sums"]
        return State(sums, got["state.mins"], got["state.counts"], got.get("state.scores", torch.empty(len(sums), 0)))

    def update(
        self, scores: Tensor, logps: Tensor | None, slots: Tensor, state: State, accepted: Tensor | None = None
    ) -> State:
        """`update_slots_cuda`."""
        scalars = [len(slots), scores.stride(0), 1 if logps is None else logps.stride(0), slots.dtype == torch.int64,
                   state.sums.shape[0], state.scores.shape[1]]  # fmt: skip
        buffers = [_input("token scores", scores), _input("token logps", logps), _input("slots", slots),
                   _flags("accepted", accepted), *self._state_buffers(state)]  # fmt: skip
        return self._state_of(self._call("separability.update", scalars, buffers))

    def read(self, state: State, slots: Tensor | None = None, query: Query | None = None) -> Tensor:
        """`read_slots_cuda`: [pools, slots]."""
        query = query or Query()
        n = state.sums.shape[0] if slots is None else slots.numel()
        scalars = [state.sums.shape[0], state.scores.shape[1], n, slots is not None and slots.dtype == torch.int64,
                   *query.scalars()]  # fmt: skip
        out = np.full((len(query.pools), n), 77, np.float32)
        buffers = [*self._state_buffers(state, output=False), _input("slots", slots), Buffer("out", out, output=True)]
        return self._call("separability.read", scalars, buffers)["out"]

    def merge(
        self,
        values: Tensor,
        argmax: Tensor,
        lse: Tensor,
        *,
        include_top1: bool = False,
        eps: float = 1e-6,
        min_competitors: int = 8,
    ) -> Rows:
        """`merge_partials_cuda` over values [P, N, k], argmax [P, N], lse [P, N]."""
        shards, n, k = values.shape
        scalars = [shards, n, k, include_top1, eps, min_competitors, 0]
        buffers = [_input("shard values", values), _input("shard argmax", argmax), _input("shard lse", lse)]
        got = self._call("separability.merge", scalars, [*buffers, *self._row_buffers(n, k, None)])
        return Rows(*(got[name] for name in Rows._fields))
