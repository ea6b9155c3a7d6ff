"""Bytes that the CUDA kernels read per row, counted by the shim: the claim of one pass plus small re-reads."""

from __future__ import annotations

import pytest
import torch
from simt.client import Device
from simt.separability import Separability, separability_driver
from test_separability_simt import hard_rows

VOCABULARIES = (1000, 4099, 32000, 131072, 151936)
NAMES = ("normal", "top k one a block", "top k in two blocks", "half -inf", "ascending", "all equal")


def rows_of(v: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rows = dict(zip(NAMES, hard_rows(v, dtype), strict=True))
    rows["descending"] = rows["ascending"].flip(0)
    # Every block's maximum differs and the last block wins: the bound is as low as it can be.
    rows["block maxima rise"] = (torch.arange(v) // 64 / 8 - 60).to(dtype)
    rows["two values"] = (torch.arange(v) % 3 == 0).to(dtype)
    rows["one block holds all but -inf"] = torch.where(torch.arange(v) // 64 == 3, rows["normal"], -torch.inf)
    return rows


def limit(v: int, k: int) -> float:
    return 1.05 if v >= 131072 and k == 64 else 1 + 1.1 * 64 * k / v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_read_per_row(dtype: torch.dtype) -> None:
    table = [f"{dtype}: bytes of logits read / bytes of the row (limit); 32-byte sectors of the stream / the row's"]
    failures = []
    with Device(separability_driver(), seed=3, count=True) as device:
        kernels = Separability(device, multiprocessors=132, guarded=True)
        for v in VOCABULARIES:
            for name, row in rows_of(v, dtype).items():
                for k in (64,) if v > 4099 else (8, 64, 256):
                    # Guarded: a read that is not counted would fault. All outputs, so the argmax's work is in.
                    kernels.rows(row[None], k)
                    read = sum(c.bytes for (_, buffer), c in device.counts.items() if buffer == "logits")
                    stream = device.counts["stream_kernel", "logits"]
                    size = v * row.element_size()
                    table.append(
                        f"V {v:7d} k {k:3d} {name:30s} {read / size:7.4f} ({limit(v, k):.4f})  "
                        f"{stream.sectors * 32 / size:.4f}"
                    )
                    if read > limit(v, k) * size:
                        failures.append(table[-1])
                    assert stream.bytes == size, "the stream reads every logit once and nothing else"
    print("\n".join(table))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_loads(dtype: torch.dtype) -> None:
    """Aligned rows stream in 16-byte loads, 512 bytes a warp's request; other rows stay coalesced."""
    v = 32768
    logits = torch.randn(2, v + 16).to(dtype)  # rows start at whole sectors
    with Device(separability_driver(), seed=1, count=True) as device:
        kernels = Separability(device, multiprocessors=8, guarded=True)
        kernels.rows(logits[:, :v])
        stream = device.counts["stream_kernel", "logits"]
        assert stream.bytes == stream.loads * 16 == stream.requests * 512 == stream.sectors * 32
        kernels.rows(logits[:, 1 : v + 1])
        shifted = device.counts["stream_kernel", "logits"]
        assert shifted.bytes == stream.bytes and shifted.requests == shifted.loads / 32


def test_workspace_traffic_is_small() -> None:
    """What the second launch reads of the first one's: a maximum per 64 elements, a pair per 4 KiB, twice."""
    v = 151936
    with Device(separability_driver(), seed=1, count=True) as device:
        kernels = Separability(device, multiprocessors=8)
        for dtype, share in ((torch.float32, 0.02), (torch.bfloat16, 0.02)):
            row = torch.randn(1, v).to(dtype)
            kernels.rows(row)
            read = sum(c.bytes for (_, buffer), c in device.counts.items() if buffer == "workspace")
            assert 0 < read <= share * v * row.element_size()
