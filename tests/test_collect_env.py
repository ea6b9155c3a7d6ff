"""``speceyes collect-env``, the lazily loaded extension, and what both say when something is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speceyes_kernels import BackendUnavailable, _native, collect_env
from speceyes_kernels._schemas import SEPARABILITY_SCHEMAS

ROOT = Path(__file__).resolve().parent.parent


def python(code: str, path: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Runs ``code`` in a fresh interpreter that imports the package from ``path``."""
    full = os.environ | {"PYTHONPATH": str(path)} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=path, env=full, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's Python files alone: no extension, no build record."""
    ignore = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
    shutil.copytree(ROOT / "speceyes_kernels", tmp_path / "speceyes_kernels", ignore=ignore)
    return tmp_path


# ---- the extension ---------------------------------------------------------------------------------------------------


def test_library_loads_and_knows_itself() -> None:
    _native.load()
    _native.load()  # a second time does nothing
    info, record = _native.build_info(), _native.build_record()
    assert record["kind"] == ("cuda" if info["cuda"] else "cpu")
    assert info["cuda"] == bool(info["cuda_archs"]) == _native.has_cuda_kernels()
    assert info["cuda_archs"] == ";".join(record["cuda_archs"])
    assert info["cpu_isa"]["portable"] and info["cpu_isa"][info["cpu_isa_used"]]
    assert set(info["cpu_isa"]) == set(_native.CPU_ISAS)


def test_the_best_instruction_set_is_the_default_and_the_environment_lowers_it() -> None:
    code = "from speceyes_kernels import _native; i = _native.build_info(); print(i['cpu_isa_used'], i['cpu_isa'])"
    have = [isa for isa, there in _native.build_info()["cpu_isa"].items() if there]
    for wanted, expected in [("", have[-1]), *((isa, isa) for isa in have)]:
        done = python(code, SPECEYES_CPU_ISA=wanted)
        assert done.stdout.split(" ")[0] == expected, done.stderr


def test_forcing_an_instruction_set() -> None:
    def used() -> str:
        import torch

        return json.loads(torch.ops.speceyes.build_info())["cpu_isa_used"]

    before = _native.build_info()["cpu_isa_used"]
    with _native.cpu_isa("portable"):
        assert used() == "portable"
    assert used() == before
    with pytest.raises(ValueError, match=r"cpu_isa: expected one of portable.*, got 'sse9'"), _native.cpu_isa("sse9"):
        pass


