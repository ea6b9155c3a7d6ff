"""From scenes and conversations to batches: several conversations of a scene share a row, behind its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .network import Batch, patches
from .scenes import COLORS, CROP_SCALE, GLYPHS, GRID, SCALE, SCENE_TOKEN, SHAPES, Scene, Tag, cut, seen
from .wording import ENTITIES, PREFIX, VISUAL_TOKENS, Branch

_SIDE = 4  # visual tokens a side
_NO_COLOR = len(COLORS)


@dataclass
class Labels:
    """What visual tokens show, for the auxiliary losses.

    ``scene``: int64 [scenes, 16, 2], colour and entity of each visual token of a scene's picture; ``pictures``: which
    pictures of the batch those are. ``glyphs``: rows of (picture, visual token, glyph), ``small``: which of them
    are glyphs of medium tags in a scene's small picture. ``places``: rows of (picture,
    visual token, column of the box, row of the box).
    """

    scene: Tensor
    pictures: Tensor
    glyphs: Tensor
    small: Tensor
    places: Tensor


@dataclass
class Packed:
    """A batch with its targets. ``weights`` [rows, length] of the next token's loss; ``tasks`` [rows, length], -1: none."""

    batch: Batch
    targets: Tensor
    weights: Tensor
    tasks: Tensor
    branches: Tensor
    labels: Labels
    names: list[str] = field(default_factory=list)


@dataclass
class _Row:
    ids: list[int]
    shown: list[int]
    positions: list[np.ndarray]
    weights: list[float] = field(default_factory=list)  # behind the prefix
    lengths: list[tuple[int, int]] = field(default_factory=list)  # of each conversation, and its task


