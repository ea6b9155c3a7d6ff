"""Scenes and questions of the benchmark: drawn as described, answered right, apart by part."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from speceyes_kernels.benchmark.dataset import MIX, items, record, write
from speceyes_kernels.benchmark.questions import NAMES, SPLITS, Question, questions
from speceyes_kernels.benchmark.scenes import (
    BACKGROUNDS,
    COLORS,
    CROP_SCALE,
    GRID,
    SCALE,
    SEEN,
    SIDE,
    WINDOW,
    Scene,
    bitmap,
    cut,
    scene,
    seen,
)

SEEDS = range(250)


def asked(seed: int) -> tuple[Scene, list[Question]]:
    what = scene(seed)
    return what, questions(what, random.Random(seed))


def test_the_seed_is_the_picture() -> None:
    for seed in (0, 7, 1 << 40):
        first, again = scene(seed), scene(seed)
        assert first == again
        assert np.array_equal(first.draw(), again.draw())
    assert scene(1) != scene(2)
    # A value that has to stay: trained models and recorded figures belong to these pictures.
    assert int(scene(0).draw().astype(np.int64).sum()) == 5_830_236


@pytest.mark.parametrize("seed", SEEDS[:60])
def test_things_are_where_the_scene_says(seed: int) -> None:
    what = scene(seed)
    image = what.draw().astype(int)
    for shape, shade in zip(what.shapes, what.shades, strict=True):
        x, y = (int(v) for v in shape.center)
        # a triangle's middle is inside it, too
        assert np.abs(image[y, x] - shade).max() < 40
        assert np.abs(np.array(shade) - COLORS[shape.color]).max() <= 12
    for tag in what.tags:
        assert (tag.width, tag.height) in ((24, 24), (38, 24), (44, 44))
        rim = image[tag.y, tag.x : tag.x + tag.width]
        assert np.abs(rim.mean(0) - COLORS[tag.color]).max() < 12
        for glyph, (left, top, right, bottom) in zip(tag.glyphs, tag.glyph_boxes(), strict=True):
            part = image[top:bottom, left:right]
            inked = np.abs(part - np.array(COLORS[tag.color])).sum(-1) > 150
            assert np.array_equal(inked, bitmap(glyph, tag.scale)), glyph
            assert tag.x < left and right < tag.x + tag.width and tag.y < top and bottom < tag.y + tag.height
    corner = image[:2, :2].mean((0, 1))
    assert np.abs(corner - BACKGROUNDS[what.background]).max() < 25


def test_nothing_covers_another_and_colours_of_tags_differ() -> None:
    for seed in SEEDS:
        what = scene(seed)
        taken = np.zeros((SIDE, SIDE), int)
        for s in what.shapes:
            taken[s.y : s.y + s.size, s.x : s.x + s.size] += 1
        for t in what.tags:
            taken[t.y : t.y + t.height, t.x : t.x + t.width] += 1
        assert taken.max() == 1
        assert what.tags[0].color != what.tags[1].color


def test_windows_show_their_tag_on_the_grid() -> None:
    for seed in SEEDS:
        for tag in scene(seed).tags:
            left, top, right, bottom = tag.box
            assert left % GRID == top % GRID == 0 and right - left == bottom - top == WINDOW
            assert left >= 0 and right <= SEEN and top >= 0 and bottom <= SEEN
            assert tag.within(tag.box)
            off = (left + WINDOW, top, right + WINDOW, bottom)
            assert not tag.within(off)


def test_a_crop_is_the_scene_at_its_own_size() -> None:
    assert CROP_SCALE == 1
    what = scene(3)
    image = what.draw()
    left, top, right, bottom = (v * SCALE for v in what.tags[0].box)
    assert np.array_equal(cut(image, what.tags[0].box), image[top:bottom, left:right])
    assert seen(image).shape == (SEEN, SEEN, 3)
    mean = image.reshape(SEEN, SCALE, SEEN, SCALE, 3).mean((1, 3))
    assert np.abs(seen(image) - mean).mean() < 3


def right_answer(what: Scene, question: Question) -> str:
    """Told from the scene by the question's own words, not by the code that asked."""
    words = question.text.rstrip("?").split()
    shapes = [(s.color, s.shape, s.center) for s in what.shapes]
    tags = {tag.color: tag for tag in what.tags}

    def option(word: str) -> str:
        return "AB"[question.options.index(word)]

    if question.name == "background":
        return what.background
    if question.name == "count":
        return str(sum(f"{shape}s" == words[3] for _, shape, _ in shapes))
    if question.name == "color":
        (found,) = [color for color, shape, _ in shapes if shape == words[-1]]
        return found
    if question.name == "shape":
        (found,) = [shape for color, shape, _ in shapes if color == words[-2]]
        return found
    if question.name == "exists":
        return "yes" if any((c, s) == (words[-2], words[-1]) for c, s, _ in shapes) else "no"
    if question.name == "side":
        (first,) = [at for c, s, at in shapes if (c, s) == (words[3], words[4])]
        (second,) = [at for c, s, at in shapes if (c, s) == (words[-2], words[-1])]
        if "left" in words:
            return option("left" if first[0] < second[0] else "right")
        return option("above" if first[1] < second[1] else "below")
    if question.name == "pair":
        glyphs = tags[words[-2]].glyphs
        return option("left" if glyphs.index(words[2]) < glyphs.index(words[8]) else "right")
    if question.name == "tagged":
        return "yes" if tags[words[2]].glyphs == (words[-1],) else "no"
    return tags[words[-2]].glyphs[0]


