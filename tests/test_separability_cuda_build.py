"""The nvcc gate: what the compiler made of the CUDA kernels, for every target, on a machine without a GPU.

No spills, no local memory, registers within what the intended occupancy allows, 16-byte loads and few instructions per
element in the streaming loop. The gate is shown to catch each of these faults in a planted variant of the sources.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import cuda_gate
import pytest
from cuda_gate import CSRC, TARGETS, Kernel

ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
ROW_SOURCES = [CSRC / f"separability_cuda_{t}.cu" for t in ELEMENT_BYTES]
SOURCES = [*ROW_SOURCES, CSRC / "separability_cuda.cu"]
#: 256 threads a block, 65,536 registers a multiprocessor: 4 resident blocks of the stream kernel, 3 of the others.
REGISTER_CAPS = {"stream_kernel": 64, "select_kernel": 80}
OTHER_CAP = 80
MAX_INSTRUCTIONS = {("bf16", "90"): 13.0}
KERNELS_BESIDE_ROWS = {"update_kernel", "read_kernel", "merge_kernel", "empty_answers_kernel"}


def plain_name(mangled: str) -> str:
    """stream_kernel, ... of an Itanium-mangled name."""
    return re.search(r"\d+((?:[a-z]+_)+kernel)", mangled)[1]


def is_aligned_stream(mangled: str) -> bool:
    return "stream_kernel" in mangled and "Lb1E" in mangled


def instructions_per_element(kernel: Kernel, element_bytes: int) -> float:
    """Of one lane, over one trip of the streaming loop: every instruction in it, loads and control included."""
    body = kernel.streaming_loop()
    loads = sum("LDG.E.128" in i for i in body)
    return len(body) / (loads * 16 / element_bytes) if loads else float("inf")


def faults(kernels: dict[str, Kernel], dtype: str | None, target: str) -> list[str]:
    """What is wrong with the kernels of one cubin, in words; the gate demands an empty list."""
    found = []
    for name, k in kernels.items():
        plain = plain_name(name)
        if k.spill_bytes:
            found.append(f"{plain}: {k.spill_bytes} bytes of spills")
        local = k.count(r"\b(LDL|STL)\b")
        if k.stack or local:
            found.append(f"{plain}: local memory: {k.stack} bytes of stack, {local} accesses")
        if not 0 < k.registers <= REGISTER_CAPS.get(plain, OTHER_CAP):
            found.append(f"{plain}: {k.registers} registers, cap {REGISTER_CAPS.get(plain, OTHER_CAP)}")
        if not k.instructions:
            found.append(f"{plain}: no machine code found")
        if is_aligned_stream(name):
            body = k.streaming_loop()
            wide = sum(re.search(r"LDG\.E\.128", i) is not None for i in body)
            narrow = sum(re.search(r"\bLDG\b", i) is not None for i in body) - wide
            if wide == 0 or narrow:
                found.append(f"{plain}: {wide} 16-byte and {narrow} narrower loads in the streaming loop")
            limit = MAX_INSTRUCTIONS.get((dtype, target))
            count = instructions_per_element(k, ELEMENT_BYTES[dtype])
            if limit is not None and count > limit:
                found.append(f"{plain}: {count:.2f} instructions per element, limit {limit}")
    return found


@pytest.fixture(scope="module")
def cubins():
    return cuda_gate.compile_all(SOURCES)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_kernels_pass_the_gate(cubins, source: Path, target: str):
    dtype = source.stem.rsplit("_", 1)[1]
    kernels = cubins[source.stem, target]
    names = sorted(map(plain_name, kernels))
    if dtype in ELEMENT_BYTES:
        assert names == ["select_kernel", "stream_kernel", "stream_kernel"]
        assert sum(map(is_aligned_stream, kernels)) == 1
    else:
        assert set(names) == KERNELS_BESIDE_ROWS
    assert faults(kernels, dtype, target) == []


def test_instructions_per_element_table(cubins, capsys):
    """Printed for every target and dtype, with the registers; `make test` shows it with -s."""
    lines = [f"{'target':>8} {'dtype':>6} {'instr/element':>14} {'registers':>10} {'select registers':>17}"]
    for target in TARGETS:
        for dtype, size in ELEMENT_BYTES.items():
            kernels = cubins[f"separability_cuda_{dtype}", target]
            stream = next(k for n, k in kernels.items() if is_aligned_stream(n))
            select = next(k for n, k in kernels.items() if plain_name(n) == "select_kernel")
            per_element = instructions_per_element(stream, size)
            lines.append(
                f"{'sm_' + target:>8} {dtype:>6} {per_element:>14.2f} {stream.registers:>10} {select.registers:>17}"
            )
            assert stream.streaming_loop(), (target, dtype)
            assert sum("MUFU.EX2" in i for i in stream.streaming_loop()) >= 8 * 16 // size
    with capsys.disabled():
        print("\n" + "\n".join(lines))


# ---- the gate can fail -----------------------------------------------------------------------------------------------
def planted(folder: Path, file: str, old: str, new: str, source: str = "separability_cuda_bf16.cu") -> list[str]:
    """The gate's verdict on a copy of the sources in which `old` reads `new`."""
    shutil.copytree(CSRC, folder / "csrc")
    path = folder / "csrc" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file}: expected once: {old!r}"
    path.write_text(text.replace(old, new))
    return faults(cuda_gate.compile_cubin(folder / "csrc" / source, "90"), "bf16", "90")