class Packer:
    """Packs scenes for a tokenizer. ``length``: of a row, in tokens, where a conversation is not longer. ``answer_weight``:
    times the weight of a piece that is an answer."""

    def __init__(self, tokenizer: Any, length: int = 224) -> None:
        self.tokenizer = tokenizer
        self.length = length
        self.answer_weight = 1.0
        self.pad: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._known: dict[str, list[int]] = {}
        self._prefix = self.encode(PREFIX)
        self._prefix_positions, self._after = self.positions(self._prefix, 0)
        self.names: list[str] = []

    def encode(self, text: str) -> list[int]:
        found = self._known.get(text)
        if found is None:
            if len(self._known) > 300_000:
                self._known.clear()
            found = self._known[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def positions(self, ids: Sequence[int], start: int) -> tuple[np.ndarray, int]:
        """Positions [3, tokens] from ``start`` on, and the next one: a picture takes as many as a side has tokens."""
        out = np.zeros((3, len(ids)), np.int64)
        grid = np.arange(VISUAL_TOKENS)
        i, at = 0, start
        while i < len(ids):
            if ids[i] == self.pad:
                out[:, i : i + VISUAL_TOKENS] = at + np.stack([grid * 0, grid // _SIDE, grid % _SIDE])
                i, at = i + VISUAL_TOKENS, at + _SIDE
            else:
                out[:, i] = at
                i, at = i + 1, at + 1
        return out, at

    def pack(self, scenes: Sequence[tuple[Scene, np.ndarray, Sequence[Branch]]]) -> Packed:
        """Each with its drawn picture, uint8 [256, 256, 3], and its conversations."""
        rows: list[_Row] = []
        views: list[np.ndarray] = []
        first: list[int] = []
        glyphs: list[tuple[int, int, int]] = []
        places: list[tuple[int, int, int, int]] = []
        for what, image, branches in scenes:
            number = len(views)
            first.append(number)
            views.append(seen(image))
            for tag in what.tags:
                places.append((number, scene_token(tag.center), tag.box[0] // GRID, tag.box[1] // GRID))
                if not tag.small:
                    glyphs += _glyphs(number, tag, (0, 0), SCALE)
            open_rows: list[_Row] = []
            for branch in branches:
                said = [
                    (token, piece.weight * (self.answer_weight if piece.answer else 1))
                    for piece in branch.pieces
                    for token in self.encode(piece.text)
                ]
                shown = number
                if branch.box is not None and branch.target is not None:
                    shown = len(views)
                    glyphs += _glyphs(shown, branch.target, branch.box[:2], CROP_SCALE)
                    views.append(cut(image, branch.box))
                if not said:
                    continue
                row = next((row for row in open_rows if len(row.ids) + len(said) <= self.length), None)
                if row is None:
                    row = _Row(list(self._prefix), [number], [self._prefix_positions])
                    open_rows.append(row)
                ids = [token for token, _ in said]
                row.ids += ids
                row.weights += [weight for _, weight in said]
                row.lengths.append((len(said), self._task(branch.task)))
                row.positions.append(self.positions(ids, self._after)[0])
                row.shown += [shown] * (ids.count(self.pad) // VISUAL_TOKENS)
            rows += open_rows
        scene_pictures = set(first)
        labels = Labels(
            torch.tensor([cells(what) for what, _, _ in scenes]),
            torch.tensor(first),
            torch.tensor(glyphs, dtype=torch.long).view(-1, 3),
            torch.tensor([picture in scene_pictures for picture, _, _ in glyphs], dtype=torch.bool),
            torch.tensor(places, dtype=torch.long).view(-1, 4),
        )
        return self._padded(rows, torch.from_numpy(np.stack(views)), labels)

    def _task(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def _padded(self, rows: list[_Row], views: Tensor, labels: Labels) -> Packed:
        length = -(-max((len(row.ids) for row in rows), default=1) // 32) * 32
        shape = (len(rows), length)
        ids, tasks = torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
        branches, weights = torch.full(shape, -1), torch.zeros(shape)
        positions = torch.zeros((3, *shape), dtype=torch.long)
        for i, row in enumerate(rows):
            n, at = len(row.ids), len(self._prefix)
            ids[i, :n], branches[i, :at] = torch.tensor(row.ids), 0
            weights[i, at:n] = torch.tensor(row.weights)
            positions[:, i, :n] = torch.from_numpy(np.concatenate(row.positions, 1))
            for index, (long, task) in enumerate(row.lengths, 1):
                branches[i, at : at + long], tasks[i, at : at + long] = index, task
                at += long
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        seen_by = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
        where = (ids == self.pad).nonzero(as_tuple=True)
        next_weights = weights.roll(-1, 1) * (branches.roll(-1, 1) == branches)
        next_weights[:, -1] = 0
        shown = torch.tensor([number for row in rows for number in row.shown])
        batch = Batch(patches(views), shown, ids, positions, (causal & seen_by)[:, None], *where)
        return Packed(batch, ids.roll(-1, 1), next_weights, tasks, branches, labels, self.names)


def scene_token(center: tuple[float, float]) -> int:
    """The visual token of a scene's picture in which a point lies."""
    x, y = (min(_SIDE - 1, int(value // SCENE_TOKEN)) for value in center)
    return y * _SIDE + x


def _glyphs(picture: int, tag: Tag, corner: tuple[int, int], pixels: float) -> list[tuple[int, int, int]]:
    """(picture, visual token, glyph) of a tag's glyphs in a view whose pixel is so many of the scene, from a corner in
    seen pixels; those outside are left out."""
    found = []
    for glyph, (left, top, right, bottom) in zip(tag.glyphs, tag.glyph_boxes(), strict=True):
        x = ((left + right) / 2 - corner[0] * SCALE) / pixels / 16
        y = ((top + bottom) / 2 - corner[1] * SCALE) / pixels / 16
        if 0 <= x < _SIDE and 0 <= y < _SIDE:
            found.append((picture, int(y) * _SIDE + int(x), GLYPHS.index(glyph)))
    return found


def cells(scene: Scene) -> list[tuple[int, int]]:
    """Colour and entity that each visual token of a scene's picture shows most of; tags count more, being small."""
    best = [(0.0, _NO_COLOR, len(ENTITIES) - 1)] * VISUAL_TOKENS
    colors = list(COLORS)
    things = [(s.x, s.y, s.size, s.size, 1.0, s.color, SHAPES.index(s.shape)) for s in scene.shapes]
    things += [(t.x, t.y, t.width, t.height, 6.0, t.color, ENTITIES.index("tag")) for t in scene.tags]
    for x, y, width, height, factor, color, entity in things:
        for row in range(y // SCENE_TOKEN, min(_SIDE - 1, (y + height - 1) // SCENE_TOKEN) + 1):
            for column in range(x // SCENE_TOKEN, min(_SIDE - 1, (x + width - 1) // SCENE_TOKEN) + 1):
                wide = min(x + width, (column + 1) * SCENE_TOKEN) - max(x, column * SCENE_TOKEN)
                tall = min(y + height, (row + 1) * SCENE_TOKEN) - max(y, row * SCENE_TOKEN)
                area, index = wide * tall * factor, row * _SIDE + column
                if area > max(300.0, best[index][0]):
                    best[index] = area, colors.index(color), entity
    return [(color, entity) for _, color, entity in best]
