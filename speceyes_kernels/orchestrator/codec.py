"""JSON both ways for the frozen dataclasses of :mod:`.types`, by their annotations."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

T = TypeVar("T", bound="Json")
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # JSON has none of them


class Json:
    """Gives a dataclass ``to_json`` and ``from_json``. Fields at their default are left out."""

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values that ``json.dumps(..., allow_nan=False)`` takes."""
        out = {}
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            factory = f.default_factory
            default = factory() if callable(factory) else f.default
            if (value := getattr(self, f.name)) != default:
                out[f.name] = _encode(value)
        return out

    @classmethod
    def from_json(cls: type[T], data: Any) -> T:
        """
        Raises
        ------
        ValueError
            Not an object, an unknown or missing field, or a value of another type.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"{cls.__name__}: expected an object, got {data!r}")
        hints = _hints(cls)  # type: ignore[arg-type]
        unknown = set(data) - set(hints)
        if unknown:
            raise ValueError(f"{cls.__name__}: unknown field {min(unknown)!r}; expected some of {', '.join(hints)}")
        try:
            return cls(**{name: _decode(value, hints[name], f"{cls.__name__}.{name}") for name, value in data.items()})
        except TypeError as error:
            raise ValueError(f"{cls.__name__}: {error}") from error


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _encode(value: Any) -> Any:
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any, hint: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(value, get_args(hint), where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        return tuple(_decode(v, get_args(hint)[0], where) for v in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected an object, got {value!r}")
        return {k: _decode(v, get_args(hint)[1], where) for k, v in value.items()}
    if origin is typing.Literal:
        if value not in get_args(hint):
            raise ValueError(f"{where}: expected one of {', '.join(map(str, get_args(hint)))}, got {value!r}")
        return value
    if hint is Any:
        return value
    if hint is float:
        if isinstance(value, str) and value in _NUMBERS:
            return _NUMBERS[value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{where}: expected a number, got {value!r}")
        return float(value)
    if hasattr(hint, "from_json"):
        return hint.from_json(value)
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return hint(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value


def _decode_union(value: Any, hints: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    problem: Exception = ValueError(f"{where}: got {value!r}")
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return _decode(value, hint, where)
        except ValueError as error:
            problem = error
    raise problem
