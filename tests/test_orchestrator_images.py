"""What a processor makes of a picture's size, boxes in three coordinate systems, crops."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from speceyes_kernels.orchestrator.errors import PictureError
from speceyes_kernels.orchestrator.images import Picture, PixelRule, box_in_original, crop

QWEN25, QWEN3 = PixelRule(), PixelRule(32, 65536, 16777216)


# ---- resizing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((100, 50), (112, 56)),
        ((28, 28), (56, 56)),  # below four patches: up
        ((1, 1), (56, 56)),
        ((14, 1400), (28, 560)),  # half a patch goes to none, hence up by the area
        ((42, 420), (56, 420)),  # 1.5 patches: to the even one, as Python rounds
        ((70, 700), (56, 700)),  # 2.5 as well
        ((7680, 4320), (4760, 2688)),  # above the limit: by 28 / 45
        ((3584, 3584), (3584, 3584)),
        ((3600, 3600), (3584, 3584)),
    ],
)
def test_known_sizes(size: tuple[int, int], resized: tuple[int, int]) -> None:
    assert QWEN25.resized(*size) == resized


@settings(deadline=None)
@given(st.integers(1, 20000), st.integers(1, 20000), st.sampled_from([QWEN25, QWEN3, PixelRule(28, 784, 100 * 784)]))
def test_resizing(width: int, height: int, rule: PixelRule) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(PictureError, match="expected sides within 1 : 200"):
            rule.resized(width, height)
        return
    new = rule.resized(width, height)
    assert all(side % rule.factor == 0 and side > 0 for side in new)
    assert rule.min_pixels <= new[0] * new[1]
    # One factor is the least side: only a long strip, whose short side cannot shrink, may pass the upper limit.
    assert new[0] * new[1] <= rule.max_pixels or min(new) == rule.factor
    assert rule.resized(height, width) == new[::-1]
    if min(new) > 4 * rule.factor:  # the shape is kept up to a factor on each side
        ratio = new[0] * height / (new[1] * width)
        assert 1 / 1.5 < ratio < 1.5
    if rule.min_pixels <= new[0] * new[1] <= rule.max_pixels and min(new) > 2 * rule.factor:
        assert rule.resized(*new) == new


@settings(deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000))
def test_resizing_is_the_processors(width: int, height: int) -> None:
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for rule in (QWEN25, QWEN3):
        try:
            expected = qwen.smart_resize(height, width, rule.factor, rule.min_pixels, rule.max_pixels)
        except ValueError:
            with pytest.raises(PictureError):
                rule.resized(width, height)
            continue
        assert rule.resized(width, height) == expected[::-1]


def test_rules_from_a_processors_file() -> None:
    assert (
        PixelRule.from_config({"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}) == QWEN25
    )
    assert (
        PixelRule.from_config({"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}) == QWEN3
    )
    assert PixelRule.from_config({}) == QWEN25
    with pytest.raises(ValueError, match="min_pixels <= max_pixels, got 28, 3136, 100"):
        PixelRule(max_pixels=100)


# ---- boxes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "coordinates", "whole"),
    [
        ([10, 20, 30, 40], "seen", (20, 60, 60, 120)),  # twice as wide and three times as high as it was seen
        ([20, 60, 60, 120], "original", (20, 60, 60, 120)),
        ([100, 200, 300, 400], "thousandths", (20, 60, 60, 120)),
        ([-5, -5, 1e6, 1e6], "seen", (0, 0, 200, 300)),
        ([0, 0, 1000, 1000], "thousandths", (0, 0, 200, 300)),
        ([0.1, 0.1, 0.2, 0.2], "seen", (0, 0, 1, 1)),
        ([99.9, 99.9, 120, 120], "seen", (199, 299, 200, 300)),
    ],
)
def test_boxes_in_three_coordinate_systems(box: list[float], coordinates: Any, whole: tuple[int, ...]) -> None:
    assert box_in_original(box, coordinates, (200, 300), (100, 100)) == whole


@settings(deadline=None)
@given(
    st.lists(st.floats(-2000, 4000), min_size=4, max_size=4),
    st.sampled_from(["seen", "original", "thousandths"]),
    st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
)
def test_a_box_covers_exactly_what_was_meant(
    box: list[float], coordinates: Any, original: tuple[int, int], seen: tuple[int, int]
) -> None:
    whole = {"seen": seen, "original": original, "thousandths": (1000, 1000)}[coordinates]
    try:
        x1, y1, x2, y2 = box_in_original(box, coordinates, original, seen)
    except PictureError:
        inside = [max(0, box[0]), max(0, box[1]), min(whole[0], box[2]), min(whole[1], box[3])]
        assert inside[0] >= inside[2] or inside[1] >= inside[3]
        return
    assert 0 <= x1 < x2 <= original[0] and 0 <= y1 < y2 <= original[1]
    for low, high, begin, end, side, of in (
        (x1, x2, box[0], box[2], 0, whole[0]),
        (y1, y2, box[1], box[3], 1, whole[1]),
    ):
        exact = [min(max(Fraction(0), Fraction(v)), Fraction(of)) * original[side] / of for v in (begin, end)]
        slack = Fraction(1, 10**6)
        assert low <= exact[0] + slack and exact[1] - slack <= high  # nothing is lost
        assert exact[0] - low < 1 + slack and high - exact[1] < 1 + slack  # and less than a pixel is added


@pytest.mark.parametrize(
    ("box", "problem"),
    [
        ([10, 10, 10, 20], "is empty"),
        ([30, 10, 20, 20], "is empty"),
        ([100, 0, 120, 20], "is outside the picture, which is 100 x 100"),
        ([-9, -9, 0, 0], "is outside"),
        ([1, 2, 3], "four finite numbers"),
        ([1, 2, 3, math.nan], "four finite numbers"),
        ([1, 2, 3, math.inf], "four finite numbers"),
        ([1, 2, 3, True], "four finite numbers"),
        ([1, 2, 3, "4"], "four finite numbers"),
        ([1, 2, 3, 10**400], "four finite numbers"),
        ("1234", "four finite numbers"),
    ],
)
def test_boxes_that_are_refused(box: Any, problem: str) -> None:
    with pytest.raises(PictureError, match=problem):
        box_in_original(box, "seen", (200, 300), (100, 100))


def gradient(width: int, height: int) -> Image.Image:
    """Red is x, green is y: a pixel says where it is from."""
    y, x = numpy.mgrid[0:height, 0:width]
    return Image.fromarray(numpy.stack([x * 255 // width, y * 255 // height, 0 * x], 2).astype("uint8"))


def test_a_crop_is_of_the_original() -> None:
    part = crop(Picture(gradient(1000, 1000)), (500, 0, 750, 250), QWEN25)
    assert part.size == (252, 252)
    corners = [part.open().getpixel(place) for place in ((0, 0), (251, 251))]
    assert numpy.allclose(corners, [[127, 0, 0], [191, 63, 0]], atol=2)
