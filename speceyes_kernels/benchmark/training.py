"""Training of the two models: the eyes on what lies where and which glyph it is, then everything, then mostly answers."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .network import SIZES, Forward, build
from .packing import Labels, Packed, Packer
from .questions import questions
from .scenes import COLORS, GLYPHS, GRID, SEEN, WINDOW, Part, Scene, Tag, scene
from .tokenizer import save_tokenizer, train_tokenizer
from .wording import ENTITIES, Branch, direct, direct_in_loop, inventory, judge, loop, rate

Role = Literal["small", "large"]
CHECKPOINT, LOG = "checkpoint.pt", "training.json"
_HARD = ("count", "side", "exists")
_PLACES = (SEEN - WINDOW) // GRID + 1  # columns, and rows, of boxes


@dataclass(frozen=True)
class Recipe:
    """How a model is trained; steps, never seconds, so that it is the same everywhere.

    Parameters
    ----------
    role : "small" or "large"
        What it is taught: direct answers, or the judge's, the agent's and the marker's turns as well.
    size : str
        A key of `network.SIZES`.
    vision_steps, steps, polish_steps : int
        Of the three stages.
    scenes, vision_scenes : int
        A step, in the first stage and in the others.
    rate : float
        Highest learning rate of the first two stages. ``eyes_rate``: times it, the vision tower's after the first.
    polish_rate, answer_weight : float
        Of the third stage: its highest learning rate; how much more than other tokens an answer's weigh.
    """

    role: Role
    size: str
    vision_steps: int
    steps: int
    scenes: int = 16
    vision_scenes: int = 24
    rate: float = 2e-3
    eyes_rate: float = 0.4
    polish_steps: int = 0
    polish_rate: float = 1e-3
    answer_weight: float = 6.0
    auxiliary: float = 0.3
    seed: int = 0
    names: tuple[str, ...] = ()


RECIPES: dict[Role, Recipe] = {
    "small": Recipe("small", "small", 2000, 5000, scenes=12, polish_steps=2000),
    "large": Recipe("large", "large", 2000, 5000, scenes=8, polish_steps=1000),
}


class Heads(nn.Module):
    """Thrown away after training: the box around a tag, read off the visual token that shows the tag."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.place = nn.Linear(hidden, 2 * _PLACES)


class Words:
    """Embeddings of the words for what a visual token shows: tokens are pulled towards them."""

    def __init__(self, tokenizer: Any) -> None:
        def one(text: str) -> int:
            return tokenizer.encode(text, add_special_tokens=False)[0]

        self.colors = [one(f" {word}") for word in (*COLORS, "none")]
        self.entities = [one(f" {word}") for word in ENTITIES]
        self.glyphs = [one(g) if g.isdigit() else one(f" {g}") for g in GLYPHS]


def drawn(seed: int, part: Part = "train") -> tuple[Scene, np.ndarray, random.Random]:
    """A scene, its picture, and the generator of everything else about it."""
    what = scene(seed, part)
    return what, what.draw(), random.Random(f"branches/{part}/{seed}")


def moved(tag: Tag, rng: random.Random) -> tuple[int, int, int, int]:
    """The window around a tag, off by up to 3 seen pixels, with its glyphs inside."""
    for _ in range(8):
        left, top = (min(max(edge + rng.randint(-3, 3), 0), SEEN - WINDOW) for edge in tag.box[:2])
        box = left, top, left + WINDOW, top + WINDOW
        if tag.within(box):
            return box
    return tag.box


