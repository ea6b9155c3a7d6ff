"""The models: Qwen3-VL's own classes, small; and a batched forward over their parameters for training.

transformers runs a picture and a prompt at a time through code for any size. All pictures here are 64 x 64 and all
prompts of a scene share its picture, so the same parameters are run on fixed grids, with many conversations behind one
picture in a row. `tests/test_benchmark_training.py` holds both forwards equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._torchvision import repair
from .scenes import SEEN
from .wording import VISUAL_TOKENS

PATCH, MERGE, TIME = 8, 2, 2
PATCHES = (SEEN // PATCH) ** 2
HEAD = 32  # of the language model; mrope's sections fit it
MROPE = [6, 5, 5]


@dataclass(frozen=True)
class Size:
    """Of a model. ``layers``, ``hidden`` of the language model, ``vision_*`` of the vision tower."""

    hidden: int
    layers: int
    feed_forward: int
    vision_hidden: int
    vision_layers: int
    vision_feed_forward: int
    deepstack: tuple[int, ...] = (1,)


SMALL = Size(96, 3, 256, 96, 3, 256)
LARGE = Size(128, 8, 384, 128, 4, 384)
TINY = Size(64, 2, 128, 64, 2, 128)  # for tests: learns the easiest questions in a minute
SIZES = {"small": SMALL, "large": LARGE, "tiny": TINY}


def build(size: Size, tokenizer: Any, seed: int = 0) -> Any:
    """A ``Qwen3VLForConditionalGeneration`` in float32 with weights of variance 1 / fan-in: transformers' .02 stalls."""
    repair()
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    index = tokenizer.convert_tokens_to_ids
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // HEAD,
        num_key_value_heads=size.hidden // HEAD,
        head_dim=HEAD,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": MROPE,
            "mrope_interleaved": True,
        },
        eos_token_id=index("<|im_end|>"),
        bos_token_id=index("<|endoftext|>"),
    )
    vision = dict(
        depth=size.vision_layers,
        hidden_size=size.vision_hidden,
        intermediate_size=size.vision_feed_forward,
        num_heads=size.vision_hidden // HEAD,
        out_hidden_size=size.hidden,
        patch_size=PATCH,
        spatial_merge_size=MERGE,
        temporal_patch_size=TIME,
        num_position_embeddings=PATCHES,
        deepstack_visual_indexes=list(size.deepstack),
        in_channels=3,
    )
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=index("<|image_pad|>"),
        video_token_id=index("<|video_pad|>"),
        vision_start_token_id=index("<|vision_start|>"),
        vision_end_token_id=index("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, _deviation(name, weight, size))
    return model


def _deviation(name: str, weight: Tensor, size: Size) -> float:
    if "embed_tokens" in name or "lm_head" in name:
        return 0.1
    if "pos_embed" in name:
        return 0.3
    value = weight[0].numel() ** -0.5
    if any(part in name for part in ("o_proj", "down_proj", "attn.proj", "mlp.linear_fc2")):
        value /= (2 * (size.vision_layers if "visual" in name else size.layers)) ** 0.5
    if "deepstack" in name and "fc2" in name:
        value *= 0.3
    return value


def patches(images: Tensor) -> Tensor:
    """uint8 [n, 64, 64, 3] to float32 [n, 64, 384], in the order of Qwen's processor (2 x 2 patches together)."""
    side = SEEN // PATCH // MERGE
    x = (images.float() / 127.5 - 1).permute(0, 3, 1, 2)
    x = x.reshape(len(images), 3, side, MERGE, PATCH, side, MERGE, PATCH).permute(0, 2, 5, 3, 6, 1, 4, 7)
    x = x.unsqueeze(6).expand(*x.shape[:6], TIME, *x.shape[6:])
    return x.reshape(len(images), PATCHES, 3 * TIME * PATCH * PATCH)


@dataclass
class Batch:
    """Rows of conversations, each behind one picture.

    Parameters
    ----------
    pixels : Tensor
        [pictures, 64, 384].
    shown : Tensor
        int64: the pictures in the order in which the rows show them, row by row.
    ids : Tensor
        int64 [rows, length].
    positions : Tensor
        int64 [3, rows, length].
    mask : Tensor
        bool [rows, 1, length, length]: what may be attended to.
    rows, columns : Tensor
        Where the visual tokens are.
    """

    pixels: Tensor
    shown: Tensor
    ids: Tensor
    positions: Tensor
    mask: Tensor
    rows: Tensor
    columns: Tensor


class Forward:
    """The batched forward of a model; parameters stay the model's."""

    def __init__(self, model: Any) -> None:
        repair()
        from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

        self.model = model
        self.vision, self.text = model.model.visual, model.model.language_model
        grid = torch.tensor([[1, SEEN // PATCH, SEEN // PATCH]])
        self._at, self._weights = qwen.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=self.vision.num_grid_per_side,
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=MERGE,
            kwargs={},
        )
        cos, sin = self.vision.rotary_pos_emb(torch.zeros(1), qwen.get_vision_position_ids(grid, MERGE, kwargs={}))
        self._vision_turn = cos[None, None], sin[None, None]
        rotary = self.text.rotary_emb
        self._inverse = rotary.inv_freq
        self._axis = torch.zeros(len(self._inverse), dtype=torch.long)
        for axis, start in ((1, 1), (2, 2)):
            self._axis[start : rotary.mrope_section[axis] * 3 : 3] = axis

    def look(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Visual tokens [pictures, 16, hidden] of `patches`, and what deepstack adds in the first layers."""
        tower = self.vision
        count = len(pixels)
        x = F.linear(pixels, tower.patch_embed.proj.weight.flatten(1), tower.patch_embed.proj.bias)
        x = x + (tower.pos_embed(self._at) * self._weights[:, :, None]).sum(1)
        deep: list[Tensor] = []
        for index, block in enumerate(tower.blocks):
            heads = block.attn.num_heads
            qkv = block.attn.qkv(block.norm1(x)).view(count, PATCHES, 3, heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            q, k, v = _turn(q, *self._vision_turn).float(), _turn(k, *self._vision_turn).float(), v.float()
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, PATCHES, -1)
            x = x + block.attn.proj(mixed)
            x = x + block.mlp(block.norm2(x))
            if index in tower.deepstack_visual_indexes:
                merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(index)]
                deep.append(merger(x).view(count, VISUAL_TOKENS, -1))
        return tower.merger(x).view(count, VISUAL_TOKENS, -1), deep

    def read(self, batch: Batch, visual: Tensor, deep: list[Tensor]) -> Tensor:
        """Hidden states [rows, length, hidden] before the LM head."""
        where = (batch.rows, batch.columns)
        x = self.text.embed_tokens(batch.ids)
        x = x.index_put(where, visual[batch.shown].flatten(0, 1).to(x.dtype))
        rows, length, _ = x.shape
        angles = batch.positions.permute(1, 2, 0).float()[..., self._axis] * self._inverse
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        for index, layer in enumerate(self.text.layers):
            attention = layer.self_attn
            y = layer.input_layernorm(x)
            shape = (rows, length, -1, attention.head_dim)
            q = attention.q_norm(attention.q_proj(y).view(shape)).transpose(1, 2)
            k = attention.k_norm(attention.k_proj(y).view(shape)).transpose(1, 2)
            v = attention.v_proj(y).view(shape).transpose(1, 2)
            q, k, v = _turn(q, cos, sin).float(), _turn(k, cos, sin).float(), v.float()
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask)
            x = x + attention.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if index < len(deep):
                x = x.index_put(where, deep[index][batch.shown].flatten(0, 1).to(x.dtype), accumulate=True)
        return self.text.norm(x)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hidden states, and the visual tokens."""
        visual, deep = self.look(batch.pixels)
        return self.read(batch, visual, deep), visual


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
