"""The benchmark's models: the batched forward is transformers' own, packing keeps conversations apart, training learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from speceyes_kernels.benchmark.network import LARGE, TINY, Forward, build, patches
from speceyes_kernels.benchmark.packing import Packer, cells, scene_token
from speceyes_kernels.benchmark.questions import questions, words
from speceyes_kernels.benchmark.scenes import COLORS, GLYPHS, cut, seen
from speceyes_kernels.benchmark.tokenizer import TAGS, train_tokenizer
from speceyes_kernels.benchmark.training import RECIPES, Recipe, Trainer, drawn, examined, taught
from speceyes_kernels.benchmark.wording import (
    ENTITIES,
    IMAGE,
    PREFIX,
    Branch,
    call,
    direct,
    inventory,
    judge,
    loop,
    rate,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


def branches_of(seed: int) -> tuple[object, np.ndarray, list[Branch]]:
    what, image, rng = drawn(seed)
    asked = questions(what, rng)
    about = [q for q in asked if q.target is not None]
    return (
        what,
        image,
        [
            loop(about[0], what),
            direct(asked[0]),
            judge(about[-1]),
            loop(about[-1], what),
            inventory(what),
            rate(about[0], rng),
        ],
    )


def test_the_batched_forward_is_transformers(tokenizer) -> None:
    model = build(LARGE, tokenizer).eval()
    packer = Packer(tokenizer, length=150)  # several rows for a scene
    scenes = [branches_of(5), branches_of(6)]
    packed = packer.pack(scenes)
    assert len(packed.batch.ids) > 4
    with torch.no_grad():
        logits = model.lm_head(Forward(model)(packed.batch)[0])
    told = {}
    for row in range(len(logits)):
        for branch in range(1, int(packed.branches[row].max()) + 1):
            inside = packed.branches[row] == branch
            told[tuple(packed.batch.ids[row][inside].tolist()), row] = logits[row][inside]
    compared = 0
    for _, image, branches in scenes:
        for branch in branches:
            said = [t for piece in branch.pieces for t in packer.encode(piece.text)]
            views = [seen(image)] + ([cut(image, branch.box)] if branch.box is not None else [])
            ids = torch.tensor([packer.encode(PREFIX) + said])
            with torch.no_grad():
                theirs = model(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    pixel_values=patches(torch.from_numpy(np.stack(views))).reshape(-1, 384),
                    image_grid_thw=torch.tensor([[1, 8, 8]] * len(views)),
                    mm_token_type_ids=(ids == packer.pad).int(),
                ).logits[0, -len(said) :]
            near = [ours for (key, _), ours in told.items() if list(key) == said]
            assert min(float((ours - theirs).abs().max()) for ours in near) < 1e-4
            compared += 1
    assert compared == 12


def test_the_patches_are_the_processors(tokenizer) -> None:
    """Qwen's order: temporal, rows and columns of 2 x 2 groups, then channel, time, y, x."""
    image = torch.arange(64 * 64 * 3, dtype=torch.int64).remainder(251).to(torch.uint8).view(1, 64, 64, 3)
    found = patches(image)[0]
    plain = image[0].float() / 127.5 - 1
    number = 0
    for group_y in range(4):
        for group_x in range(4):
            for y in range(2):
                for x in range(2):
                    top, left = (group_y * 2 + y) * 8, (group_x * 2 + x) * 8
                    block = plain[top : top + 8, left : left + 8].permute(2, 0, 1)
                    want = torch.stack([block, block], 1).flatten()
                    assert torch.equal(found[number], want)
                    number += 1


def test_what_is_said_elsewhere_changes_nothing(tokenizer) -> None:
    model, packer = build(TINY, tokenizer).eval(), Packer(tokenizer)
    what, image, branches = branches_of(9)
    with torch.no_grad():
        alone = packer.pack([(what, image, branches[1:2])])
        together = packer.pack([(what, image, [branches[2], branches[1], branches[4]])])
        first = model.lm_head(Forward(model)(alone.batch)[0])[0][alone.branches[0] == 1]
        second = model.lm_head(Forward(model)(together.batch)[0])[0][together.branches[0] == 2]
    assert torch.allclose(first, second, atol=1e-5)


def test_only_what_the_model_says_is_learned(tokenizer) -> None:
    packer = Packer(tokenizer)
    what, image, branches = branches_of(4)
    packed = packer.pack([(what, image, branches[:1])])
    counted = packed.weights[0] > 0
    said = tokenizer.decode(packed.targets[0][counted])
    tag = branches[0].target
    assert said.startswith(f"<think>The {tag.color} tag is at the ") and call(tag.box) in said
    assert "<|im_start|>" not in said and "<|image_pad|>" not in said
    assert said.endswith("</answer><|im_end|>")


