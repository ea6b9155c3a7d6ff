"""Settings from flags, environment and file; and `speceyes run` on a folder, interrupted and resumed."""

from __future__ import annotations

import json

import funnel_cases
import pytest
import virtual_loop
from PIL import Image

from speceyes_kernels.orchestrator.account import CostAccount
from speceyes_kernels.orchestrator.batch import Progress, load_questions, run_questions
from speceyes_kernels.orchestrator.config import engine_flag, load_settings, parse_flag
from speceyes_kernels.orchestrator.errors import ResumeRefused, SettingsError
from speceyes_kernels.orchestrator.runlog import read_log
from speceyes_kernels.orchestrator.tools.sandbox.host import Sandbox, SandboxUnavailable

LARGE = {"large.model": "big", "large.urls": ["http://a:1"]}


def values(loaded):
    return {s.key: (s.value, s.source) for s in loaded.values}


def test_flags_over_environment_over_file_over_defaults(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(
        "large: {model: big, urls: ['http://a:1'], api_key: secret}\n"
        "funnel: {steps: 3, seed: 7, gate: {tau: 0.9, k: 32, strict: false}}\n"
    )
    environ = {"SPECEYES_FUNNEL__GATE__TAU": "0.8", "SPECEYES_FUNNEL__GATE__K": "48", "SPECEYES_BUILD": "cpu"}
    loaded = load_settings({"funnel.gate.tau": 0.7}, file=file, environ=environ)
    found = values(loaded)
    assert found["funnel.gate.tau"] == (0.7, "flag") and found["funnel.gate.k"] == (48, "environment")
    assert found["funnel.steps"] == (3, "s.yaml") and found["funnel.gate.strict"] == (False, "s.yaml")
    assert found["funnel.judge"] == ("large", "default") and found["large.api_key"] == ("***", "s.yaml")
    assert loaded.settings.funnel.gate.tau == 0.7 and loaded.settings.large.api_key.get_secret_value() == "secret"
    assert "secret" not in repr(loaded)


def test_toml_says_the_same(tmp_path):
    pytest.importorskip("tomllib", reason="Python 3.11")
    file = tmp_path / "s.toml"
    file.write_text('[large]\nmodel = "big"\n[funnel.gate]\ntau = 0.9\n')
    assert load_settings(file=file, environ={}).settings.funnel.gate.tau == 0.9


@pytest.mark.parametrize(
    "flags, environ, text, words",
    [
        ({}, {}, None, "large: Field required"),
        ({"funnel.gate.taau": 1}, {}, None, r"funnel.gate.taau: unknown key, got 1 \(from flag\)"),
        ({"funnel.gate.tau": 1.5}, {}, None, r"funnel.gate.tau: .*less than 1, got 1.5 \(from flag\)"),
        ({}, {"SPECEYES_FUNNEL__STEPS": "many"}, None, r"funnel.steps: .*integer.*'many' \(from environment\)"),
        ({}, {}, "funnel: {in_flight: 0}", r"funnel.in_flight: .*got 0 \(from s.yaml\)"),
        ({}, {}, "funel: {}", "funel: unknown key"),
        ({}, {}, "- a", "expected keys and values"),
        ({}, {}, "a: [", "not YAML"),
        ({"large.urls": ["host:1"]}, {}, None, "large.urls.0"),
        ({"funnel.judge": "off", "funnel.overlap": True}, {}, None, "overlap: expected a judge"),
        ({"funnel": 3, "funnel.steps": 2}, {}, None, "funnel.steps"),
    ],
)
def test_errors_name_key_and_source(tmp_path, flags, environ, text, words):
    file = None
    if text is not None:
        file = tmp_path / "s.yaml"
        file.write_text(text)
    given = {**(LARGE if "large" not in words else {}), **flags}
    with pytest.raises(SettingsError, match=words):
        load_settings(given, file=file, environ=environ)


def test_flags():
    assert parse_flag("funnel.overlap=true") == ("funnel.overlap", True)
    assert parse_flag("funnel.draft.stop=['a', 'b']") == ("funnel.draft.stop", ["a", "b"])
    assert engine_flag("/models/x") == {"model": "/models/x"}
    assert engine_flag("org/m@http://a:1, https://b") == {"model": "org/m", "urls": ["http://a:1", "https://b"]}
    for bad in ("funnel.overlap", "=1", "a=[", "@http://a"):
        with pytest.raises(SettingsError):
            engine_flag(bad) if bad.startswith("@") else parse_flag(bad)


# ---- run -------------------------------------------------------------------------------------------------------------
def _questions(tmp_path, n=6):
    folder = tmp_path / "questions"
    folder.mkdir()
    for i in range(n):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"q{i}.png")
        (folder / f"q{i}.txt").write_text(f"What is in picture {i}?\n")
    return folder


def _run(tmp_path, folder, limit=None, **flags):
    large, small = funnel_cases.engines(large=2, small=2)
    settings = load_settings({**LARGE, "agent": "direct", **flags}, environ={}).settings
    main = run_questions(settings, folder, tmp_path / "out", limit=limit, engines=(large, small), quiet=True)
    return virtual_loop.run(main), large, small


