"""The replay figures: ``python bench/bench_replay.py [rejected] [goodput] [ablation] [scopes] [--quick] [--traces FOLDER]``.

``rejected``: sequential replay at Arctic's 24 operating points (depth 24, 64; factor 1, 2, 4; minimum probability .1, .3,
.5, .7), all traces with one setting of ours, whose own curve is a sweep of theta only. ``goodput``: lockstep, modelled
goodput at each batch size against the best fixed Arctic setting, ngram and plain decoding; the paper's own policy beside
it. ``ablation``: each part of ours switched off. What was wanted is printed with every figure as met or MISSED.

Replays are deterministic but for the wall times, which this program does not report; ``--store`` keeps them, so that a
second run replays only what has changed.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from speceyes_kernels.replay import (
    DrafterError,
    FolderTokenizer,
    Job,
    ReplayResult,
    drafter_specs,
    figures,
    load_rollouts,
    run_jobs,
)
from speceyes_kernels.scope_inference import ChatMarkers, ScopeInference

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
NAMES = ("humaneval", "tau-airline", "game24", "intercode-sql")
DEPTHS, FACTORS, PROBS = (24, 64), (1.0, 2.0, 4.0), (0.1, 0.3, 0.5, 0.7)
BATCHES = (1, 8, 32, 64, 128, 192, 256, 384)
THETAS = ".02/.08/.25/.5/.8/.96"
OURS = "ours:policy=survival"  # the cache's own budget
AGENTSPEC = "ours:policy=agentspec,estimator=counts,strict=1,alpha=1024/4096"  # as published, clamped
ABLATIONS = {
    "no rollout level": "ours:policy=survival,levels=QAG",
    "no query level": "ours:policy=survival,levels=LAG",
    "no agent level": "ours:policy=survival,levels=LQG",
    "no level of all": "ours:policy=survival,levels=LQA",
    "no semantic blocks": "ours:policy=survival,blocks=0",
    "no mixer (counts)": "ours:policy=survival,estimator=counts",
    "scopes inferred, not sent": "ours:policy=survival,scopes=inferred",
    "no scopes, no blocks": "ours:policy=survival,scopes=none",
    "strict isolation": "ours:policy=survival,strict=1",
}
FIXED = "ours:theta=.1/.25/.5"  # own budgets, one theta for all requests; the best one is shown
MEASURES = ("full batch", "whole run")
Rows = dict[str, dict[tuple[str, int], tuple[float, float]]]  # {drafter: {(trace, batch): speedups by MEASURES}}


class Runner:
    """Runs jobs and says how far it is."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.files = {name: args.traces / f"{name}.jsonl.gz" for name in args.names}
        for file in self.files.values():
            if not file.is_file():
                sys.exit(f"bench_replay: expected the trace {file}; give the folder with --traces")

    def job(self, name: str, drafter: str, batch: int = 1, budget: str | None = None) -> Job:
        limit = 150 if self.args.quick else self.args.limit
        return Job(str(self.files[name]), drafter, batch, budget, intensity=self.args.intensity, limit=limit)

    def run(self, jobs: Sequence[Job]) -> list[ReplayResult]:
        count = kept = 0
        total = len(set(jobs))

        def done(job: Job, result: ReplayResult, stored: bool) -> None:
            nonlocal count, kept
            count, kept = count + 1, kept + stored
            if sys.stderr.isatty() or count == total or count % 25 == 0:
                end = "\r" if sys.stderr.isatty() and count < total else "\n"
                seconds = time.monotonic() - self.began
                print(f"{count}/{total} replays ({kept} stored), {seconds:.0f} s", end=end, file=sys.stderr, flush=True)

        return run_jobs(jobs, workers=self.args.workers, store=self.args.store, done=done)


def words(text: str) -> list[str]:
    return [spec.text for spec in drafter_specs(text)]


def arctic(depth: int, factor: float, prob: float) -> str:
    return f"arctic:depth={depth},factor={factor:g},prob={prob:g}"


def points() -> list[tuple[int, float, float]]:
    return [(d, f, p) for d in DEPTHS for f in FACTORS for p in PROBS]


