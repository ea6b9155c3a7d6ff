"""Dialects on good and bad outputs, and the loop over a scripted engine on the virtual clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from speceyes_kernels.orchestrator.agents import DeepEyes, Loop, Plain, SpecReason, Thyme
from speceyes_kernels.orchestrator.agents.deepeyes import DeepEyesDialect
from speceyes_kernels.orchestrator.agents.dialect import Call, Final, Malformed
from speceyes_kernels.orchestrator.agents.plain import PlainDialect
from speceyes_kernels.orchestrator.agents.specreason import parse_mark
from speceyes_kernels.orchestrator.agents.thyme import ThymeDialect
from speceyes_kernels.orchestrator.engines.limiter import wasted_into
from speceyes_kernels.orchestrator.errors import EngineUnavailable
from speceyes_kernels.orchestrator.images import Picture
from speceyes_kernels.orchestrator.tools.base import ToolContext, ToolResult
from speceyes_kernels.orchestrator.tools.calculator import Calculator
from speceyes_kernels.orchestrator.tools.code import CodeArguments
from speceyes_kernels.orchestrator.tools.zoom import Zoom
from speceyes_kernels.orchestrator.types import LoopResult, Priority, Query, ScoreRequest, Waste

ZOOM = {"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [1, 2, 30, 40]}}
CALL = f"<tool_call>{json.dumps(ZOOM)}</tool_call>"


# ---- parsing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (f"<think>there</think>\n{CALL}", "image_zoom_in_tool", ZOOM["arguments"]),
        (CALL[: -len("</tool_call>")], "image_zoom_in_tool", ZOOM["arguments"]),  # an engine that cuts the stop string
        (f"<tool_call>\n```json\n{json.dumps(ZOOM)}\n```\n</tool_call>", "image_zoom_in_tool", ZOOM["arguments"]),
        (f"{CALL}{CALL.replace('30', '31')}", "image_zoom_in_tool", ZOOM["arguments"]),  # two calls: the first
        (f"{CALL}<answer>a dog</answer>", "image_zoom_in_tool", ZOOM["arguments"]),  # not seen yet: the call
        (f"{json.dumps(ZOOM)}</tool_call>", "image_zoom_in_tool", ZOOM["arguments"]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": {\\"b\\": [1]}}"}</tool_call>', "f", {"a": {"b": [1]}}),
        ('<tool_call>{"name": "f", "parameters": {"a": "}</b>"}}</tool_call>', "f", {"a": "}</b>"}),
        ('<tool_call>{"name": "f", "arguments": {}} and so on</tool_call>', "f", {}),
    ],
)
def test_calls(text: str, name: str, arguments: dict[str, Any]) -> None:
    for dialect in (DeepEyesDialect(), PlainDialect()):
        parsed = dialect.parse(text)
        assert isinstance(parsed, Call) and (parsed.name, parsed.arguments) == (name, arguments)
        assert text[: parsed.end].count("</tool_call>") <= 1 and "<answer>" not in text[: parsed.end]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm</think><answer>a red bus</answer>", "a red bus"),
        ("<answer> B </answer>", "B"),
        ("<Answer>B</ANSWER>", "B"),
        ("<answer>cut off at the", "cut off at the"),
        (f"<answer>B</answer>{CALL}", "B"),  # what it wrote behind the answer does not count
        ("<answer>1</answer><answer>2</answer>", "1"),
        ("just text", "just text"),
        ("<think>hm</think> C", "C"),
        ("hm</think> C", "C"),
    ],
)
def test_answers(text: str, answer: str) -> None:
    assert DeepEyesDialect().parse(text) == Final(answer)
    if "<tool_call>" not in text:
        assert ThymeDialect().parse(text) == Final(answer)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "neither a call nor an answer"),
        ("<think>and on and on", "the thinking did not end"),
        ("<think>a</think>  ", "neither a call nor an answer"),
        ("<answer>  </answer>", "the answer is empty"),
        ("<tool_call></tool_call>", "there is no JSON object in the call"),
        ('<tool_call>{"name": "image_zoom', "the call is no JSON: .*; it may have been cut off"),
        ('<tool_call>{"name": "f", "arguments": {"bbox_2d": [1, 2,</tool_call>', "the call is no JSON"),
        ("<tool_call>{'name': 'f'}</tool_call>", "the call is no JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'the call has no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'the call has no "name"'),
        ('<tool_call>{"name": "f"}</tool_call>', '"arguments" are no JSON object'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" are no JSON object'),
        ('<tool_call>{"name": "f", "arguments": "no"}</tool_call>', "are a string that is no JSON"),
        ('<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000 + "</tool_call>", "the call is no JSON"),
    ],
)
def test_outputs_that_cannot_be_read(text: str, problem: str) -> None:
    parsed = DeepEyesDialect().parse(text)
    assert isinstance(parsed, Malformed)
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(parsed.problem)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("x <code>```python\na = 1\n\nprint(a)\n```</code>", "a = 1\n\nprint(a)"),
        ("<code>\n```\nprint(1)\n```\n</code> <answer>2</answer>", "print(1)"),
        ("<code>print('```')</code>", "print('```')"),
        ("<CODE>\n  if 1:\n    pass\n</CODE>", "  if 1:\n    pass"),
        ("<code>a</code><code>b</code>", "a"),
        ("<code>```python\nprint(1)", Malformed("the code was cut off: there is no </code>")),
        ("<code>```python\n```</code>", Malformed("the code is empty")),
        ("<answer>2</answer><code>b</code>", Final("2")),
        ("", Malformed("there is neither a call nor an answer")),
    ],
)
def test_thymes_blocks(text: str, parsed: Any) -> None:
    got = ThymeDialect().parse(text)
    assert (got.arguments["code"] if isinstance(got, Call) else got) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("2 + 2 is 4.\nAnswer: 4", Final("4")),
        ("**Answer:** 4", Final("4")),
        ("Answer: 3\nno, wait\nanswer: 4\n", Final("4")),
        ("four", Final("four")),
        ("The Answer: is near", Final("The Answer: is near")),  # within a line it is no label
        ("Answer:", Malformed("nothing follows Answer:")),
        ("<answer>Answer: 4</answer>", Final("Answer: 4")),
    ],
)
def test_plain_answers(text: str, parsed: Any) -> None:
    assert PlainDialect().parse(text) == parsed


_PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<answer>",
    "</answer>",
    "<code>",
    "</code>",
    "<think>",
    "</think>",
    "```",
    "{",
    "}",
]
_PIECES += ['"name"', '"arguments"', ":", "[", "]", '"', "\\", "\n", "NaN", "1e999", "Answer:", "\ud800", "\0", "f"]


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(), st.lists(st.sampled_from(_PIECES)).map("".join)))
def test_parsing_never_raises(text: str) -> None:
    for dialect in (DeepEyesDialect(), PlainDialect(), ThymeDialect()):
        parsed = dialect.parse(text)
        if isinstance(parsed, Call):
            assert isinstance(parsed.name, str) and isinstance(parsed.arguments, dict) and 0 < parsed.end <= len(text)
        else:
            assert parsed.problem if isinstance(parsed, Malformed) else parsed.text.strip() == parsed.text != ""


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=8))  # fmt: skip
def test_any_json_as_arguments(value: Any) -> None:
    body = json.dumps({"name": "f", "arguments": value}).replace("</", "<\\/")
    text = f"<tool_call>{body}</tool_call>"
    parsed = DeepEyesDialect().parse(text)
    assert isinstance(parsed, Call if isinstance(value, dict) else Malformed) or isinstance(value, str)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def picture(width: int = 560, height: int = 280) -> Picture:
    return Picture(Image.new("RGB", (width, height), "red"))


def test_what_the_model_is_told() -> None:
    image = picture()
    query = Query("Which colour?", images=(image,), options=("red", "blue"))
    system, user = DeepEyesDialect().first(query, [Zoom()])
    schema = json.loads(system.text.split("<tools>\n")[1].split("\n</tools>")[0])
    assert schema["function"]["name"] == "image_zoom_in_tool" and schema["function"]["parameters"]["required"] == [
        "bbox_2d"
    ]
    assert user.parts[0] is image and user.text.startswith("Which colour?\nA. red\nB. blue\n")
    assert "<tools>" not in DeepEyesDialect().first(query, [])[0].text  # without tools none are spoken of
    thyme = ThymeDialect().first(query, [])[1].text
    assert "image_path, 560 x 280 pixels" in thyme
    two = ThymeDialect().first(Query("?", images=(image, image)), [])[1].text
    assert "image_1_path, 560 x 280 pixels; image_2_path" in two


# ---- the loop --------------------------------------------------------------------------------------------------------


def run(agent: Any, replies: list[Scripted] | list[str], query: Query | None = None, **options: Any) -> tuple[LoopResult, FakeEngine]:  # fmt: skip
    engine = FakeEngine([Scripted(r) if isinstance(r, str) else r for r in replies])
    query = query or Query("How many?", images=(picture(),), id="q")
    return virtual_loop.run(agent.run(query, engine, **options)), engine


def test_a_crop_and_an_answer() -> None:
    result, engine = run(
        DeepEyes(),
        [Scripted(CALL + "what I imagine", delay=2, output_tokens=9), Scripted("<answer>3</answer>", delay=1)],
    )
    assert (result.text, result.raw, result.error) == ("3", "<answer>3</answer>", None)
    first, second = (call.request for call in engine.calls)
    assert first.stop == ("</tool_call>", "</answer>") and first.max_tokens == 512 and first.temperature == 0
    assert first.affinity == "q" and first.priority is Priority.LOOP and first.score is None
    assert [turn.role for turn in second.turns] == ["system", "user", "assistant", "user"]
    assert second.turns[2].text == CALL and not second.continue_last  # what was made up behind the call is gone
    crop = second.turns[3].pictures[0]
    assert second.turns[3].parts == ("<tool_response>\n", crop, "\n</tool_response>") and crop.size == (56, 84)
    call, answer = result.steps
    assert (call.phase, call.decision, call.tool, call.error, call.output_tokens) == (
        "loop",
        "call",
        "image_zoom_in_tool",
        None,
        9,
    )
    assert (call.start_s, call.service_s, answer.start_s, answer.service_s, answer.decision) == (0, 2, 2, 1, "answer")
    assert answer.model == "fake-model" and call.text.endswith("imagine")


def test_thyme_goes_on_in_its_own_turn() -> None:
    class Code:
        name, description, cheap, schema = "code", "", False, CodeArguments

        async def __call__(self, arguments: CodeArguments, context: ToolContext) -> ToolResult:
            return ToolResult((f"ran {arguments.code}", part))

    part = picture(56, 56)
    result, engine = run(Thyme([Code()]), ["a <code>x</code>", "b <code>y</code>", "c <answer>d</answer>"])
    assert result.text == "d" and [step.tool for step in result.steps] == ["code", "code", None]
    last = engine.calls[2].request
    assert last.continue_last and [turn.role for turn in last.turns] == ["system", "user", "assistant"]
    output = ("\n<sandbox_output>\n", "ran {}", part, "\n</sandbox_output>\n")
    expected: list[Any] = []
    for text, code in (("a <code>x</code>", "x"), ("b <code>y</code>", "y")):
        expected += [text, *(p.format(code) if isinstance(p, str) else p for p in output)]
    assert last.turns[2].parts == tuple(expected)
    assert last.max_tokens == 2048 and last.stop == ("</code>", "</answer>")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("<tool_call>{</tool_call>", "the call is no JSON"),
        ("", "neither a call nor an answer"),
        (CALL.replace("image_zoom_in_tool", "rm"), "there is no tool 'rm'; there are image_zoom_in_tool"),
        (CALL.replace("[1, 2, 30, 40]", '"x"'), "image_zoom_in_tool: bbox_2d: "),
    ],
)
def test_one_corrective_turn(bad: str, problem: str) -> None:
    result, engine = run(DeepEyes(), [bad, "<answer>3</answer>"])
    assert (result.text, result.error) == ("3", None)
    assert [step.decision for step in result.steps] == ["malformed", "answer"] and problem in str(result.steps[0].error)
    said, corrected = engine.calls[1].request.turns[-2:]
    assert said.text == bad and problem in corrected.text and corrected.role == "user"
    result, engine = run(DeepEyes(), [bad, CALL, bad + " "])
    assert len(engine.calls) == 3 and result.text == bad.strip() and result.raw == bad + " "
    assert str(result.error).startswith("a second output that cannot be read: ") and problem in str(result.error)


def test_a_tools_failure_is_seen_by_the_model_and_in_the_trail() -> None:
    outside = CALL.replace("[1, 2, 30, 40]", "[900, 900, 999, 999]")
    result, engine = run(DeepEyes(), [outside, outside, outside, "<answer>3</answer>"])
    assert result.error is None and result.text == "3"  # no limit but the steps'
    assert ["is outside the picture" in str(step.error) for step in result.steps] == [True, True, True, False]
    assert "Error: the box [900.0, 900.0, 999.0, 999.0] is outside" in engine.calls[1].request.turns[-1].text


def test_the_step_limit() -> None:
    result, engine = run(DeepEyes(), [CALL] * 9, steps=5)
    assert len(engine.calls) == 5 and result.error == "step limit: 5 steps and no answer"
    assert result.text == result.raw == CALL and result.steps[-1].error == "step limit"
    result, engine = run(DeepEyes(), [CALL] * 9, steps=1)
    assert len(engine.calls) == 1 and len(result.steps) == 1
    result, _ = run(DeepEyes(), ["<tool_call>"], steps=1)
    assert str(result.error).startswith("an output that cannot be read: there is no JSON object")
    with pytest.raises(ValueError, match="steps: expected an integer >= 1, got 0"):
        run(DeepEyes(), [], steps=0)


def test_the_second_crop_counts_the_first() -> None:
    again = json.dumps({"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 28, 28], "image": 2}})
    result, engine = run(DeepEyes(), [CALL, f"<tool_call>{again}</tool_call>", "<answer>3</answer>"])
    assert [step.error for step in result.steps] == [None] * 3
    assert len(engine.calls[2].request.turns[-1].pictures) == 1


def test_engines_errors_pass_and_cleaning_up_is_done() -> None:
    closed: list[str] = []

    class Opens:
        name, description, cheap, schema = "code", "", False, CodeArguments

        async def __call__(self, arguments: CodeArguments, context: ToolContext) -> ToolResult:
            async def close() -> None:
                closed.append(arguments.code)

            context.at_end(close)
            return ToolResult(("ok",))

    with pytest.raises(EngineUnavailable):
        run(Thyme([Opens()]), [Scripted("<code>x</code>"), Scripted(raises=EngineUnavailable("gone"))])
    run(Thyme([Opens()]), ["<code>y</code>", "<answer>1</answer>"])
    assert closed == ["x", "y"]


def test_scores_are_asked_for_at_every_step_and_only_cheap_tools_offered() -> None:
    score = ScoreRequest()
    agent = DeepEyes(["zoom", "code"], max_pixels=10_000)
    result, engine = run(
        agent, [Scripted(CALL, min_score=2.0), Scripted("<answer>3</answer>", min_score=5.0)],
        score=score, cheap_only=True, priority=Priority.DRAFT, affinity="a",
    )  # fmt: skip
    assert result.steps[-1].scores is not None and result.steps[-1].scores.values["min"] == 5.0
    for call in engine.calls:
        assert (call.request.score, call.request.priority, call.request.affinity) == (score, Priority.DRAFT, "a")
        assert call.request.max_pixels == 10_000
    assert '"code"' not in engine.calls[0].request.turns[0].text
    refused, _ = run(agent, ['<tool_call>{"name": "code", "arguments": {"code": "1"}}</tool_call>', "<answer>3</answer>"], cheap_only=True)  # fmt: skip
    assert "there is no tool 'code'" in str(refused.steps[0].error)


def test_a_picture_that_cannot_be_read_is_a_marked_error() -> None:
    result, engine = run(Thyme([]), [], Query("?", images=(Picture(b"no image"),)))
    assert engine.calls == [] and "not an image" in str(result.error)


def test_plain_with_the_calculator() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>'
    result, engine = run(Plain(), [call, "Answer: 391"], Query("17 * 23?"))
    assert result.text == "391" and engine.calls[1].request.turns[-1].text == "<tool_response>\n391\n</tool_response>"


def test_loops_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="tool_timeout: expected seconds > 0, got 0"):
        Loop(PlainDialect(), [Calculator()], tool_timeout=0)


# ---- SpecReason ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "mark"), [("7", 7), (" 9\n", 9), ("0.", 0), ("10", None), ("good", None), ("", None), ("-3", None)])  # fmt: skip
def test_marks(text: str, mark: int | None) -> None:
    assert parse_mark(text) == mark


def test_specreason_keeps_what_is_marked_seven_or_more() -> None:
    small = FakeEngine(
        [Scripted(CALL, delay=1, output_tokens=5), Scripted("<answer>wrong</answer>", delay=1, output_tokens=6)],
        name="s",
    )
    large = FakeEngine(
        [
            Scripted("7", delay=0.5),
            Scripted("6", delay=0.5),
            Scripted("<answer>right</answer>", delay=4, output_tokens=8),
        ],
        name="l",
    )
    query = Query("How many?", images=(picture(),), id="q")
    wasted: list[Waste] = []

    async def main() -> LoopResult:
        wasted_into(wasted)
        return await SpecReason(DeepEyes(), small).run(query, large)

    result = virtual_loop.run(main())
    assert (result.text, result.error) == ("right", None)
    kept, rewritten = result.steps
    assert (kept.text, kept.replica, kept.service_s, kept.output_tokens) == (CALL, "s", 1.5, 5)
    assert (rewritten.replica, rewritten.service_s, rewritten.output_tokens) == ("l", 4.5, 8)
    assert wasted == [Waste(1, 6, 1.0)]
    marking = large.calls[0].request
    assert marking.max_tokens == 1 and marking.stop == () and marking.turns[-2].text == CALL
    assert large.calls[2].request.turns == small.calls[1].request.turns


def test_specreason_marks_a_continued_turn_as_one() -> None:
    class Code:
        name, description, cheap, schema = "code", "", False, CodeArguments

        async def __call__(self, arguments: CodeArguments, context: ToolContext) -> ToolResult:
            return ToolResult(("4",))

    small = FakeEngine([Scripted("<code>x</code>"), Scripted("<answer>4</answer>")], name="s")
    large = FakeEngine([Scripted("9"), Scripted("8")], name="l")
    result = virtual_loop.run(SpecReason(Thyme([Code()]), small).run(Query("?"), large))
    assert result.text == "4"
    turns = large.calls[1].request.turns
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[2].text.startswith("<code>x</code>") and turns[2].text.endswith("<answer>4</answer>")