def taught(recipe: Recipe, what: Scene, rng: random.Random, *, polish: bool = False) -> list[Branch]:
    """The conversations about a scene that a model learns from; ``polish``: in the last stage, more of what is answered at
    once and less of what is learned by then."""
    asked = questions(what, rng)
    if recipe.names:
        asked = [q for q in asked if q.name in recipe.names]
    branches: list[Branch] = []
    if recipe.role == "small":
        # A second draw of what is hardest to learn and costs few tokens.
        for _ in range(3 if polish else 1):
            asked += [q for q in questions(what, rng) if q.name in _HARD and q not in asked]
        for question in asked:
            if not question.zoom or rng.random() < 0.3:
                branches.append(direct(question))
            if rng.random() < 0.15:
                branches.append(direct_in_loop(question))
    else:
        for question in asked:
            if rng.random() < (0.15 if question.zoom else 0.6 if polish else 0.25):
                branches.append(direct(question))
            # Two questions about a tag share the call: each of them half of the time.
            if question.target is not None and (question.name == "pair" or rng.random() < 0.5):
                branches.append(loop(question, what, moved(question.target, rng)))
            elif question.target is None and rng.random() < (0.6 if polish else 0.3):
                branches.append(loop(question, what))
        branches += [judge(question) for question in rng.sample(asked, min(2, len(asked)))]
        branches.append(rate(rng.choice(asked), rng))
    if rng.random() < (0.0 if polish else 0.3):
        branches.append(inventory(what))
    return branches


def examined(role: Role, what: Scene, rng: random.Random) -> list[Branch]:
    """The conversations about a scene that progress is measured on."""
    asked = questions(what, rng)
    branches = [direct(question) for question in asked]
    if role == "large":
        branches += [judge(question) for question in asked] + [loop(question, what) for question in asked]
    return branches


