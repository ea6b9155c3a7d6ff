"""Random histories of draft caches under sanitizers (`native/draft_cache_fuzz.cpp`): threads, afresh, loaded; all alike."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DRAFTING = ROOT / "csrc" / "drafting"
SOURCES = sorted(s for s in DRAFTING.glob("*.cpp") if not s.name.startswith("suffix_index"))
MEMORY = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]
RACES = ["-g", "-O1", "-fsanitize=thread"]


def compiled(source: Path, folder: Path, flags: list[str]) -> Path:
    out = folder / f"{source.stem}.o"
    subprocess.run(
        ["g++", "-std=c++20", *flags, "-c", f"-I{DRAFTING}", "-pthread", str(source), "-o", str(out)], check=True
    )
    return out


def objects(folder: Path, flags: list[str]) -> list[Path]:
    assert shutil.which("g++"), "g++ is needed to build the fuzzer"
    return [compiled(s, folder, flags) for s in (*SOURCES, ROOT / "tests/native/draft_cache_fuzz.cpp")]


def fuzz(folder: Path, parts: list[Path], flags: list[str], *arguments: int) -> subprocess.CompletedProcess[str]:
    subprocess.run(["g++", *flags, *map(str, parts), "-pthread", "-o", str(folder / "fuzz")], check=True)
    return subprocess.run([folder / "fuzz", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def for_memory(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return objects(tmp_path_factory.mktemp("memory"), ["-O0", *MEMORY])


@pytest.fixture(scope="module")
def for_races(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return objects(tmp_path_factory.mktemp("races"), RACES)


def test_caches_agree(tmp_path, for_memory):
    done = fuzz(tmp_path, for_memory, MEMORY, 1, 5_000, 2)
    assert done.returncode == 0 and "5000 operations held" in done.stdout, done.stdout + done.stderr


def test_threads_do_not_race(tmp_path, for_races):
    done = fuzz(tmp_path, for_races, RACES, 1, 3_000, 4)
    assert done.returncode == 0 and "3000 operations held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_million_operations(tmp_path):
    flags = ["-O1", *MEMORY]
    done = fuzz(tmp_path, objects(tmp_path, flags), flags, 1, 1_000_000, 2)
    assert done.returncode == 0 and "1000000 operations held" in done.stdout, done.stdout + done.stderr


def broken(folder: Path, parts: list[Path], flags: list[str], name: str, line: str, fault: str) -> list[Path]:
    text = (DRAFTING / name).read_text()
    assert text.count(line) == 1, "the line to break is gone: plant the fault anew"
    (folder / name).write_text(text.replace(line, fault))
    part = compiled(folder / name, folder, flags)
    return [part if p.name == part.name else p for p in parts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("draft_cache_evict.cpp", "for (const Moved& m : moved) m.forest->insert(m.root, m.pos);", ""),
        ("draft_cache_evict.cpp", "stats_.ended_responses--;", ""),
        ("draft_cache.cpp", "prompt_ends(r.prompt_end = text_[end])++;", "r.prompt_end = text_[end];"),
        ("draft_cache.cpp", "stats_.tokens -= r.text.length;\n    text_.clear(r.text);", "text_.clear(r.text);"),
        ("draft_cache_image.cpp", "std::sort(runs.begin(), runs.end(), [](const Timed", "(void)([](const Timed"),
        ("context_forest.cpp", "if (node.newest == self) node.newest = newest_below(node);", ""),
        ("estimator.cpp", "p_[c.index] = c.p;", ""),
    ],
)
def test_a_planted_fault_is_seen(tmp_path, for_memory, name, line, fault):
    parts = broken(tmp_path, for_memory, ["-O0", *MEMORY], name, line, fault)
    done = fuzz(tmp_path, parts, MEMORY, 1, 50_000, 2)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert any(word in said for word in ("not so", "Sanitizer", "runtime error", "Assertion", "what():")), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "fault"),
    [
        ("draft_cache.cpp", "response && level > 0; level--) task[tasks++] = level;",
         "response && level > 0; level--) task[tasks++] = 1;"),
        ("draft_cache_propose.cpp", "const Token token = position.best.token;",
         "const Token token = position.best.token; stats_.judged++;"),
    ],
)  # fmt: skip
def test_a_planted_race_is_seen(tmp_path, for_races, name, line, fault):
    done = fuzz(tmp_path, broken(tmp_path, for_races, RACES, name, line, fault), RACES, 1, 10_000, 4)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and ("data race" in said or "not so" in said), said
