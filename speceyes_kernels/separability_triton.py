"""The ops as Triton kernels, in torch's namespace ``speceyes_triton`` (design: docs/triton.md).

For GPUs without a native build of this library. Capture-safe: the current stream, no synchronisation, scratch memory
from torch, grids that depend on shapes only. With ``TRITON_INTERPRET=1`` set before Triton is imported, the same
kernels run in Triton's interpreter on CPU tensors (slowly: for tests).
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._schemas import POOL_IDS, SEPARABILITY_SCHEMAS

_MIN_TRITON = (3, 6)  # what torch 2.10 comes with


def _import_triton() -> ModuleType:
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"the triton backend needs Triton >= {'.'.join(map(str, _MIN_TRITON))}, which is not installed "
            f"(torch {torch.__version__}); run 'pip install triton'"
        ) from error
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _MIN_TRITON:
        raise ImportError(
            f"the triton backend needs Triton >= {'.'.join(map(str, _MIN_TRITON))}, found {triton.__version__} "
            f"(torch {torch.__version__}); run 'pip install -U triton'"
        )
    return triton


triton = _import_triton()

from . import separability_triton_kernels as _rows  # noqa: E402
from . import separability_triton_pools as _pools  # noqa: E402

NAMESPACE = "speceyes_triton"
#: Columns of one program of the streaming kernel: fixed, so that the sums never depend on the batch.
TILE = 4096
_STREAM_WARPS = 4
#: Rows, answers or list entries looked at together by the pools.
_CHUNK = 1024
_MAX_MERGE = 16384  # values of all shards of one row

# Key bits that a source type never sets (float16 and bfloat16 widened to float32).
_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_INTERPRETED = not isinstance(_rows.stream_kernel, triton.runtime.JITFunction)


# ---- launching -------------------------------------------------------------------------------------------------------
def _launch(kernel: Any, grid: int, args: tuple, warps: int, constants: dict) -> None:
    # Fusing a * b + c would make the bits of the sums depend on the compiler's choices; the default differs by version.
    kernel[(grid,)](*args, num_warps=warps, num_stages=1, enable_fp_fusion=False, **constants)


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    if not _INTERPRETED:
        raise ValueError(
            f"backend 'triton': expected CUDA tensors, got one on {tensor.device}; use backend='cpu', or set TRITON_INTERPRET=1 before "
            "Triton is imported to run the kernels in its interpreter"
        )
    return _NOTHING


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


_NOTHING = _Nothing()


def _log2(n: int) -> int:
    """Exponent of the next power of two."""
    return max(0, n - 1).bit_length()


def _warps(elements: int) -> int:
    """Warps for a program that holds `elements` 4-byte values: 16 a lane."""
    return min(16, max(4, 1 << _log2(elements // 512)))


class _Stream:
    """Launches the streaming kernel and holds what the selecting kernels need of it."""

    def __init__(
        self, logits: Tensor, vocab: int, k: int, counters: bool = False, answers: Tensor | None = None
    ) -> None:
        rows = logits.shape[0]
        tiles = max(1, -(-vocab // TILE))
        self.k2 = max(16, 1 << _log2(k))
        size = logits.element_size()
        width = 16 // size
        row_stride, col_stride = logits.stride()
        unit = col_stride == 1 or logits.shape[1] == 1
        aligned = unit and logits.data_ptr() % 16 == 0 and (row_stride * size % 16 == 0 or rows == 1)
        shape = {
            "TILE": TILE,
            "VEC": width if aligned else 1,
            "UNIT": unit,
            "SHIFT": _SHIFT[logits.dtype],
        }
        keys, partials, scratch, self.counters = torch.empty(
            rows * (tiles * (TILE // 64 + 2) + 3 * self.k2 + 1), dtype=torch.int32, device=logits.device
        ).split([rows * tiles * (TILE // 64), rows * tiles * 2, rows * 3 * self.k2, rows])
        row = (logits, row_stride, col_stride, vocab, tiles, keys, partials.view(torch.float32))
        _launch(
            _rows.stream_kernel, rows * tiles,
            (*row, self.counters if counters else None, answers, 0 if answers is None else answers.numel()),
            _STREAM_WARPS,
            shape | {"HALVES": _log2(TILE // (32 * _STREAM_WARPS * width)), "ALL": _log2(TILE)},
        )  # fmt: skip
        tiles2 = 1 << _log2(tiles)
        self.args = (*row, scratch)
        self.constants = shape | {
            "TILES2": tiles2, "LOG_TILES": _log2(tiles), "K2": self.k2, "LOG_K": _log2(self.k2),
        }  # fmt: skip
        self.warps = _warps(max(tiles2, self.k2) * 64)


def _pool_code(pools: Sequence[int]) -> tuple[int, int, int]:
    """(3 bits a pool, number of pools, bottom among them)."""
    return sum(p << (3 * i) for i, p in enumerate(pools)), len(pools), int(POOL_IDS["bottom"] in pools)


def _share_bits(share: float) -> int:
    """Bits of the float64: a float argument of a Triton kernel would be rounded to float32."""
    return struct.unpack("<q", struct.pack("<d", share))[0]


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _select(
    logits: Tensor,
    k: int,
    vocab: int,
    offset: int,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    top1: Tensor | None,
    argmax: Tensor | None,
    mean: Tensor | None,
    std: Tensor | None,
    lse: Tensor | None,
    count: Tensor | None,
    score: Tensor | None,
    values: Tensor | None,
) -> None:
    if not logits.shape[0]:
        return
    with _on_device(logits):
        s = _Stream(logits, vocab, k)
        _launch(
            _rows.select_kernel, logits.shape[0],
            (*s.args, k, offset, eps, min_competitors, top1, argmax, mean, std, lse, count, score, values),
            s.warps, s.constants | {"INCLUDE": include_top1},
        )  # fmt: skip


# ---- the ops ---------------------------------------------------------------------------------------------------------
def topk_stats(
    logits: Tensor,
    k: int,
    valid_vocab: int,
    top1: Tensor,
    argmax: Tensor,
    mean: Tensor,
    std: Tensor,
    lse: Tensor,
    count: Tensor,
) -> None:
    _select(logits, k, valid_vocab, 0, False, 1e-6, 1, top1, argmax, mean, std, lse, count, None, None)


def token_separability(
    logits: Tensor, k: int, valid_vocab: int, include_top1: bool, eps: float, min_competitors: int, out: Tensor
) -> None:
    _select(
        logits, k, valid_vocab, 0, include_top1, eps, min_competitors, None, None, None, None, None, None, out, None
    )


def partial_topk(
    logits: Tensor, k: int, valid_vocab: int, offset: int, values: Tensor, argmax: Tensor, lse: Tensor
) -> None:
    _select(logits, k, valid_vocab, offset, False, 1e-6, 1, None, argmax, None, None, lse, None, None, values)


def answer_separability(
    logits: Tensor,
    cu_seqlens: Tensor,
    token_mask: Tensor | None,
    k: int,
    valid_vocab: int,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    pools: list[int],
    bottom_share: float,
    bottom_ceil: bool,
    records: Tensor,
    out: Tensor,
) -> None:
    rows, answers = logits.shape[0], cu_seqlens.shape[0] - 1
    if not rows:
        out.fill_(-math.inf)
        return
    with _on_device(logits):
        s = _Stream(logits, valid_vocab, k, counters=True, answers=out)
        code, num_pools, want_bottom = _pool_code(pools)
        _launch(
            _rows.select_answers_kernel, rows,
            (*s.args, k, eps, min_competitors, records, rows, cu_seqlens.contiguous(), _bytes(token_mask), s.counters,
             answers, code, num_pools, want_bottom, _share_bits(bottom_share), int(bottom_ceil), out),
            s.warps, s.constants | {"INCLUDE": include_top1, "CHUNK": _CHUNK},
        )  # fmt: skip


def pool_update(
    logits: Tensor,
    slots: Tensor,
    accepted: Tensor | None,
    k: int,
    valid_vocab: int,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    sums: Tensor,
    mins: Tensor,
    counts: Tensor,
    scores: Tensor,
    records: Tensor,
) -> None:
    rows = logits.shape[0]
    if not rows:
        return
    with _on_device(logits):
        s = _Stream(logits, valid_vocab, k, counters=True)
        _launch(
            _rows.select_slots_kernel, rows,
            (*s.args, k, eps, min_competitors, records, rows, slots.contiguous(), _bytes(accepted), s.counters,
             sums, mins, counts, scores, sums.shape[0], scores.shape[1]),
            s.warps, s.constants | {"INCLUDE": include_top1, "CHUNK": _CHUNK},
        )  # fmt: skip


def pool_update_scores(
    token_scores: Tensor,
    token_logps: Tensor | None,
    slots: Tensor,
    accepted: Tensor | None,
    sums: Tensor,
    mins: Tensor,
    counts: Tensor,
    scores: Tensor,
) -> None:
    rows = token_scores.shape[0]
    if not rows:
        return
    with _on_device(token_scores):
        _launch(
            _pools.update_scores_kernel, rows,
            (token_scores, token_scores.stride(0), token_logps, 0 if token_logps is None else token_logps.stride(0),
             slots.contiguous(), _bytes(accepted), rows, sums, mins, counts, scores, sums.shape[0], scores.shape[1]),
            4, {"CHUNK": _CHUNK},
        )  # fmt: skip


def pool_read(
    sums: Tensor,
    mins: Tensor,
    counts: Tensor,
    scores: Tensor,
    slots: Tensor | None,
    pools: list[int],
    bottom_share: float,
    bottom_ceil: bool,
    out: Tensor,
) -> None:
    columns = out.shape[1]
    if not columns:
        return
    with _on_device(sums):
        _launch(
            _pools.read_kernel, columns,
            (sums, mins, counts, scores, None if slots is None else slots.contiguous(), columns, sums.shape[0],
             scores.shape[1], *_pool_code(pools), _share_bits(bottom_share), int(bottom_ceil), out),
            4, {"CHUNK": _CHUNK},
        )  # fmt: skip


def merge_partials(
    values: Tensor,
    argmaxes: Tensor,
    lses: Tensor,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    top1: Tensor,
    argmax: Tensor,
    mean: Tensor,
    std: Tensor,
    lse: Tensor,
    count: Tensor,
    scores: Tensor,
) -> None:
    shards, rows, k = values.shape
    k2, log_s = max(16, 1 << _log2(k)), _log2(shards)
    if k2 << log_s > _MAX_MERGE:
        raise ValueError(
            f"merge_partials: expected at most {_MAX_MERGE // k2} shards with k = {k}, got {shards}; merge in groups"
        )
    if not rows:
        return
    with _on_device(values):
        scratch = torch.empty(rows * 2 * k2, dtype=torch.int32, device=values.device)
        _launch(
            _rows.merge_kernel, rows,
            (values.contiguous(), argmaxes.contiguous(), lses.contiguous(), shards, rows, k, scratch, eps,
             min_competitors, top1, argmax, mean, std, lse, count, scores),
            _warps(max(k2 << log_s, 16 * k2)),
            {"S2": 1 << log_s, "LOG_S": log_s, "K2": k2, "LOG_K": _log2(k2), "INCLUDE": include_top1},
        )  # fmt: skip


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SEPARABILITY_SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, globals()[_name], _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", lambda *args, **kwargs: None, lib=_LIBRARY)
