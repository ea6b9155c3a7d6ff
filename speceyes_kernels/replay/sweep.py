"""Many replays at once: a process pool, and a store for what was replayed before."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import drafters, lockstep, traces
from .drafters import drafter_specs
from .lockstep import INTENSITY, ReplayResult, replay, replay_settings
from .traces import FolderTokenizer, Rollout, load_rollouts


@dataclass(frozen=True)
class Job:
    """One replay.

    Attributes
    ----------
    trace : str
        File of rollouts.
    drafter : str
        One drafter, as :func:`drafter_specs` reads it.
    batch, budget, intensity, slope
        As :func:`replay` takes them.
    limit : int, optional
        Only the first so many rollouts.
    tokenizer : str, optional
        Folder of the tokenizer; None: the default one.
    """

    trace: str
    drafter: str
    batch: int = 1
    budget: str | None = None
    intensity: float = INTENSITY
    slope: float = 0.0
    limit: int | None = None
    tokenizer: str | None = None

    @property
    def trace_name(self) -> str:
        name = Path(self.trace).name.removesuffix(".gz")
        return name.rsplit(".", 1)[0] or name


@functools.cache
def _tokenizer(folder: str | None) -> tuple[FolderTokenizer, list[bytes]]:
    encoder = FolderTokenizer(folder)
    return encoder, encoder.token_bytes()


@functools.lru_cache(maxsize=8)
def rollouts_of(trace: str, tokenizer: str | None, limit: int | None) -> list[Rollout]:
    """Rollouts of a file, kept: many jobs share them."""
    return load_rollouts(trace, _tokenizer(tokenizer)[0], limit)


def run_job(job: Job) -> ReplayResult:
    """Replays one job in this process."""
    return _run_group([job])[0]


def _run_group(jobs: Sequence[Job]) -> list[ReplayResult]:
    """Replays jobs that share everything but their drafters' settings; see :func:`_groups`."""
    job = jobs[0]
    rollouts = rollouts_of(job.trace, job.tokenizer, job.limit)
    made = [drafter_specs(j.drafter)[0].make(_tokenizer(job.tokenizer)[1]) for j in jobs]
    model: dict[str, Any] = {"intensity": job.intensity, "slope": job.slope, "trace": job.trace_name}
    if _shares_a_cache(job):
        return replay_settings(rollouts, made[0], made, **model)
    return [replay(rollouts, made[0], batch=job.batch, budget=job.budget, **model)]


def _shares_a_cache(job: Job) -> bool:
    return job.drafter.startswith("arctic") and job.batch == 1 and job.budget is None


def _groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that are replayed together: Arctic's settings of one depth, one rollout at a time, share one cache."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        shared: object = job
        if _shares_a_cache(job):
            (spec,) = drafter_specs(job.drafter)
            own = tuple(sorted((k, v) for k, v in spec.settings if k not in ("factor", "prob", "cap")))
            shared = (dataclasses.replace(job, drafter="arctic"), own)
        groups.setdefault(shared, []).append(job)
    return list(groups.values())


def _begin_worker() -> None:
    import torch

    torch.set_num_threads(1)


def run_jobs(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    store: Path | None = None,
    done: Callable[[Job, ReplayResult, bool], None] | None = None,
) -> list[ReplayResult]:
    """Replays all jobs; a job named twice runs once.

    Parameters
    ----------
    jobs : sequence of Job
    workers : int
        Processes, each with one thread; 1: this process, with its threads. Wall times of results are those of a machine
        that does all of it at once.
    store : path, optional
        Folder in which results are kept, one file a job, found again while trace, settings and code are the same. The
        wall times in them are of the run that made them.
    done : callable, optional
        Gets (job, result, whether it came from the store) as jobs end.

    Returns
    -------
    list of ReplayResult
        In the order of `jobs`.
    """
    for job in jobs:
        drafter_specs(job.drafter)  # refused before anything runs
    found: dict[Job, ReplayResult] = {}
    files: dict[Job, Path] = {}
    waiting: list[Job] = []
    for job in dict.fromkeys(jobs):
        if store is not None:
            files[job] = store / f"{_key(job)}.json"
            if (kept := _read(files[job])) is not None:
                found[job] = kept
                if done is not None:
                    done(job, kept, True)
                continue
        waiting.append(job)

    def keep(group: list[Job], results: list[ReplayResult]) -> None:
        for job, result in zip(group, results, strict=True):
            found[job] = result
            if store is not None:
                _write(files[job], result)
            if done is not None:
                done(job, result, False)

    groups = _groups(waiting)
    if workers == 1 or len(groups) < 2:
        for group in groups:
            keep(group, _run_group(group))
    else:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(workers, len(groups)), context, _begin_worker) as pool:
            futures = {pool.submit(_run_group, group): group for group in groups}
            try:
                for future in as_completed(futures):
                    keep(futures[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [found[job] for job in jobs]


# ---- the store -------------------------------------------------------------------------------------------------------
def _key(job: Job) -> str:
    """Names a job by its contents: file, settings, and the code that replays it."""
    (spec,) = drafter_specs(job.drafter)
    settings = dataclasses.asdict(job) | {"trace": _file_digest(job.trace), "name": job.trace_name}
    code = _code_digest(spec.kind, _shares_a_cache(job))
    return hashlib.sha256(json.dumps([settings, code], sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@functools.cache
def _code_digest(kind: str, shares: bool) -> str:
    loop = lockstep.replay_settings if shares else lockstep.replay
    parts = (traces, loop, lockstep.right_tokens, lockstep.plain_time)
    code = [inspect.getsource(part) for part in (*parts, drafters._KINDS[kind])]
    if kind == "arctic":
        code.append(importlib.metadata.version("arctic-inference"))
    digest = hashlib.sha256("".join(code).encode())
    if kind == "ours":  # changes with every build and with the Python around it
        package = Path(__file__).resolve().parent.parent
        for file in sorted(package.glob("*.py")) + sorted(package.glob("*.so")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _write(file: Path, result: ReplayResult) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fields = dataclasses.asdict(result) | {"latencies": result.latencies.tolist()}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(fields))
    part.replace(file)


def _read(file: Path) -> ReplayResult | None:
    try:
        fields = json.loads(file.read_text())
        return ReplayResult(**fields | {"latencies": np.asarray(fields["latencies"], float)})
    except (OSError, ValueError, TypeError, KeyError):  # absent, cut off, or of another version: replayed again
        return None
