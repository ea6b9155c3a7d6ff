"""The orchestrator's data: JSON both ways, hashes, refusals, pictures; and that the package imports nothing early."""

from __future__ import annotations

import base64
import io
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speceyes_kernels.orchestrator.errors import PictureError
from speceyes_kernels.orchestrator.images import Picture
from speceyes_kernels.orchestrator.types import (
    Answer,
    Priority,
    Query,
    Reply,
    Request,
    ScoreRequest,
    Scores,
    Step,
    Trail,
    Turn,
    Waste,
)

Image = pytest.importorskip("PIL.Image", reason="pip install 'speceyes_kernels[orchestrator]'")


def _image(size=(7, 5), color=(200, 10, 30)):
    image = Image.new("RGB", size, color)
    image.putpixel((0, 0), (1, 2, 3))
    return image


def _bytes(kind="PNG", **how):
    buffer = io.BytesIO()
    _image(**how).save(buffer, kind)
    return buffer.getvalue()


def _through_json(value):
    return type(value).from_json(json.loads(json.dumps(value.to_json(), allow_nan=False)))


# ---- JSON ------------------------------------------------------------------------------------------------------------
NUMBERS = st.floats(allow_nan=False)
SCORES = st.builds(
    Scores, st.dictionaries(st.sampled_from(["min", "mean"]), NUMBERS), st.integers(0, 99), st.integers(2, 96),
    rejected_at=st.none() | st.integers(0, 9), error=st.none() | st.text(),
)  # fmt: skip
STEPS = st.builds(
    Step, st.text(), st.text(), st.text(), st.none() | SCORES, start_s=NUMBERS, tool=st.none() | st.text()
)
TRAILS = st.builds(Trail, st.lists(STEPS, max_size=3).map(tuple), st.text(), st.booleans(), st.builds(Waste, st.integers()))
ANSWERS = st.builds(Answer, st.text(), st.text(), TRAILS, kind=st.sampled_from([None, "option", "yes/no"]))


@given(ANSWERS)
def test_answers_survive_json(answer):
    assert _through_json(answer) == answer


@given(
    st.builds(
        Request,
        st.lists(st.builds(Turn, st.sampled_from(["user", "assistant"]), st.tuples(st.text())), min_size=1).map(tuple),
        st.integers(1, 2048), stop=st.lists(st.text(min_size=1)).map(tuple), priority=st.sampled_from(Priority),
        score=st.none() | st.builds(ScoreRequest, k=st.integers(2, 256)), seed=st.none() | st.integers(),
        timeout=st.none() | st.floats(0.1, 1e6),
    )
)  # fmt: skip
def test_requests_survive_json(request):
    back = _through_json(request)
    assert back == request and type(back.priority) is Priority


def test_queries_survive_json_with_their_pictures(tmp_path):
    (tmp_path / "a.png").write_bytes(_bytes())
    turn = Turn("user", ("look: ", Picture(_bytes("JPEG")), " there"))
    pictures = (Picture(tmp_path / "a.png"), Picture(_image()))
    query = Query("what?", images=pictures, options=("x", "y"), history=(turn,), gold=("x",), meta={"n": 1})
    back = _through_json(query)
    assert back == query and back.images[0].path == tmp_path / "a.png"
    assert back.history[0].parts[1].size == (7, 5)


def test_numbers_that_json_lacks():
    scores = Scores({"min": -math.inf, "mean": math.inf}, 0, 64)
    assert _through_json(scores) == scores
    assert math.isnan(_through_json(Scores({"min": math.nan}, 0, 64)).values["min"])


