"""Settings from flags, environment, a file and the defaults, in this order; each value knows where it comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from .errors import SettingsError
from .settings import FunnelSettings, SpeceyesSettings, WordingSettings

PREFIX = "SPECEYES_"


class _Environment(BaseSettings):
    """Reads ``SPECEYES_LARGE__MODEL=...``: a name per level, two underscores between them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="ignore")
    large: dict[str, Any] | None = None
    small: dict[str, Any] | None = None
    agent: str | None = None
    loop: dict[str, Any] | None = None
    funnel: dict[str, Any] | None = None
    serve: dict[str, Any] | None = None


@dataclass(frozen=True)
class Setting:
    """One value, dotted key and source: "flag", "environment", the file's name, "default"."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Loaded:
    """Checked settings, and every value with its source."""

    settings: SpeceyesSettings
    values: tuple[Setting, ...]


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Reads and checks all settings.

    Parameters
    ----------
    flags : mapping, optional
        Dotted key to value, e.g. ``{"funnel.gate.tau": 0.95}``.
    file : path, optional
        YAML (``.yaml``, ``.yml``) or TOML (``.toml``).
    environ : mapping, optional
        Instead of ``os.environ``.

    Raises
    ------
    SettingsError
        Naming the key, where it was set, and what was expected.
    """
    sources: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        sources.append((Path(file).name, _read(Path(file))))
    sources.append(("environment", _environment(os.environ if environ is None else environ)))
    tree: dict[str, Any] = {}
    for key, value in (flags or {}).items():
        _put(tree, key.split("."), value, key)
    sources.append(("flag", tree))
    merged: dict[str, Any] = {}
    where: dict[str, str] = {}
    for name, values in sources:
        _merge(merged, values, name, where, ())
    try:
        settings = SpeceyesSettings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(explain(error, where)) from None
    found = tuple(Setting(k, v, _source(k, where)) for k, v in _leaves(settings, ()))
    return Loaded(settings, found)


def load_wording(file: str | Path) -> WordingSettings:
    """``funnel.wording`` of a settings file, whatever else the file holds or lacks.

    Raises
    ------
    SettingsError
        As :func:`load_settings`.
    """
    funnel = _read(Path(file)).get("funnel") or {}
    wording = funnel.get("wording") or {} if isinstance(funnel, dict) else funnel
    try:
        return WordingSettings.model_validate(wording)
    except ValidationError as error:
        raise SettingsError(f"{file}: funnel.wording: {explain(error, {})}") from None


def explain(error: ValidationError, where: Mapping[str, str]) -> str:
    """pydantic's findings, a line each: key, what is wrong, what was given, from where."""
    lines = []
    for found in error.errors():
        key = ".".join(str(p) for p in found["loc"]) or "settings"
        message = "unknown key" if found["type"] == "extra_forbidden" else found["msg"].removeprefix("Value error, ")
        given = "" if found["type"] in ("missing", "value_error") else f", got {found['input']!r}"
        source = where.get(key)
        lines.append(f"{key}: {message}{given}" + (f" (from {source})" if source else ""))
    return "\n".join(lines)


def _source(key: str, where: Mapping[str, str]) -> str:
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        if (found := where.get(".".join(parts[:n]))) is not None:
            return found
    # Of a value that is a mapping, the keys within have sources of their own.
    below = {found: None for other, found in where.items() if other.startswith(f"{key}.")}
    return ", ".join(below) or "default"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    if path.suffix == ".toml":
        try:
            import tomllib
        except ImportError:  # Python 3.10
            raise SettingsError(f"{path}: TOML needs Python 3.11; write it as YAML") from None
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path}: not TOML: {error}") from error
    if path.suffix not in (".yaml", ".yml"):
        raise SettingsError(f"{path}: expected a .yaml, .yml or .toml file")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: expected keys and values, got {type(data).__name__}")
    return data


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    source = EnvSettingsSource(_Environment)
    source.env_vars = {name.lower(): value for name, value in environ.items()}
    found = source()
    return {key: value for key, value in found.items() if value is not None}


def _put(tree: dict[str, Any], path: Sequence[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{key}: given twice, as a value and as a section")
    tree[path[-1]] = value


def _merge(
    into: dict[str, Any], values: Mapping[str, Any], name: str, where: dict[str, str], at: tuple[str, ...]
) -> None:
    for key, value in values.items():
        here = (*at, str(key))
        if isinstance(value, Mapping):
            below = into.get(key)
            if not isinstance(below, dict):
                below = into[key] = {}
            _merge(below, value, name, where, here)
        else:
            into[key] = value
            where[".".join(here)] = name


def _leaves(section: BaseModel, at: tuple[str, ...]) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        here = (*at, name)
        if isinstance(value, BaseModel):
            out += _leaves(value, here)
        else:
            out.append((".".join(here), _masked(value)))
    return out


def _masked(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_masked, value))
    return "***" if isinstance(value, SecretStr) else value


def parse_flag(text: str) -> tuple[str, Any]:
    """``key=value`` of ``-s``; the value is read as YAML, so that numbers, booleans and lists are what they look like.

    Raises
    ------
    SettingsError
        No ``=``, or a value that is no YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise SettingsError(f"-s: expected key=value, got {text!r}")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SettingsError(f"{key}: cannot be read: {error}") from error


def engine_flag(text: str) -> dict[str, Any]:
    """``MODEL`` (run here by vLLM) or ``MODEL@URL[,URL...]`` of ``--large`` and ``--small``."""
    model, at, urls = text.partition("@http")
    if not model:
        raise SettingsError(f"--large, --small: expected MODEL or MODEL@http://host:port, got {text!r}")
    return {"model": model, **({"urls": [u.strip() for u in f"http{urls}".split(",")]} if at else {})}


def header(settings: SpeceyesSettings) -> dict[str, Any]:
    """What makes two runs the same run: models, agent and its loop, and the funnel's settings that decide about answers."""
    free = {"in_flight", "attempts", "timeout", "loop_concurrency"}
    funnel: FunnelSettings = settings.funnel
    small = None if settings.small is None else settings.small.known_as
    return {
        "models": {"large": settings.large.known_as, "small": small},
        "agent": settings.agent,
        "loop": settings.loop.model_dump(mode="json"),
        "settings": {k: v for k, v in funnel.model_dump(mode="json").items() if k not in free},
    }
