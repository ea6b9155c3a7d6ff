"""The build (setup.py): what it decides, what it says when something is missing, and what it puts into a wheel."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("speceyes_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "SPECEYES_BUILD TORCH_CUDA_ARCH_LIST MAX_JOBS NVCC_THREADS CXX CUDAHOSTCXX CUDACXX CUDA_HOME CUDA_PATH"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)


def nvcc(build: ModuleType, release: str = "13.0", targets: str = "75 80 86 89 90 90a 100 120"):
    return build.Nvcc("/opt/cuda/bin/nvcc", release, frozenset(targets.split()))


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0;8.6", ["sm_80", "sm_86"]),
        ("8.0 9.0a,12.0+PTX", ["sm_80", "sm_90a", "sm_120+PTX"]),
        ("9.0;9.0", ["sm_90"]),
        ("9.0;9.0+PTX", ["sm_90+PTX"]),
        ("9.0+PTX;9.0", ["sm_90+PTX"]),
        ("10.3f", ["sm_103f"]),
        ("Ampere", ["sm_80", "sm_86+PTX"]),
        ("Turing;Ampere", ["sm_75+PTX", "sm_80", "sm_86+PTX"]),
        ("Hopper;8.9", ["sm_90+PTX", "sm_89"]),
    ],
)
def test_arch_list(build: ModuleType, text: str, expected: list[str]) -> None:
    assert [str(a) for a in build.parse_arch_list(text)] == expected


@pytest.mark.parametrize("text", ["80", "8.0+ptx", "sm_80", "8.x", "8.0;Kelper", "9.0b", "8.00"])
def test_arch_list_names_the_bad_entry(build: ModuleType, text: str) -> None:
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST: .* is no target; expected entries like 8\.0") as error:
        build.parse_arch_list(text)
    assert text.split(";")[-1] in str(error.value)


def test_a_missing_compiler_is_named_with_what_to_install(build: ModuleType, tmp_path: Path) -> None:
    step = build.Step(tmp_path / "a.cpp", tmp_path / "a.o", ("no-such-compiler", "-c"))
    with pytest.raises(SystemExit, match=r"cannot run no-such-compiler for a\.o.*\n.*Install g\+\+ 11"):
        step.run()


def test_arch_list_of_nothing(build: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no target in ' ; '"):
        build.parse_arch_list(" ; ")


def test_default_targets(build: ModuleType) -> None:
    archs = build.parse_arch_list(build.DEFAULT_ARCHS)
    assert [str(a) for a in archs] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120+PTX"]
    assert archs[-1].gencode() == ["-gencode", "arch=compute_120,code=[sm_120,compute_120]"]
    assert archs[0].gencode() == ["-gencode", "arch=compute_80,code=[sm_80]"]


def test_targets_that_nvcc_lacks_are_dropped_aloud(build: ModuleType, capsys: pytest.CaptureFixture) -> None:
    old = nvcc(build, "12.4", "80 86 89 90 90a")
    kept = build.usable_archs(build.parse_arch_list("7.5;8.0;9.0;12.0+PTX"), old)
    # PTX moves to the newest target that is left, so that newer processors still run.
    assert [str(a) for a in kept] == ["sm_80", "sm_90+PTX"]
    said = capsys.readouterr().err
    assert "dropped CUDA targets: sm_75 (the kernels need sm_80 or newer), sm_120+PTX (nvcc 12.4 does not know" in said


def test_nothing_is_said_when_nothing_is_dropped(build: ModuleType, capsys: pytest.CaptureFixture) -> None:
    wanted = build.parse_arch_list(build.DEFAULT_ARCHS)
    assert build.usable_archs(wanted, nvcc(build)) == wanted
    assert capsys.readouterr().err == ""


# ---- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_cuda", "release", "expected"),
    [
        (None, "13.0", "CPU build: the file loads on it"),
        ("13.0", "13.2", "matches torch's CUDA 13.0"),
        ("12.8", "13.0", "WARNING: nvcc 13.0 and torch's CUDA 12.8 differ in the major version: a driver for CUDA 13"),
        ("13.0", "12.4", "WARNING: nvcc 12.4 and torch's CUDA 13.0 differ in the major version: any driver"),
    ],
)
def test_cuda_majors(build: ModuleType, torch_cuda: str | None, release: str, expected: str) -> None:
    torch = build.Torch("2.13.0", torch_cuda, Path("include"), Path("lib"))
    assert expected in build.note_cuda_majors(nvcc(build, release), torch)


def test_auto_without_nvcc_is_a_loud_cpu_build(build, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    plan = build.make_plan()
    assert not plan.cuda
    assert "*** CPU-ONLY BUILD: no nvcc found" in capsys.readouterr().err
    assert plan.notes == [line for line in plan.notes if "CPU-ONLY BUILD" in line] != []


def test_auto_with_nvcc_is_a_cuda_build(build, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc(build))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    plan = build.make_plan()
    assert plan.cuda and [str(a) for a in plan.archs] == ["sm_90"]
    assert "CUDA build for sm_90: nvcc 13.0" in capsys.readouterr().err


def test_auto_with_an_nvcc_of_no_use_is_a_loud_cpu_build(build, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc(build, "11.8", "70 75"))
    assert not build.make_plan().cuda
    said = capsys.readouterr().err
    assert "dropped CUDA targets" in said and "*** CPU-ONLY BUILD: no CUDA target is left: sm_80 (nvcc 11.8" in said


def test_cpu_never_looks_for_nvcc(build, monkeypatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: pytest.fail("looked for nvcc"))
    monkeypatch.setenv("SPECEYES_BUILD", "cpu")
    assert not build.make_plan().cuda


def test_cuda_without_nvcc_says_what_is_missing(build, monkeypatch) -> None:
    monkeypatch.setattr(build, "nvcc_candidates", lambda: ["/nonexistent/nvcc"])
    monkeypatch.setenv("SPECEYES_BUILD", "cuda")
    with pytest.raises(SystemExit, match="SPECEYES_BUILD=cuda, but no nvcc was found; looked at CUDACXX, CUDA_HOME"):
        build.make_plan()


def test_cuda_with_an_nvcc_of_no_use_fails(build, monkeypatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc(build, "11.8", "70 75"))
    monkeypatch.setenv("SPECEYES_BUILD", "cuda")
    with pytest.raises(SystemExit, match=r"no CUDA target is left: .*sm_120\+PTX \(nvcc 11\.8 does not know it\)"):
        build.make_plan()


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ("7.0", r"sm_70 \(the kernels need sm_80 or newer\)"),
        ("Turing", r"sm_75\+PTX \(the kernels need sm_80 or newer\)"),
        ("12.0", r"sm_120 \(nvcc 12\.0 does not know it\)"),
        ("7.0;12.0", r"sm_70 \(the kernels need sm_80 or newer\), sm_120 \(nvcc 12\.0 does not know it\)"),
    ],
)
def test_no_target_left_blames_whom_it_should(build, monkeypatch, capsys, targets: str, reason: str) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc(build, "12.0", "70 75 80 90"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", targets)
    monkeypatch.setenv("SPECEYES_BUILD", "cuda")
    with pytest.raises(SystemExit, match=f"SPECEYES_BUILD=cuda, but no CUDA target is left: {reason};"):
        build.make_plan()
    monkeypatch.setenv("SPECEYES_BUILD", "auto")
    assert not build.make_plan().cuda
    assert re.search(r"\*\*\* CPU-ONLY BUILD: no CUDA target is left: " + reason + r" \*\*\*", capsys.readouterr().err)


def fake_nvcc(path: Path, says: str = "Cuda compilation tools, release 12.8, V12.8.1") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '{says}' || echo 'sm_80 sm_90a'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize("fault", ["absent", "not executable", "fails", "no nvcc"])
def test_a_named_nvcc_that_is_wrong_is_refused(build, monkeypatch, tmp_path, variable: str, fault: str) -> None:
    """Also where another one could be found: whoever names one means it."""
    monkeypatch.setattr(build, "nvcc_candidates", lambda: [str(fake_nvcc(tmp_path / "other" / "nvcc"))])
    path = tmp_path / "cuda" / "bin" / "nvcc"
    if fault != "absent":
        fake_nvcc(path, "clang version 18.1.0" if fault == "no nvcc" else "release 12.8")
    if fault == "not executable":
        path.chmod(0o644)
    if fault == "fails":
        path.write_text("#!/bin/sh\nexit 3\n")
    reason = {
        "absent": "does not run .*No such file",
        "not executable": "does not run .*Permission denied",
        "fails": "does not run",
        "no nvcc": "is no nvcc",
    }[fault]
    value = path if variable == "CUDACXX" else tmp_path / "cuda"
    monkeypatch.setenv(variable, str(value))
    for mode in ("auto", "cuda"):
        monkeypatch.setenv("SPECEYES_BUILD", mode)
        with pytest.raises(SystemExit, match=f"{variable}={value} names the CUDA compiler, but .*{reason}") as caught:
            build.make_plan()
        assert f"Correct {variable}, or unset it" in str(caught.value) and "SPECEYES_BUILD=cpu" in str(caught.value)
    monkeypatch.setenv("SPECEYES_BUILD", "cpu")
    assert not build.make_plan().cuda


def test_a_named_nvcc_goes_before_those_that_are_found(build, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build, "nvcc_candidates", lambda: pytest.fail("looked further"))
    home = fake_nvcc(tmp_path / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc().path == str(home)
    direct = fake_nvcc(tmp_path / "direct" / "nvcc-12.8")
    monkeypatch.setenv("CUDACXX", str(direct))
    assert build.find_nvcc().path == str(direct)
    monkeypatch.setenv("PATH", str(direct.parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDACXX", "nvcc-12.8")
    assert build.find_nvcc().path == str(direct)


def test_a_broken_nvcc_is_passed_over_aloud(build, monkeypatch, tmp_path, capsys) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    good = tmp_path / "good" / "nvcc"
    good.parent.mkdir()
    good.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'Cuda compilation tools, release 12.8, V12.8.1' || echo 'sm_80 sm_90a'\n"
    )
    good.chmod(0o755)
    monkeypatch.setattr(build, "nvcc_candidates", lambda: [str(broken), str(good)])
    found = build.find_nvcc()
    assert (found.path, found.release, found.major, found.targets) == (str(good), "12.8", 12, frozenset({"80", "90a"}))
    assert "does not run" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text"), [("SPECEYES_BUILD", "gpu"), ("SPECEYES_BUILD", "1")])
def test_unknown_mode(build, monkeypatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit, match=f"SPECEYES_BUILD: expected auto, cpu or cuda, got '{text}'"):
        build.make_plan()


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_max_jobs_must_count(build, monkeypatch, text: str) -> None:
    monkeypatch.setenv("MAX_JOBS", text)
    with pytest.raises(SystemExit, match=f"MAX_JOBS: expected a whole number of at least 1, got '{text}'"):
        build.positive("MAX_JOBS", 4)


def test_jobs_from_cores_and_memory(build, monkeypatch) -> None:
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(8)))
    for free, expected in ((64, 8), (6, 3), (1, 1), (0, 1)):
        monkeypatch.setattr(build, "free_memory", lambda free=free: free * build.GIB)
        assert build.default_jobs(2 * build.GIB) == expected
    assert build.positive("MAX_JOBS", 3) == 3
    monkeypatch.setenv("MAX_JOBS", "5")
    assert build.positive("MAX_JOBS", 3) == 5


def test_without_torch_the_build_gives_the_command(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.modules['torch'] = None; "
        f"sys.argv = ['setup.py', 'build_ext', '--build-lib', {str(tmp_path)!r}]; "
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    environment = os.environ | {"SPECEYES_BUILD": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{sys.executable} -m pip install 'torch>=2.10' 'setuptools>=77'" in done.stderr
    assert f"{sys.executable} -m pip install --no-build-isolation ." in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_old_torch_is_refused(build, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    sys.modules["torch"].__version__ = "2.9.1+cu128"
    with pytest.raises(SystemExit, match=r"found torch 2\.9\.1\+cu128, but the extension needs torch >= 2\.10"):
        build.find_torch()


# ---- commands --------------------------------------------------------------------------------------------------------


def plan_of(build: ModuleType, cuda: bool):
    plan = build.Plan(build.Torch("2.13.0", None, Path("/t/include"), Path("/t/lib")))
    if cuda:
        plan.nvcc, plan.archs = nvcc(build), build.parse_arch_list("8.0;9.0+PTX")
    return plan


def test_instruction_set_flags_and_link_order(build, tmp_path) -> None:
    plan = plan_of(build, cuda=False)
    steps = build.plan_steps(plan, tmp_path)
    for step in steps:
        wide = [f for f in step.command if f.startswith("-mavx")]
        stem = step.source.stem
        assert bool(wide) == stem.endswith(("_avx2", "_avx512")), stem
        assert ("-mavx512f" in wide) == stem.endswith("_avx512"), stem
        assert not {"-ffast-math", "-Ofast", "-march=native"} & set(step.command)
        assert "-ffp-contract=off" in step.command
    # The linker keeps the first copy of an inline function that several objects carry; only a baseline copy runs
    # everywhere, so all baseline objects come before all wider ones.
    linked = [Path(x).stem for x in build.link_command(plan, steps, tmp_path / "x.so") if x.endswith(".o")]
    ranks = [2 if s.endswith("_avx512") else 1 if s.endswith("_avx2") else 0 for s in linked]
    assert len(linked) == len(steps) and set(ranks) == {0, 1, 2} and ranks == sorted(ranks)


def test_other_processors_get_portable_sources_only(build, monkeypatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    names = {s.stem for s in build.cpu_sources()}
    assert names and not [n for n in names if n.endswith(("_avx2", "_avx512"))]


def test_nvcc_commands(build, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NVCC_THREADS", "3")
    monkeypatch.setenv("CUDAHOSTCXX", "g++-12")
    plan = plan_of(build, cuda=True)
    steps = build.plan_steps(plan, tmp_path)
    cuda = [s for s in steps if s.source.suffix == ".cu"]
    assert {s.source.parent.name for s in cuda} == {"separability", "drafting", "python_bindings"}
    for step in cuda:
        command = " ".join(step.command)
        assert "arch=compute_80,code=[sm_80]" in command and "code=[sm_90,compute_90]" in command
        assert "--threads 3" in command and "-ccbin g++-12" in command
        assert "/t/include" not in command, "kernels know no torch"
    link = " ".join(build.link_command(plan, steps, tmp_path / "x.so"))
    assert "-cudart static" in link and "-ltorch_cuda" not in link and "--no-as-needed" in link
    binding = next(s for s in steps if s.source.name == "separability.cpp")
    assert "-DSPECEYES_WITH_CUDA=1" in binding.command
    assert not [s for s in build.plan_steps(plan_of(build, cuda=False), tmp_path) if s.source.suffix == ".cu"]


def test_objects_are_rebuilt_only_when_something_changed(build, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source, header = tmp_path / "a file.cpp", tmp_path / "a.h"
    header.write_text("inline int one() { return 1; }\n")
    source.write_text('#include "a.h"\nint f() { return one(); }\n')
    output = tmp_path / "a.o"

    def step(*flags: str):
        depend = ("-MMD", "-MF", str(output.with_suffix(".d")))
        return build.Step(source, output, ("g++", *flags, *depend, "-c", str(source), "-o", str(output)))

    assert not step().fresh()
    step().run()
    assert step().fresh()
    assert not step("-O2").fresh(), "other flags"
    later = time.time_ns() + 10**9
    os.utime(header, ns=(later, later))
    assert not step().fresh(), "a newer header"
    os.utime(output, ns=(later, later))
    assert step().fresh()
    slow = tmp_path / "slow-g++"  # a source that is edited while the compiler runs
    slow.write_text(f'#!/bin/sh\ng++ "$@" && touch {str(source)!r}\n')
    slow.chmod(0o755)
    edited = build.Step(source, output, (str(slow), *step().command[1:]))
    os.utime(header)
    edited.run()
    assert not edited.fresh(), "edited during the build"
    header.unlink()
    assert not step().fresh(), "a header that is gone"
    with pytest.raises(SystemExit, match=r"building a\.o failed"):
        step().run()
    assert not step().fresh(), "a failed build is never fresh"


def test_installing_a_file_replaces_it_whole(build, tmp_path) -> None:
    target = tmp_path / "lib.so"
    target.write_text("old")
    with open(target) as mapped:  # as a process that has the library loaded
        new = tmp_path / "new"
        new.write_text("new")
        build.install_file(new, target)
        assert mapped.read() == "old"
    assert target.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lib.so", "new"]


# ---- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A CPU wheel of this checkout; objects that are up to date are not compiled again."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(out / "build")]
    command += ["bdist_wheel", "--bdist-dir", str(out / "bdist"), "-d", str(out)]
    environment = os.environ | {"SPECEYES_BUILD": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_content(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    package = {n for n in names if n.startswith("speceyes_kernels/")}
    expected = ("__init__.py", "py.typed", "libspeceyes.so", "_build_info.json")
    assert {f"speceyes_kernels/{name}" for name in expected} <= package
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"speceyes_kernels"}
    assert not [n for n in names if n.endswith((".cpp", ".h", ".cu", ".cuh"))]
    assert "-py3-none-linux_" in wheel.filename
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "speceyes_kernels").rglob("*.py")}
    assert sources == {n for n in package if n.endswith(".py")}
    models = {f"speceyes_kernels/benchmark/models/{role}/model.safetensors" for role in ("small", "large")}
    assert models | {"speceyes_kernels/benchmark/models/calibration.json"} <= package  # the demo's
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    needs = metadata.get_all("Requires-Dist")
    assert sorted(n for n in needs if "extra ==" not in n) == ["numpy", "torch>=2.10"]
    assert {"vllm", "cli", "dev"} <= set(metadata.get_all("Provides-Extra"))


def test_only_the_named_objects_use_wider_registers(build: ModuleType, wheel: zipfile.ZipFile) -> None:
    """Baseline objects must run on every x86-64 processor, the AVX2 ones on those without AVX-512."""
    if build.platform.machine() != "x86_64":
        pytest.skip("registers are x86-64's; this machine compiles portable sources only")
    plan = build.Plan(build.find_torch())
    for step in build.plan_steps(plan, ROOT / "build" / "native" / "cpu"):
        code = subprocess.run(["objdump", "-d", step.output], capture_output=True, text=True, check=True).stdout
        allowed = {"": (), "_avx2": ("%ymm",), "_avx512": ("%ymm", "%zmm")}[build.isa_suffix(step.source)]
        used = tuple(register for register in ("%ymm", "%zmm") if register in code)
        assert used == allowed, step.source.name


def test_library_holds_no_path_of_the_build_machine(wheel: zipfile.ZipFile) -> None:
    library = wheel.read("speceyes_kernels/libspeceyes.so")
    assert str(ROOT).encode() not in library
    assert sys.prefix.encode() not in library
    assert str(ROOT).encode() not in wheel.read("speceyes_kernels/_build_info.json")
