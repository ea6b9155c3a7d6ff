"""The SIMT shim itself: right kernels pass under every schedule and sanitizer, every planted fault is caught."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from simt.build import HERE, build
from simt.client import Buffer, Device, DeviceError

SAMPLES = [HERE / "samples.cu"]
FAULTS = re.findall(r"k(\w+)", re.search(r"enum Fault \{(.*?)kFaults", SAMPLES[0].read_text(), re.S).group(1))
SEEDS = (0, 1, 2, 3)
ROWS, COLUMNS, TILES = 5, 1000, 9


@pytest.fixture(scope="module", params=["plain", "asan", "tsan"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def driver(mode: str) -> Path:
    return build(SAMPLES, mode=mode)


def sum_rows(device: Device, fault: str = "None", *, shift: int = 0, guarded: bool = False) -> None:
    x = np.random.default_rng(1).integers(-8, 8, (ROWS, COLUMNS)).astype(np.float32)
    rows, arrived, total = device.call(
        "sum_rows",
        [FAULTS.index(fault), ROWS, COLUMNS],
        [
            Buffer("x", x, shift=shift, guarded=guarded),
            Buffer("rows", np.full(ROWS, 9, np.float32), output=True),
            Buffer("arrived", np.zeros(1, np.uint32), output=True),
            Buffer("total", np.zeros(1, np.float32), output=True),
        ],
    )
    np.testing.assert_array_equal(rows, x.sum(1))
    assert arrived == ROWS and total == x.sum()


def sum_rows_guarded(device: Device, fault: str = "None") -> None:
    sum_rows(device, fault, shift=16, guarded=True)


def scan_warp(device: Device, fault: str = "None") -> None:
    x = np.random.default_rng(2).integers(-8, 8, 32).astype(np.int32)
    (y,) = device.call(
        "scan_warp",
        [FAULTS.index(fault)],
        [Buffer("x", x), Buffer("y", np.zeros(32, np.int32), output=True)],
    )
    np.testing.assert_array_equal(y, np.cumsum(x))


def sum_pipelined(device: Device, fault: str = "None") -> None:
    x = np.random.default_rng(3).integers(-8, 8, (TILES, 64, 2, 4)).astype(np.float32)
    (out,) = device.call(
        "sum_pipelined",
        [FAULTS.index(fault), TILES],
        [Buffer("x", x), Buffer("out", np.zeros(2, np.float32), output=True)],
    )
    np.testing.assert_array_equal(out, x.sum((0, 1, 3))[::-1])


def operations(device: Device, fault: str = "None") -> None:
    (wrong,) = device.call("operations", [FAULTS.index(fault)], [Buffer("wrong", np.zeros(1, np.int32), output=True)])
    assert wrong == 0


def test_right_kernels_pass(mode: str) -> None:
    with Device(driver(mode)) as device:
        for seed in SEEDS:
            device.options(seed=seed)
            for kernel in (sum_rows, sum_rows_guarded, scan_warp, sum_pipelined, operations):
                kernel(device)


def test_blocks_over_os_threads() -> None:
    with Device(driver("plain"), workers=2, seed=5) as device:
        for _ in range(20):
            sum_rows(device)


#: fault -> (kernel, build, what must be reported). `None`: the results differ from the right ones in some schedule.
CAUGHT = [
    ("MissingBarrier", sum_rows, "plain", None),
    ("MissingBarrier", sum_rows, "tsan", r"data race(?s:.*)sum_rows"),
    ("DivergentBarrier", sum_rows, "plain", r"kernel sum_rows block \(\d,0,0\) .*samples\.cu:\d+: divergent barrier"),
    (
        "DifferentBarriers",
        sum_rows,
        "plain",
        r"divergent barrier: this thread is at __syncthreads, others .*samples\.cu:",
    ),
    ("WrongMask", sum_rows, "plain", r"thread \(\d+,0,0\) samples\.cu:\d+: __shfl_xor_sync: .* mask 0x0000ffff"),
    ("SharedOverrun", sum_rows, "plain", r"shared memory overrun: wrote 0 bytes past the end of array `partial`"),
    (
        "SharedOverrun",
        sum_rows,
        "asan",
        r"AddressSanitizer: use-after-poison(?s:.*)in kernel sum_rows block \(\d,0,0\)",
    ),
    ("MisalignedLoad", sum_rows, "plain", r"samples\.cu:\d+: misaligned 16-byte load at address ending in 0x\w4"),
    ("ReadPastEnd", sum_rows, "plain", r"out-of-bounds global load of 16 bytes, 0 bytes past the end of buffer `x`"),
    ("PlainReadPastEnd", sum_rows, "asan", r"AddressSanitizer: heap-buffer-overflow(?s:.*)READ of size 4"),
    (
        "WritePastEnd",
        sum_rows,
        "plain",
        r"out-of-bounds global store of 4 bytes, 0 bytes past the end of buffer `rows`",
    ),
    ("PlainWritePastEnd", sum_rows, "plain", r"out-of-bounds write 0 bytes past the end of buffer `rows`"),
    ("PlainWritePastEnd", sum_rows, "asan", r"AddressSanitizer: heap-buffer-overflow(?s:.*)WRITE of size 4"),
    ("ReadOnlyStore", sum_rows, "plain", r"store into read-only buffer `x`"),
    ("Uninitialised", sum_rows, "plain", None),
    ("MissingFence", sum_rows, "tsan", r"data race(?s:.*)sum_rows"),
    ("MissingSyncwarp", scan_warp, "plain", None),
    ("MissingSyncwarp", scan_warp, "tsan", r"data race(?s:.*)scan_warp"),
    ("WeakWait", sum_pipelined, "plain", None),
    ("EarlyRefill", sum_pipelined, "plain", None),
    ("EarlyRefill", sum_pipelined, "tsan", r"data race"),
    ("UncountedRead", sum_rows_guarded, "plain", r"kernel sum_rows block \(\d,0,0\) thread \(\d+,0,0\): memory fault"),
    ("ExitedLane", operations, "plain", r"samples\.cu:\d+: (__syncwarp: mask .* exited lane|thread exits while lanes)"),
]


@pytest.mark.parametrize(("fault", "kernel", "mode_", "message"), CAUGHT, ids=[f"{c[0]}-{c[2]}" for c in CAUGHT])
def test_planted_fault_is_caught(fault: str, kernel, mode_: str, message: str | None) -> None:
    expected = AssertionError if message is None else DeviceError
    with pytest.raises(expected, match=message):
        for seed in SEEDS:  # the first schedule that shows it is enough
            with Device(driver(mode_), seed=seed) as device:
                kernel(device, fault)


def test_every_fault_is_tried() -> None:
    assert {c[0] for c in CAUGHT} == set(FAULTS) - {"None"}


def test_error_ends_the_launch_not_the_driver() -> None:
    with Device(driver("plain")) as device:
        with pytest.raises(DeviceError, match="misaligned"):
            sum_rows(device, "MisalignedLoad")
        sum_rows(device)
        with pytest.raises(DeviceError, match="misaligned 16-byte load"):
            sum_rows(device, shift=4)
        sum_rows(device, shift=16)


@pytest.mark.parametrize(
    "shape",
    [(0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 49153), (1, 32, 1 << 20)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_impossible_launch_is_an_error(shape: tuple[int, int, int]) -> None:
    x = np.zeros(32, np.int32)
    with Device(driver("plain")) as device:
        with pytest.raises(DeviceError, match="status 9"):
            device.call("launch_shape", shape, [Buffer("x", x), Buffer("y", x, output=True)])
        device.call("launch_shape", (1, 32, 49152 - 256), [Buffer("x", x), Buffer("y", x, output=True)])


def test_counts_of_a_known_kernel() -> None:
    """5 rows of 250 vectors: 8 warp requests a row, each vector half a sector."""
    with Device(driver("plain"), seed=2, count=True) as device:
        sum_rows(device)
        (key, count), *rest = device.counts.items()
    assert key == ("sum_rows", "x") and not rest
    assert (count.loads, count.bytes, count.requests) == (ROWS * 250, ROWS * 4000, ROWS * 8)
    assert count.sectors == ROWS * 125


def test_conversions_are_exact() -> None:
    torch = pytest.importorskip("torch", reason="needs torch as the oracle of bfloat16")
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    rng = np.random.default_rng(4)
    x = np.concatenate(
        [
            rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32),
            patterns.view(np.float16).astype(np.float32),
            np.float32([0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, 5.96e-8, 2.98e-8, 3.3895314e38]),
        ]
    )
    # Exact halves between neighbours: ties must go to even.
    halfway = (patterns.astype(np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([x, halfway])
    with Device(driver("plain")) as device:
        from_bf16, from_half, to_bf16, to_half = device.call(
            "convert",
            [x.size],
            [
                Buffer("x", x),
                Buffer("from_bf16", np.zeros(65536, np.float32), output=True),
                Buffer("from_half", np.zeros(65536, np.float32), output=True),
                Buffer("to_bf16", np.zeros(x.size, np.uint16), output=True),
                Buffer("to_half", np.zeros(x.size, np.uint16), output=True),
            ],
        )
    np.testing.assert_array_equal(from_bf16, (patterns.astype(np.uint32) << 16).view(np.float32))
    np.testing.assert_array_equal(from_half, patterns.view(np.float16).astype(np.float32))
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(to_half[number], x[number].astype(np.float16).view(np.uint16))
    bf16 = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_bf16[number], bf16[number])
    assert (to_half[~number] == 0x7FFF).all() and (to_bf16[~number] == 0x7FFF).all()
