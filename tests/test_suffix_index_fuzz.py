"""The native suffix index under sanitizers: random histories against brute force (`native/suffix_index_fuzz.cpp`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DRAFTING = ROOT / "csrc" / "drafting"
PARTS = (
    "suffix_index",
    "suffix_index_image",
    "context_forest",
    "context_tables",
    "cache_file",
    "cache_image",
    "parallel",
)
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]


def fuzz(
    folder: Path, flags: list[str], executions: int, broken: Path | None = None
) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the fuzzer"
    sources = [DRAFTING / f"{name}.cpp" for name in PARTS]
    sources = [broken if broken is not None and s.name == broken.name else s for s in sources]
    command = [compiler, "-std=c++20", *flags, f"-I{DRAFTING}", str(ROOT / "tests/native/suffix_index_fuzz.cpp")]
    subprocess.run([*command, *map(str, sources), "-o", str(folder / "fuzz")], check=True)
    return subprocess.run([folder / "fuzz", "1", str(executions)], capture_output=True, text=True)


def test_histories_equal_brute_force(tmp_path):
    done = fuzz(tmp_path, ["-O0", *SANITIZERS], 3_000)  # compiling takes longest
    assert done.returncode == 0 and "3000 executions held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_million_histories_equal_brute_force(tmp_path):
    done = fuzz(tmp_path, ["-O2", *SANITIZERS], 1_000_000)
    assert done.returncode == 0 and "1000000 executions held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("suffix_index.cpp", "for (const Pos p : kept) forest_.insert(root_, p);", "(void)kept;"),
        ("suffix_index.cpp", "i < tokens + forest_.max_depth(); p", "i < tokens; p"),
        ("suffix_index.cpp", "tokens_ -= s.text.length;", ""),
        ("suffix_index.cpp", "forest_.settle(root_, s.cursor, context());", ""),
        ("suffix_index.cpp", "if (context[i] >= 0) said", "said"),
        ("suffix_index.cpp", "Token said[kMaxDepth + kMostDraft];", "Token said[kMaxDepth + kMostDraft - 60];"),
        ("suffix_index.cpp", "by_age_[s.order = ++order_]", "by_age_[s.order = s.order == 0 ? ++order_ : s.order]"),
    ],
)
def test_a_planted_fault_is_seen(tmp_path, name, line, fault):
    text = (DRAFTING / name).read_text()
    assert text.count(line) == 1, "the line to break is gone: plant the fault anew"
    (tmp_path / name).write_text(text.replace(line, fault))
    done = fuzz(tmp_path, ["-O0", *SANITIZERS], 20_000, tmp_path / name)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert any(word in said for word in ("not so", "Sanitizer", "runtime error", "Assertion")), said