def test_every_answer_is_right() -> None:
    met = set()
    for seed in SEEDS:
        what, found = asked(seed)
        for question in found:
            assert question.answer == right_answer(what, question), question
            met.add(question.name)
            if question.target is not None:
                assert question.zoom == (question.target.scale == 2)
            assert (question.negative is None) or question.answer == "no"
    assert met == set(NAMES)


def test_a_wrong_answer_would_be_seen() -> None:
    what, found = asked(5)
    other = scene(6)
    assert other.background != what.background
    assert right_answer(what, found[0]) != right_answer(other, found[0])


def test_negatives_are_what_they_are_called() -> None:
    adversarial = popular = 0
    for seed in SEEDS:
        what, found = asked(seed)
        for question in found:
            words = question.text.rstrip("?").split()
            if question.name == "exists" and question.negative == "adversarial":
                adversarial += 1
                assert words[-2] in {s.color for s in what.shapes} | {t.color for t in what.tags}
            if question.name == "exists" and question.negative == "popular":
                popular += 1
                assert words[-2] in ("red", "blue")
    assert adversarial > 10 and popular > 10


def layout(what: Scene) -> tuple[tuple[int, str], ...]:
    def cell(center: tuple[float, float]) -> int:
        return min(2, int(center[1] // 85)) * 3 + min(2, int(center[0] // 85))

    things = [(cell(s.center), s.shape) for s in what.shapes]
    for tag in what.tags:
        sort = "pair" if len(tag.glyphs) == 2 else "medium" if not tag.small else tag.glyphs[0].isdigit()
        things.append((cell(tag.center), str(sort)))
    return tuple(sorted(things))


def test_parts_share_no_layout() -> None:
    train = {layout(scene(seed)) for seed in range(3000)}
    test = {layout(scene(seed, "test")) for seed in range(600)}
    calibration = {layout(scene(seed, "calibration")) for seed in range(600)}
    assert not train & test and not train & calibration and not test & calibration
    # Among themselves they do meet: the check above can fail.
    again = {layout(scene(seed)) for seed in range(3000, 6000)}
    assert train & again


@pytest.mark.parametrize("split", SPLITS)
def test_items_are_balanced_and_each_has_a_scene_of_its_own(split: str) -> None:
    found = list(items("test", split, 150))
    assert len({item.scene.seed for item in found}) == 150
    assert {item.question.split for item in found} == {split}
    assert found[:40] == list(items("test", split, 40))
    answers = [item.question.answer for item in found]
    if split != "attributes":
        common = max(answers.count(answer) for answer in set(answers))
        assert common < 0.62 * len(answers)
    zoomed = sum(item.question.zoom for item in found)
    assert 0.25 * 150 < zoomed < 0.6 * 150
    assert set(MIX[split]) >= {item.question.name for item in found} - {"digit"}


def test_files_are_read_back_by_the_evaluation(tmp_path: Path) -> None:
    from speceyes_kernels.orchestrator.evaluation.datasets import load_dataset
    from speceyes_kernels.orchestrator.evaluation.grading import is_right, kind_of_query

    kinds = write(tmp_path, "test", {"attributes": 12, "relations": 6, "existence": 6})
    assert sum(kinds.values()) == 24
    queries = load_dataset(tmp_path, layout="jsonl", seed=None)
    chosen = [
        item
        for split, n in (("attributes", 12), ("relations", 6), ("existence", 6))
        for item in items("test", split, n)
    ]
    for query, item in zip(queries, chosen, strict=True):
        assert query.text == item.question.text and query.split == item.question.split
        assert kind_of_query(query) == item.question.kind
        assert is_right(kind_of_query(query), f"The answer is {item.question.answer}.", query.gold, query.options)
        picture = np.asarray(query.images[0].open()).astype(int)
        assert np.abs(picture - item.scene.draw()).mean() < 3


def test_stale_pictures_are_drawn_again(tmp_path: Path) -> None:
    write(tmp_path, "test", {"relations": 3})
    file = tmp_path / "pictures" / "relations_00000.jpg"
    right = file.read_bytes()
    file.write_bytes(b"old")
    write(tmp_path, "test", {"relations": 3})
    assert file.read_bytes() == b"old"  # the same questions: nothing is drawn
    (tmp_path / "questions.jsonl").write_text("{}\n")
    write(tmp_path, "test", {"relations": 3})
    assert file.read_bytes() == right


def test_records_say_where_to_look() -> None:
    for item in items("test", "relations", 30):
        row = json.loads(json.dumps(record(item, "p.jpg")))
        assert ("box" in row["meta"]) == (item.question.name == "pair")
        if "box" in row["meta"]:
            (left, top), (right, bottom) = row["meta"]["glyphs"]
            box = [v * SCALE for v in row["meta"]["box"]]
            assert box[0] <= left < right <= box[2] and box[1] <= top < bottom <= box[3]
