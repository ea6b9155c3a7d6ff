"""The structure tracker against the slow reference, its rules by example, and the grammar of the structure string."""

from __future__ import annotations

import gc
import itertools
import json
import random
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speceyes_kernels import structure_reference as reference
from speceyes_kernels.structure import Structure, StructureError, StructureTracker, TokenBytes

CODE, MATH = 1, 2
#: The two groups of the paper's example, its misspelt closing tag included.
PAPER = r"""[[("```", "```"), ("<tool_call>", "<\tool_call>")],
 [("\[", "\]"), ("\(", "\)"), ("$$", "$$"), ("$", "$")]]"""


def blocks_by_byte(structure, text: bytes) -> list[int]:
    tracker = StructureTracker(structure)
    return [tracker.feed_bytes(text[i : i + 1]) for i in range(len(text))]


def expected_by_byte(spec: reference.Spec, text: bytes) -> list[int]:
    tracker = reference.ReferenceTracker(spec)
    blocks = []
    for i in range(len(text)):
        tracker.feed(text[i : i + 1])
        blocks.append(tracker.block)
    return blocks


# ---- rules by example ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "text", "blocks"),
    [
        # start equal to end; a delimiter is one only when whole
        (PAPER, "a```b```c", "000111100"),
        # `$` opens at once; the next byte may make it `$$`
        (PAPER, "$x$", "220"),
        (PAPER, "$$x$$y", "222200"),
        # two inline formulas side by side: a block's own end wins over the longer start
        (PAPER, "$a$$b$", "220220"),
        # the misspelt closing tag, as it stands and as it is meant
        (PAPER, r"<tool_call>a<\tool_call>b", "0" * 10 + "1" * 13 + "00"),
        (PAPER, "<tool_call>a</tool_call>b", "0" * 10 + "1" * 13 + "00"),
        (PAPER, r"\[x\]\(y\)", "0222002220"),
        # never closed inside: the outer end closes both
        (PAPER, "```$```c", "00122200"),
        # an end without its start is text
        (PAPER, r"\]</tool_call>x", "0" * 15),
        # nesting of one kind in itself
        ([[("<a>", "</a>")]], "<a><a></a></a>", "00111111111110"),
        # overlapping: what is consumed is gone
        ([[("aba", "X")], [("ba", "X")]], "ababa", "00112"),
        ([[("ab", "ba")]], "abab", "0111"),
        # several ends of one start, in one group
        ([[("<f", "</f>"), ("<f", "/>")]], "<f/><f</f>", "0110011110"),
        # a shorter delimiter inside of a longer one that does not come true
        ([[("abcd", "X")], [("b", "X")]], "abce", "0222"),
        ([[("abcd", "X")], [("b", "X")]], "abcd", "0221"),
        ('{"groups": [[["(", ")"]]], "max_nesting": 1}', "(()x)", "11000"),
    ],
)
def test_rules(structure, text, blocks):
    got = blocks_by_byte(structure, text.encode())
    assert got == [int(c) for c in blocks]


def test_tokens_cut_delimiters_and_characters():
    table = [b"``", b"`", b"`py\n", b"\xe2\x82", b"\xac", b"$", b"$$", b""]
    tracker = StructureTracker('[[("```", "```")], [("€", "$")]]', table)
    assert tracker.feed([0, 1]).tolist() == [0, 1]
    assert tracker.feed(np.array([0, 2], np.int64)).tolist() == [1, 0]
    assert tracker.feed(torch.tensor([3, 7, -1, 99, 4])).tolist() == [0, 0, 0, 0, 2]
    assert tracker.open_blocks == [2]
    assert tracker.feed([6]).tolist() == [0]


def test_peek_and_copy_leave_the_tracker():
    tracker = StructureTracker(PAPER, [b"$", b"x", b"``", b"`"])
    tracker.feed([0, 1])
    assert tracker.peek([0, 2, 3, 0]).tolist() == [0, 0, 1, 2]
    ahead = tracker.copy()
    assert ahead.structure is tracker.structure
    assert ahead.feed([0]).tolist() == [0] and tracker.block == MATH
    ahead.reset()
    assert ahead.block == 0 and tracker.feed([1]).tolist() == [MATH]


def test_nesting_is_bounded():
    for most in (1, 3, 16):
        structure = Structure([[("(", ")")]], max_nesting=most)
        tracker = StructureTracker(structure)
        tracker.feed_bytes(b"(" * 40)
        assert tracker.open_blocks == [1] * most


def test_compiled_parts_are_shared_across_threads():
    structure, table = Structure(PAPER), TokenBytes([b"$", b"x"])
    texts = [random.Random(seed).choices([0, 1], k=2000) for seed in range(4)]
    ends: list[int] = [-1] * len(texts)

    def run(i: int) -> None:
        ends[i] = int(StructureTracker(structure, table).feed(texts[i])[-1])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for text, end in zip(texts, ends, strict=True):
        tracker = reference.ReferenceTracker(reference.parse_structure(PAPER))
        tracker.feed(b"".join([b"$", b"x"][t] for t in text))
        assert end == tracker.block