def test_native_checks_name_the_argument() -> None:
    import torch

    _native.load()
    score = torch.ops.speceyes.token_separability.default
    x, out = torch.zeros(2, 100), torch.empty(2)
    for arguments, message in [
        ((x.double(), 64, 100, False, 1e-6, 8, out), "logits: expected a 2-D float32, float16 or bfloat16 tensor"),
        ((x[0], 64, 100, False, 1e-6, 8, out), r"logits: .*, got a 1-D float32 tensor of shape \[100\] on cpu"),
        ((x, 64, 101, False, 1e-6, 8, out), r"valid_vocab: expected 1 to 100 \(the columns of logits\), got 101"),
        ((x, 1, 100, False, 1e-6, 8, out), "k: expected 2 to 256, got 1"),
        ((x, 65, 64, False, 1e-6, 8, out), "k: expected at most valid_vocab = 64, got 65"),
        ((x, 64, 100, False, float("nan"), 8, out), r"eps: expected a number in 1e-37\.\.1e37, got nan"),
        ((x, 64, 100, False, 0.0, 8, out), r"eps: expected a number in 1e-37\.\.1e37, got 0"),
        ((x, 64, 100, False, 1e-6, 0, out), "min_competitors: expected at least 1, got 0"),
        ((x, 64, 100, False, 1e-6, 8, torch.empty(3)), r"out: expected a contiguous float32 tensor of shape \[2\]"),
        ((x, 64, 100, False, 1e-6, 8, torch.empty(4)[::2]), "got a 1-D non-contiguous float32 tensor"),
        ((x, 64, 100, False, 1e-6, 8, out.double()), "out: expected a contiguous float32 .* got a 1-D float64 tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            score(*arguments)


def test_native_checks_come_before_any_write() -> None:
    """Row numbers and slots out of range are found before a pool or an output is touched."""
    import torch

    _native.load()
    x = torch.randn(3, 100)
    records, out = torch.full((3, 2), 7.0), torch.full((1, 2), 7.0)
    answer = torch.ops.speceyes.answer_separability.default
    for cu in ([0, 2, 4], [0, 3, 2], [-1, 0, 3]):
        with pytest.raises(ValueError, match="cu_seqlens: expected ascending row numbers from 0 to 3, got"):
            answer(x, torch.tensor(cu), None, 64, 100, False, 1e-6, 8, [0], 0.2, False, records, out)
    state = [torch.full((2, 2), 7.0, dtype=torch.float64), torch.full((2, 2), 7.0)]
    state += [torch.full((2, 2), 7, dtype=torch.int32), torch.full((2, 4), 7.0)]
    for slots in ([0, 1, 2], [0, -2, 1]):
        for dtype in (torch.int32, torch.int64):
            with pytest.raises(ValueError, match="slots: expected -1 to 1, got"):
                torch.ops.speceyes.pool_update.default(
                    x, torch.tensor(slots, dtype=dtype), None, 64, 100, False, 1e-6, 8, *state, records
                )
    for tensor in (records, out, *state):
        assert (tensor == 7).all()


# ---- broken installations --------------------------------------------------------------------------------------------


def test_import_without_the_library_works_and_says_why(copy: Path) -> None:
    code = (
        "import speceyes_kernels as sk, torch\n"
        "assert sk.available_backends()[0] == 'reference' and 'cpu' not in sk.available_backends()\n"
        "assert sk.token_separability(torch.randn(2, 100), backend='reference').shape == (2,)\n"
        "for _ in range(2):\n"
        "    try: sk.token_separability(torch.randn(2, 100), backend='cpu')\n"
        "    except sk.BackendUnavailable as error: print('cause:', type(error.__cause__).__name__, error)\n"
    )
    done = python(code, copy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the native extension of speceyes_kernels cannot be loaded: FileNotFoundError") == 2
    assert done.stdout.count("cause: FileNotFoundError") == 2
    assert "libspeceyes.so is not in" in done.stdout and "the extension was not built" in done.stdout
    assert "-m pip install --no-build-isolation --force-reinstall --no-deps .\n" in done.stdout


def test_a_broken_library_keeps_the_original_error(copy: Path) -> None:
    (copy / "speceyes_kernels" / "libspeceyes.so").write_bytes(b"not a library")
    code = (
        "import speceyes_kernels._native as native, traceback\n"
        "try: native.load()\n"
        "except native.BackendUnavailable as error: traceback.print_exception(error)\n"
    )
    done = python(code, copy)
    assert done.returncode == 0, done.stderr
    assert "OSError" in done.stderr and "direct cause" in done.stderr
    assert "built with torch unknown" in done.stderr and "torch 2." in done.stderr


@pytest.mark.parametrize("share", [0.01, 0.5, 0.8])
def test_a_library_cut_short_is_refused_instead_of_killing_the_process(copy: Path, share: float) -> None:
    whole = _native.library_path().read_bytes()
    (copy / "speceyes_kernels" / "libspeceyes.so").write_bytes(whole[: int(share * len(whole))])
    done = python("import speceyes_kernels as sk; print(sk.unavailable_reason('cpu'))", copy)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "libspeceyes.so is cut short" in done.stdout and "pip install" in done.stdout


def test_a_torch_without_the_stable_abi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_loaded", False)
    monkeypatch.setattr(_native, "_failure", None)
    monkeypatch.setattr(_native.torch, "__version__", "2.9.1+cu128")
    with pytest.raises(BackendUnavailable, match=r"torch 2\.9\.1\+cu128 is older than 2\.10") as error:
        _native.load()
    assert isinstance(error.value.__cause__, ImportError)


def test_fakes_cover_every_op() -> None:
    import torch
    from torch._library import simple_registry as fakes

    _native.load()
    for name in SEPARABILITY_SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"speceyes::{name}", "Meta") or (
            fakes.singleton.find(f"speceyes::{name}").fake_impl.kernel is not None
        ), name


# ---- without torch ---------------------------------------------------------------------------------------------------

BLOCKED = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == {name!r}:
            raise {error}
sys.meta_path.insert(0, Absent())
"""


def without(folder: Path, name: str, error: str | None = None) -> dict[str, str]:
    """The environment of an interpreter in which importing ``name`` fails."""
    error = error or f"ModuleNotFoundError({f'No module named {name}'!r})"
    (folder / "sitecustomize.py").write_text(BLOCKED.format(name=name, error=error))
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize(
    ("name", "error", "cause"),
    [
        ("torch", None, "ModuleNotFoundError: No module named torch"),
        ("numpy", None, "ModuleNotFoundError: No module named numpy"),
        ("torch", "OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
    ],
)
def test_without_a_requirement_the_import_gives_the_command(tmp_path: Path, name: str, error: str, cause: str) -> None:
    environment = without(tmp_path, name, error)
    code = (
        "try: import speceyes_kernels\nexcept ImportError as e: print(type(e).__name__, e, '| from', repr(e.__cause__))"
    )
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    assert f"ImportError speceyes_kernels needs {name}, and `import {name}` failed: {cause}" in done.stdout
    assert f"\n    {sys.executable} -m pip install '{'torch>=2.10' if name == 'torch' else 'numpy'}'\n" in done.stdout
    assert f"| from {cause.partition(':')[0]}(" in done.stdout


@pytest.mark.parametrize("arguments", [["--json"], ["--summary"], []])
def test_the_report_works_without_torch_and_says_what_to_run(tmp_path: Path, arguments: list[str]) -> None:
    full = os.environ | without(tmp_path, "torch")
    command = [sys.executable, "-m", "speceyes_kernels.collect_env", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=full, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["requirements"] if arguments == ["--json"] else done.stdout
    assert "speceyes_kernels needs torch, and `import torch` failed" in said
    assert f"{sys.executable} -m pip install 'torch>=2.10'" in said


def test_the_speceyes_command_reports_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="the extra cli is not installed")
    (tmp_path / "speceyes").write_text("from speceyes_kernels.cli import main\nmain()\n")
    full = os.environ | without(tmp_path, "torch")
    command = [sys.executable, "speceyes", "collect-env", "--summary"]
    done = subprocess.run(command, cwd=tmp_path, env=full, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'torch>=2.10'" in done.stdout


# ---- the report ------------------------------------------------------------------------------------------------------


def test_report_of_a_working_installation() -> None:
    report = json.loads(json.dumps(collect_env.collect()))
    assert report["extension"]["loads"] is True
    assert report["backends"]["reference"] is None and report["backends"]["cpu"] is None
    assert report["torch"]["version"] and report["cpu"]["cores"] >= 1
    assert "cpu       ready" in collect_env.summary(report)


def test_report_of_a_broken_installation_without_typer(copy: Path) -> None:
    (copy / "speceyes_kernels" / "libspeceyes.so").write_bytes(b"not a library")
    run = "import sys, runpy; sys.modules['typer'] = None; sys.argv = ['collect_env', {0}]; " + (
        "runpy.run_module('speceyes_kernels.collect_env', run_name='__main__')"
    )
    done = python(run.format("'--json'"), copy)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["extension"]["loads"] is False
    assert any("OSError" in line for line in report["extension"]["traceback"])
    assert "cannot be loaded" in report["backends"]["cpu"] and report["backends"]["reference"] is None
    summary = python(run.format("'--summary'"), copy)
    (line,) = (line for line in summary.stdout.splitlines() if line.startswith("  cpu "))
    assert line.startswith("  cpu       unavailable: ") and "extension of speceyes_kernels cannot be loaded" in line


def test_a_part_that_fails_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "_torch", lambda: 1 / 0)
    assert collect_env.collect()["torch"] == {"error": "ZeroDivisionError: division by zero"}


# ---- the command -----------------------------------------------------------------------------------------------------

COMMAND = "import sys; sys.argv = ['speceyes', *{0}]; {1}; from speceyes_kernels.cli import main; main()"


def test_command_without_its_extra_says_what_to_install() -> None:
    done = python(COMMAND.format([], "sys.modules['typer'] = None"))
    assert done.returncode == 1
    assert "pip install 'speceyes_kernels[cli]'" in done.stderr
    assert "python -m speceyes_kernels.collect_env" in done.stderr


def test_command_lists_subcommands_without_importing_them() -> None:
    pytest.importorskip("typer", reason="needs the extra cli: pip install 'speceyes_kernels[cli]'")
    block = "sys.modules['speceyes_kernels.cli.demo'] = None"
    done = python(COMMAND.format(["--help"], block))
    assert done.returncode == 0 and "collect-env" in done.stdout and "demo" in done.stdout, done.stderr
    broken = python(COMMAND.format(["demo"], block))
    assert broken.returncode == 1
    assert "speceyes demo:" in broken.stderr and "make install" in broken.stderr


def test_command_collect_env_json() -> None:
    pytest.importorskip("typer", reason="needs the extra cli: pip install 'speceyes_kernels[cli]'")
    done = python(COMMAND.format(["collect-env", "--json"], "pass"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["extension"]["loads"] is True
    wrong = python(COMMAND.format(["collect-env", "--nonsense"], "pass"))
    assert wrong.returncode == 2 and "--nonsense" in wrong.stderr
