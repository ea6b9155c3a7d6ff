"""Loaders on small files in the published layouts, written here."""

from __future__ import annotations

import base64
import collections
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from speceyes_kernels.orchestrator.evaluation import DataError, load_hrbench, load_jsonl, load_pope, load_vstar
from speceyes_kernels.orchestrator.evaluation.grading import is_right, kind_of_query
from speceyes_kernels.orchestrator.evaluation.rows import shuffle_options
from speceyes_kernels.orchestrator.types import Query


def image(colour: str, kind: str = "JPEG", size: tuple[int, int] = (8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


def right_text(query: Query) -> str:
    """The text of the option that the gold letter names."""
    return query.options["ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(query.gold[0])]


# ---- V* --------------------------------------------------------------------------------------------------------------


def vstar(root: Path, count: int = 40) -> Path:
    for split in ("direct_attributes", "relative_position"):
        (root / split).mkdir(parents=True)
        for i in range(count):
            row = {
                "target_object": ["cup"],
                "bbox": [[1, 2, 3, 4]],
                "question": f"What colour is cup {i}?",
                "options": [f"The colour of the cup is {word} {i}." for word in ("right", "b", "c", "d")],
            }
            (root / split / f"sa_{i}.json").write_text(json.dumps(row))
            (root / split / f"sa_{i}.jpg").write_bytes(image("red"))
    return root


def test_vstar(tmp_path: Path) -> None:
    queries = list(load_vstar(vstar(tmp_path)))
    assert len(queries) == 80 and collections.Counter(q.split for q in queries) == {
        "direct_attributes": 40,
        "relative_position": 40,
    }
    first = queries[0]
    assert (
        first.id == "vstar/direct_attributes/sa_0" and first.text == "What colour is cup 0?" and first.kind == "option"
    )
    assert first.images[0].size == (8, 6) and first.meta == {"bbox": [[1, 2, 3, 4]]}
    assert [q.id for q in queries[:3]] == [f"vstar/direct_attributes/sa_{i}" for i in range(3)]  # 2 before 10
    for query in queries:
        assert len(query.options) == 4 and "right" in right_text(query)
        assert is_right("option", right_text(query), query.gold, query.options)
    letters = collections.Counter(q.gold[0] for q in queries)
    assert set(letters) == set("ABCD") and max(letters.values()) < 40  # always A in the files
    assert [q.gold for q in load_vstar(tmp_path)] == [q.gold for q in queries]
    assert [q.gold for q in load_vstar(tmp_path, seed=1)] != [q.gold for q in queries]
    assert {q.gold for q in load_vstar(tmp_path, seed=None)} == {("A",)}
    part = list(load_vstar(tmp_path, splits=["relative_position"]))
    assert [q.gold for q in part] == [q.gold for q in queries[40:]]  # a row's order hangs on nothing but the row


@pytest.mark.parametrize(
    ("break_", "problem"),
    [
        (lambda r: (r / "direct_attributes/sa_1.jpg").unlink(), r"sa_1.json: there is no picture of this name"),
        (lambda r: (r / "direct_attributes/sa_1.json").write_text("{"), r"sa_1.json: expected JSON with question"),
        (
            lambda r: (r / "direct_attributes/sa_1.json").write_text('{"question": "?"}'),
            r"sa_1.json: .*KeyError: 'options'",
        ),
        (lambda r: (r / "direct_attributes/sa_1.json").write_text("[1]"), r"sa_1.json: expected JSON with question"),
        (
            lambda r: (r / "direct_attributes/sa_1.json").write_text('{"question": "?", "options": ["a"]}'),
            r"sa_1: expected 2 to 26 options, got 1",
        ),
        (
            lambda r: (r / "direct_attributes/sa_1.json").write_text('{"question": "?", "options": ["a", "a"]}'),
            r"sa_1: expected options that differ",
        ),
        (
            lambda r: [p.unlink() for p in (r / "relative_position").glob("*.json")],
            "relative_position: there are no JSON",
        ),
        (lambda r: (r / "relative_position").rename(r / "x"), "expected a folder 'relative_position' in it"),
    ],
)
def test_a_broken_vstar_names_the_file(break_: Callable[[Path], Any], problem: str, tmp_path: Path) -> None:
    break_(vstar(tmp_path, 2))
    with pytest.raises(DataError, match=problem):
        list(load_vstar(tmp_path))


# ---- HR-Bench --------------------------------------------------------------------------------------------------------

HR_COLUMNS = ("index", "question", "answer", "category", "A", "B", "C", "D", "cycle_category", "image")


def hr_rows() -> list[dict[str, Any]]:
    """Two questions in four rotations; the second one's later rows name the first row's picture by its index."""
    rows = []
    options = ["right", "b\twith a tab", 'c "quoted"', "d"]
    for question in range(2):
        picture = base64.b64encode(image("red" if question else "blue", size=(300, 200))).decode()
        for turn in range(4):
            shown = options[turn:] + options[:turn]
            index = question * 4 + turn
            rows.append({
                "index": index, "question": f"Question {question}?\nSecond line", "answer": "ABCD"[shown.index("right")],
                "category": ("single", "cross")[question], **dict(zip("ABCD", shown, strict=True)),
                "cycle_category": turn, "image": picture if not (question and turn) else "4",
            })  # fmt: skip
    return rows


def write_hr(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...] = HR_COLUMNS) -> Path:
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, delimiter="\t", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_hrbench(tmp_path: Path) -> None:
    file = write_hr(tmp_path / "hr_bench_4k.tsv", hr_rows())
    queries = list(load_hrbench(file))
    assert [q.id for q in queries] == [f"hr_bench_4k/{i}" for i in range(8)]
    assert [q.split for q in queries] == ["single"] * 4 + ["cross"] * 4
    assert queries[0].text == "Question 0?\nSecond line" and queries[0].options[1] == "b\twith a tab"
    assert [q.gold for q in queries] == [("A",), ("D",), ("C",), ("B",)] * 2
    assert all(right_text(q) == "right" for q in queries) and queries[5].meta == {"cycle": "1"}
    stored = sorted(p.name for p in (tmp_path / "hr_bench_4k.pictures").iterdir())
    assert len(stored) == 2 and all(name.endswith(".jpg") for name in stored)  # once each, and no half-written ones
    assert len({q.images[0].path for q in queries}) == 2 and queries[7].images[0].size == (300, 200)
    shuffled = list(load_hrbench(file, seed=3, pictures=tmp_path / "elsewhere"))
    assert [q.gold for q in shuffled] != [q.gold for q in queries] and all(right_text(q) == "right" for q in shuffled)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_hrbench_reads_pictures_larger_than_csvs_own_limit(tmp_path: Path) -> None:
    rows = hr_rows()[:1]
    data = image("red", "PNG", (10, 10)) + bytes(300_000)
    rows[0]["image"] = base64.b64encode(data).decode()
    (query,) = load_hrbench(write_hr(tmp_path / "x.tsv", rows))
    assert query.images[0].encoded() == data


def test_hrbench_is_read_row_by_row(tmp_path: Path) -> None:
    rows = hr_rows()
    rows[3]["answer"] = "E"
    loader = load_hrbench(write_hr(tmp_path / "x.tsv", rows))
    assert [next(loader).id for _ in range(3)] == ["x/0", "x/1", "x/2"]
    with pytest.raises(DataError, match=r"x.tsv, row 5: expected an answer among A, B, C, D, got 'E'"):
        next(loader)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"image": "!!" * 50}, "row 2: the image is not base64"),
        ({"image": "99"}, "row 2: the image names row '99', which did not come before"),
        ({"image": ""}, "row 2: image is empty"),
        ({"question": ""}, "row 2: question is empty"),
        ({"A": ""}, "expected an answer among B, C, D, got 'A'"),
        ({"B": "right"}, "row 2: x/0: expected options that differ"),
        ({"index": 1}, "two rows have the id 'x/1'"),
    ],
)
def test_a_broken_hrbench_names_the_row(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    rows = hr_rows()
    rows[0].update(change)
    with pytest.raises(DataError, match=problem):
        list(load_hrbench(write_hr(tmp_path / "x.tsv", rows)))


def test_hrbench_without_its_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing answer, D"):
        list(
            load_hrbench(
                write_hr(tmp_path / "x.tsv", hr_rows(), tuple(c for c in HR_COLUMNS if c not in ("answer", "D")))
            )
        )
    with pytest.raises(DataError, match="there are no rows"):
        list(load_hrbench(write_hr(tmp_path / "x.tsv", [])))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        list(load_hrbench(tmp_path / "none.tsv"))


# ---- POPE ------------------------------------------------------------------------------------------------------------


def pope_rows(category: str, count: int = 6) -> list[dict[str, Any]]:
    return [
        {
            "id": str(i), "question_id": str(i + 1), "question": f"Is there a dog in the image {i}?",
            "answer": "yes" if i % 2 else "no", "image_source": "COCO_val2014_000000000001", "category": category,
            "image": {"bytes": image(("red", "blue")[i // 6 % 2]), "path": None},
        }
        for i in range(count)
    ]  # fmt: skip


def write_pope(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    return path


def test_pope(tmp_path: Path) -> None:
    """Both published forms: a file a category, and all of them in one."""
    splits = ("adversarial", "popular", "random")
    for split in splits:
        write_pope(tmp_path / "Full" / f"{split}-00000-of-00001.parquet", pope_rows(split, 130))
    one = write_pope(tmp_path / "test.parquet", [row for split in splits for row in pope_rows(split, 130)])
    queries = list(load_pope(tmp_path / "Full"))
    assert queries == list(load_pope(one)) and len(queries) == 390
    assert collections.Counter(q.split for q in queries) == dict.fromkeys(splits, 130)
    assert queries[1].id == "pope/adversarial/2" and queries[1].gold == ("yes",) and queries[1].kind == "yes/no"
    assert is_right(kind_of_query(queries[0]), "No, there is no dog.", queries[0].gold)
    assert queries[0].images[0].size == (8, 6) and len(list((tmp_path / "Full.pictures").iterdir())) == 2
    assert {q.split for q in load_pope(one, splits=["popular"])} == {"popular"}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answer": "maybe"}, "row 2: expected the answer yes or no, got 'maybe'"),
        ({"answer": None}, "row 2: expected the answer yes or no, got None"),
        ({"image": {"bytes": None, "path": "x"}}, "row 2: expected an image as bytes"),
        ({"question": ""}, "row 2: the question or its id is empty"),
        ({"question_id": "1"}, "two rows have the id 'pope/random/1'"),
    ],
)
def test_a_broken_pope_names_the_row(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    rows = pope_rows("random")
    rows[1].update(change)
    with pytest.raises(DataError, match=problem):
        list(load_pope(write_pope(tmp_path / "x.parquet", rows)))


def test_what_is_no_pope(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing category, image"):
        list(load_pope(write_pope(tmp_path / "a.parquet", [{"question_id": "1", "question": "?", "answer": "yes"}])))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="b.parquet: cannot be read as Parquet"):
        list(load_pope(tmp_path / "b.parquet"))
    with pytest.raises(DataError, match="there is no Parquet file"):
        load_pope(tmp_path / "none")


# ---- JSONL -----------------------------------------------------------------------------------------------------------


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image("red", "PNG"))
    url = "data:image/png;base64," + base64.b64encode(image("blue", "PNG")).decode()
    file = jsonl(
        tmp_path / "mine.jsonl",
        {"question": "Which?", "images": ["a.png", url], "options": ["red", "blue", "B"], "answer": "blue", "id": "q1"},
        "",
        {"question": "Which?", "options": ["red", "blue"], "answer": "b", "split": "s", "meta": {"x": 1}},
        {"question": "Is it?", "answer": True},
        {"question": "How many?", "answer": [3, "three"], "kind": "number"},
        {"question": "Who?"},
        {"question": "Which letter?", "options": ["B", "A"], "answer": "A"},
    )
    queries = list(load_jsonl(file))
    assert [q.id for q in queries] == ["q1", "mine/3", "mine/4", "mine/5", "mine/6", "mine/7"]
    assert [q.gold for q in queries] == [("B",), ("B",), ("yes",), ("3", "three"), (), ("B",)]
    assert [kind_of_query(q) for q in queries] == ["option", "option", "yes/no", "number", "text", "option"]
    assert [p.open().getpixel((0, 0)) for p in queries[0].images] == [(255, 0, 0), (0, 0, 255)]
    assert (queries[1].split, queries[1].meta) == ("s", {"x": 1})
    for seed in range(5):
        assert [right_text(q) for q in load_jsonl(file, seed=seed) if q.options] == ["blue", "blue", "A"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "Expecting property name"),
        ([1], "expected a JSON object, got list"),
        ({"question": "?", "anwser": 1}, "unknown key 'anwser'; expected some of id, question"),
        ({"answer": "x"}, "question: expected words, got None"),
        ({"question": "?", "images": "a.png"}, "images: expected a list of words"),
        ({"question": "?", "images": ["b.png"]}, "b.png: there is no such picture"),
        ({"question": "?", "images": ["https://example.com/a.png"]}, "pictures are not fetched"),
        ({"question": "?", "options": ["a", "b"], "answer": "c"}, "expected an option's text or letter, got 'c'"),
        ({"question": "?", "options": ["a", "b"], "answer": ["a", "b"]}, "expected one right option, got 2"),
        ({"question": "?", "options": ["a"], "answer": "a"}, "expected 2 to 26 options, got 1"),
        ({"question": "?", "answer": {"a": 1}}, "answer: expected words, a number or a boolean"),
        ({"question": "?", "answer": "many", "kind": "number"}, "expected an answer of kind number, got 'many'"),
        ({"question": "?", "kind": "word"}, "kind: expected one of option, yes/no, number, text"),
        ({"question": "?", "meta": [1]}, "meta: expected an object"),
        ({"question": "?", "split": 3}, "split: expected words"),
        ({"question": "?", "id": "first"}, "two rows have the id 'first'"),
    ],
)
def test_a_broken_line_is_named(row: Any, problem: str, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", {"question": "?", "id": "first"}, row)
    with pytest.raises(DataError, match=problem) as error:
        list(load_jsonl(file))
    assert "x.jsonl, line 2: " in str(error.value) or "two rows" in problem


def test_jsonl_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no rows"):
        list(load_jsonl(jsonl(tmp_path / "x.jsonl", "")))


# ---- options ---------------------------------------------------------------------------------------------------------


def test_orders_are_even() -> None:
    """Every place of the right option about equally often: 4,000 rows, each place within five standard deviations."""
    places = collections.Counter(shuffle_options("wxyz", 2, 0, f"row {i}")[1] for i in range(4000))
    assert all(abs(places[letter] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for letter in "ABCD")
    for i in range(50):
        options, letter = shuffle_options("wxyz", i % 4, 7, str(i))
        assert sorted(options) == list("wxyz") and options["ABCD".index(letter)] == "wxyz"[i % 4]
