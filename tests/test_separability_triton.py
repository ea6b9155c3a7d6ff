"""The Triton backend: its interpreter tests in a process of their own, and what it says where it cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def run_python(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    base["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), base.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *args], env=base | env, cwd=TESTS.parent, capture_output=True, text=True, timeout=880
    )


def test_in_the_interpreter():
    done = run_python(
        "-m", "pytest", "-q", "-x", "--durations=8", "-p", "no:cacheprovider", str(TESTS / "triton_interpreted.py"),
        TRITON_INTERPRET="1", OMP_NUM_THREADS="1",
    )  # fmt: skip
    print(done.stdout[-8000:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary and int(summary[1]) >= 40 and "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("sys.modules['triton'] = None", ("needs Triton >= 3.6", "not installed", "torch 2", "pip install triton")),
        (
            "import triton; triton.__version__ = '2.1.0'",
            ("found 2.1.0", "needs Triton >= 3.6", "pip install -U triton"),
        ),
    ],
)
def test_a_backend_that_cannot_load_says_why(setup, words):
    done = run_python(
        "-c", f"import sys; {setup}; import speceyes_kernels as sk; print(sk.unavailable_reason('triton'))"
    )
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_cpu_tensors_are_refused_outside_the_interpreter():
    done = run_python(
        "-c",
        "import torch; from speceyes_kernels import _backends, separability_triton\n"
        "try: _backends.ops('triton').token_separability(torch.zeros(1, 99), 4, 99, False, 1e-6, 8, torch.zeros(1))\n"
        "except ValueError as error: print(error)",
    )
    assert "expected CUDA tensors, got one on cpu; use backend='cpu', or set TRITON_INTERPRET=1" in done.stdout, done