def test_a_folder_of_pictures_and_questions_resumed(tmp_path):
    folder = _questions(tmp_path)
    figures, _, small = _run(tmp_path, folder, limit=4)
    assert (figures["queries"], figures["beta"], figures["alpha"]) == (4, 1.0, 1.0) and len(small.calls) == 4
    assert small.calls[0].request.turns[-1].pictures[0].size == (8, 8)
    # The same command goes on where it was; figures are of the whole.
    figures, large, small = _run(tmp_path, folder)
    assert figures["queries"] == 6 and len(small.calls) == 2 and large.closed == small.closed == 1
    answers = [r["answer"] for r in read_log(tmp_path / "out") if "answer" in r]
    assert sorted(a["query_id"] for a in answers) == [f"q{i}" for i in range(6)]
    with pytest.raises(ResumeRefused, match="settings: gate: tau"):
        _run(tmp_path, folder, **{"funnel.gate.tau": 0.5})
    json.dumps(figures)


def test_money_where_every_price_is_given(tmp_path):
    prices = {"large.prompt_price": 0, "large.output_price": 10, "small.prompt_price": 0, "small.output_price": 1}
    small = {"small.model": "little", "small.urls": ["http://b:1"]}
    folder = _questions(tmp_path)
    figures, *_ = _run(tmp_path, folder, **small, **prices)
    # Scripted: a judge's one token of the large model, a draft's four of the small one.
    assert figures["money"]["judge_s"] == pytest.approx(10e-6) and figures["money"]["draft_s"] == pytest.approx(4e-6)
    del prices["small.output_price"]
    with pytest.raises(SettingsError, match="small.output_price: expected a price, as large.prompt_price has one"):
        _run(tmp_path / "x", folder, **small, **prices)


def test_one_model_has_one_price(tmp_path, monkeypatch):
    """Both roles by the same model: what it costs is the model's, whoever asks."""
    made = funnel_cases.engines

    def same(**how):
        large, small = made(**how)
        small.model = large.model
        return large, small

    monkeypatch.setattr(funnel_cases, "engines", same)
    prices = {"large.prompt_price": 2, "large.output_price": 10, "small.prompt_price": 2, "small.output_price": 1}
    small = {"small.model": "large", "small.urls": ["http://b:1"]}
    folder = _questions(tmp_path)
    with pytest.raises(SettingsError, match=r"small.output_price: expected large's \(2, 10\), got 2, 1: both are model 'large'"):
        _run(tmp_path / "x", folder, **small, **prices)
    figures, *_ = _run(tmp_path, folder, **small, **prices | {"small.output_price": 10})
    assert figures["money"]["draft_s"] == pytest.approx((4 * 10 + 10 * 2) * 1e-6)


def test_a_sandbox_that_cannot_isolate_ends_the_run_before_any_query(tmp_path, monkeypatch):
    async def check(self):
        raise SandboxUnavailable("no namespaces here")

    monkeypatch.setattr(Sandbox, "check", check)
    made = large, small = funnel_cases.engines(large=2, small=2)
    monkeypatch.setattr(funnel_cases, "engines", lambda **how: made)
    with pytest.raises(SettingsError, match="tool 'code' cannot be used here: no namespaces"):
        _run(tmp_path, _questions(tmp_path), agent="thyme")
    assert not large.calls and not small.calls and large.closed == small.closed == 1


def test_questions_from_jsonl(tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question": "a?", "options": ["x", "y"], "answer": "y"}\n')
    (query,) = load_questions(tmp_path)
    assert query.text == "a?" and query.options == ("x", "y")
    assert [q.text for q in load_questions(tmp_path / "questions.jsonl")] == ["a?"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="empty"):
        load_questions(tmp_path / "empty")


def test_the_live_line():
    progress = Progress(10, 2, quiet=True)
    account = CostAccount()
    for route in ("draft", "draft", "loop:gate"):
        progress.update(route, account)
    line = progress.line(account.figures())
    assert line.startswith("5 of 10 | draft 2 | loop:gate 1") and "left" in line


def test_the_commands(monkeypatch, capsys, tmp_path):
    pytest.importorskip("typer")
    from speceyes_kernels.cli.app import app

    def speceyes(*args):
        with pytest.raises(SystemExit) as ended:
            app(list(args), prog_name="speceyes")
        return ended.value.code, capsys.readouterr().out

    code, out = speceyes("show-config", "--large", "big@http://a:1", "--tau", "0.9", "-s", "funnel.steps=4")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert code == 0 and rows["funnel.gate.tau"] == ["0.9", "flag"] and rows["funnel.steps"] == ["4", "flag"]
    assert rows["large.model"] == ["big", "flag"] and rows["funnel.seed"] == ["0", "default"]
    code, _ = speceyes("show-config", "--large", "big", "--tau", "2")
    assert "funnel.gate.tau" in code
    code, _ = speceyes("run", str(tmp_path), "--large", "big@http://127.0.0.1:9", "--mode", "base", "--output", str(tmp_path / "o"))
    assert "questions.jsonl" in code


def test_a_model_is_known_by_the_name_that_it_is_served_under():
    from speceyes_kernels.orchestrator.config import header
    from speceyes_kernels.orchestrator.settings import EngineSettings, SpeceyesSettings

    plain = EngineSettings(model="/a/folder")
    named = EngineSettings(model="/a/folder", vllm={"served_model_name": ["one", "two"]})
    assert (plain.known_as, named.known_as) == ("/a/folder", "one")
    settings = SpeceyesSettings(large=named, small=EngineSettings(model="s", vllm={"served_model_name": "small-1"}))
    assert header(settings)["models"] == {"large": "one", "small": "small-1"}
