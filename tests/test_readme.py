"""The README's code runs, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    exec(code, names)
    assert names["scores"].shape == names["accepted"].shape == (2,)
    assert names["accepted"].dtype == torch.bool
    assert not names["accepted"].any(), "random logits are no confident answer"


def test_links_and_files_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`?make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_flags_name_what_exists():
    from speceyes_kernels import vllm

    for name in re.findall(r"speceyes_kernels\.vllm[.:](\w+)", README):
        assert name in vllm.__all__
    import speceyes_kernels as sk

    for name in re.findall(r"\bsk\.(\w+)", README):
        assert hasattr(sk, name), name
