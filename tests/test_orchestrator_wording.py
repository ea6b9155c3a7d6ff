"""Wording and loop as settings: the defaults byte by byte, each key where it belongs, what is refused, resume, artifacts."""

from __future__ import annotations

import hashlib
import json
import logging

import funnel_cases
import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from funnel_cases import queries, run
from PIL import Image

from speceyes_kernels.orchestrator.agents import DeepEyes, Plain, Thyme, build_agent
from speceyes_kernels.orchestrator.agents.prompts import json_tools
from speceyes_kernels.orchestrator.batch import run_questions
from speceyes_kernels.orchestrator.calibration import (
    Artifact,
    ArtifactError,
    KindThreshold,
    load_artifact,
    save_artifact,
)
from speceyes_kernels.orchestrator.calibration.sources import from_run
from speceyes_kernels.orchestrator.config import load_settings
from speceyes_kernels.orchestrator.errors import ResumeRefused, SettingsError
from speceyes_kernels.orchestrator.evaluation import load_jsonl
from speceyes_kernels.orchestrator.evaluation.replay import replay
from speceyes_kernels.orchestrator.evaluation.results import Run
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.images import Picture
from speceyes_kernels.orchestrator.phases import Gate, direct_request, judge_request
from speceyes_kernels.orchestrator.runlog import RunLog, read_log
from speceyes_kernels.orchestrator.settings import FunnelSettings, WordingSettings
from speceyes_kernels.orchestrator.types import Priority, Query
from speceyes_kernels.orchestrator.wording import JUDGE, RATE

LARGE = {"large.model": "big", "large.urls": ["http://a:1"]}
QUERY = Query("How many {red} cups?", id="q0", options=("one", "two"))


def load(environ=None, **flags):
    return load_settings({**LARGE, **flags}, environ=environ or {}).settings


def spoken(turns):
    return "\x1e".join(f"{turn.role}\x1f{turn.text}" for turn in turns)


def short_hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def direct(query, **wording):
    made = FunnelSettings(wording=wording)
    return direct_request(query, made, max_tokens=5, priority=Priority.DRAFT).turns[-1].text


