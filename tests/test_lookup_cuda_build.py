"""The nvcc gate for the lookup's kernels, every target: no spills, no local memory, registers within the occupancy meant."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import cuda_gate
import pytest
from cuda_gate import DRAFTING, TARGETS, Kernel

SOURCE = DRAFTING / "lookup_cuda.cu"
#: 65,536 registers a multiprocessor. lookup: 6 requests (blocks of 128) at once; select: its one block of 1,024 threads.
REGISTER_CAPS = {"apply_kernel": 32, "lookup_kernel": 80, "select_kernel": 64}


def plain_name(mangled: str) -> str:
    return re.search(r"\d+((?:[a-z]+_)+kernel)", mangled)[1]


def faults(kernels: dict[str, Kernel]) -> list[str]:
    """What is wrong, in words."""
    found = []
    for name, k in kernels.items():
        plain, local = plain_name(name), k.count(r"\b(LDL|STL)\b")
        if k.spill_bytes or k.stack or local:
            found.append(f"{plain}: {k.spill_bytes} bytes of spills, {k.stack} of stack, {local} local accesses")
        if not 0 < k.registers <= REGISTER_CAPS[plain]:
            found.append(f"{plain}: {k.registers} registers, cap {REGISTER_CAPS[plain]}")
        if not k.instructions:
            found.append(f"{plain}: no machine code found")
    return found


@pytest.fixture(scope="module")
def cubins():
    return cuda_gate.compile_all([SOURCE])


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_pass_the_gate(cubins, target: str):
    kernels = cubins[SOURCE.stem, target]
    assert sorted(map(plain_name, kernels)) == ["apply_kernel", "lookup_kernel", "lookup_kernel", "select_kernel"]
    assert faults(kernels) == []


def test_gate_sees_local_memory(tmp_path: Path):
    shutil.copytree(DRAFTING.parent, tmp_path / "csrc")
    path = tmp_path / "csrc" / "drafting" / "lookup_cuda.cu"
    old = "const int t = int(threadIdx.x), level = t / 32, row_of = int(blockIdx.x);"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, old + " volatile int own[64]; own[t % 64] = t; if (own[63 - t % 64] == -1) return;"))
    assert any("of stack" in f for f in faults(cuda_gate.compile_cubin(path, "90")))
