"""Every Triton kernel compiled ahead of time for sm_80, 90 and 100, and what the machine code must look like.

The launches are recorded from the ops themselves, so what is compiled here, specialisation and options included, is
what a GPU would run. The disassemblers come with Triton. In interpreter mode all of it moves to a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from separability_cases import ALL_POOLS
from triton.backends.compiler import GPUTarget

from speceyes_kernels import separability_triton
from speceyes_kernels._schemas import POOL_IDS

TARGETS = (80, 90, 100)
INTERPRETED = not isinstance(separability_triton._rows.stream_kernel, triton.runtime.JITFunction)

#: Registers a thread, at most. 64 keep 8 blocks of the streaming kernel on a multiprocessor; 128 keep a 16-warp block
#: of the selecting kernels resident.
CAPS = {
    "stream_kernel": 64,
    "select_kernel": 128,
    "select_slots_kernel": 128,
    "select_answers_kernel": 128,
    "merge_kernel": 128,
    "update_scores_kernel": 64,
    "read_kernel": 64,
}


class Code(NamedTuple):
    name: str
    registers: int
    stack: int
    local: int
    sass: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))


class _Driver:
    """Stands for the GPU driver: Triton asks it only for the target when it compiles without launching."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def _tool(name: str, *args: str) -> str:
    return subprocess.run(
        [getattr(triton.knobs.nvidia, name).path, *args], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def build(monkeypatch, tmp_path) -> Callable[..., list[Code]]:
    """build(capability, call, **changed constants or options) -> the machine code of the launches of call()."""

    def run(capability: int, call: Callable[[], object], **changed: int) -> list[Code]:
        codes = []

        def launch(kernel, grid, args, warps, constants):
            options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
            known = {name: value for name, value in changed.items() if name in constants or name == "maxnreg"}
            binary = kernel.run(*args, grid=(grid,), warmup=True, **options | constants | known)
            path = tmp_path / "kernel.cubin"
            path.write_bytes(binary.asm["cubin"])
            usage = _tool("cuobjdump", "--dump-resource-usage", str(path))
            used = {key: int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")}
            codes.append(Code(kernel.fn.__name__, *used.values(), _tool("nvdisasm", "-c", str(path))))

        monkeypatch.setattr(separability_triton, "_launch", launch)
        monkeypatch.setattr(separability_triton, "_on_device", lambda tensor: separability_triton._NOTHING)
        monkeypatch.setattr(triton.runtime.driver, "_active", _Driver(capability))
        call()
        return codes

    return run


def check_gate(code: Code) -> None:
    assert code.stack == 0 and code.local == 0, (
        f"{code.name}: {code.stack} bytes of stack, {code.local} of local memory"
    )
    assert code.count(r"\b(LDL|STL)\b") == 0, f"{code.name} spills"
    assert code.registers <= CAPS[code.name], f"{code.name}: {code.registers} registers, cap {CAPS[code.name]}"


def check_wide_loads(code: Code, size: int) -> None:
    """All full tiles come in 16-byte loads: as many as a lane's share of the tile needs."""
    share = separability_triton.TILE * size // (16 * 32 * separability_triton._STREAM_WARPS)
    wide = code.count(r"LDG\.E\.128")
    assert wide == share, f"{code.name}: {wide} 16-byte loads, expected {share}"


# ---- the ops, on tensors that are never read -------------------------------------------------------------------------
def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def stats(logits: torch.Tensor, k: int = 64) -> None:
    n = logits.shape[0]
    long, count = zeros(n, dtype=torch.int64), zeros(n, dtype=torch.int32)
    f = [zeros(n) for _ in range(4)]
    separability_triton.topk_stats(logits, k, logits.shape[1], f[0], long, f[1], f[2], f[3], count)


def tokens(logits: torch.Tensor, k: int = 64) -> None:
    separability_triton.token_separability(logits, k, logits.shape[1], True, 1e-6, 8, zeros(logits.shape[0]))


def answers(logits: torch.Tensor, k: int = 64) -> None:
    n, mask = logits.shape[0], zeros(logits.shape[0], dtype=torch.bool)
    separability_triton.answer_separability(
        logits, zeros(3, dtype=torch.int32), mask, k, logits.shape[1], False, 1e-6, 8,
        [POOL_IDS[p] for p in ALL_POOLS], 0.2, False, zeros(n, 2), zeros(5, 2),
    )  # fmt: skip


STATE = (zeros(3, 2, dtype=torch.float64), zeros(3, 2), zeros(3, 2, dtype=torch.int32), zeros(3, 9))


def slots(logits: torch.Tensor, k: int = 64) -> None:
    n = logits.shape[0]
    separability_triton.pool_update(
        logits, zeros(n, dtype=torch.int64), zeros(n, dtype=torch.bool), k, logits.shape[1], False, 1e-6, 8, *STATE,
        zeros(n, 2),
    )  # fmt: skip


def small(k: int, shards: int) -> None:
    n, long, count = 4, zeros(4, dtype=torch.int64), zeros(4, dtype=torch.int32)
    separability_triton.pool_update_scores(zeros(n), zeros(n), long, None, *STATE)
    separability_triton.pool_read(*STATE, long, [0, 1, 2, 3, 4], 0.2, True, zeros(5, 4))
    separability_triton.merge_partials(
        zeros(shards, n, k), zeros(shards, n, dtype=torch.int64), zeros(shards, n), True, 1e-6, 8, zeros(n), long,
        zeros(n), zeros(n), zeros(n), count, zeros(n),
    )  # fmt: skip


def report(capability: int, codes: list[Code]) -> None:
    for code in codes:
        print(f"sm_{capability} {code.name}: {code.registers} registers, {code.count(r'LDG')} loads")


# ---- the gate --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("capability", TARGETS)
def test_row_kernels(build, capability):
    """A usual vocabulary, the widest (where registers are scarcest), and a small one; every kernel in some dtype."""
    cases = [
        (stats, zeros(4, 151_936, dtype=torch.bfloat16), 64),
        (tokens, zeros(4, 1000, dtype=torch.float16), 2),
        (answers, zeros(4, 151_936), 64),
        (slots, zeros(4, 1 << 20, dtype=torch.bfloat16), 256),
    ]
    for call, logits, k in cases:
        codes = build(capability, lambda call=call, logits=logits, k=k: call(logits, k))
        report(capability, codes)
        assert len(codes) == 2
        for code in codes:
            check_gate(code)
        check_wide_loads(codes[0], logits.element_size())
        assert codes[1].count(r"LDG\.E\.128") > 0, "candidate blocks are read narrowly"


@pytest.mark.parametrize("capability", TARGETS)
def test_small_kernels(build, capability):
    codes = build(capability, lambda: small(256, 8))
    report(capability, codes)
    assert Counter(code.name for code in codes) == {"update_scores_kernel": 1, "read_kernel": 1, "merge_kernel": 1}
    for code in codes:
        check_gate(code)


def test_the_widest_merge_and_the_widest_answers(build):
    """The largest register demand: 16,384 values in a merge; 2**20 columns in fp32 with k = 256."""
    for codes in (build(90, lambda: small(256, 64)), build(90, lambda: answers(zeros(2, 1 << 20), 256))):
        for code in codes:
            check_gate(code)


@pytest.mark.parametrize(("dtype", "cap"), [(torch.bfloat16, 13), (torch.float32, 16)])
def test_instructions_per_element(build, dtype, cap):
    """Of a full tile on sm_90, prologue and epilogue included; up to 13 a bf16 pass is bound by memory, fp32 twice."""
    code = build(90, lambda: stats(zeros(4, 151_936, dtype=dtype)))[0]
    body = [line for line in code.sass.splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", line) and "NOP" not in line]
    # The branch of the last, masked tile: from the forward branch over the narrow loads to the jump back.
    first_narrow = next(i for i, line in enumerate(body) if re.search(r"LDG\.E(\.U16)? ", line))
    last_narrow = max(i for i, line in enumerate(body) if re.search(r"LDG\.E(\.U16)? ", line))
    start = max(i for i, line in enumerate(body[:first_narrow]) if "BRA" in line)
    end = next(i for i, line in enumerate(body) if i > last_narrow and "BRA" in line)
    assert not any("LDG.E.128" in line for line in body[start:end])
    per_element = (len(body) - (end - start)) / (separability_triton.TILE / (32 * separability_triton._STREAM_WARPS))
    print(f"sm_90 stream_kernel {dtype}: {per_element:.2f} instructions an element")
    assert 5 < per_element <= cap


def test_any_row_layout_compiles_within_the_gate(build):
    """Odd strides, an odd start and strided columns take narrow loads, never local memory."""
    wide = zeros(4, 2 * 4103, dtype=torch.bfloat16)
    for logits in (wide[:, 1:4100], wide[:, : 2 * 4100 : 2]):
        for code in build(90, lambda logits=logits: tokens(logits)):
            caps = dict.fromkeys(CAPS, 128)
            assert code.stack == 0 and code.local == 0 and code.registers <= caps[code.name]
            assert code.count(r"\b(LDL|STL)\b") == 0


# ---- the gate must be able to fail -----------------------------------------------------------------------------------
def test_a_missing_alignment_hint_is_found(build):
    code = build(90, lambda: stats(zeros(4, 4096, dtype=torch.bfloat16)), VEC=1)[0]
    with pytest.raises(AssertionError, match="0 16-byte loads, expected 4"):
        check_wide_loads(code, 2)


def test_an_unaligned_row_is_never_read_wide(build):
    """The opposite fault would crash: 16-byte loads where a row starts between."""
    logits = zeros(4, 4101, dtype=torch.bfloat16)
    assert all(code.count(r"LDG\.E\.128") == 0 for code in build(90, lambda: stats(logits))[:1])


def test_spills_are_found(build):
    codes = build(90, lambda: stats(zeros(4, 151_936, dtype=torch.bfloat16)), maxnreg=32)
    with pytest.raises(AssertionError, match=r"bytes of stack|spills"):
        for code in codes:
            check_gate(code)


if INTERPRETED:
    for _name in [name for name in globals() if name.startswith("test_")]:
        del globals()[_name]

    def test_in_a_process_of_its_own():
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(Path(__file__))], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-6000:]
