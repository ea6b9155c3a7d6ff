"""The CUDA kernels under sanitizers, and faults planted in copies of their sources: each must be caught."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from separability_cases import DTYPES, edge_batch
from simt.build import Patch
from simt.client import Device, DeviceError
from simt.separability import Query, Separability, State, separability_driver
from test_separability_simt import BOUNDS, assert_rows, expected_pools, pool_case, token_rows


def small_case(kernels: Separability, dtype: torch.dtype, rows: int = 29, k: int = 64) -> None:
    """Aligned, misaligned and strided rows over several chunks and blocks; answers; slots; merge."""
    v = 2600
    logits = edge_batch(v, dtype)[:rows]
    wide = torch.full((rows, v + 3), math.nan, dtype=dtype)
    wide[:, 1 : 1 + v] = logits
    aligned = torch.full((rows, 2608), math.nan, dtype=dtype)
    aligned[:, :v] = logits
    for x in (logits, wide[:, 1 : 1 + v], aligned):
        assert_rows(kernels.rows(x, k, vocab=v)[0], logits, k)


def pools_case(kernels: Separability, dtype: torch.dtype, rows: int) -> None:
    logits, cu, mask = pool_case(dtype)
    logits, cu, mask = logits[:rows], torch.tensor(BOUNDS).clamp(max=rows), mask[:rows]
    table, _, out = kernels.rows(logits, 16, cu=cu, mask=mask, query=Query())
    assert torch.equal(out, expected_pools(table.records, cu, mask, Query()))
    owner = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())
    owner[~mask] = -1
    _, state, _ = kernels.rows(logits, 16, slots=owner, state=State.fresh(len(cu) - 1, max_tokens=rows))
    assert torch.equal(kernels.read(state), out)
    again = kernels.update(table.records[:, 0], table.records[:, 1], owner, State.fresh(len(cu) - 1, max_tokens=rows))
    assert torch.equal(kernels.read(again), out)


def merge_case(kernels: Separability, dtype: torch.dtype, rows: int = 29) -> None:
    logits = edge_batch(300, dtype)[:rows]
    parts = [kernels.rows(logits[:, a:b], 40, argmax_offset=a)[0] for a, b in ((0, 7), (7, 201), (201, 300))]
    stacked = (torch.stack([getattr(p, name) for p in parts]) for name in ("values", "argmax", "lse"))
    assert_rows(kernels.merge(*stacked), logits, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clean_under_address_and_undefined_behaviour_sanitizers(dtype: torch.dtype) -> None:
    with Device(separability_driver("asan"), seed=1) as device:
        for seed, multiprocessors in ((1, 132), (2, 2)):
            device.options(seed=seed)
            kernels = Separability(device, multiprocessors=multiprocessors)
            small_case(kernels, dtype)
            pools_case(kernels, dtype, rows=335 if seed == 1 else 60)
            merge_case(kernels, dtype)
            for v in (1, 63, 64, 65, 129):
                logits = token_rows(3, dtype)[:, :v] if v <= 96 else edge_batch(v, dtype)[:3]
                if v >= 2:
                    kernels.rows(logits, 2)
            kernels.rows(torch.empty(0, 70, dtype=dtype), 8, cu=torch.tensor([0, 0]), query=Query())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_data_race(dtype: torch.dtype) -> None:
    """Few rows: every thread of every block costs the race detector about a millisecond."""
    with Device(separability_driver("tsan"), seed=1) as device:
        kernels = Separability(device, multiprocessors=4)
        small_case(kernels, dtype, rows=2)
        device.options(seed=2)
        if dtype == torch.bfloat16:
            pools_case(kernels, dtype, rows=12)
        if dtype == torch.float32:
            merge_case(kernels, dtype, rows=2)


# ---- planted faults ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fault:
    """A change to the real sources, the build and case that show it, and what is reported (None: wrong results)."""

    name: str
    patch: Patch
    mode: str
    message: str | None
    case: str = "rows"


STREAM, SELECT = "separability_cuda_stream.cuh", "separability_cuda_select.cuh"
TOPK, POOL, LAUNCH = "separability_cuda_topk.cuh", "separability_cuda_pool.cuh", "separability_cuda.cuh"
BARRIER = r"\n *__syncthreads\(\);"

FAULTS = [
    Fault(
        "missing barrier",
        Patch(SELECT, r"(s\.first_block = n;\n *\})" + BARRIER, r"\1"),
        "plain",
        None,
    ),
    Fault(
        "missing barrier, as a race",
        Patch(TOPK, r"(histogram\[tid\] = 0;)" + BARRIER, r"\1"),
        "tsan",
        r"data race(?s:.*)separability_cuda_topk\.cuh",
    ),
    Fault(
        "missing __syncwarp",
        Patch(STREAM, r"__syncwarp\(\);(\s*const uint4\* vectors)", r"\1"),
        "tsan",
        r"data race(?s:.*)separability_cuda_stream\.cuh",
    ),
    Fault(
        "missing fence before the last block reads",
        Patch(POOL, r"__threadfence\(\);", "", count=2),
        "tsan",
        r"data race(?s:.*)separability_cuda_pool\.cuh",
        case="pools",
    ),
    Fault(
        "divergent barrier",
        Patch(TOPK, r"(s\.rank = rank - int\(above\);)", r"\1 __syncthreads();"),
        "plain",
        r"kernel select_kernel block .*separability_cuda_topk\.cuh:\d+: divergent barrier",
    ),
    Fault(
        "wrong mask",
        Patch(STREAM, r"__reduce_max_sync\(kAllLanes", "__reduce_max_sync(0x7fffffffu"),
        "plain",
        r"kernel stream_kernel block .*: __reduce_max_sync: calling lane 31 is not in mask 0x7fffffff",
    ),
    Fault(
        "overrun of dynamic shared memory",
        Patch(LAUNCH, r"(const size_t keys = size_t\(chunks\) \* kChunkWords \* sizeof\(uint32_t\))", r"\1 - 4"),
        "plain",
        r"kernel select_kernel block .*: shared memory overrun: wrote \d bytes past the end of array `\(dynamic\)`",
    ),
    Fault(
        "overrun of a shared array",
        Patch(SELECT, r"s\.warp_top\[warp\] = top", "s.warp_top[warp + 1] = top"),
        "asan",
        r"separability_cuda_select\.cuh:\d+:\d+: runtime error: index 8 out of bounds",
    ),
    Fault(
        "misaligned load",
        Patch(
            LAUNCH, r"reinterpret_cast<uintptr_t>\(x\.data\) % 16 == 0", "reinterpret_cast<uintptr_t>(x.data) % 2 == 0"
        ),
        "plain",
        r"kernel stream_kernel block .*separability_cuda_stream\.cuh:\d+: misaligned 16-byte load",
        case="one misaligned row",
    ),
    Fault(
        "read past the row's end",
        Patch(STREAM, r"if \(i < whole\) v\[j\] = LDG", "if (i <= whole) v[j] = LDG"),
        "plain",
        r"kernel stream_kernel block .*: out-of-bounds global load of 16 bytes.*buffer `logits`",
    ),
    Fault(
        "write past an output",
        Patch(POOL, r"place < state\.max_tokens", "place <= state.max_tokens"),
        "asan",
        r"AddressSanitizer: heap-buffer-overflow(?s:.*)WRITE of size 4",
        case="overflow",
    ),
    Fault(
        "uninitialised shared memory",
        Patch(SELECT, r"s\.num_candidates = 0;", ""),
        "plain",
        "",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.name} ({f.mode})")
def test_planted_fault_is_caught(fault: Fault) -> None:
    driver = separability_driver(fault.mode, (fault.patch,), dtypes=("bf16",))
    expected = (
        (DeviceError, AssertionError)
        if fault.message == ""
        else AssertionError
        if fault.message is None
        else DeviceError
    )
    with pytest.raises(expected, match=fault.message or None):
        for seed in (1, 2, 3):
            with Device(driver, seed=seed) as device:
                kernels = Separability(device, multiprocessors=4)
                if fault.case == "pools":
                    pools_case(kernels, torch.bfloat16, rows=12)
                elif fault.case == "overflow":
                    kernels.rows(
                        token_rows(9, torch.bfloat16),
                        16,
                        slots=torch.zeros(9, dtype=torch.int32),
                        state=State.fresh(1, 4),
                    )
                elif fault.case == "one misaligned row":
                    kernels.rows(torch.randn(1, 3000).bfloat16()[:, 1:])
                else:
                    small_case(kernels, torch.bfloat16, rows=2 if fault.mode == "tsan" else 6)


def test_the_unplanted_copy_passes() -> None:
    """The planted faults' cases fail for their faults alone."""
    driver = separability_driver("plain", (Patch(TOPK, r"(#pragma once)", r"\1\n"),), dtypes=("bf16",))
    with Device(driver, seed=1) as device:
        kernels = Separability(device, multiprocessors=4)
        small_case(kernels, torch.bfloat16, rows=6)
        pools_case(kernels, torch.bfloat16, rows=45)