# ---- the defaults ----------------------------------------------------------------------------------------------------
# Hashes of the prompts as they were before they could be set: runs and thresholds from then hold for these texts only.
AGENTS = {
    "deepeyes": ("caaa63ac6b3f3c10", "e818b0fba776d2e3"),
    "plain": ("313781a570921f38", "1599f78f5044a7c6"),
    "thyme": ("07af273fee171389", "07af273fee171389"),
}
DIRECT = {
    "option": "a8feffbf9add57a1", "yes/no": "1769b0d24dd24e48", "number": "cce254c0ae3fc4d6", "text": "45d3452d6d64988f",
    None: "47cac94020288da6",
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_of_default_settings_says_what_it_always_said(name):
    built, bare = build_agent(load(agent=name)), {"deepeyes": DeepEyes, "plain": Plain, "thyme": Thyme}[name]()
    for agent in (built, bare):
        said = [short_hash(spoken(agent.dialect.first(QUERY, tools))) for tools in (agent.tools, ())]
        assert tuple(said) == AGENTS[name]
    options = ("name", "coordinates", "rule", "max_pixels", "max_tokens", "tool_timeout")
    assert [getattr(built, o) for o in options] == [getattr(bare, o) for o in options]
    assert [t.name for t in built.tools] == [t.name for t in bare.tools]


def test_thyme_names_the_pictures_as_it_always_did():
    one, two = Picture(Image.new("RGB", (8, 4))), Picture(Image.new("RGB", (4, 4)))
    agent = build_agent(load(agent="thyme"))
    said = [short_hash(spoken(agent.dialect.first(Query("Q?", images=i), agent.tools))) for i in ((one,), (one, two))]
    assert said == ["bb25ab5971cbb82b", "9f2c53c67f49a2c2"]


def test_judge_direct_and_rate_are_what_they_always_were():
    assert short_hash(spoken(judge_request(QUERY, FunnelSettings()).turns)) == "4db80ff423aa6df3"
    for kind, wanted in DIRECT.items():
        request = direct_request(Query("Q?", kind=kind), FunnelSettings(), max_tokens=5, priority=Priority.LOOP)
        assert short_hash(spoken(request.turns)) == wanted, kind
    assert short_hash(RATE) == "c9ef880a9eed4e8f"


# ---- each key where it belongs ---------------------------------------------------------------------------------------
def test_the_judges_text():
    made = FunnelSettings(wording={"judge": "Tools for this?\n{question}\nSay yes or no."})
    large, small = funnel_cases.engines()
    run(large, small, [QUERY], wording=made.wording.model_dump())
    # The braces of the question are its own.
    assert (
        large.calls[0].request.turns[-1].text == "Tools for this?\nHow many {red} cups?\nA. one\nB. two\nSay yes or no."
    )
    twice = Query("What is {question}?", id="x")
    assert judge_request(twice, made).turns[-1].text == "Tools for this?\nWhat is {question}?\nSay yes or no."


def test_endings_of_direct_questions():
    def asked(kind, wording):
        return direct(Query("Q?", kind=kind), direct=wording)

    for kind in DIRECT:
        assert asked(kind, "In \\boxed{}.") == "Q?\nIn \\boxed{}." and asked(kind, "") == "Q?"
    given = {"number": "Digits only.", "option": ""}
    assert asked("number", given) == "Q?\nDigits only." and asked("option", given) == "Q?"
    for kind in ("yes/no", "text", None):
        assert asked(kind, given) == asked(kind, None) != "Q?"


def test_drafts_and_answers_without_tools_end_alike():
    large, small = funnel_cases.engines(score=1.0)

    async def main():
        async with Funnel(
            large, small, settings=FunnelSettings(wording={"direct": "Briefly!"})
        ) as funnel:  # no agent: the direct one
            await funnel.answer(QUERY)

    virtual_loop.run(main())
    drafts, direct_ones = [c.request for c in small.calls], [c.request for c in large.calls[1:]]
    assert len(drafts) == len(direct_ones) == 1
    assert drafts[0].turns == direct_ones[0].turns and drafts[0].turns[-1].text.endswith("B. two\nBriefly!")


@pytest.mark.parametrize("name", AGENTS)
def test_the_loops_system_and_last_text(name):
    texts = {
        "funnel.wording.system": 'You look. {tools}\nNo {"json": {}} touched.',
        "funnel.wording.loop": "Think {hard}.",
    }
    agent = build_agent(load(agent=name, **texts))
    engine = FakeEngine([Scripted("<answer>3</answer>")])
    virtual_loop.run(agent.run(QUERY, engine))
    system, user = engine.calls[0].request.turns
    assert (system.role, system.text) == (
        "system",
        f'You look. {json_tools(agent.tools)}\nNo {{"json": {{}}}} touched.',
    )
    assert "<tools>" in system.text and agent.tools[0].name in system.text
    assert user.text == "How many {red} cups?\nA. one\nB. two\nThink {hard}."
    # An empty text is no turn, and nothing behind the question.
    agent = build_agent(load(agent=name, **{"funnel.wording.system": "", "funnel.wording.loop": ""}))
    (only,) = agent.dialect.first(QUERY, agent.tools)
    assert (only.role, only.text) == ("user", "How many {red} cups?\nA. one\nB. two")


def test_how_specreason_asks_for_a_mark():
    def script(request):
        return Scripted("9" if request.turns[-1].text == "Mark it 0-9." else "<answer>8</answer>", 1)

    large, small = FakeEngine(script, "L", "large"), FakeEngine(script, "S", "small")
    wording = {"rate": "Mark it 0-9.", "system": ""}
    agent = Plain(system="")
    ((_, answer),) = run(large, small, queries(1), agent=agent, mode="specreason", wording=wording)
    assert answer.text == "8" and [c.request.turns[-1].text for c in large.calls] == ["Mark it 0-9."]
    assert [t.role for t in small.calls[0].request.turns] == ["user"]


def test_a_wording_that_the_agent_does_not_have_is_no_silent_loss():
    large, small = funnel_cases.engines()
    for key, own in (("system", "system"), ("loop", "last")):
        settings = FunnelSettings(wording={key: "Look."})
        with pytest.raises(SettingsError, match=f"funnel.wording.{key}: the agent 'deepeyes'"):
            Funnel(large, small, settings=settings, agent=DeepEyes())
        Funnel(large, small, settings=settings, agent=DeepEyes(**{own: "Look."}))
        Funnel(large, small, settings=settings)  # without tools there is no loop to word


# ---- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key, value, words",
    [
        ("funnel.wording.judge", "Tools?", r"funnel.wording.judge: expected a text with \{question\} in it"),
        ("funnel.wording.judge", "", r"funnel.wording.judge: .*\{question\}"),
        ("funnel.wording.judge", "{question} {options}", r"funnel.wording.judge: .*only braces, got '\{options\}'"),
        ("funnel.wording.judge", "{question} {}", r"funnel.wording.judge: .*got '\{\}'"),
        ("funnel.wording.judge", "{{question}}", r"funnel.wording.judge: .*got '\{\}'"),
        ("funnel.wording.judge", "{question} }", r"funnel.wording.judge: .*got '\}'"),
        (
            "funnel.wording.direct",
            {"colour": "x"},
            "funnel.wording.direct: expected kinds among option, .*got 'colour'",
        ),
        ("funnel.wording.direct", {"number": 3}, "funnel.wording.direct: number: expected a text, got 3"),
        ("funnel.wording.direct", 3, "funnel.wording.direct: expected a text, or a mapping"),
        ("funnel.wording.direct", {"text": "{question}!"}, "funnel.wording.direct: .*stands before it"),
        ("funnel.wording.loop", "{question} Think.", "funnel.wording.loop: .*stands before it"),
        ("funnel.wording.rate", "", "funnel.wording.rate: "),
        ("funnel.wording.sistem", "x", "funnel.wording.sistem: unknown key"),
    ],
)
def test_errors_name_the_key(key, value, words):
    with pytest.raises(SettingsError, match=words) as caught:
        load(**{key: value})
    assert len(str(caught.value).splitlines()) == 1