class Trainer:
    """One model in training; `run` goes on from the folder's checkpoint.

    Parameters
    ----------
    recipe : Recipe
    folder : Path
        Of the model; holds checkpoint and log while it is in training.
    compiled : bool
        By torch.compile: a third quicker after a minute or two; needs a C++ compiler.
    """

    def __init__(self, recipe: Recipe, folder: Path, *, compiled: bool = False) -> None:
        self.recipe, self.folder = recipe, folder
        self.tokenizer = train_tokenizer()
        self.packer = Packer(self.tokenizer)
        self.words = Words(self.tokenizer)
        self.model = build(SIZES[recipe.size], self.tokenizer, recipe.seed)
        self.forward = Forward(self.model)
        if compiled:
            self.forward.look = torch.compile(self.forward.look, dynamic=True)  # type: ignore[method-assign]
            self.forward.read = torch.compile(self.forward.read, dynamic=True)  # type: ignore[method-assign]
        self.heads = Heads(SIZES[recipe.size].hidden)
        self.optimizer = self._optimizer()
        self.step = 0
        self.log: list[dict[str, Any]] = []

    def _optimizer(self) -> torch.optim.Optimizer:
        seeing = {id(p) for p in self.forward.vision.parameters()}
        groups = []
        for eyes in (True, False):
            mine = [p for p in self.model.parameters() if (id(p) in seeing) == eyes]
            free = [p for p in mine if p.ndim <= 1] + ([] if eyes else list(self.heads.parameters()))
            groups.append({"params": [p for p in mine if p.ndim > 1], "weight_decay": 0.05, "eyes": eyes})
            groups.append({"params": free, "weight_decay": 0.0, "eyes": eyes})
        return torch.optim.AdamW(groups, lr=self.recipe.rate, betas=(0.9, 0.98), fused=True)

    def run(
        self, *, until: int | None = None, every: int = 500, scenes: int = 96, say: Callable[[str], None] = print
    ) -> dict[str, float]:
        """Trains to the end of the recipe, or to a step, with a checkpoint and a measurement every so many steps.

        ``scenes``: to measure on.

        Returns
        -------
        dict
            Share of right answers by task, teacher-forced, on scenes that were not trained on.
        """
        total = self.recipe.vision_steps + self.recipe.steps + self.recipe.polish_steps
        last = min(total, until or total)
        self._resume(say)
        began, begun_at = time.monotonic(), self.step
        smooth: dict[str, float] = {}
        figures: dict[str, float] = {}
        while self.step < last:
            parts = self._train_step()
            for name, value in parts.items():
                smooth[name] = smooth.get(name, value) * 0.98 + value * 0.02
            self.step += 1
            if self.step % every == 0 or self.step == last:
                pace = (time.monotonic() - began) / (self.step - begun_at)
                losses = {name: round(value, 4) for name, value in smooth.items()}
                figures = self.measure(scenes) if self.step > self.recipe.vision_steps else {}
                self.log.append({"step": self.step, "losses": losses, "right": figures})
                say(f"step {self.step} of {total}, {pace:.3f} s a step: {losses} {figures}")
                self._keep()
        return figures

    def _train_step(self) -> dict[str, float]:
        recipe, step = self.recipe, self.step
        at, length, early, polish = step, recipe.vision_steps, True, False
        if at >= length:
            at, length, early = at - length, recipe.steps, False
            if at >= length:
                at, length, polish = at - length, recipe.polish_steps, True
        highest = recipe.polish_rate if polish else recipe.rate
        rate = highest * min(1, (at + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * at / length)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (1 if early or not group["eyes"] else recipe.eyes_rate)
        first = (recipe.seed << 40) + step * 64
        if early:
            loss, parts = self._vision_loss(range(first, first + recipe.vision_scenes))
        else:
            loss, parts = self._joint_loss(range(first, first + recipe.scenes), polish)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return parts

    def _vision_loss(self, seeds: range) -> tuple[Tensor, dict[str, float]]:
        rows = []
        for seed in seeds:
            what, image, rng = drawn(seed)
            looks = [Branch("look", (), moved(tag, rng), tag) for tag in what.tags]
            rows.append((what, image, looks))
        packed = self.packer.pack(rows)
        with torch.autocast("cpu", torch.bfloat16):
            visual, _ = self.forward.look(packed.batch.pixels)
        parts = self._auxiliary(visual.float(), packed.labels)
        return sum(parts.values(), torch.zeros(())), {k: v.item() for k, v in parts.items()}

    def _joint_loss(self, seeds: range, polish: bool) -> tuple[Tensor, dict[str, float]]:
        rows = []
        for seed in seeds:
            what, image, rng = drawn(seed)
            rows.append((what, image, taught(self.recipe, what, rng, polish=polish)))
        self.packer.answer_weight = self.recipe.answer_weight if polish else 1.0
        packed = self.packer.pack(rows)
        self.packer.answer_weight = 1.0
        counted = packed.weights > 0
        with torch.autocast("cpu", torch.bfloat16):
            hidden, visual = self.forward(packed.batch)
            logits = self.model.lm_head(hidden[counted])
        weights = packed.weights[counted]
        each = F.cross_entropy(logits.float(), packed.targets[counted], reduction="none")
        text = (each * weights).sum() / weights.sum()
        parts = {"text": text, **self._auxiliary(visual.float(), packed.labels)}
        more = sum((v for k, v in parts.items() if k != "text"), torch.zeros(()))
        return text + self.recipe.auxiliary * more, {k: v.item() for k, v in parts.items()}

    def _auxiliary(self, visual: Tensor, labels: Labels) -> dict[str, Tensor]:
        table = self.model.lm_head.weight

        def named(tokens: Tensor, vocabulary: list[int], wanted: Tensor) -> Tensor:
            scaled = tokens * (tokens.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            return F.cross_entropy(scaled @ table[vocabulary].T, wanted)

        scenes = visual[labels.pictures].flatten(0, 1)
        wanted = labels.scene.flatten(0, 1)
        picture, token, column, row = labels.places.unbind(1)
        places = self.heads.place(visual[picture, token])
        out = {
            "color": named(scenes, self.words.colors, wanted[:, 0]),
            "entity": named(scenes, self.words.entities, wanted[:, 1]),
            "place": (F.cross_entropy(places[:, :_PLACES], column) + F.cross_entropy(places[:, _PLACES:], row)) / 2,
        }
        # Apart: those in a small picture are few and hard.
        for name, chosen in (("glyph", ~labels.small), ("small_glyph", labels.small)):
            if chosen.any():
                picture, token, glyph = labels.glyphs[chosen].unbind(1)
                out[name] = named(visual[picture, token], self.words.glyphs, glyph)
        return out

    @torch.no_grad()
    def measure(self, scenes: int = 96) -> dict[str, float]:
        """Share of turns whose every token is the most likely one, by task, on scenes of their own."""
        right: dict[str, list[bool]] = {}
        for start in range(0, scenes, 16):
            rows = []
            for seed in range((1 << 60) + start, (1 << 60) + start + 16):
                what, image, rng = drawn(seed)
                rows.append((what, image, examined(self.recipe.role, what, rng)))
            packed = self.packer.pack(rows)
            hidden, _ = self.forward(packed.batch)
            guessed = self.model.lm_head(hidden).argmax(-1)
            _count(packed, guessed == packed.targets, right)
        return {name: round(sum(values) / len(values), 3) for name, values in sorted(right.items())}

    def _resume(self, say: Callable[[str], None]) -> None:
        path = self.folder / CHECKPOINT
        if self.step or not path.exists():
            return
        state = torch.load(path, weights_only=True)
        theirs = Recipe(**json.loads(state["recipe"], object_hook=lambda d: d | {"names": tuple(d["names"])}))
        if _until(theirs, state["step"]) != _until(self.recipe, state["step"]):
            raise ValueError(f"{path}: of another recipe; expected {self.recipe}, got {theirs}")
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.log = state["step"], state["log"]
        say(f"going on at step {self.step}")

    def _keep(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": json.dumps(asdict(self.recipe)),
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "log": self.log,
        }
        fresh = self.folder / f"{CHECKPOINT}.new"
        torch.save(state, fresh)
        fresh.replace(self.folder / CHECKPOINT)

    def save(self) -> None:
        """The model as vLLM and transformers load it, with the training's log beside it."""
        save_model(self.model, self.tokenizer, self.folder)
        document = {"recipe": asdict(self.recipe), "log": self.log}
        (self.folder / LOG).write_text(json.dumps(document, indent=1) + "\n")


def _until(recipe: Recipe, step: int) -> Recipe:
    """What of a recipe decided about the steps so far: a later stage may be added or changed."""
    if step <= recipe.vision_steps + recipe.steps:
        return replace(recipe, polish_steps=0, polish_rate=0.0, answer_weight=0.0)
    return recipe


def _count(packed: Packed, right: Tensor, found: dict[str, list[bool]]) -> None:
    """Adds each branch's turns: of the agent's way the call and the answer apart, all others whole."""
    for row in range(len(right)):
        for branch in range(1, int(packed.branches[row].max()) + 1):
            inside = (packed.branches[row] == branch) & (packed.weights[row] > 0)
            name = packed.names[int(packed.tasks[row][packed.branches[row] == branch][0])]
            if name.startswith("loop_"):
                answer = inside & (packed.weights[row] > 2)
                found.setdefault("call", []).append(bool(right[row][inside & ~answer].all()))
                found.setdefault(name, []).append(bool(right[row][answer].all()))
            else:
                found.setdefault(name, []).append(bool(right[row][inside].all()))


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Weights in float16 (half the size; loaded as float32), configuration, tokenizer, processor."""
    folder.mkdir(parents=True, exist_ok=True)
    half = {name: value.half() for name, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=half)
    save_tokenizer(tokenizer, folder)
    sizes = {"shortest_edge": SEEN * SEEN, "longest_edge": SEEN * SEEN}
    common = {
        "size": sizes, "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    image = {**common, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**common, "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1) + "\n")


def train_pair(output: Path, roles: tuple[Role, ...], *, compiled: bool, every: int) -> None:
    """Trains models side by side, each in a process of one thread, into ``output/ROLE``.

    Raises
    ------
    RuntimeError
        A training failed; what it said is on standard error.
    """
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    processes = {
        role: context.Process(target=_train, args=(role, output / role, compiled, every), name=role) for role in roles
    }
    for process in processes.values():
        process.start()
    for process in processes.values():
        process.join()
    failed = [role for role, process in processes.items() if process.exitcode]
    if failed:
        raise RuntimeError(f"training of {', '.join(failed)} ended with an error")


def _train(role: Role, folder: Path, compiled: bool, every: int) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(RECIPES[role], folder, compiled=compiled)
    trainer.run(every=every, say=lambda text: print(f"{role}: {text}", flush=True))
    trainer.save()
    print(f"{role}: saved {folder}", flush=True)
