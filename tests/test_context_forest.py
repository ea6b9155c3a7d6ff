"""The context forest under sanitizers, against brute force over the raw sequences (tests/native/context_forest_check.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [
    ROOT / "tests/native/context_forest_check.cpp",
    ROOT / "csrc/drafting/context_forest.cpp",
    ROOT / "csrc/drafting/context_tables.cpp",
]


def build(folder: Path, flags: list[str], sources: list[Path] = SOURCES) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the check"
    program = folder / "context_forest_check"
    include = [f"-I{ROOT / 'csrc/drafting'}"]
    subprocess.run([compiler, "-std=c++20", *flags, *include, *map(str, sources), "-o", str(program)], check=True)
    return program


def test_forest_equals_brute_force_under_sanitizers(tmp_path):
    program = build(tmp_path, ["-O1", "-g", "-fsanitize=address,undefined", "-D_GLIBCXX_ASSERTIONS"])
    done = subprocess.run([program, "0", "24"], capture_output=True, text=True)
    assert done.returncode == 0 and "24 worlds held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_forest_equals_brute_force_on_many_worlds(tmp_path):
    program = build(tmp_path, ["-O2"])
    done = subprocess.run([program, "1000", "2000"], capture_output=True, text=True)
    assert done.returncode == 0 and "2000 worlds held" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("if (node.newest == self) refresh_newest(v);", ""),
        ("if (entry.newest == self) refresh_entry(v, uint32_t(i));", ""),
        ("free_node(first);\n}", "}"),
        ("if (best != index) swap_entries(n, index, best);", ""),
        ("if (((i - home) & mask) >= ((i - hole) & mask)) {", "if (true) {"),
    ],
)
def test_the_check_sees_a_planted_fault(tmp_path, line, fault):
    sources = [SOURCES[0]]
    planted = 0
    for source in SOURCES[1:]:
        text = source.read_text()
        planted += line in text
        copy = tmp_path / source.name
        copy.write_text(text.replace(line, fault))
        sources.append(copy)
    assert planted, "the line to break is gone: plant the fault anew"
    done = subprocess.run([build(tmp_path, ["-O1"], sources), "0", "24"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