# ---- runs and their logs ---------------------------------------------------------------------------------------------
def _run(folder, **flags):
    file = folder / "questions.jsonl"
    file.write_text(
        "".join(json.dumps({"id": f"q{i}", "question": f"{i}?", "answer": f"draft q{i}"}) + "\n" for i in range(3))
    )
    large, small = funnel_cases.engines(large=2, small=2)
    main = run_questions(load(**flags), file, folder / "out", engines=(large, small), quiet=True)
    return virtual_loop.run(main), small


def test_a_run_with_another_wording_or_loop_is_another_run(tmp_path):
    _, small = _run(tmp_path)
    assert len(small.calls) == 3
    head = next(read_log(tmp_path / "out"))["run"]
    assert head["settings"]["wording"]["judge"] == JUDGE and head["loop"]["coordinates"] == "seen"
    for key, value, words in (
        ("funnel.wording.judge", "{question}?", "settings: wording: judge"),
        ("funnel.wording.direct", "Now.", "settings: wording: direct"),
        ("funnel.wording.system", "", 'settings: wording: system: was null, is ""'),
        ("funnel.wording.loop", "Think.", "settings: wording: loop"),
        ("funnel.wording.rate", "Mark it.", "settings: wording: rate"),
        ("loop.coordinates", "original", 'loop: coordinates: was "seen", is "original"'),
        ("loop.pixels.factor", 32, "loop: pixels: factor"),
    ):
        with pytest.raises(ResumeRefused, match=words):
            _run(tmp_path, **{key: value})
    _, small = _run(tmp_path)
    assert not small.calls


def test_a_run_from_before_the_wording_could_be_set_goes_on_with_the_defaults_only(tmp_path):
    _run(tmp_path)
    head = {k: v for k, v in next(read_log(tmp_path / "out"))["run"].items() if k not in ("loop", "format")}
    old = {**head, "settings": {k: v for k, v in head["settings"].items() if k != "wording"}}
    RunLog(tmp_path / "old", old)._release()
    assert "wording" not in next(read_log(tmp_path / "old"))["run"]["settings"]
    RunLog(tmp_path / "old", {**old, **head, "loop": load().loop.model_dump(mode="json")})._release()
    for now in (load(**{"funnel.wording.loop": "x"}), load(**{"loop.max_tokens": 3})):
        settings = {**head["settings"], "wording": now.funnel.wording.model_dump(mode="json")}
        with pytest.raises(ResumeRefused, match="loop"):
            RunLog(tmp_path / "old", {**head, "settings": settings, "loop": now.loop.model_dump(mode="json")})


# ---- calibration -----------------------------------------------------------------------------------------------------
def _artifact(guaranteed=False, **fields):
    return Artifact(
        **{
            "large": "large", "small": "small", "k": 64, "form": "exclude_top1", "pool": "min", "strict": True, "span": "output",
            "source": "gate", "objective": "accuracy", "data_hash": "", "thresholds": {"text": KindThreshold(1.0)},
            "epsilon": 0.1 if guaranteed else None, **fields,
        }
    )  # fmt: skip


def _gate(artifact, depth=0, **wording):
    return Gate(FunnelSettings().gate, artifact, "large", "small", WordingSettings(**wording).of_drafts(depth))


def test_another_wording_than_calibrations_is_warned_of_and_refused_under_a_guarantee(caplog):
    own = WordingSettings(direct={"number": "Digits."}).texts()
    for made, wording in ((_artifact(), {}), (_artifact(wording=own), {"direct": {"number": "Digits."}})):
        assert not _gate(made, **wording).differences  # without the field: the library's own words
    cases = [
        (_artifact, {}, {"judge": "{question}?"}, ["judge"], 0),
        (_artifact, {"wording": own}, {}, ["direct.number"], 0),
        (_artifact, {}, {"direct": {"text": "A word."}}, ["direct.text"], 0),
        (_artifact, {}, {"system": "", "loop": "x", "rate": "y"}, [], 0),  # no draft depends on these
        (_artifact, {}, {"system": "", "loop": "x", "direct": "y"}, ["system", "loop"], 1),  # with tools, on these
    ]
    for make, fields, wording, keys, depth in cases:
        with caplog.at_level(logging.WARNING):
            found = _gate(make(**fields), depth, **wording).differences
        assert [d.split("funnel.wording.")[1].split()[0] for d in found] == keys
        assert all(d in caplog.text for d in found)
        if keys:
            with pytest.raises(SettingsError, match=f"another funnel.wording.{keys[0]} .*calibrate anew"):
                _gate(make(guaranteed=True, **fields), depth, **wording)
        else:
            _gate(make(guaranteed=True, **fields), depth, **wording)


