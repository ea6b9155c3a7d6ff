"""The context forest against brute force over the raw sequences, under sanitizers (tests/native/context_forest_*)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NATIVE, CSRC = ROOT / "tests/native", ROOT / "csrc/drafting"
HEADERS = ["pod_array.h", "dirty_words.h", "text_store.h", "block_arena.h", "context_forest.h", "estimator_math.h",
           "cache_image.h", "estimator.h", "lookup_view.h", "lookup_mirror.h"]  # fmt: skip
SOURCES = ["context_forest.cpp", "context_tables.cpp", "estimator.cpp", "lookup_mirror.cpp"]


def build(folder: Path, flags: list[str], check: str = "context_forest_check", csrc: Path = CSRC) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the check"
    program = folder / check
    sources = [NATIVE / f"{check}.cpp", *(csrc / s for s in SOURCES)]
    command = [compiler, "-std=c++20", *flags, f"-I{csrc}", f"-I{NATIVE}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, *args: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=300)


def test_forest_equals_brute_force_under_sanitizers(tmp_path):
    program = build(tmp_path, ["-O1", "-g", "-fsanitize=address,undefined", "-D_GLIBCXX_ASSERTIONS"])
    done = run(program, 0, 32)
    assert done.returncode == 0 and "32 worlds held" in done.stdout, done.stdout + done.stderr


def test_levels_change_in_parallel(tmp_path):
    program = build(tmp_path, ["-O1", "-g", "-fsanitize=thread", "-pthread"], "context_forest_threads")
    done = run(program, 20)
    assert done.returncode == 0 and "20 rounds held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_forest_equals_brute_force_on_many_worlds(tmp_path):
    done = run(build(tmp_path, ["-O2"]), 1000, 4000)
    assert done.returncode == 0 and "4000 worlds held" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        # removal
        ("if (node.newest == self) node.newest = newest_below(node);", ""),
        ("if (c.newest == leaf) c.newest = newest_below(node_[n], token);", ""),
        ("free_node(first);\n}", "}"),
        ("if (i == kTop - 1) refill_top(node);", ""),
        ("tags[slot] = ends_here ? kEmpty : kErased;", "tags[slot] = kEmpty;"),
        # cursors
        ("m.length = text_.agree(text_.before(position(newest(m.at))), context.token, most);", ""),
        ("int(node_[up].depth) >= m.length;) m.at = up;", "false;) m.at = up;"),
        ("c.removals != removals_ || m.length > context.length", "c.removals != removals_"),
        ("c.match = deepen(next, longer);", "c.match = next;"),
        # growth, and the clock that comes round
        ("rise(node, slot, latest);", ""),
        ("if (clock_ + 1 >= clock_end_) renumber();", "if (clock_ + 1 >= clock_end_) clock_ = 0;"),
        ("arena_.give(old.conts, cont_words(old.cont_class));", ""),
    ],
)
def test_the_check_sees_a_planted_fault(tmp_path, line, fault):
    planted = 0
    for name in HEADERS + SOURCES:
        text = (CSRC / name).read_text()
        planted += line in text
        (tmp_path / name).write_text(text.replace(line, fault))
    assert planted, "the line to break is gone: plant the fault anew"
    try:
        done = run(build(tmp_path, ["-O1", "-D_GLIBCXX_ASSERTIONS"], csrc=tmp_path), 0, 120)
    except subprocess.TimeoutExpired:
        return  # it hangs: seen
    assert done.returncode != 0
