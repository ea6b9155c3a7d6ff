"""The device's mirror of the index: a write that is not marked is seen (what it must equal: tests/native/lookup_mirror_probe.h)."""

from __future__ import annotations

import re
import subprocess

import pytest
from test_context_forest import CSRC, HEADERS, SOURCES, build, run

#: A mark, and where: every kind of thing that is written.
MARKS = [
    ("context_forest.cpp", r"const uint32_t count = node\.count\+\+;\n  wrote_node\(n\);"),
    ("context_forest.cpp", r"leaf_parent_\.wrote\(slot\);"),
    ("context_tables.cpp", r"wrote\(tag, 1\);"),
    ("context_tables.cpp", r"wrote_slot\(table, slot\);"),
    ("context_tables.cpp", r"wrote\(top, kTop \* sizeof \*top\);"),
    ("text_store.h", r"page_\.wrote\(&page_\[s\.last / kPage\]\);"),
]


@pytest.mark.parametrize(("file", "mark"), MARKS)
def test_a_forgotten_mark_is_seen(tmp_path, file, mark):
    for name in HEADERS + SOURCES:
        text = (CSRC / name).read_text()
        if name == file:
            text, found = re.subn(mark, lambda m: re.sub(r"\w*wrote\w*\([^;]*\);|\w+\.wrote\([^;]*\);", "", m[0]), text)
            assert found, "the mark is gone: plant the fault anew"
        (tmp_path / name).write_text(text)
    try:
        done = run(build(tmp_path, ["-O0"], csrc=tmp_path), 0, 60)
    except subprocess.TimeoutExpired:
        return
    assert done.returncode != 0 and "mirror broken" in done.stdout, done.stdout + done.stderr
