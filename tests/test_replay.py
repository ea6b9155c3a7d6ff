"""Replays: loaders, drafters against brute force, acceptance by hand, lockstep, reports, the command."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import Letters, Script, check_sums, copies, random_rollouts, rollout

from speceyes_kernels.replay import (
    Drafter,
    DrafterError,
    Ngram,
    Ours,
    TraceError,
    load_rollouts,
    parse_drafters,
    plain_time,
    replay,
    report,
)


# ---- acceptance ------------------------------------------------------------------------------------------------------
def test_acceptance_by_hand():
    # Response 10..15. Step 1: 10, free. Step 2: draft 11 12 99 -> 11 12 and 13. Step 3: draft 98 -> 14.
    # Step 4: draft 15 97 96, of which only 15 is left to be judged: 15; two tokens past the end count as drafted.
    drafts = {1: [11, 12, 99], 4: [98], 5: [15, 97, 96]}
    script = Script(lambda _, known: drafts[known])
    result = replay([rollout(([1, 2], [10, 11, 12, 13, 14, 15]))], script)
    assert script.known == {(0, 0): [10, 11, 12, 13, 14, 15]}
    assert (result.steps, result.tokens, result.drafted, result.accepted) == (4, 6, 7, 3)
    figures = result.figures()
    assert figures["tokens_per_step"] == 1.5
    assert figures["rejected_share"] == pytest.approx(4 / 7)
    assert figures["speedup"] == 1.5 and figures["goodput"] == 1.5
    assert result.latencies.tolist() == [4]


def test_steps_with_a_full_batch_by_hand():
    # Rollouts of 4, 2 and 4 tokens, two at a time, no drafts: the first two; the first and the third; it alone, 2 steps.
    made = [rollout(([1], [5] * n)) for n in (4, 2, 4)]
    result = replay(made, Drafter(), batch=2)
    assert (result.engine_steps, result.modelled_time, result.plain_time) == (6, 6.0, 6.0)
    assert (result.full_tokens, result.full_time, result.full_plain) == (8, 4.0, 4.0)
    # A right draft token in the first rollout's second step, which ends it after 3.
    script = Script(lambda request, known: [5] if request[0] == 0 and known == 1 else [])
    faster = replay(made, script, batch=2, intensity=2)
    # Full steps over 2, 3 and 2 tokens: 1 + 1.5 + 1 for 7 tokens, as plain decoding takes.
    assert faster.full_tokens == 7 and faster.full_time == 3.5 and faster.full_plain == 3.5
    assert faster.speedup_full == 1.0
    assert replay(made, Drafter(), batch=8).speedup_full == 1.0  # never full: of the whole run


def test_first_token_of_a_call_is_never_drafted():
    script = Script(lambda _, known: [] if known else pytest.fail("drafted before the first token"))
    result = replay([rollout(([1], [2, 3]), ([4], [5]), ([], [6, 6]))], script)
    assert result.calls == 3 and result.steps == 5
    assert script.prompts == {(0, 0): [1], (0, 1): [1, 2, 3, 4], (0, 2): [1, 2, 3, 4, 5]}
    assert script.log[:2] == [("start", (0, 0), "a", "q"), ("stop", (0, 0), 2, 3)]


def test_modelled_time_of_drafts_beyond_the_intensity():
    # Two at a time, intensity 4: steps of 2, then 2 + 6, then 2 tokens: 1 + 2 + 1 empty steps.
    script = Script(lambda _, known: [7, 7, 7] if known == 1 else [])
    result = replay([rollout(([1], [5, 6, 8]))] * 2, script, batch=2, intensity=4, budget="own")
    assert (result.engine_steps, result.modelled_time, result.plain_time) == (3, 4.0, 3.0)
    assert result.room == 6 and result.room_used == 2
    assert result.latencies.tolist() == [4, 4]


def test_global_budget_takes_the_best_positions():
    # Intensity 5, two requests: room for 3 draft tokens; survival .9 .5 .4: two of one row and one of the other.
    script = Script(lambda r, known: [3, 4, 5] if known == 1 else [], survival=[0.9, 0.5, 0.4])
    made = [rollout(([1], [2, 3, 4, 5, 9]))] * 2
    result = replay(made, script, batch=2, intensity=5)
    assert result.budget == "global" and result.drafted == 3 and result.accepted == 3
    own = replay(made, Script(script.drafts, script.survival), batch=2, intensity=5, budget="own")
    assert own.budget == "own" and own.drafted == 6 and own.accepted == 6


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 9), kind=st.sampled_from(["own", "global"]))
@settings(max_examples=40, deadline=None)
def test_lockstep_yields_the_record(seed, batch, kind):
    rng = np.random.default_rng(seed)
    made = random_rollouts(rng, int(rng.integers(1, 8)))
    noise = np.random.default_rng(seed + 1)

    def drafts(request, known):  # partly right
        number, call = request
        r = by_number[number]
        start, end = r.calls[call]
        draft = r.tokens[start + known : min(end, start + known + int(noise.integers(0, 6)))].tolist()
        return [t if noise.random() < 0.8 else 9 for t in draft]

    kept = [r for r in made if r.response_tokens]
    by_number = dict(enumerate(kept))
    script = Script(drafts, survival=[0.8**i for i in range(1, 9)])
    result = replay(made, script, batch=batch, budget=kind)
    expected = {(i, c): r.tokens[s:e].tolist() for i, r in enumerate(kept) for c, (s, e) in enumerate(r.calls) if s < e}
    assert script.known == expected
    assert result.tokens == sum(map(len, expected.values()))
    check_sums(result)
    assert len(result.latencies) == len(expected) == result.calls
    assert max(_overlaps(script.log), default=0) <= batch


def _overlaps(log):
    running = 0
    for event, *_ in log:
        running += 1 if event == "start" else -1
        yield running


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_plain_time_equals_a_replay_without_drafts(seed, batch):
    made = random_rollouts(np.random.default_rng(seed), 9)
    result = replay(made, Drafter(), batch=batch, intensity=4)
    assert result.modelled_time == pytest.approx(result.plain_time)
    assert result.drafted == 0 and result.steps == result.tokens
    assert plain_time(made, 1, lambda n: 1.0) == sum(r.response_tokens for r in made)


# ---- drafters --------------------------------------------------------------------------------------------------------
def ngram_by_brute_force(text, tokens, most, least):
    for n in range(most, least - 1, -1):
        for start in range(len(text) - n):
            if len(text) > n and text[start : start + n] == text[-n:]:
                return text[start + n : start + n + tokens]
    return []


@given(
    # 257 and 65,536 look like others' parts when bytes are searched without care for where a token begins
    text=st.lists(st.sampled_from([0, 1, 256, 257, 65536, 2**31 - 1]), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    tokens=st.integers(1, 6),
    least=st.integers(1, 4),
    more=st.integers(0, 3),
)
@settings(max_examples=400, deadline=None)
def test_ngram_equals_brute_force(text, cut, tokens, least, more):
    drafter = Ngram(tokens, least + more, least)
    drafter.start("r", np.asarray(text[:cut], np.int32), "a", "q")
    drafter.extend(["r"], [np.asarray(text[cut:], np.int32)])
    assert drafter.propose(["r"]) == ([ngram_by_brute_force(text, tokens, least + more, least)], None)


def test_ngram_takes_vllms_defaults():
    assert (Ngram().tokens, Ngram().most, Ngram().least) == (5, 4, 4)
    with pytest.raises(DrafterError, match="least"):
        Ngram(5, 2, 3)


@pytest.mark.parametrize("strict", [False, True])
def test_a_perfect_copy_is_accepted_whole(strict):
    made = copies(12)
    last = []
    replay(made, Ours(theta=0.2, strict=strict), on_tokens=lambda r, t: last.append((r, len(t))))
    steps = [n for (number, _), n in last if number == 11]
    # First token free, then drafts of up to 32 and one more: 60 tokens in 3 steps at best.
    assert steps[0] == 1 and len(steps) <= 5 and sum(steps) == 60
    first = [n for (number, _), n in last if number == 0]
    assert first == [1] * 60  # nothing to copy from


def test_strict_isolation_keeps_scopes_apart():
    response = list(range(100, 130))
    made = [rollout(([1], response), query="q0"), rollout(([1], response), query="q1")] * 4
    mixed = replay(made, Ours(theta=0.2))
    strict = replay(made[:2], Ours(theta=0.2, strict=True))
    assert strict.accepted == 0 and strict.drafted == 0
    assert mixed.accepted > 100


@pytest.mark.parametrize("settings_", [{}, {"estimator": "counts"}, {"strict": True}])
def test_ours_in_lockstep(settings_):
    result = replay(copies(30), Ours(theta=0.0, **settings_), batch=7)
    assert result.budget == "global" and result.tokens == 30 * 60
    check_sums(result)
    assert result.figures()["speedup"] > 2
    assert result.drafted <= result.room  # never past the free budget at T(n) = max(1, n / 256)
    assert result.bytes > 0


@pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None, reason="not installed: arctic-inference (a rival, optional)"
)
def test_arctic_copies_too():
    (make,) = parse_drafters("arctic:depth=16,prob=.2,factor=2")
    drafter = make()
    assert (drafter.depth, drafter.prob, drafter.factor) == (16, 0.2, 2.0)
    result = replay(copies(6), drafter)
    assert result.tokens == 360 and result.accepted > 200
    check_sums(result)
    assert result.bytes > 0


def test_arctic_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(DrafterError, match="pip install .*arctic-inference==0.3.0"):
        parse_drafters("arctic")[0]()


def test_parse_drafters_sweeps():
    assert [m().theta for m in parse_drafters("ours:theta=.25/.5,cap=8")] == [0.25, 0.5]
    assert [(d.tokens, d.most) for d in (m() for m in parse_drafters("ngram:tokens=3/5,most=2/4"))] == [
        (3, 2), (3, 4), (5, 2), (5, 4)
    ]  # fmt: skip
    assert parse_drafters("none")[0]().name == "none"
    for text, words in [
        ("theirs", "one of ours, arctic"),
        ("ours:tau=1", "got 'tau'"),
        ("ours:theta=x", "cannot read 'x'"),
        ("none:cap=1", r"\(none\)"),
    ]:
        with pytest.raises(DrafterError, match=words):
            parse_drafters(text)


# ---- loaders ---------------------------------------------------------------------------------------------------------
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": [{"type": "text", "text": "v"}, {"type": "image_url", "image_url": {}}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "\\u00e9"}'}}],
    },
]


def spoken(r):
    return ["".join(map(chr, r.tokens[s:e])) for s, e in r.calls]


def check_messages(r):
    tool = '\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>\n'
    assert spoken(r) == ["one<|im_end|>\n", tool]
    prompt = "".join(map(chr, r.tokens[: r.calls[0][0]]))
    assert prompt == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip


def test_loads_jsonl(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    lines = [json.dumps({"agent": "a", "query": i, "messages": MESSAGES}) for i in range(3)]
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    made = load_rollouts(path, Letters())
    assert [(r.agent, r.query) for r in made] == [("a", "0"), ("a", "1"), ("a", "2")]
    check_messages(made[2])
    assert len(load_rollouts(path, Letters(), limit=2)) == 2


def test_loads_openai_lists(tmp_path):
    other = [{"role": "system", "content": "s"}, {"role": "user", "content": "w"}, *MESSAGES[2:]]
    for name, text in [
        ("a.json", json.dumps(MESSAGES)),
        ("b.json", json.dumps([MESSAGES, other])),
        ("c.jsonl", json.dumps(MESSAGES) + "\n" + json.dumps(other)),
    ]:
        (tmp_path / name).write_text(text)
        made = load_rollouts(tmp_path / name, Letters())
        check_messages(made[0])
        if len(made) == 2:  # same system message, other first user message
            assert made[0].agent == made[1].agent and made[0].query != made[1].query
    assert len(made) == 2


def test_loads_swe_agent(tmp_path):
    path = tmp_path / "lib-1.2__issue-7.traj"
    history = [m | {"agent": "main"} for m in MESSAGES]
    path.write_text(json.dumps({"trajectory": [], "history": history, "info": {}}))
    (made,) = load_rollouts(path, Letters())
    assert (made.agent, made.query) == ("main", "lib-1.2__issue-7")
    check_messages(made)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "found none"),
        ("a.jsonl", "\n{", r"a\.jsonl:2: expected JSON"),
        ("a.jsonl", '{"messages": []}', r"a\.jsonl:1: expected a list of messages"),
        ("a.jsonl", '[{"content": "x"}]', "message 0: expected an object with 'role'"),
        ("a.jsonl", '[{"role": "user", "content": 7}]', "'content' as a string"),
        ("a.jsonl", '[{"role": "assistant", "content": "", "tool_calls": ["f"]}]', "message 0: expected tool calls"),
        ("a.json", "nothing", "expected JSON"),
        ("a.traj", "[]", "list 'history'"),
        ("a.jsonl.gz", "no gzip", "unreadable"),
    ],
)
def test_refuses_broken_traces(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=words):
        load_rollouts(tmp_path / name, Letters())
    with pytest.raises(TraceError, match="does not exist"):
        load_rollouts(tmp_path / "other.jsonl", Letters())


# ---- reports ---------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("rich", "matplotlib")), reason="not installed: extra cli"
)
def test_report(tmp_path):
    made = copies(8)
    results = [replay(made, Ours(theta=t), batch=b, trace="t") for b in (1, 4) for t in (0.2, 0.6)]
    results.append(replay(made, Ngram(), trace="t"))
    assert report.table(results, "x").row_count == 5
    report.write_csv(results, tmp_path / "r.csv")
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(r["tokens_per_step"]) for r in rows] == [r.tokens / r.steps for r in results]
    report.write_json(results, tmp_path / "r.json", {"a": 1})
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["facts"] == {"a": 1} and [r["accepted"] for r in kept["results"]] == [r.accepted for r in results]
    files = report.write_curves(results, tmp_path)
    assert [f.name for f in files] == ["accepted-t.png", "goodput-t.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files)
    assert "max(1, n / 256)" in report.explain(256)


@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("typer", "rich", "matplotlib", "tokenizers")),
    reason="not installed: extra cli, tokenizers",
)
def test_command(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    record = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e f g h " * 4}]}
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps(record)] * 6))

    def run(*args):
        code = "from speceyes_kernels.cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, "replay", str(tmp_path / "t.jsonl"), "--tokenizer", str(tmp_path), *args],
            capture_output=True, text=True, timeout=300, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip

    done = run("-d", "ours:theta=0/.5", "-d", "ngram", "-d", "none", "-b", "1,2", "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert (
        "ours theta=0.5" in done.stdout and "no-blocks" not in done.stdout and "T(n) = max(1, n / 256)" in done.stdout
    )
    kept = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert [(r["batch"], r["drafter"]) for r in kept["results"]] == [
        (b, d) for b in (1, 2) for d in ("ours theta=0", "ours theta=0.5", "ngram 5/4", "none")
    ]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "replay.csv", "replay.json", "accepted-t.png", "goodput-t.png"
    }  # fmt: skip
    for args, words in [(("-b", "0"), "sizes in 1..1024"), (("-d", "x"), "one of ours"), (("--budget", "y"), "'own'")]:
        done = run(*args)
        assert done.returncode == 1 and words in done.stderr, done.stderr
