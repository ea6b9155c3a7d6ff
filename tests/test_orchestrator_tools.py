"""The tools: zoom, calculator, code, OCR; what is registered; how failures reach the model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from pathlib import Path
from typing import Any

import anyio
import numpy
import pytest
import virtual_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import BaseModel
from sandbox_support import refuses, sandbox

from speceyes_kernels.orchestrator.errors import SettingsError
from speceyes_kernels.orchestrator.images import Picture, PixelRule
from speceyes_kernels.orchestrator.tools import base
from speceyes_kernels.orchestrator.tools.base import ToolContext, ToolError, ToolResult, call_tool, check_arguments
from speceyes_kernels.orchestrator.tools.calculator import Calculator, calculate
from speceyes_kernels.orchestrator.tools.code import CodeTool
from speceyes_kernels.orchestrator.tools.ocr import Ocr
from speceyes_kernels.orchestrator.tools.zoom import Zoom
from speceyes_kernels.orchestrator.types import Query


def gradient(width: int, height: int) -> Image.Image:
    """Red is x, green is y: a pixel says where it is from."""
    y, x = numpy.mgrid[0:height, 0:width]
    return Image.fromarray(numpy.stack([x * 255 // width, y * 255 // height, 0 * x], 2).astype("uint8"))


# ---- calling tools ---------------------------------------------------------------------------------------------------


def context(*pictures: Picture, **options: Any) -> ToolContext:
    return ToolContext(Query("?", images=pictures), list(pictures), **options)


def use(tool: Any, given: dict[str, Any], where: ToolContext, timeout: float = 30) -> ToolResult:
    async def main() -> ToolResult:
        return await call_tool(tool, check_arguments(tool, given), where, timeout)

    return virtual_loop.run(main())


def test_zoom_reads_boxes_in_what_the_model_saw() -> None:
    """2,000 x 1,000 under a limit of 500,000 pixels is seen as 1,000 x 500, by the processor as 1,008 x 504."""
    where = context(Picture(gradient(2000, 1000)), max_pixels=500_000)
    assert where.seen_size(where.pictures[0]) == (1008, 504)
    (part,) = use(Zoom(), {"bbox_2d": [504, 252, 1008, 504], "label": "x"}, where).parts
    assert isinstance(part, Picture) and part.size == PixelRule().resized(1000, 500)
    assert numpy.allclose(part.open().getpixel((0, 0)), [127, 127, 0], atol=2)


def test_zoom_into_a_crop() -> None:
    where = context(Picture(gradient(560, 560)))
    (part,) = use(Zoom(), {"bbox_2d": [280, 280, 560, 560]}, where).parts
    where.pictures.append(part)  # type: ignore[arg-type]
    (again,) = use(Zoom(), {"bbox_2d": [140, 140, 280, 280], "image": 2}, where).parts
    assert isinstance(again, Picture)
    assert numpy.allclose(again.open().getpixel((0, 0)), [191, 191, 0], atol=3)


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        ({"bbox_2d": [5, 5, 5, 9]}, "is empty"),
        ({"bbox_2d": [900, 0, 990, 9]}, "is outside the picture, which is 112 x 112"),
        ({"bbox_2d": [1, 2, 3, 4], "image": 3}, "there is no picture 3, only 1"),
        ({"bbox_2d": [0, 0, 0.001, 112]}, None),
    ],
)
def test_zooms_that_fail_are_told_to_the_model(given_: dict[str, Any], problem: str | None) -> None:
    result = use(Zoom(), given_, context(Picture(gradient(100, 100))))
    if problem is None:
        assert result.error is None and isinstance(result.parts[0], Picture)
    else:
        assert result.error is not None and problem in result.error and result.parts == (f"Error: {result.error}",)


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({}, "bbox_2d"),
        ({"bbox_2d": [1, 2, 3]}, "bbox_2d"),
        ({"bbox_2d": ["1", 2, 3, 4]}, "bbox_2d.0"),
        ({"bbox_2d": [1, 2, 3, math.nan]}, "bbox_2d.3"),
        ({"bbox_2d": {"x": 1}}, "bbox_2d"),
        ({"bbox_2d": [1, 2, 3, 4], "image": 0}, "image"),
    ],
)
def test_arguments_of_the_wrong_form(given_: dict[str, Any], field: str) -> None:
    with pytest.raises(base.BadArguments, match=f"image_zoom_in_tool: {field}: "):
        check_arguments(Zoom(), given_)


class Slow:
    name, description, cheap = "slow", "", True
    schema = type("Nothing", (BaseModel,), {})

    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem = problem

    async def __call__(self, arguments: Any, context: ToolContext) -> ToolResult:
        if self.problem is not None:
            raise self.problem
        await anyio.sleep(100)
        raise AssertionError


def test_a_crash_and_a_timeout_become_observations() -> None:
    assert use(Slow(KeyError("x")), {}, context()).error == "slow failed: KeyError: 'x'"
    assert use(Slow(ToolError("not today")), {}, context()).parts == ("Error: not today",)
    assert use(Slow(TimeoutError("inner")), {}, context()).error == "slow failed: TimeoutError: inner"
    assert use(Slow(), {}, context(), timeout=7).error == "slow took longer than 7 s"


def test_what_was_opened_is_closed_whatever_happens() -> None:
    closed: list[int] = []

    async def main() -> None:
        where = context()

        def closing(number: int, fails: bool = False) -> Any:
            async def close() -> None:
                await anyio.sleep(1)
                closed.append(number)
                if fails:
                    raise OSError

            return close

        for number in range(3):
            where.at_end(closing(number, fails=number == 1))
        with anyio.move_on_after(0.5):
            try:
                await anyio.sleep(9)
            finally:
                await where.aclose()

    virtual_loop.run(main())
    assert closed == [2, 1, 0]


# ---- the calculator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3 =", "9"), ("2 ^ 10", "1024"), ("2 ** 100", str(2**100)), ("7 / 2", "3.5"),
        ("7 // 2", "3"), ("-7 % 3", "2"), ("1,234,567 + 1", "1234568"), ("max(1,234)", "234"), ("0.1 + 0.2", "0.3"),
        ("3 \N{MULTIPLICATION SIGN} 4 \N{MINUS SIGN} 5 \N{DIVISION SIGN} 2", "9.5"), ("sqrt(16)", "4"), ("round(2.567, 2)", "2.57"), ("2 * pi", "6.28318530718"),
        ("1e3", "1000"), ("10 / 5", "2"), ("-(-3)", "3"), ("2 ** -1", "0.5"), ("2 ** 0.5", "1.41421356237"),
    ],
)  # fmt: skip
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os').system('x')", "(1).__class__", "[1]", "'a' * 3", "9 ** 9 ** 9 ** 9", "10 ** 10000", "1 / 0", "x", "",
     "lambda: 1", "True", "1 if 1 else 2", "sqrt(-1)", "(-1) ** 0.5", "1e999", "sin()", "exp(1000)", "(" * 300, "1 +", "1j",
     "round(1, ndigits=0)", "-" * 499 + "1" + "+", "max(*[1])", "(2 ** 4000) * (2 ** 4000)", "lcm(2 ** 4095 + 1, 2 ** 4095)",
     "1" * 501, "\0", "log(0)", "0 ** -1", "nan", "1 << 9", "f'{1}'"],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    with pytest.raises(ToolError, match="calculator: "):
        calculate(expression)


@settings(deadline=None)
@given(st.recursive(st.integers(0, 99).map(str), lambda e: st.tuples(e, st.sampled_from("+-*"), e).map(lambda t: f"({''.join(t)})"), max_leaves=20))  # fmt: skip
def test_arithmetic_is_pythons(expression: str) -> None:
    if len(expression) <= 500:
        assert calculate(expression) == str(eval(expression))


@settings(deadline=None)
@given(st.text("0123456789+-*/%().,^ esqrtpi", max_size=30))
def test_any_text_ends_in_a_number_or_a_tool_error(expression: str) -> None:
    with contextlib.suppress(ToolError):
        float(calculate(expression))


def test_the_calculator_as_a_tool() -> None:
    assert use(Calculator(), {"expression": "6 * 7"}, context()) == ToolResult(("42",))
    assert use(Calculator(), {"expression": "6 *"}, context()).error is not None


# ---- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["root", "user"])
def test_code_sees_the_pictures_keeps_variables_and_returns_pictures(way: str, tmp_path: Path) -> None:
    async def main() -> None:
        box = sandbox(way)
        where = context(Picture(gradient(100, 50)))
        tool = CodeTool(sandbox=box)
        if await refuses(box, tmp_path):
            result = await call_tool(tool, check_arguments(tool, {"code": "print(1)"}), where, 30)
            assert result.error is not None and result.error.startswith("no code is run: ")
            return

        async def run(code: str) -> ToolResult:
            return await call_tool(tool, check_arguments(tool, {"code": code}), where, 30)

        try:
            first = await run("from PIL import Image\nimage = Image.open(image_path)\nprint(image.size, image_1_path)")
            assert first == ToolResult(("(100, 50) /sandbox/image_1.png",))
            second = await run("part = image.crop((50, 0, 100, 50))\npart.save('part.png')\nprint('part.png')")
            assert second.parts[0] == "part.png" and isinstance(second.parts[1], Picture)
            assert second.parts[1].open().tobytes() == gradient(100, 50).crop((50, 0, 100, 50)).tobytes()
            failed = await run("print('so far')\npart.nothing()")
            assert str(failed.parts[0]).startswith("so far\nError: Traceback") and "AttributeError" in str(failed.error)
            assert (await run("pass")).parts == ("(no output)",)
            long = await run("print('a' * 3000 + 'b' * 3000)")
            assert "[2000 characters left out]" in str(long.parts[0]) and len(str(long.parts[0])) < 4100
            ended = await run("import os\nos._exit(0)")
            assert str(ended.parts[0]) == "Error: ended: it ended by itself\nIts variables and files are gone."
            assert (await run("print(image_path)\nprint('part' in dir())")).parts == ("/sandbox/image_1.png\nFalse",)
        finally:
            await where.aclose()
        assert where.state["code"]._over

    anyio.run(main)


# ---- OCR -------------------------------------------------------------------------------------------------------------


def test_ocr_reads_the_part() -> None:
    sizes: list[tuple[int, ...]] = []

    def recogniser(array: Any) -> list[str]:
        sizes.append(array.shape)
        return ["EXIT", "12 km"]

    where = context(Picture(gradient(1120, 560)))
    assert use(Ocr(recogniser), {"bbox_2d": [0, 0, 560, 280]}, where) == ToolResult(("EXIT\n12 km",))
    assert use(Ocr(recogniser), {}, where).error is None
    assert sizes == [(280, 560, 3), (560, 1120, 3)]
    assert use(Ocr(lambda array: []), {}, where).parts == ("(no text found)",)
    assert "no picture 2" in str(use(Ocr(recogniser), {"image": 2}, where).error)


def test_ocr_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "rapidocr", None)
    assert "pip install 'speceyes_kernels[ocr]'" in str(use(Ocr(), {}, context(Picture(gradient(60, 60)))).error)


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_tools_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [type(tool).__name__ for tool in base.make_tools(["zoom", "calculator", "code", "ocr"])] == [
        "Zoom", "Calculator", "CodeTool", "Ocr",
    ]  # fmt: skip
    entries = [
        importlib.metadata.EntryPoint("mine", f"{__name__}:Slow", base.GROUP),
        importlib.metadata.EntryPoint("zoom", f"{__name__}:Slow", base.GROUP),
        importlib.metadata.EntryPoint("gone", "no.such:Tool", base.GROUP),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == "speceyes.tools" else [])
    made = base.make_tools(["mine", Zoom()])
    assert [tool.name for tool in made] == ["slow", "image_zoom_in_tool"]
    assert isinstance(base.make_tools(["zoom"])[0], Zoom)  # another package does not replace a built-in one
    for names, problem in (
        (["nothing"], "'nothing' is not installed; there are calculator, code, gone, mine, ocr, zoom"),
        (["gone"], "'gone' does not load: ModuleNotFoundError"),
        ([object()], "is no tool: it needs name, description, schema, cheap and a call"),
        (["zoom", Zoom()], "two are named 'image_zoom_in_tool'"),
    ):
        with pytest.raises(SettingsError, match=problem):
            base.make_tools(names)  # type: ignore[arg-type]