def test_native_parts_go_with_their_python_objects():
    structure = Structure(PAPER)
    handle = structure._handle
    del structure
    gc.collect()
    with pytest.raises((ValueError, RuntimeError), match="expected a live handle"):
        torch.ops.speceyes.structure_open_blocks(handle, torch.zeros(40, dtype=torch.uint8))


def test_a_foreign_state_is_refused():
    structure = Structure(PAPER)
    state = torch.full((torch.ops.speceyes.structure_state_size(),), 255, dtype=torch.uint8)
    with pytest.raises((ValueError, RuntimeError), match="expected one of this structure's states"):
        torch.ops.speceyes.structure_feed_bytes(structure._handle, state, torch.zeros(1, dtype=torch.uint8))


# ---- against the reference -------------------------------------------------------------------------------------------

delimiter = st.text("ab$", min_size=1, max_size=4)
groups_of_pairs = st.lists(st.lists(st.tuples(delimiter, delimiter), min_size=1, max_size=3), max_size=3)


@settings(deadline=None, max_examples=400)
@given(groups_of_pairs, st.integers(1, 4), st.data())
def test_tracker_equals_the_reference(groups, max_nesting, data):
    owner: dict[str, int] = {}
    groups = [[p for p in pairs if owner.setdefault(p[0], g) == g] for g, pairs in enumerate(groups)]
    groups = [pairs for pairs in groups if pairs]
    text = data.draw(st.text("ab$" * 3 + "x", max_size=60)).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    expected = expected_by_byte(reference.Spec(groups, max_nesting), text)
    structure = Structure(groups, max_nesting)
    assert blocks_by_byte(structure, text) == expected

    edges = [0, *cuts, len(text)]
    table = [text[a:b] for a, b in itertools.pairwise(edges)]
    tracker = StructureTracker(structure, table)
    assert tracker.feed(range(len(table))).tolist() == [expected[b - 1] if b else 0 for b in edges[1:]]
    assert tracker.open_blocks == [1 + g for g in reference.open_groups(reference.Spec(groups, max_nesting), text)]


ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "tests/native/structure_fuzz.cpp"]
SOURCES += [ROOT / "csrc/drafting" / name for name in ("structure.cpp", "structure_parse.cpp")]


def fuzz(folder: Path, flags: list[str], executions: int, sources: list[Path] = SOURCES) -> subprocess.CompletedProcess:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the fuzzer"
    command = [compiler, "-std=c++20", *flags, f"-I{ROOT / 'csrc/drafting'}", *map(str, sources)]
    subprocess.run([*command, "-o", str(folder / "structure_fuzz")], check=True)
    return subprocess.run([folder / "structure_fuzz", "1", str(executions)], capture_output=True, text=True)


def test_fuzz_under_sanitizers(tmp_path):
    done = fuzz(tmp_path, ["-O1", "-g", "-fsanitize=address,undefined", "-D_GLIBCXX_ASSERTIONS"], 10_000)
    assert done.returncode == 0 and "10000 executions held" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_fuzz_a_million_executions(tmp_path):
    done = fuzz(tmp_path, ["-O2", "-fsanitize=address,undefined"], 1_000_000)
    assert done.returncode == 0 and "1000000 executions held" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("node_[node.parent].inner || node_[node.fail].inner", "node_[node.parent].inner"),
        ("if (i == n && !ended && !node_[node].leaf) {", "if (i == n && !ended && end_length == 0) {"),
        ("if (const int d = closes(s, node); d >= 0)", "if (const int d = closes(s, node); d >= 0 && end_length == 0)"),
        ("for (int d = s.depth - 1; d >= 0; d--) {", "for (int d = 0; d < s.depth; d++) {"),
    ],
)
def test_the_fuzzer_sees_a_planted_fault(tmp_path, line, fault):
    text = SOURCES[1].read_text()
    assert line in text, "the line to break is gone: plant the fault anew"
    broken = tmp_path / "structure.cpp"
    broken.write_text(text.replace(line, fault))
    assert fuzz(tmp_path, ["-O1"], 10_000, [SOURCES[0], broken, SOURCES[2]]).returncode != 0


# ---- the structure string --------------------------------------------------------------------------------------------


def outcome(parse, text):
    try:
        return parse(text)
    except StructureError as error:
        return str(error), error.position


def test_paper_string_reads_as_meant():
    spec = reference.parse_structure(PAPER)
    assert spec.groups[0] == [("```", "```"), ("<tool_call>", r"<\tool_call>")]
    assert spec.groups[1] == [(r"\[", r"\]"), (r"\(", r"\)"), ("$$", "$$"), ("$", "$")]
    # as a Python client writes it: every backslash twice, or the tag's eaten by its source code
    sample = rb"<tool_call>$\(x</tool_call>$"
    for text in (repr(spec.groups), json.dumps({"groups": spec.groups}), PAPER.replace(r"<\t", "<\t")):
        assert blocks_by_byte(text, sample) == blocks_by_byte(PAPER, sample)


