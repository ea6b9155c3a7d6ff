"""Agents, queries and blocks inferred from prompts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speceyes_kernels import DraftCache
from speceyes_kernels.scope_inference import ChatMarkers, ScopeInference

CHATML = b"<|im_start|>", b"<|im_end|>", b"\n", b"sys", b"tem", b"user", b"ass", b"istant", b"tool"
START, END, LINE, SYS, TEM, USER, ASS, ISTANT, TOOL = range(9)
HEADS = {"system": [SYS, TEM], "user": [USER], "assistant": [ASS, ISTANT], "tool": [TOOL]}
WORD = 100  # content tokens are above


def message(role, content):
    return [START, *HEADS[role], LINE, *content, END, LINE]


def prompt(*messages):
    return [t for m in messages for t in message(*m)] + [START, *HEADS["assistant"], LINE]


def text(seed, n=60):
    return (WORD + np.random.default_rng(seed).integers(0, 1000, n)).tolist()


SYSTEM = [("system", text(1)), ("system", text(2))]


@pytest.mark.parametrize("markers", [ChatMarkers.of(CHATML), None], ids=["markers", "plain"])
def test_turns_and_trials_share_their_query(markers):
    scopes = ScopeInference(markers)
    first = {(a, q): prompt(SYSTEM[a], ("user", text(10 + q))) for a in (0, 1) for q in (0, 1, 2)}
    found = {k: scopes.infer(p) for k, p in first.items()}
    assert len(set(found.values())) == 6
    for (a, q), p in first.items():
        for trial in range(3):
            assert scopes.infer(p) == found[a, q]
            longer = p
            for turn in range(3):
                answer, result = text(1000 * trial + 10 * turn + a), text(7 * turn + trial)
                longer = longer + answer + [END, LINE] + prompt(("tool", result))
                assert scopes.infer(longer) == found[a, q]
    assert len(scopes) == 6
    if markers is not None:  # the system message names the agent
        assert {found[0, q][0] for q in range(3)}.isdisjoint({found[1, q][0] for q in range(3)})
        assert len({agent for agent, _ in found.values()}) == 2


def test_demonstrations_belong_to_the_first_prompt():
    scopes = ScopeInference(ChatMarkers.of(CHATML))
    shown = [SYSTEM[0], ("user", text(3)), ("assistant", text(4))]
    one, other = (prompt(*shown, ("user", text(q))) for q in (5, 6))
    a, b = scopes.infer(one), scopes.infer(other)
    assert a[0] == b[0] and a[1] != b[1]
    assert scopes.infer(one + text(8) + [END, LINE] + prompt(("user", text(9)))) == a


def test_the_answers_header_may_change():
    # A template that opens a thought in the generation prompt and leaves it out of the history.
    scopes = ScopeInference(ChatMarkers.of(CHATML))
    p = prompt(SYSTEM[0], ("user", text(3)))
    first = scopes.infer([*p, WORD, WORD + 1])
    assert scopes.infer(p + text(4) + [END, LINE] + prompt(("user", text(5)))) == first
    assert ScopeInference().infer([*p, WORD, WORD + 1]) != first  # planted: without markers that is not seen
    plain = ScopeInference()
    begun = plain.infer([*p, WORD, WORD + 1])
    assert plain.infer(p + text(4)) != begun


def test_a_short_system_message_and_the_users_template_tell_the_agent():
    # Two agents with the same short system message; their user messages follow own templates.
    scopes, rng = ScopeInference(ChatMarkers.of(CHATML)), np.random.default_rng(0)
    seen = {0: [], 1: []}
    for q in range(80):
        agent = int(rng.integers(0, 2))
        ask = ("user", text(500 + agent, 30) + text(1000 + q, 40))
        seen[agent].append(scopes.infer(prompt(("system", text(1, 8)), ask))[0])
    late = {agent: set(found[-10:]) for agent, found in seen.items()}
    assert len(late[0]) == len(late[1]) == 1 and late[0] != late[1]


def test_prompts_without_anything_in_common_share_an_agent():
    for markers in (None, ChatMarkers.of(CHATML)):
        scopes = ScopeInference(markers)
        assert len({scopes.infer(prompt(("user", text(q))))[0] for q in range(100)}) == 1


@given(seed=st.integers(0, 10**6), bound=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_bounded_and_deterministic(seed, bound):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 3, rng.integers(0, 12)).tolist() for _ in range(60)]
    one, two = ScopeInference(max_prompts=bound), ScopeInference(max_prompts=bound)
    for p in prompts:
        assert one.infer(p) == two.infer(p)
        assert len(one) <= bound and sum(one._lengths.values()) == len(one)
        assert one.infer(p) == two.infer(np.asarray(p, np.int32))  # the prompt that came last is known


def test_a_stub_of_a_prompt_takes_nobody_in():
    scopes = ScopeInference()
    assert scopes.infer([1]) == scopes.infer([1])
    scopes.infer([])
    assert scopes.infer([1, *text(3)])[1] not in (scopes.infer([1])[1], scopes.infer([])[1])
    assert len(scopes) == 1


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_plain_queries_are_the_shortest_earlier_prompt(seed):
    rng, scopes, first = np.random.default_rng(seed), ScopeInference(), []
    scopes._SHORTEST = 1
    ids = {}
    for _ in range(80):
        p = tuple(rng.integers(0, 2, rng.integers(1, 10)).tolist())
        known = [f for f in first if p[: len(f)] == f]
        owner = min(known, key=len) if known else p
        if not known:
            first.append(p)
        assert ids.setdefault(owner, scopes.infer(p)[1]) == scopes.infer(p)[1]
    assert len(set(ids.values())) == len(ids)


def test_template_statistics_forget_what_leaves_the_sample(monkeypatch):
    monkeypatch.setattr(ScopeInference, "_SAMPLE", 5)
    scopes, rng = ScopeInference(), np.random.default_rng(0)
    for _ in range(200):
        scopes.infer(rng.integers(0, 3, 40))
    expected = {}
    for path in scopes._sample:
        for node in path:
            expected.setdefault(node, [0, set()])[0] += 1
        for parent, node in itertools.pairwise(path):
            expected[parent][1].add(node)
    counts = {n: [c, sum(expected[k][0] == 1 for k in kids)] for n, (c, kids) in expected.items()}
    assert scopes._nodes == counts


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (CHATML, [(1, "system"), (9, "user"), (15, "")]),
        ([b"<s>", b"[INST]", b"[/INST]", b"x"], [(1, "user"), (3, "assistant"), (5, "user")]),
        ([b"<|START_OF_TURN_TOKEN|>", b"<|USER_TOKEN|>", b"<|CHATBOT_TOKEN|>"], [(0, "user"), (3, "assistant")]),
    ],
)
def test_messages(vocabulary, expected):
    ids = {
        "system": [SYS] * 0 + [999, *message("system", [WORD] * 2), *message("user", [2**31 - 1])[:6], START, -1],
        "user": [0, 1, 3, 2, 3, 1] if len(vocabulary) == 4 else [0, 1, 50, 0, 2],
    }[expected[0][1]]
    assert ChatMarkers.of(vocabulary).messages(np.asarray(ids)) == expected


def test_blocks_of_the_vocabulary():
    assert ChatMarkers.of([b"a"]).structure[2] == (("<think>", "</think>"),)
    both = ChatMarkers.of([b"[THINK]", b"[/THINK]", b"<tool_calls>"])
    assert both.structure[2] == (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
    assert len(both.structure[1]) == 1  # an opening tag alone is no pair


def drafts_of_another_rollout(cache, first, second, **names):
    cache.start("a", first, **names)
    cache.extend(["a"], [text(77)])
    cache.stop("a")
    cache.start("b", second)
    cache.extend(["b"], [text(77)[:10]])
    return cache.propose(["b"], max_draft_tokens=4).lengths.tolist()[0]


def test_in_the_cache():
    turn, other = prompt(SYSTEM[0], ("user", text(3))), prompt(SYSTEM[0], ("user", text(4)))
    make = {"strict_isolation": True, "estimator": "counts", "policy": None, "token_bytes": CHATML}
    assert drafts_of_another_rollout(DraftCache(**make), turn, turn) == 4
    assert drafts_of_another_rollout(DraftCache(**make), turn, other) == 0
    assert drafts_of_another_rollout(DraftCache(infer_scopes=False, **make), turn, other) == 4  # None is one scope
    assert drafts_of_another_rollout(DraftCache(**make), turn, turn, agent_id="me", query_id=1) == 0
    assert drafts_of_another_rollout(DraftCache(**make), turn, turn, query_id=1) == 0


def test_inferred_blocks_in_the_cache():
    # Strictly isolated caches keep the fence's text apart from the same text outside.
    words = [bytes([97 + i]) for i in range(20)]
    table = [*words, b"```"]
    inside, outside = [20, *range(10), 20], [*range(10)]
    for infer, structure, expected in [(True, None, 0), (True, "", 3), (False, None, 3)]:
        cache = DraftCache(
            strict_isolation=True, estimator="counts", policy=None, token_bytes=table, infer_scopes=infer
        )
        for request, response in enumerate([inside, outside[:5]]):
            cache.start(request, [11], agent_id=0, query_id=0, structure=structure)
            cache.extend([request], [response])
            if request == 0:
                cache.stop(request)
        assert cache.propose([1], max_draft_tokens=3).lengths.tolist() == [expected]


def test_refuses_no_room():
    with pytest.raises(ValueError, match="max_prompts"):
        ScopeInference(max_prompts=0)
