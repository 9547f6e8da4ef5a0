"""Strict dataclasses from plain mappings: how every YAML section and every config.json becomes a typed object.

A wrong key, a wrong type or a missing field is a `ValueError` that names the place, what is allowed and the nearest
valid name; nothing is dropped silently and nothing passes through `**kwargs`.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def parse(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Builds the dataclass `cls` from `values`; nested dataclass fields are parsed from nested mappings.

    Args:
        cls: a dataclass; its own `__post_init__` checks ranges and may raise `ValueError`.
        values: field name -> plain value (what YAML or JSON gives).
        where: how error messages call this mapping, for example "config.yaml: optim".

    Raises:
        ValueError: unknown key, wrong type, missing field, or a value that `__post_init__` refuses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a mapping of settings, got {type(values).__name__}")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(str(key), fields)}")
    arguments = {name: _convert(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    missing = [
        name
        for name, field in fields.items()
        if name not in arguments
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """The part of an error message that says what is allowed, the likeliest meaning first."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(names)}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(options, value, where)
    if origin is typing.Literal:
        if value not in options:
            raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(repr, options))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        return tuple(_convert(options[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, typing.cast(type, hint)) else parse(typing.cast(type, hint), value, where)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected a mapping, got {value!r}")
        return dict(value)
    if hint is float:
        return _number(value, where)
    if type(value) is not hint:  # bool is a subclass of int: `type` keeps "true" out of integer fields
        raise ValueError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is not type(None):
            try:
                return _convert(option, value, where)
            except ValueError as error:
                errors.append(str(error))
    raise ValueError(errors[0])


def _number(value: Any, where: str) -> float:
    """A float; YAML 1.1 reads "1e-3" as a string, which nobody who writes a learning rate expects."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{where}: expected a number, got {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: expected a number, got {value!r}")
    return float(value)
