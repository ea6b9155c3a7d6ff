"""Build of the native extension: g++ and nvcc called directly, because torch's CUDAExtension needs a CUDA torch.

One file, ``speceyes_kernels/libspeceyes.so``, on torch's stable ABI: it loads on any torch >= 2.10, CPU or CUDA, and
does not depend on the Python version. Settings (environment): see docs/building.md.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
PACKAGE = "speceyes_kernels"
LIBRARY = "libspeceyes.so"
BUILD_INFO = "_build_info.json"
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch that the file loads on
MIN_TORCH = (2, 10)
DEFAULT_ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
MIN_ARCH = (8, 0)
NAMED_ARCHS = {  # torch's; those that are too old are dropped aloud
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}
GIB = 1 << 30
CPU_JOB_BYTES, NVCC_JOB_BYTES = 1 * GIB, 2 * GIB

# Floating-point contraction stays off: scores must not depend on which translation unit computed them.
CXX_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"]
CXX_FLAGS += ["-fno-math-errno", "-Wall", "-Wextra", f"-ffile-prefix-map={ROOT}=."]
# In link order: of an inline function that several units emit, the linker keeps the first copy, and that one must run
# on every processor.
ISA_FLAGS = {
    "": [],
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xfatbin", "-compress-all"]
NVCC_FLAGS += ["-Xptxas", "-warn-spills", "-lineinfo"]


def say(line: str) -> None:
    """One line the reader must not miss. pip shows it with ``-v``; ``speceyes collect-env`` repeats it."""
    print(f"{PACKAGE}: {line}", file=sys.stderr, flush=True)


class BuildError(SystemExit):
    """Ends the build with a message that says what is missing and how to get it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\n{PACKAGE}: {message}\n")


@dataclass(frozen=True)
class Torch:
    """The parts of the installed torch that a build needs."""

    version: str
    cuda: str | None
    include: Path
    lib: Path