@pytest.mark.parametrize(
    "kind, data, words",
    [
        (Step, {"phase": "judge", "phasee": 1}, "phasee"),
        (Step, {}, "phase"),
        (Step, {"phase": 3}, "Step.phase: expected str"),
        (Step, {"phase": "x", "scores": {"values": {"min": "big"}, "num_tokens": 1, "k": 2}}, "Scores.values"),
        (Reply, {"text": "", "finish_reason": "stop", "prompt_tokens": True, "output_tokens": 1}, "prompt_tokens"),
        (Answer, {"query_id": "a", "text": "", "trail": {}, "status": "fine"}, "Answer.status"),
        (Query, [], "expected an object"),
        (Turn, {"role": "user", "parts": [{"url": "x"}]}, "Picture"),
    ],
)
def test_damaged_json_is_refused_by_name(kind, data, words):
    with pytest.raises(ValueError, match=words):
        kind.from_json(data)


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Query("x", id=""), "id"),
        (lambda: Query("x", kind="letter"), "kind"),
        (lambda: Query("x", options="ABCD"), "options"),
        (lambda: Query("x", images=("a.png",)), "images"),
        (lambda: Turn("robot", ()), "role"),
        (lambda: Turn("user", "text"), "parts"),
        (lambda: Request((), 5), "turns"),
        (lambda: Request((Turn("user", ("a",)),), 0), "max_tokens"),
        (lambda: Request((Turn("user", ("a",)),), 1, stop=("",)), "stop"),
        (lambda: Request((Turn("user", ("a",)),), 1, continue_last=True), "continue_last"),
        (lambda: Request((Turn("user", ("a",)),), 1, temperature=math.nan), "temperature"),
        (lambda: Request((Turn("user", ("a",)),), 1, timeout=0), "timeout"),
        (lambda: ScoreRequest(k=1), "k"),
        (lambda: ScoreRequest(pools=("max",)), "pools"),
        (lambda: ScoreRequest(tau=1.0), "tau"),
        (lambda: ScoreRequest(reject_early=True), "reject_early"),
        (lambda: ScoreRequest(reject_early=True, tau=0.9, pools=("mean", "min")), "reject_early"),
        (lambda: ScoreRequest(reject_early=True, tau=0.9, span="answer"), "reject_early"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


# ---- hashes ----------------------------------------------------------------------------------------------------------
def test_content_hash_is_of_the_content_only(tmp_path):
    (tmp_path / "a.png").write_bytes(_bytes())
    base = Query("q", images=(Picture(tmp_path / "a.png"),), options=("a", "b"))
    same = Query("q", images=(Picture(_bytes()),), options=("a", "b"), gold=("a",), split="s", meta={"x": 1}, kind="text")
    assert base.id != same.id and base.content_hash == same.content_hash
    others = [
        Query("q ", images=base.images, options=("a", "b")),
        Query("q", images=base.images, options=("b", "a")),
        Query("q", images=base.images, options=("a,b",)),
        Query("q", options=("a", "b")),
        Query("q", images=(Picture(_bytes(color=(0, 0, 0))),), options=("a", "b")),
        Query("q", images=base.images, options=("a", "b"), history=(Turn("user", ("x",)),)),
    ]
    hashes = {base.content_hash, *(q.content_hash for q in others)}
    assert len(hashes) == len(others) + 1


# ---- pictures --------------------------------------------------------------------------------------------------------
def test_every_source_gives_the_same_pixels(tmp_path):
    (tmp_path / "a.png").write_bytes(_bytes())
    url = "data:image/png;base64," + base64.b64encode(_bytes()).decode()
    pictures = [Picture(s) for s in (tmp_path / "a.png", str(tmp_path / "a.png"), _bytes(), url, _image())]
    for picture in pictures:
        assert picture.size == (7, 5) and picture.open().tobytes() == _image().tobytes()
        again = Picture(picture.data_url())
        assert again.open().tobytes() == _image().tobytes()
    assert len({p.hash for p in pictures[:4]}) == 1


def test_upright_and_smaller():
    image = _image((40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    picture = Picture(buffer.getvalue())
    assert picture.size == (20, 40) == picture.open().size
    assert Picture(picture.data_url()).size == (20, 40)
    small = picture.within(200)
    assert small.size == (10, 20)
    assert Picture(picture.data_url(200)).size == (10, 20)
    assert picture.within(10_000).size == (20, 40)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: Picture(p / "none.png").hash, "none.png: cannot be read"),
        (lambda p: Picture(b"no image").open(), "not an image"),
        (lambda p: Picture(_bytes()[:60]).open(), "cannot be decoded|not an image"),
        (lambda p: Picture("data:image/png,abc").hash, "base64"),
        (lambda p: Picture("data:image/png;base64,@@@@").hash, "not base64"),
        (lambda p: Picture("https://example.com/a.png"), "not fetched"),
        (lambda p: Picture(_bytes(), max_pixels=34).open(), "35|7 x 5"),
        (lambda p: Picture(_bytes(), max_bytes=20).hash, "20 bytes"),
        (lambda p: Picture("data:image/png;base64," + "A" * 400, max_bytes=20).hash, "20 bytes"),
        (lambda p: Picture(_image(), max_pixels=34).encoded(), "7 x 5"),
        (lambda p: Picture(7), "int"),
    ],
)
def test_pictures_that_cannot_be(tmp_path, make, words):
    with pytest.raises((PictureError, TypeError), match=words):
        make(tmp_path)


def test_pixels_are_refused_before_they_are_decoded():
    # A header of 60,000 x 60,000 with no data behind it: decoding would need 10 GB.
    import struct
    import zlib

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    with pytest.raises(PictureError, match="60000 x 60000|not an image"):
        Picture(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + b"\0\0\0\0").open()


# ---- laziness --------------------------------------------------------------------------------------------------------
def test_the_package_imports_nothing_early():
    code = (
        "import sys, speceyes_kernels, speceyes_kernels.orchestrator as o\n"
        "names = ('httpx', 'anyio', 'pydantic', 'PIL', 'yaml', 'scipy', 'vllm')\n"
        "assert not [n for n in names if n in sys.modules]\n"
        "o.Query, o.Engine, o.Picture\n"
        "assert not [n for n in names if n in sys.modules]\n"
        "assert set(o.__all__) and all(getattr(o, n) for n in ('Answer', 'Trail', 'Step'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