def rejected(runner: Runner, out: dict) -> list[figures.Verdict]:
    ours = [(n, w) for n in runner.files for w in words(f"ours:theta={THETAS}")]
    theirs = [(n, p) for n in runner.files for p in points()]
    results = runner.run([runner.job(n, w) for n, w in ours] + [runner.job(n, arctic(*p)) for n, p in theirs])
    at: dict[tuple[int, float, float], list[ReplayResult]] = {}
    for (_, point), result in zip(theirs, results[len(ours) :], strict=True):
        at.setdefault(point, []).append(result)
    compared = figures.compare_rejected(results[: len(ours)], at)
    out["rejected"] = [vars(c) | {"ratio": c.ratio} for c in compared]
    out["curve"] = [r.figures() for r in results[: len(ours)]]

    print("\nRejected share, Arctic -> ours, at Arctic's tokens a step (< : below our curve, its first point taken;")
    print("> : above it, not reached)")
    print(f"{'depth factor prob':20}" + "".join(f"{n:>29}" for n in runner.files))
    for depth, factor, prob in points():
        cells = []
        for c in compared:
            if (c.depth, c.factor, c.prob) == (depth, factor, prob):
                mark = {"inside": " ", "below": "<", "above": ">"}[c.where]
                cells.append(f"{c.tokens_per_step:7.2f}: {c.theirs:.3f} ->{mark}{c.ours:.3f} {c.ratio:.2f}")
        print(f"{depth:5} {factor:6g} {prob:4g}   " + "".join(f"{cell:>29}" for cell in cells))
    print("\nOur curve, theta: tokens a step / rejected share")
    for name in runner.files:
        mine = [r for r in results[: len(ours)] if r.trace == name]
        pairs = zip(words(f"ours:theta={THETAS}"), mine, strict=True)
        print(
            f"{name:14}"
            + ", ".join(f"{w.split('=')[1]} {r.tokens / r.steps:.2f}/{figures.rejected_share(r):.3f}" for w, r in pairs)
        )
    return figures.judge_rejected(compared)


def speedups(runner: Runner, labelled: dict[str, str], budget: str | None = None) -> Rows:
    cells = [(label, n, b) for label in labelled for n in runner.files for b in runner.args.batch]
    results = runner.run([runner.job(n, labelled[label], b, budget) for label, n, b in cells])
    rows: Rows = {label: {} for label in labelled}
    for (label, name, batch), r in zip(cells, results, strict=True):
        rows[label][name, batch] = (r.speedup_full, r.speedup)
    return rows


def best_of(rows: Rows) -> dict[tuple[str, int], tuple[float, float]]:
    """The best row at each place, for either measure by itself."""
    keys = next(iter(rows.values())).keys()
    return {k: (max(r[k][0] for r in rows.values()), max(r[k][1] for r in rows.values())) for k in keys}


def best_arctic(runner: Runner) -> tuple[dict[tuple[str, int], tuple[float, float]], dict[tuple[str, int], str]]:
    """Best fixed setting at each (trace, batch). All are replayed one rollout at a time; those that promise most at a
    batch size are replayed in lockstep: ``--candidates`` of them where the figure is judged, else the first."""
    theirs = [(n, p) for n in runner.files for p in points()]
    alone = dict(zip(theirs, runner.run([runner.job(n, arctic(*p)) for n, p in theirs]), strict=True))

    def promise(name: str, batch: int, point: tuple[int, float, float]) -> float:
        return figures.estimated_goodput(alone[name, point], batch, runner.args.intensity)

    cells = []
    for name in runner.files:
        for batch in runner.args.batch:
            order = sorted(points(), key=lambda p: -promise(name, batch, p))
            judged = figures.GOODPUT_BATCHES[0] <= batch <= figures.GOODPUT_BATCHES[1]
            cells += [(name, batch, p) for p in order[: runner.args.candidates if judged else 1]]
    results = runner.run([runner.job(n, arctic(*p), b) for n, b, p in cells])
    best: dict[tuple[str, int], tuple[float, float]] = {}
    setting: dict[tuple[str, int], str] = {}
    for (name, batch, point), r in zip(cells, results, strict=True):
        full, whole = best.get((name, batch), (0.0, 0.0))
        if r.speedup_full > full:
            setting[name, batch] = "{}/{:g}/{:g}".format(*point)
        best[name, batch] = (max(full, r.speedup_full), max(whole, r.speedup))
    return best, setting


def goodput(runner: Runner, out: dict) -> list[figures.Verdict]:
    ours = speedups(runner, {"ours": OURS})["ours"]
    best, setting = best_arctic(runner)
    rows = {"ours": ours, "best fixed Arctic": best} | speedups(runner, {"ngram": "ngram"})
    rows["AgentSpec's own policy, best alpha"] = best_of(speedups(runner, {w: w for w in words(AGENTSPEC)}))
    verdicts = []
    for i, measure in enumerate(MEASURES):
        show(runner, f"Modelled speedup over plain decoding, {measure}", rows, i)
        mine, theirs, ngram = ({k: v[i] for k, v in rows[n].items()} for n in ("ours", "best fixed Arctic", "ngram"))
        verdicts += figures.judge_goodput(mine, theirs, ngram, measure)
    print("best fixed Arctic settings (depth/factor/prob): ", end="")
    print("; ".join(f"{n} " + " ".join(setting[n, b] for b in runner.args.batch) for n in runner.files))
    out["goodput"] = flat(rows)
    out["best_arctic_setting"] = [[n, b, s] for (n, b), s in setting.items()]
    return verdicts