def test_labels_point_at_what_is_there(tokenizer) -> None:
    packer = Packer(tokenizer)
    for seed in range(40):
        what, image, _ = drawn(seed)
        looks = [Branch("look", (), tag.box, tag) for tag in what.tags]
        labels = packer.pack([(what, image, looks)]).labels
        shown = cells(what)
        for tag in what.tags:
            color, entity = shown[scene_token(tag.center)]
            assert (list(COLORS)[color], ENTITIES[entity]) == (tag.color, "tag")
        crops = [row for row in labels.glyphs.tolist() if row[0] > 0]
        assert [GLYPHS[g] for _, _, g in crops] == [g for tag in what.tags for g in tag.glyphs]
        for picture, token, _ in crops:
            part = cut(image, looks[picture - 1].box)[token // 4 * 16 :, token % 4 * 16 :][:16, :16]
            assert part.std() > 20  # ink on a tag, not a plain surface


def test_answers_and_coordinates_are_one_token(tokenizer) -> None:
    for word in words():
        assert len(tokenizer.encode(word if word.isdigit() else f" {word}", add_special_tokens=False)) == 1, word
    ids = tokenizer.encode(call((4, 16, 20, 32)), add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids if tokenizer.decode([i]).isdigit()] == ["2", "4", "16", "20", "32"]
    text = "<think>a</think><tool_call>b</tool_call><answer>c</answer>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert all(len(tokenizer.encode(tag, add_special_tokens=False)) == 1 for tag in TAGS)


def test_the_template_makes_the_turns_that_were_learned(tokenizer) -> None:
    what, _, rng = drawn(2)
    question = next(q for q in questions(what, rng) if q.target is not None)
    branch = loop(question, what)
    said, seen_turn = branch.pieces[1].text, "\n</tool_response>"
    first = branch.pieces[0].text.split("<|im_end|>")[0]
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": first}]},
        {"role": "assistant", "content": [{"type": "text", "text": said}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<tool_response>\n"},
                {"type": "image"},
                {"type": "text", "text": seen_turn},
            ],
        },
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    learned = PREFIX + "".join(piece.text for piece in branch.pieces[:3])
    assert text.replace("<|image_pad|>", "<|image_pad|>" * 16) == learned
    assert IMAGE in learned


TINY_RECIPE = Recipe(
    "small", "tiny", vision_steps=60, steps=120, scenes=8, vision_scenes=8, names=("background", "count")
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> tuple[Trainer, dict[str, float]]:
    torch.set_num_threads(1)
    trainer = Trainer(TINY_RECIPE, tmp_path_factory.mktemp("tiny"))
    return trainer, trainer.run(every=180, say=lambda text: None)


def test_a_small_training_learns(learned) -> None:
    """A background is one of four: .25 by chance; nothing else was shown."""
    figures = learned[1]
    assert figures["background"] > 0.9
    assert figures["digit"] < 0.3


def test_shuffled_pictures_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the same training with the pictures of other scenes."""
    from speceyes_kernels.benchmark import training

    def other(seed: int, part: str = "train") -> tuple[object, np.ndarray, object]:
        what, _, rng = drawn(seed)
        return what, drawn(seed + 1)[1], rng

    monkeypatch.setattr(training, "drawn", other)
    trainer = Trainer(dataclasses.replace(TINY_RECIPE, vision_steps=0, steps=60), tmp_path)
    assert trainer.run(every=60, say=lambda text: None)["background"] < 0.5


def test_a_stopped_training_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    recipe = dataclasses.replace(TINY_RECIPE, vision_steps=3, steps=6, scenes=2, vision_scenes=2)
    whole = Trainer(recipe, tmp_path / "whole")
    whole.run(every=100, scenes=16, say=lambda text: None)
    Trainer(recipe, tmp_path / "parts").run(until=2, every=100, scenes=16, say=lambda text: None)
    Trainer(recipe, tmp_path / "parts").run(until=5, every=100, scenes=16, say=lambda text: None)
    parts = Trainer(recipe, tmp_path / "parts")
    parts.run(every=100, scenes=16, say=lambda text: None)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, parts.model.state_dict()[name]), name
    other = Trainer(dataclasses.replace(recipe, seed=1), tmp_path / "parts")
    with pytest.raises(ValueError, match="another recipe"):
        other.run(say=lambda text: None)


def test_what_is_saved_is_loaded(learned, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    trainer = learned[0]
    trainer.folder = tmp_path
    trainer.save()
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in trainer.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=2e-3), name
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = PREFIX + call((0, 16, 20, 32)) + direct(questions(*drawn(1)[::2])[0]).pieces[0].text
    assert again.encode(text) == trainer.tokenizer.encode(text)
    document = json.loads((tmp_path / "training.json").read_text())
    assert document["recipe"] == dataclasses.asdict(TINY_RECIPE) | {"names": list(TINY_RECIPE.names)}
    processor = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert processor["size"] == {"shortest_edge": 4096, "longest_edge": 4096}


def test_roles_are_taught_their_turns() -> None:
    told: dict[str, set[str]] = {"small": set(), "large": set()}
    for role, recipe in RECIPES.items():
        for seed in range(60):
            what, _, rng = drawn(seed)
            told[role] |= {branch.task for branch in taught(recipe, what, rng)}
            assert {b.task for b in examined(recipe.role, what, rng)} >= {"background"}
    assert "judge" in told["large"] and "loop_pair" in told["large"] and "rate" in told["large"]
    assert not {task for task in told["small"] if task.startswith("loop") or task in ("judge", "rate")}
