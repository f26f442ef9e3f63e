"""Frozen dataclasses to strict JSON and back, driven by their annotations.

Understood are str, bool, int, float, Literal, None, dataclasses, ``tuple[X, ...]`` and unions of
these. Everything else is refused, so a report cannot grow a field that nobody checks. A missing
fact, `NotAvailable`, is written as ``{"not_available": reason}``. bool is not an int here, a NaN is
not a number, and a numpy scalar is not a Python one: such values would not survive the round trip.
"""

import json
import math
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pipelines.reports.errors import ReportError
from pipelines.reports.parts import NotAvailable

_MISSING = "not_available"
T = TypeVar("T")
_hints: Any = cache(get_type_hints)  # reading annotations is slow, and a report has many rows


def to_json(value: Any) -> str:
    """Write a dataclass as JSON.

    Args:
        value: A dataclass built of the types in the module docstring.

    Returns:
        JSON text with sorted keys and a final newline.

    Raises:
        ReportError: A number is not finite or a type is not JSON.
    """
    try:
        text = json.dumps(
            _encode(value), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise ReportError(f"cannot write the report as JSON: {error}") from error
    return text + "\n"


def from_json(kind: type[T], text: str) -> T:
    """Read a dataclass from JSON.

    Args:
        kind: The dataclass to build.
        text: What `to_json` wrote.

    Returns:
        An instance of `kind`.

    Raises:
        ReportError: Not JSON, duplicate or unknown or missing fields, wrong types.
    """
    try:
        plain = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ReportError(f"not JSON: {error}") from error
    built: T = _decode(kind, plain, "report")
    return built


def check(kind: Any, value: Any, path: str) -> None:
    """Raise unless a value has exactly the annotated type, all the way down.

    Args:
        kind: An annotation.
        value: The value to look at.
        path: Where it stands, for the message.

    Raises:
        ReportError: Names the path, the expected type and the type found.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        check(_member(kind, value, path), value, path)
    elif origin is tuple and type(value) is tuple:
        for index, item in enumerate(value):
            check(get_args(kind)[0], item, f"{path}[{index}]")
    elif is_dataclass(kind) and type(value) is kind:
        for name, hint in _hints(kind).items():
            check(hint, getattr(value, name), f"{path}.{name}")
    elif origin is Literal:
        if not any(value == allowed and type(value) is type(allowed) for allowed in get_args(kind)):
            raise ReportError(f"{path}: expected one of {get_args(kind)}, got {value!r}")
    else:
        _check_scalar(kind, value, path)


def _check_scalar(kind: Any, value: Any, path: str) -> None:
    if not _is_scalar(kind, value):
        raise ReportError(f"{path}: expected {_name(kind)}, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ReportError(f"{path}: expected a finite number, got {value}")
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise ReportError(f"{path}: expected text that UTF-8 can hold, got a lone surrogate")


def _is_scalar(kind: Any, value: Any) -> bool:
    """An int may stand where a float is asked for; nothing else is converted."""
    return type(value) is kind or (kind is float and type(value) is int)


def _member(union: Any, value: Any, path: str) -> Any:
    """The member of a union that a value belongs to, judged by its outer type alone."""
    for kind in get_args(union):
        outer = get_origin(kind) or kind
        if type(value) is outer or _is_scalar(outer, value):
            return kind
    names = " or ".join(_name(kind) for kind in get_args(union))
    raise ReportError(f"{path}: expected {names}, got {type(value).__name__}")


def _encode(value: Any) -> Any:
    if isinstance(value, NotAvailable):
        return {_MISSING: value.reason}
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, plain: Any, path: str) -> Any:
    if get_origin(kind) in (Union, UnionType):
        kind = _shape(kind, plain, path)
    if get_origin(kind) is tuple and isinstance(plain, list):
        item = get_args(kind)[0]
        return tuple(_decode(item, part, f"{path}[{index}]") for index, part in enumerate(plain))
    if kind is NotAvailable and isinstance(plain, dict) and set(plain) == {_MISSING}:
        check(str, plain[_MISSING], path)
        return NotAvailable(reason=plain[_MISSING])
    if is_dataclass(kind) and isinstance(plain, dict):
        hints = _hints(kind)
        for problem, names in (
            ("unknown field", sorted(set(plain) - set(hints))),
            ("missing field", sorted(set(hints) - set(plain))),
        ):
            if names:
                raise ReportError(f"{path}: {problem} {', '.join(names)}")
        parts = {name: _decode(hints[name], plain[name], f"{path}.{name}") for name in hints}
        return kind(**parts)  # type: ignore[operator]  # is_dataclass narrows to an instance too
    check(kind, plain, path)
    return plain


def _shape(union: Any, plain: Any, path: str) -> Any:
    """The member of a union that a piece of JSON is written for."""
    members = get_args(union)
    if isinstance(plain, dict):
        wanted = [k for k in members if is_dataclass(k)]
        missing = set(plain) == {_MISSING}
        wanted = [k for k in wanted if (k is NotAvailable) == missing]
        # Of several, the one with these fields; if none has them, the first says which is unknown or missing.
        wanted.sort(key=lambda k: set(_hints(k)) != set(plain))
    elif isinstance(plain, list):
        wanted = [k for k in members if get_origin(k) is tuple]
    else:
        wanted = [k for k in members if not is_dataclass(k) and _is_scalar(k, plain)]
    if not wanted:
        names = " or ".join(_name(kind) for kind in members)
        raise ReportError(f"{path}: expected {names}, got {type(plain).__name__}")
    return wanted[0]


def _name(kind: Any) -> str:
    return "null" if kind is NoneType else getattr(kind, "__name__", str(kind))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ReportError(f"duplicate field {key!r}")
        found[key] = value
    return found


def _refuse_constant(text: str) -> Any:
    raise ReportError(f"expected a finite number, got {text}")