def ablation(runner: Runner, out: dict) -> list[figures.Verdict]:
    rows = speedups(runner, {"ours": OURS} | ABLATIONS)
    rows["no global budget, best theta"] = best_of(speedups(runner, {w: w for w in words(FIXED)}, budget="own"))
    show(runner, f"Each part switched off: modelled speedup over plain decoding, {MEASURES[0]}", rows, 0)
    out["ablation"] = flat(rows)
    print("\nloss against ours, geometric mean over the traces")
    for label, row in rows.items():
        if label != "ours":
            losses = []
            for b in runner.args.batch:
                ratio = figures.geometric_mean(row[n, b][0] / rows["ours"][n, b][0] for n in runner.files)
                losses.append(f"B {b}: {100 * (1 - ratio):5.1f} %")
            print(f"{label:36}" + "  ".join(losses))
    return []


def scopes(runner: Runner, out: dict) -> list[figures.Verdict]:
    """Prompts in the order of a replay of 8 rollouts at a time: each turn of each."""
    encoder = FolderTokenizer()
    markers = ChatMarkers.of(encoder.token_bytes())
    out["scopes"] = []
    print("\nInferred scopes: groups recorded -> inferred, pairs put together rightly / pairs found; us a prompt")
    for name, file in runner.files.items():
        rollouts = load_rollouts(file, encoder, runner.job(name, "none").limit)
        turns = [
            (r, r.calls[k][0])
            for at in range(0, len(rollouts), 8)
            for k in range(max(len(r.calls) for r in rollouts[at : at + 8]))
            for r in rollouts[at : at + 8]
            if k < len(r.calls)
        ]
        for known in (markers, None):
            inference, began = ScopeInference(known), time.process_time()
            found = [inference.infer(r.tokens[:n]) for r, n in turns]
            micros = 1e6 * (time.process_time() - began) / len(turns)
            row = [name, known is not None, micros]
            for given, inferred in (
                ([r.agent for r, _ in turns], [a for a, _ in found]),
                ([(r.agent, r.query) for r, _ in turns], [q for _, q in found]),
            ):
                row += [len(set(given)), len(set(inferred)), *figures.pair_agreement(given, inferred)]
            out["scopes"].append(row)
            print(
                "{:14} {:16} agents {:4} -> {:4} {:.3f}/{:.3f}   queries {:4} -> {:4} {:.3f}/{:.3f}   {:.0f} us".format(
                    name, "chat markers" if known else "no markers", *row[3:], micros
                )
            )
    return []


def flat(rows: Rows) -> list[list]:
    return [[label, name, batch, *value] for label, row in rows.items() for (name, batch), value in row.items()]


def show(runner: Runner, title: str, rows: Rows, measure: int) -> None:
    print(f"\n{title}\n{'':50}" + "".join(f"{'B ' + str(b):>8}" for b in runner.args.batch))
    for name in runner.files:
        for label, row in rows.items():
            print(f"{name:14}{label:36}" + "".join(f"{row[name, b][measure]:8.3f}" for b in runner.args.batch))
    for label, row in rows.items():
        means = (figures.geometric_mean(row[n, b][measure] for n in runner.files) for b in runner.args.batch)
        print(f"{'geom. mean':14}{label:36}" + "".join(f"{m:8.3f}" for m in means))


FIGURES = {"rejected": rejected, "goodput": goodput, "ablation": ablation, "scopes": scopes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", nargs="*", help=f"{', '.join(FIGURES)}; default: all")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the recorded rollouts")
    parser.add_argument("--names", nargs="+", default=NAMES, help="which traces")
    parser.add_argument("--quick", action="store_true", help="150 rollouts a trace: a rough answer in a minute or two")
    parser.add_argument("--limit", type=int, help="rollouts of each trace; default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--candidates", type=int, default=3, help="Arctic settings replayed at each batch size")
    parser.add_argument("--intensity", type=float, default=256.0)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--store", type=Path, help="folder that keeps replays between runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--csv", type=Path, help="our curve and the speedups, flat")
    args = parser.parse_args()
    if unknown := set(args.figure) - set(FIGURES):
        parser.error(f"figure: expected some of {', '.join(FIGURES)}, got {', '.join(sorted(unknown))}")
    runner = Runner(args)
    out: dict = {"facts": {"intensity": args.intensity, "quick": args.quick, "limit": args.limit}}
    try:
        verdicts = [v for name in args.figure or FIGURES for v in FIGURES[name](runner, out)]
    except DrafterError as error:
        sys.exit(f"bench_replay: {error}")
    print()
    for verdict in verdicts:
        print(verdict)
    out["verdicts"] = [[v.name, v.value, v.limit, v.met] for v in verdicts]
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["what", "trace", "batch", "speedup_full", "speedup"])
            for part in ("goodput", "ablation"):
                writer.writerows(out.get(part, []))
    if any(not v.met for v in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