def test_the_funnel_hands_its_wording_to_the_gate():
    large, small = funnel_cases.engines()
    settings = FunnelSettings(wording={"direct": "Now."})
    with pytest.raises(SettingsError, match="another funnel.wording.direct "):
        Funnel(large, small, settings=settings, calibration=_artifact(guaranteed=True))
    Funnel(large, small, settings=settings, calibration=_artifact(guaranteed=True, wording=settings.wording.texts()))


def test_replayed_decisions_hold_for_the_wording_of_the_drafts_that_were_run():
    wording = WordingSettings(direct="Now.")
    settings = {"gate": {"k": 64}, "wording": wording.model_dump(mode="json")}
    drafts = Run("d", "draft-only", (), settings, {"large": "large", "small": "small"})
    made = _artifact(guaranteed=True, wording=wording.texts())
    assert replay("r", [], drafts, drafts, None, FunnelSettings().gate, calibration=made).how == "replayed"
    with pytest.raises(SettingsError, match="another funnel.wording.direct "):
        replay("r", [], drafts, drafts, None, FunnelSettings().gate, calibration=_artifact(guaranteed=True))


def test_the_artifact_keeps_the_runs_wording(tmp_path):
    pytest.importorskip("scipy", reason="calibration needs scipy: pip install 'speceyes_kernels[orchestrator]'")
    from speceyes_kernels.orchestrator.calibration.choose import Options, calibrate

    _run(tmp_path, **{"funnel.wording.direct": "Now."})
    scored = from_run(tmp_path / "out", load_jsonl(tmp_path / "questions.jsonl"))
    made = calibrate(scored, Options(epsilon=0.2, share=1.0)).artifact
    assert made.wording == WordingSettings(direct="Now.").texts()
    file = tmp_path / "a.json"
    save_artifact(made, file)
    assert load_artifact(file).wording == made.wording
    data = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in data.items() if k != "wording"}))
    assert load_artifact(file).wording is None
    file.write_text(json.dumps({**data, "wording": "x"}))
    with pytest.raises(ArtifactError, match="wording: expected texts"):
        load_artifact(file)


# ---- the commands ----------------------------------------------------------------------------------------------------
def test_the_commands(capsys, tmp_path):
    pytest.importorskip("typer")
    pytest.importorskip("scipy", reason="calibration needs scipy: pip install 'speceyes_kernels[orchestrator]'")
    from speceyes_kernels.cli.app import app

    def speceyes(*args):
        with pytest.raises(SystemExit) as ended:
            app(list(args), prog_name="speceyes")
        return ended.value.code, capsys.readouterr().out

    file = tmp_path / "s.yaml"
    file.write_text(
        'large: {model: big, urls: ["http://a:1"]}\nloop: {coordinates: thousandths}\n'
        'funnel: {wording: {judge: "Look:\\n{question}", system: "", direct: {number: Digits.}}}\n'
    )
    code, out = speceyes("show-config", "--config", str(file))
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}  # one line a setting, prompts included
    assert code == 0 and rows["funnel.wording.system"] == ["''", "s.yaml"]
    assert (
        rows["funnel.wording.judge"] == ["'Look:\\n{question}'", "s.yaml"]
        and rows["funnel.wording.rate"][-1] == "default"
    )
    assert rows["loop.coordinates"] == ["thousandths", "s.yaml"] and rows["loop.pixels.factor"] == ["None", "default"]
    assert rows["funnel.wording.direct"] == ["{'number':", "'Digits.'}", "s.yaml"]
    # A table does not know what was asked: the settings' file says it.
    table = tmp_path / "t.csv"
    table.write_text("right,score\n" + "1,9\n0,1\n" * 30)
    given = ("calibrate", str(table), "--epsilon", "0.2", "--share", "1", "-o", str(tmp_path / "a.json"))
    assert speceyes(*given)[0] == 0 and load_artifact(tmp_path / "a.json").wording is None
    assert speceyes(*given, "--config", str(file))[0] == 0
    assert load_artifact(tmp_path / "a.json").wording["direct.number"] == "Digits."
    file.write_text("funnel: {wording: {judge: no placeholder}}")
    assert "s.yaml: funnel.wording: judge: expected a text with" in speceyes(*given, "--config", str(file))[0]