def find_torch() -> Torch:
    """The installed torch, or the exact command that installs one."""
    command = f"{sys.executable} -m pip install 'torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}' 'setuptools>=77'"
    again = f"{sys.executable} -m pip install --no-build-isolation ."
    try:
        import torch
    except Exception as error:
        raise BuildError(
            f"building needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}, and `import torch` failed: "
            f"{type(error).__name__}: {error}\nRun:\n    {command}\n    {again}"
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < MIN_TORCH:
        raise BuildError(
            f"found torch {torch.__version__}, but the extension needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]} "
            f"(its stable ABI).\nRun:\n    {command}\n    {again}"
        )
    home = Path(torch.__file__).parent
    return Torch(torch.__version__, torch.version.cuda, home / "include", home / "lib")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path, release and the real targets (compute capabilities) it knows."""

    path: str
    release: str
    targets: frozenset[str]

    @property
    def major(self) -> int:
        return int(self.release.split(".")[0])


def nvcc_candidates() -> list[str]:
    """Where an nvcc may be that nobody named; PyPI's nvidia packages last."""
    found = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for site in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        found += [str(p) for p in sorted(Path(site).glob("nvidia/cu*/bin/nvcc"), reverse=True)]
        found += [str(p) for p in Path(site).glob("nvidia/cuda_nvcc/bin/nvcc")]
    return [path for path in dict.fromkeys(found) if path]


def ask_nvcc(path: str) -> Nvcc | str:
    """What the compiler at ``path`` says of itself, or why it cannot be used."""
    path = shutil.which(path) or path
    try:
        said = [subprocess.check_output([path, option], text=True) for option in ("--version", "--list-gpu-code")]
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{path} does not run ({error})"
    release = re.search(r"release (\d+\.\d+)", said[0])
    if release is None:
        return f"{path} is no nvcc: its --version names no release"
    return Nvcc(path, release.group(1), frozenset(re.findall(r"sm_(\d+[af]?)", said[1])))


def find_nvcc() -> Nvcc | None:
    """The nvcc that the environment names, which must run; else the first that is found and runs."""
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        if named := os.environ.get(variable, "").strip():
            answer = ask_nvcc(named if variable == "CUDACXX" else os.path.join(named, "bin", "nvcc"))
            if isinstance(answer, str):
                raise BuildError(
                    f"{variable}={named} names the CUDA compiler, but {answer}.\nCorrect {variable}, or unset it to take "
                    "the nvcc that is found without it, or set SPECEYES_BUILD=cpu for a build without CUDA kernels"
                )
            return answer
    for path in filter(os.path.exists, nvcc_candidates()):
        answer = ask_nvcc(path)
        if isinstance(answer, Nvcc):
            return answer
        say(f"{answer}; looking further")
    return None


@dataclass(frozen=True)
class Arch:
    """One CUDA target, as in TORCH_CUDA_ARCH_LIST: ``9.0`` or ``9.0a``, with or without ``+PTX``."""

    major: int
    minor: int
    suffix: str = ""
    ptx: bool = False

    @property
    def code(self) -> str:
        return f"{self.major}{self.minor}{self.suffix}"

    def __str__(self) -> str:
        return f"sm_{self.code}" + ("+PTX" if self.ptx else "")

    def gencode(self) -> list[str]:
        kinds = [f"sm_{self.code}"] + ([f"compute_{self.code}"] if self.ptx else [])
        return ["-gencode", f"arch=compute_{self.code},code=[{','.join(kinds)}]"]


def parse_arch_list(text: str) -> list[Arch]:
    """``"8.0;9.0a 12.0+PTX"`` or torch's family names, in order, without repeats."""
    archs: dict[str, Arch] = {}
    for name in text.replace(",", " ").replace(";", " ").split():
        family = name.removesuffix("+PTX")
        for item in NAMED_ARCHS.get(family, name).split(";"):
            match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
            if match is None:
                raise BuildError(
                    f"TORCH_CUDA_ARCH_LIST: {item!r} is no target; expected entries like 8.0, 9.0a or 12.0+PTX "
                    f"(or {', '.join(NAMED_ARCHS)}), separated by ';' or spaces, got {text!r}"
                )
            arch = Arch(int(match[1]), int(match[2]), match[3], bool(match[4]))
            if arch.code not in archs or arch.ptx:
                archs[arch.code] = arch
    if not archs:
        raise BuildError(f"TORCH_CUDA_ARCH_LIST: no target in {text!r}; leave it unset for {DEFAULT_ARCHS}")
    return list(archs.values())


def why_not(arch: Arch, nvcc: Nvcc) -> str | None:
    """Why a target cannot be built for; None when it can."""
    if (arch.major, arch.minor) < MIN_ARCH:
        return f"{arch} (the kernels need sm_{MIN_ARCH[0]}{MIN_ARCH[1]} or newer)"
    return None if arch.code in nvcc.targets else f"{arch} (nvcc {nvcc.release} does not know it)"


def usable_archs(wanted: list[Arch], nvcc: Nvcc) -> list[Arch]:
    """The targets that the kernels and this nvcc support; the others are dropped aloud, +PTX moves to the last one."""
    dropped = [reason for reason in (why_not(arch, nvcc) for arch in wanted) if reason]
    kept = [arch for arch in wanted if not why_not(arch, nvcc)]
    if dropped:
        say(f"dropped CUDA targets: {', '.join(dropped)}; kept: {', '.join(map(str, kept)) or 'none'}")
    if kept and any(a.ptx for a in wanted) and not any(a.ptx for a in kept):
        newest = max(kept, key=lambda a: (a.major, a.minor))
        kept[kept.index(newest)] = Arch(newest.major, newest.minor, newest.suffix, True)
    return kept


def free_memory() -> int:
    """Bytes that a build may take: available memory, less where a control group allows less."""
    free = 4 * GIB
    try:
        available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        free = int(available[1]) * 1024 if available else free
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit.isdigit():
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except OSError:
        pass
    return max(free, 0)


def positive(name: str, default: int) -> int:
    """An environment variable that counts something."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"{name}: expected a whole number of at least 1, got {text!r}")
    return int(text)


def default_jobs(job_bytes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, free_memory() // job_bytes))


def note_cuda_majors(nvcc: Nvcc, torch: Torch) -> str:
    """How nvcc's CUDA relates to torch's. The runtime is linked in: only the driver has to be new enough."""
    if torch.cuda is None:
        note = "is a CPU build: the file loads on it, CUDA ops do not run"
        return f"nvcc {nvcc.release}; this torch ({torch.version}) {note}"
    if nvcc.major == int(torch.cuda.split(".")[0]):
        return f"nvcc {nvcc.release} matches torch's CUDA {torch.cuda}"
    newer = nvcc.major > int(torch.cuda.split(".")[0])
    need = f"a driver for CUDA {nvcc.major} is needed" if newer else "any driver that runs this torch will do"
    return f"WARNING: nvcc {nvcc.release} and torch's CUDA {torch.cuda} differ in the major version: {need}"


@dataclass
class Plan:
    """What one build does, decided before anything is compiled."""

    torch: Torch
    nvcc: Nvcc | None = None
    archs: list[Arch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def cuda(self) -> bool:
        return self.nvcc is not None

    def note(self, line: str) -> None:
        say(line)
        self.notes.append(line)


def make_plan() -> Plan:
    """Reads SPECEYES_BUILD and the machine."""
    mode = os.environ.get("SPECEYES_BUILD", "").strip().lower() or "auto"
    if mode not in ("auto", "cpu", "cuda"):
        raise BuildError(f"SPECEYES_BUILD: expected auto, cpu or cuda, got {mode!r}")
    if mode == "cuda" and find_nvcc() is None:  # before torch is imported: this is what the caller asked about
        raise BuildError(
            "SPECEYES_BUILD=cuda, but no nvcc was found; looked at CUDACXX, CUDA_HOME, CUDA_PATH, PATH, "
            "/usr/local/cuda and the nvidia packages of this Python.\nInstall the CUDA toolkit, or set "
            "CUDA_HOME=/path/to/cuda, or SPECEYES_BUILD=cpu for a build without CUDA kernels"
        )
    plan = Plan(find_torch())
    if mode == "cpu":
        plan.note("CPU-only build, as SPECEYES_BUILD=cpu asks")
        return plan
    nvcc = find_nvcc()
    if nvcc is None:
        plan.note("*** CPU-ONLY BUILD: no nvcc found. Set CUDA_HOME and build again for the CUDA kernels ***")
        return plan
    wanted = parse_arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_ARCHS)
    archs = usable_archs(wanted, nvcc)
    if not archs:
        reason = f"no CUDA target is left: {', '.join(str(why_not(arch, nvcc)) for arch in wanted)}"
        if mode == "cuda":
            raise BuildError(f"SPECEYES_BUILD=cuda, but {reason}; see TORCH_CUDA_ARCH_LIST in docs/building.md")
        plan.note(f"*** CPU-ONLY BUILD: {reason} ***")
        return plan
    plan.nvcc, plan.archs = nvcc, archs
    plan.note(f"CUDA build for {', '.join(map(str, archs))}: {note_cuda_majors(nvcc, plan.torch)}")
    return plan


def isa_suffix(source: Path) -> str:
    return next((s for s in ISA_FLAGS if s and source.stem.endswith(s)), "")


def cpu_sources() -> list[Path]:
    """Portable sources first, then by instruction set: the link order matters (see ISA_FLAGS)."""
    sources = [*ROOT.glob("csrc/*/*_cpu*.cpp"), *ROOT.glob("csrc/drafting/*.cpp")]  # drafting: one host core, no suffix
    sources = sorted(sources) + sorted(ROOT.glob("python_bindings/*.cpp"))
    if platform.machine() not in ("x86_64", "AMD64"):
        sources = [s for s in sources if not isa_suffix(s)]
    order = list(ISA_FLAGS)
    return sorted(sources, key=lambda s: order.index(isa_suffix(s)))


def cuda_sources() -> list[Path]:
    return sorted(ROOT.glob("csrc/*/*.cu")) + sorted(ROOT.glob("python_bindings/*.cu"))


@dataclass(frozen=True)
class Step:
    """One object file: compiled again when its command or any file it read has changed."""

    source: Path
    output: Path
    command: tuple[str, ...]

    @property
    def depfile(self) -> Path:
        return self.output.with_suffix(".d")

    @property
    def stamp(self) -> Path:
        return self.output.with_suffix(".cmd")

    def digest(self) -> str:
        return hashlib.sha256("\0".join(self.command).encode()).hexdigest()

    def fresh(self) -> bool:
        try:
            if self.stamp.read_text() != self.digest():
                return False
            built = self.output.stat().st_mtime_ns
            read = shlex.split(self.depfile.read_text().replace("\\\n", " ").partition(": ")[2])
            return bool(read) and all(os.stat(path).st_mtime_ns <= built for path in read)
        except OSError:
            return False

    def run(self) -> None:
        self.stamp.unlink(missing_ok=True)
        start = time.time_ns()
        try:
            done = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        except OSError as error:
            raise BuildError(
                f"cannot run {self.command[0]} for {self.output.name}: {error}\n"
                "Install g++ 11 or newer, or set CXX to a compiler with C++20"
            ) from error
        output = done.stdout + done.stderr
        if done.returncode != 0:
            raise BuildError(f"building {self.output.name} failed:\n{shlex.join(self.command)}\n{output}")
        if output:
            print(output, file=sys.stderr, flush=True)
        os.utime(self.output, ns=(start, start))  # a file edited while the compiler ran counts as newer
        self.stamp.write_text(self.digest())


def plan_steps(plan: Plan, objects: Path) -> list[Step]:
    cxx = os.environ.get("CXX") or "g++"
    common = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-isystem", str(plan.torch.include)]
    common += [f"-ffile-prefix-map={plan.torch.include}=torch"]
    if plan.cuda:
        names = ";".join(map(str, plan.archs))
        common += ["-DSPECEYES_WITH_CUDA=1", f'-DSPECEYES_CUDA_ARCHS="{names}"']
    steps = []
    for source in cpu_sources():
        output = objects / f"{source.parent.name}_{source.stem}.o"
        torch_flags = common if source.parent.name == "python_bindings" else []  # csrc knows no torch
        flags = [*CXX_FLAGS, *ISA_FLAGS[isa_suffix(source)], *torch_flags]
        depend = ["-MMD", "-MF", str(output.with_suffix(".d"))]
        steps.append(Step(source, output, (*shlex.split(cxx), *flags, *depend, "-c", str(source), "-o", str(output))))
    if plan.nvcc is not None:
        host = ["-ccbin", os.environ["CUDAHOSTCXX"]] if os.environ.get("CUDAHOSTCXX") else []
        threads = ["--threads", str(positive("NVCC_THREADS", 1))]
        targets = [flag for arch in plan.archs for flag in arch.gencode()]
        for source in cuda_sources():
            output = objects / f"{source.parent.name}_{source.stem}.cu.o"
            depend = ["-MMD", "-MF", str(output.with_suffix(".d"))]
            command = [plan.nvcc.path, *NVCC_FLAGS, *host, *threads, *targets, *depend, "-c", str(source)]
            steps.append(Step(source, output, (*command, "-o", str(output))))
    return steps


def link_command(plan: Plan, steps: list[Step], output: Path) -> list[str]:
    # libtorch itself must stay in the list of needed files: on a CUDA torch it brings libtorch_cuda into reach of the
    # weak stream symbol.
    libs = [f"-L{plan.torch.lib}", "-ltorch", "-ltorch_cpu", "-lc10"]
    flags = ["-Wl,--no-undefined", "-Wl,--no-as-needed", "-Wl,--exclude-libs,ALL"]
    inputs = [str(step.output) for step in steps]
    if plan.nvcc is not None:
        host = ["-ccbin", os.environ["CUDAHOSTCXX"]] if os.environ.get("CUDAHOSTCXX") else []
        wrapped = [item for flag in flags for item in ("-Xlinker", flag.removeprefix("-Wl,"))]
        return [plan.nvcc.path, *host, "-shared", "-cudart", "static", "-o", str(output), *inputs, *wrapped, *libs]
    return [*shlex.split(os.environ.get("CXX") or "g++"), "-shared", "-o", str(output), *inputs, *flags, *libs]


def compile_all(plan: Plan, objects: Path) -> Path:
    """Brings every object and the library up to date, in parallel; returns the library."""
    objects.mkdir(parents=True, exist_ok=True)
    steps = plan_steps(plan, objects)
    if plan.cuda and not any(ROOT.glob("csrc/*/*.cu")):
        raise BuildError("no CUDA source under csrc/: is this a whole checkout?")
    # The longest compilations are nvcc's: they start first.
    stale = sorted((s for s in steps if not s.fresh()), key=lambda s: s.source.suffix != ".cu")
    jobs = positive("MAX_JOBS", default_jobs(NVCC_JOB_BYTES if plan.cuda else CPU_JOB_BYTES))
    say(f"compiling {len(stale)} of {len(steps)} files, {min(jobs, max(len(stale), 1))} at a time")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(step.run) for step in stale]:
            future.result()
    library = objects / LIBRARY
    link = Step(library, library, tuple(link_command(plan, steps, library)))
    newest = max(step.output.stat().st_mtime_ns for step in steps)
    current = link.stamp.exists() and link.stamp.read_text() == link.digest() and library.exists()
    if stale or not current or library.stat().st_mtime_ns < newest:
        link.run()
    return library


def install_file(content: Path | str, target: Path) -> None:
    """Atomic: a process that has the old file mapped keeps it, and none ever sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    if isinstance(content, Path):
        shutil.copyfile(content, partial)
        partial.chmod(0o755)
    else:
        partial.write_text(content)
    os.replace(partial, target)


class BuildNative(build_ext):
    """Builds the one library and its description, in place for an editable installation."""

    def _targets(self, base: str | Path) -> list[Path]:
        return [Path(base) / PACKAGE / name for name in (LIBRARY, BUILD_INFO)]

    def run(self) -> None:
        plan = make_plan()
        kind = "cuda" if plan.cuda else "cpu"
        library = compile_all(plan, ROOT / "build" / "native" / kind)
        info = {
            "kind": kind,
            "cuda_archs": [str(a) for a in plan.archs],
            "nvcc": plan.nvcc.release if plan.nvcc else None,
            "torch": plan.torch.version,
            "torch_cuda": plan.torch.cuda,
            "notes": plan.notes,
        }
        in_place = self.inplace or getattr(self, "editable_mode", False)
        so, description = self._targets(ROOT if in_place else self.build_lib)
        install_file(library, so)
        install_file(json.dumps(info, indent=1) + "\n", description)

    def get_outputs(self) -> list[str]:
        return [str(p) for p in self._targets(self.build_lib)]

    def get_output_mapping(self) -> dict[str, str]:
        built, source = self._targets(self.build_lib), self._targets(ROOT)
        return {str(b): str(s) for b, s in zip(built, source, strict=True)} if self.inplace else {}

    def get_source_files(self) -> list[str]:
        return [str(p.relative_to(ROOT)) for p in cpu_sources() + cuda_sources()]


class PlatformWheel(bdist_wheel):
    """The library is native but knows no Python ABI: py3-none-<platform>."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(f"{PACKAGE}.libspeceyes", sources=[])],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    )