def test_gate_sees_spills(tmp_path: Path):
    verdict = planted(
        tmp_path, "separability_cuda_stream.cuh", "__launch_bounds__(kStreamWarps * 32, 4)",
        "__launch_bounds__(kStreamWarps * 32, 8)",
    )  # fmt: skip
    assert any("spills" in v for v in verdict) and any("local memory" in v for v in verdict), verdict


def test_gate_sees_a_register_hog():
    hog = {
        "_Z13stream_kernel": Kernel("_Z13stream_kernel", registers=65, stack=0, spill_bytes=0, instructions=["EXIT"])
    }
    assert faults(hog, "bf16", "90") == ["stream_kernel: 65 registers, cap 64"]


def test_gate_sees_local_memory_without_spills(tmp_path: Path):
    old = "const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;"
    new = old + " volatile int local[64]; local[lane] = lane; if (local[63 - lane] == 12345) return;"
    verdict = planted(tmp_path, "separability_cuda_stream.cuh", old, new)
    assert any("local memory" in v for v in verdict) and not any("spills" in v for v in verdict), verdict


def test_gate_sees_narrow_loads(tmp_path: Path):
    old = "v[j] = LDG(vectors + int64_t(c) * (32 * kVectors) + 32 * j);"
    new = """{
        const uint32_t* p = reinterpret_cast<const uint32_t*>(vectors + int64_t(c) * (32 * kVectors) + 32 * j);
        v[j] = make_uint4(LDG(p), LDG(p + 1), LDG(p + 2), LDG(p + 3));
      }"""
    verdict = planted(tmp_path, "separability_cuda_stream.cuh", old, new)
    assert any("narrower loads" in v for v in verdict), verdict


def test_gate_sees_costly_arithmetic(tmp_path: Path):
    verdict = planted(
        tmp_path, "separability_cuda_stream.cuh",
        "part[i] += simt_math::exp2_approx(fmaf(f[e], scale, -base));",
        "part[i] += simt_math::exp2_approx(fmaf(f[e], scale, -base)) + powf(f[e], scale);",
    )  # fmt: skip
    assert any("instructions per element" in v for v in verdict), verdict


def test_missing_tools_are_an_error(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(cuda_gate, "ROOT", tmp_path)
    with pytest.raises(cuda_gate.GateError, match=r"not on this machine, and .*pip install"):
        cuda_gate.install_from_pypi(("speceyes-no-such-package==0",))
