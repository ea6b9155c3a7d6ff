"""From settings to an agent: dialect, wording, tools, and how its model's processor resizes pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..images import PixelRule
from ..settings import SpeceyesSettings
from ..types import Agent
from .deepeyes import DeepEyes
from .plain import Plain
from .thyme import Thyme

_AGENTS = {"deepeyes": DeepEyes, "thyme": Thyme, "plain": Plain}
# In the order in which transformers reads them; the first only where it holds what else is in the second.
_FILES = ("processor_config.json", "preprocessor_config.json")
_PIXELS = ("factor", "min_pixels", "max_pixels")


def build_agent(settings: SpeceyesSettings) -> Agent | None:
    """The agent that the settings name; None is the funnel's own, without tools.

    Raises
    ------
    SettingsError
        A tool that is not there; a processor's file that cannot be read.
    """
    if settings.agent == "direct":
        return None
    loop, wording = settings.loop, settings.funnel.wording
    rule = pixel_rule(settings)
    try:
        return _AGENTS[settings.agent](
            loop.tools, system=wording.system, last=wording.loop, coordinates=loop.coordinates, rule=rule,
            max_pixels=loop.max_pixels, max_tokens=loop.max_tokens, tool_timeout=loop.tool_timeout,
        )  # fmt: skip
    except SettingsError as error:
        raise SettingsError(f"loop.{error}") from error


def pixel_rule(settings: SpeceyesSettings) -> PixelRule:
    """How the large model's processor resizes: as the settings say, else its folder, else Qwen2.5-VL's.

    Raises
    ------
    SettingsError
        Naming the file and the key that cannot be, or the settings that do not go together.
    """
    given = settings.loop.pixels.model_dump(exclude_none=True)
    found: dict[str, int] = {}
    where = ""
    if len(given) < len(_PIXELS):  # else the folder has no say, and whatever is wrong in it does no harm
        for name in _FILES:
            path = Path(settings.large.model) / name
            config = _processor(path)
            if config is not None:
                rule = _rule_of(config, path)
                found, where = {key: getattr(rule, key) for key in _PIXELS}, f" (the rest from {path})"
                break
    values = {**found, **given}
    factor = values.get("factor", PixelRule().factor)
    values = {"factor": factor, "min_pixels": 4 * factor**2, "max_pixels": 16384 * factor**2, **values}
    try:
        return PixelRule(**values)
    except ValueError as error:
        raise SettingsError(f"loop.pixels: {error}{where}") from None


def _processor(path: Path) -> Mapping[str, Any] | None:
    """The picture processor's settings in a model's file; None: there are none of a kind that has such a rule."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{path}: expected an object, got {type(config).__name__}")
    if path.name == _FILES[0]:
        config = config.get("image_processor")
        if not isinstance(config, dict):
            return None
    # Other families' processors mean other things by these keys (a shortest edge that is a length, patches of a tower).
    size = config.get("size")
    both = isinstance(size, dict) and {"shortest_edge", "longest_edge"} <= set(size)
    return config if "patch_size" in config and ("merge_size" in config or both) else None


def _rule_of(config: Mapping[str, Any], path: Path) -> PixelRule:
    size = config.get("size") or {}
    if not isinstance(size, dict):
        raise SettingsError(f"{path}: size: expected an object, got {size!r}")
    checked = {key: config.get(key) for key in ("patch_size", "merge_size", "min_pixels", "max_pixels")}
    checked |= {f"size.{key}": size.get(key) for key in ("shortest_edge", "longest_edge")}
    for key, value in checked.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingsError(f"{path}: {key}: expected a whole number of at least 1, got {value!r}")
    try:
        return PixelRule.from_config({key: value for key, value in config.items() if value is not None})
    except ValueError as error:
        raise SettingsError(f"{path}: min_pixels, max_pixels (or size): {error}") from None
