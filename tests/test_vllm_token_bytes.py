"""Token tables from tokenizers of every family, against xgrammar's and against what the tokenizer decodes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_support

from speceyes_kernels import StructureTracker
from speceyes_kernels.vllm.token_bytes import table_of, token_bytes

pytestmark = pytest.mark.vllm
TEXT = 'Grüße, 世界! 🙂\n\tx = {"a": 1}  # <tool_call>\r\n'


@pytest.fixture(scope="module")
def smollm() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vllm_support.model_path())


def sentencepiece() -> Any:
    """Llama's recipe: words behind a visible space, bytes where no piece fits, one special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdehilmnortuwx",
        "▁the",
        "er",
        "▁▁",
        "<tool",
        "{",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [("e", "r")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def joined(table: list[bytes], ids: list[int]) -> bytes:
    return b"".join(table[i] for i in ids)


def test_byte_level_table_is_xgrammars(smollm: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar, which vLLM brings on most machines")
    table = token_bytes(smollm, 49152)
    assert table == xgrammar.TokenizerInfo.from_huggingface(smollm, vocab_size=49152).decoded_vocab
    assert joined(table, smollm.encode(TEXT)) == TEXT.encode()
    assert table[smollm.convert_tokens_to_ids("<|im_end|>")] == b"<|im_end|>"


def test_byte_fallback_table_is_xgrammars() -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="needs xgrammar, which vLLM brings on most machines")
    tokenizer = sentencepiece()
    table = token_bytes(tokenizer, len(tokenizer))
    special = set(tokenizer.added_tokens_decoder)
    want = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)).decoded_vocab
    assert [t for i, t in enumerate(table) if i not in special] == [t for i, t in enumerate(want) if i not in special]
    assert [table[i] for i in sorted(special)] == [b"<unk>", b"<|end|>", b"<think>"]
    text = "the water 世 {\n  x<think><|end|>"  # Prepend puts a space behind added tokens, too
    assert joined(table, tokenizer.encode(text)).lstrip(b" ") == text.encode()


def test_vllms_own_tokenizer_and_a_larger_vocabulary(smollm: Any) -> None:
    from vllm.tokenizers.registry import get_tokenizer

    tokenizer = get_tokenizer(vllm_support.model_path())
    assert token_bytes(tokenizer, 49160) == [*token_bytes(smollm, 49152), *[b""] * 8]
    assert table_of(tokenizer, 49152) is table_of(tokenizer, 49152)  # made once
    assert len(table_of(tokenizer, 100)) == 100


def test_tiktoken_ranks_and_slow_byte_level() -> None:
    ranks = {b"a": 0, b"\xe4": 1, b" the": 2}
    tokenizer = SimpleNamespace(
        mergeable_ranks=ranks, get_vocab=lambda: {"a": 0, "ä?": 1, " the": 2, "<|end|>": 3}, all_special_ids=[3],
        all_special_tokens=["<|end|>"],
    )  # fmt: skip
    assert token_bytes(tokenizer, 5) == [b"a", b"\xe4", b" the", b"<|end|>", b""]
    slow = SimpleNamespace(byte_decoder={"Ġ": 32}, get_vocab=lambda: {"Ġthe": 0, "Ċ": 1, "Ã¤": 2})
    assert token_bytes(slow, 3) == [b" the", b"\n", "ä".encode()]


def test_an_unknown_kind_is_decoded_token_by_token() -> None:
    words = {"##ing": 0, "go": 1}

    def decode(ids: list[int]) -> str:
        text = ""
        for i in ids:
            text += "ing" if i == 0 else (" go" if text else "go")
        return text

    assert token_bytes(SimpleNamespace(get_vocab=lambda: words, decode=decode), 2) == [b"ing", b" go"]


@pytest.mark.parametrize("family", ["byte level", "byte fallback"])
def test_blocks_are_found_through_the_table(family: str, smollm: Any) -> None:
    """The block after each token equals that after its bytes, fed alone."""
    tokenizer = smollm if family == "byte level" else sentencepiece()
    table = table_of(tokenizer, len(tokenizer))
    text = 'hi <tool_call>{"a": [1]}</tool_call> 世 ```x```'
    structure = json.dumps({"groups": [[["<tool_call>", "</tool_call>"]], [["{", "}"]], [["```", "```"]]]})
    by_token, by_byte = StructureTracker(structure, table), StructureTracker(structure)
    plain = token_bytes(tokenizer, len(tokenizer))
    ids = tokenizer.encode(text)
    blocks = by_token.feed(ids).tolist()
    assert blocks == [by_byte.feed_bytes(plain[i]) for i in ids]
    assert {1, 2, 3} <= set(blocks) and blocks[-1] == 0