@pytest.mark.parametrize("text", ["", "  \n", "[]", "()", '{"groups": []}'])
def test_no_structure(text):
    assert Structure(text).num_groups == 0
    assert blocks_by_byte(text, b"$a") == [0, 0]


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("x", 0, "expected '[' (a list of groups), got 'x'"),
        ("[", 1, "expected '[' (a group: a list of pairs), got the end"),
        ("[[]]", 2, "expected '[' (a pair of strings), got ']'"),
        ("[[('a')]]", 6, "expected ',' (a pair is two strings), got ')'"),
        ("[[('a', 'b', 'c')]]", 13, "expected the end of the pair (a pair is two strings), got '''"),
        ("[[('a', 'b')", 12, "expected ',' or ']', got the end"),
        ("[[('a', 'b'])", 11, "expected ',' or ')', got ']'"),
        ("[[('é', '')]]", 8, "expected a delimiter of at least one character, got an empty string"),
        ("[[('a', 'b')]] é", 15, "expected the end, got 'é'"),
        ("[[('a', 'b')], [('a', 'c')]]", 17, "this start delimiter belongs to group 0 already,"),
        ("[[('a', 'b]]", 12, 'expected "\'", got the end'),
        ("[[('a', '" + "b" * 129 + "')]]", 8, "expected a delimiter of at most 128 bytes, got 129"),
        ("[" * 9000, 0, "expected at most 8192 bytes, got 9000"),
        ("[" + "[('', '')]," * 3, 3, "expected a delimiter of at least one character"),
        (r"[[('\ud800', 'b')]]", 4, "half of a surrogate pair"),
        (r'{"groups": [[["\[", "b"]]]}', 15, "a backslash in a JSON string is written twice"),
        ('{"groups": [[["a", "b"]]], "groups": []}', 27, 'the key "groups" is given twice'),
        ('{"group": []}', 1, 'expected the key "groups" or "max_nesting"'),
        ("{}", 0, 'expected the key "groups" in the object'),
        ('{"groups": [], "max_nesting": 17}', 30, "max_nesting: expected 1 to 16"),
        ('{"groups": [], "max_nesting": "3"}', 30, "expected a whole number"),
        ('{"groups": [[["a", "b"],]]}', 24, "expected '[' (a pair of strings), got ']'"),
        ("{\"groups\": [[['a', 'b']]]}", 14, "expected a string (the start delimiter)"),
        ('{"groups": [[["a\n", "b"]]]}', 16, "no control character"),
    ],
)
def test_bad_strings_are_refused_with_their_position(text, position, message):
    for parse in (Structure, reference.parse_structure):
        with pytest.raises(StructureError) as refused:
            parse(text)
        assert (refused.value.position, message in str(refused.value)) == (position, True), str(refused.value)


edit = st.tuples(st.integers(0, 120), st.integers(0, 3), st.text("[]()\"'\\,:{}<$ntuxdé8 1", max_size=3))
GOOD = [
    PAPER,
    '{"groups": [[["a\\u00e9", "\\ud83d\\ude00"]], [["<x>", "<\\\\x>"]]], "max_nesting": 3}',
    "((('a','b'),),)",
]


@settings(deadline=None, max_examples=600)
@given(st.sampled_from(GOOD), st.lists(edit, max_size=4))
@example(PAPER, [])
def test_both_parsers_agree_on_mangled_strings(text, edits):
    for at, drop, put in edits:
        text = text[:at] + put + text[at + drop :]
    spec = outcome(reference.parse_structure, text)
    core = outcome(Structure, text)
    if isinstance(spec, tuple):
        assert core == spec
        return
    assert core.num_groups == len(spec.groups)
    # What was read shows in the blocks: run all delimiters through both.
    words = [d for pairs in spec.groups for pair in pairs for d in pair]
    sample = "".join([*words, "x", *reversed(words), "</x>", *words]).encode()[:400]
    assert blocks_by_byte(core, sample) == expected_by_byte(spec, sample)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"\(start, end\) pairs of str in group 0"):
        Structure([[("a",)]])
    with pytest.raises(StructureError, match="max_nesting: expected 1 to 16"):
        Structure([[("a", "b")]], max_nesting=17)
    with pytest.raises(TypeError, match="expected bytes for every token, got str 'x' at 1"):
        TokenBytes([b"", "x"])
    for wrong in (None, 5, b"ab", "ab"):
        with pytest.raises(TypeError, match="token_bytes: expected a list of bytes"):
            TokenBytes(wrong)
    with pytest.raises(TypeError, match="tokens: expected a dense tensor"):
        StructureTracker(PAPER, [b"a"]).feed(torch.tensor([0]).to_sparse())
    with pytest.raises(ValueError, match="tokens: expected a tensor with values"):
        StructureTracker(PAPER, [b"a"]).feed(torch.tensor([0], device="meta"))
    with pytest.raises(ValueError, match="made without"):
        StructureTracker(PAPER).feed([0])
    with pytest.raises(TypeError, match="1-D array of ints"):
        StructureTracker(PAPER, [b"a"]).feed([0.5])
    with pytest.raises(ValueError, match="32-bit"):
        StructureTracker(PAPER, [b"a"]).feed([1 << 40])
    with pytest.raises(StructureError, match="surrogate pair at character 1"):
        Structure("[\ud800")
