"""JSON <-> frozen dataclasses, strictly: the one reader and writer of every specification.

A specification is hashed, so its JSON holds integers, strings, booleans, lists and objects only. A float is written
as its shortest round-trip decimal string (`0.001` -> `"0.001"`), and comes back as the same 64 bits. An unknown
field, a missing field without default and a value of another type are errors that name the path (`config.optim.lr`).
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar, Union

from trainer.errors import SpecError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """The JSON form of a specification.

    Args:
        value: a dataclass, mapping, sequence, float, integer, string or boolean.

    Returns:
        The same structure of dicts, lists, strings, integers and booleans; floats become decimal strings and a field
        that is None is left out (canonical JSON has no null).

    Raises:
        SpecError: a float that is not finite, or an object without a JSON form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_json(item) for name, item in fields if item is not None}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return decimal_string(value)
    if isinstance(value, str | int):
        return value
    raise SpecError(f"expected a value with a JSON form, got {type(value).__name__}")


def decimal_string(value: float) -> str:
    """The shortest decimal string that reads back as the same float.

    Raises:
        SpecError: the value is not finite.
    """
    if not math.isfinite(value):
        raise SpecError(f"expected a finite number, got {value}")
    return repr(float(value))


def from_json(kind: type[T], value: Any, path: str = "") -> T:
    """Build a specification dataclass from its JSON form.

    Args:
        kind: the dataclass to build.
        value: parsed JSON.
        path: where the value stands, for messages.

    Returns:
        An instance of `kind`; its own `__post_init__` has checked ranges.

    Raises:
        SpecError: unknown or missing field, or a value of the wrong type.
    """
    where = path or kind.__name__
    if not isinstance(value, dict):
        raise SpecError(f"{where}: expected an object, got {type(value).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # kind is a dataclass
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise SpecError(
            f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(fields))}"
        )
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            given[name] = _convert(hints[name], value[name], f"{path}.{name}" if path else name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SpecError(f"{where}: field {name!r} is missing; add it")
    return kind(**given)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """One JSON value as the annotated type; `hint` is one of the few forms that specifications use."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert(next(arg for arg in args if arg is not type(None)), value, path)
    if origin is typing.Literal:
        if value not in args:
            raise SpecError(f"{path}: expected one of {', '.join(map(repr, args))}, got {value!r}")
        return value
    if origin in (tuple, dict):
        return _container(origin, args, value, path)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value, path)
    return _scalar(hint, value, path)


def _container(origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(args):
            raise SpecError(f"{path}: expected a list of {len(args)}, got {value!r}")
        return tuple(
            _convert(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True))
        )
    if not isinstance(value, dict):
        raise SpecError(f"{path}: expected an object, got {type(value).__name__}")
    return {key: _convert(args[1], item, f"{path}.{key}") for key, item in value.items()}


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float:
        # A JSON float would make the hash depend on a printer: only the string form is accepted.
        if not isinstance(value, str):
            raise SpecError(f'{path}: expected a decimal string such as "0.001", got {value!r}')
        try:
            number = float(value)
        except ValueError:
            raise SpecError(f"{path}: expected a decimal string, got {value!r}") from None
        if not math.isfinite(number):
            raise SpecError(f"{path}: expected a finite number, got {value!r}")
        return number
    # bool is an int in Python, but `"layers": true` is a mistake.
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise SpecError(f"{path}: expected {hint.__name__}, got {value!r}")
    return value
