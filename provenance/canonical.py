"""The one byte form of a text and of a JSON object: what is hashed is never ambiguous.

*Text.* UTF-8, Unicode NFC, LF line ends: ``é`` typed as one code point or as ``e`` plus accent,
on Windows or on Linux, is the same record. The profile number (:data:`CANONICALISATION`) stands in
the leaf, so a later profile cannot be confused with this one. Normalisation is for hashing only:
what is trained on is the text as delivered.

*JSON.* JCS (RFC 8785), and of JSON only integers, strings, booleans, lists and objects. A float
has many spellings and ``null`` says the same as a missing field, so both are refused; a fraction is
written as a decimal string. Reading is as strict as writing: Python's parser keeps the last of two
equal keys (``{"price":1,"price":100}`` is 100), another one keeps the first, and both would
"verify".

*Keys.* Digests of texts that are stored anywhere are keyed (HMAC-SHA256), because a phone number
has only 10^10 values and an unkeyed digest of it is an index, not a secret.

When it is wrong: NFC(x) + NFC(y) may differ from NFC(x + y), so canonical bytes are taken of whole
records only; look-alike letters and zero-width characters stay different texts.

Source: RFC 8785; Unicode Standard Annex 15.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import unicodedata
from typing import TYPE_CHECKING, Any, Final

import rfc8785

from provenance.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

CANONICALISATION: Final = 1
"""Profile number of :func:`canonical_bytes`; it stands in every leaf."""

MAX_INTEGER: Final = 2**53 - 1
"""Largest integer that every JSON reader keeps exactly (RFC 8785, section 3.2.2.3)."""

KEY_SIZE: Final = 32
"""Length of every secret key in bytes."""

MAX_DEPTH: Final = 64
"""Deepest nesting of a committed object; deeper input is an attack on the parser's stack."""


def canonical_bytes(text: str) -> bytes:
    r"""The canonical bytes of a record's text: LF line ends, NFC, UTF-8.

    Args:
        text: the text as delivered.

    Returns:
        The bytes that are hashed, never those that are trained on.

    Raises:
        FormatError: the text holds a lone surrogate and so has no UTF-8 form.

    Examples:
        >>> canonical_bytes("e\u0301\r\n") == canonical_bytes("\u00e9\n") == b"\xc3\xa9\n"
        True
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        return unicodedata.normalize("NFC", lines).encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"text is not valid Unicode: lone surrogate at character {error.start}"
        raise FormatError(message) from None


def jcs(obj: Any) -> bytes:
    """The JCS bytes of an object of integers, strings, booleans, lists and objects.

    Args:
        obj: the object; tuples count as lists.

    Returns:
        UTF-8 bytes without white space, keys sorted.

    Raises:
        FormatError: a float, a null, another type, a key that is not a string, an integer beyond
            2^53 - 1, or text that is not valid Unicode; the message names the place.

    Source: RFC 8785.
    """
    _check(obj, "$", MAX_DEPTH)
    return rfc8785.dumps(obj)


def parse_json(data: bytes) -> Any:
    """The object that strict JSON bytes stand for.

    Args:
        data: UTF-8 JSON; white space is allowed (compare with :func:`jcs` where it must not be).

    Returns:
        Integers, strings, booleans, lists and dictionaries.

    Raises:
        FormatError: not JSON, a duplicate key, a float, a null or anything else that :func:`jcs`
            refuses.
    """
    try:
        obj = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except FormatError:
        raise
    except RecursionError:
        raise FormatError("JSON is nested too deeply to be read") from None
    except ValueError as error:
        # The decoder's own message may quote the document, which may hold a text: only the place.
        place = getattr(error, "pos", getattr(error, "start", "?"))
        raise FormatError(f"not UTF-8 JSON: {type(error).__name__} at byte {place}") from None
    _check(obj, "$", MAX_DEPTH)
    return obj


def keyed(key: bytes, data: bytes) -> bytes:
    """A keyed digest, HMAC-SHA256.

    Args:
        key: secret key, at least 32 bytes.
        data: any bytes.

    Returns:
        32 bytes.

    Raises:
        FormatError: the key is shorter than 32 bytes.
    """
    if len(key) < KEY_SIZE:
        raise FormatError(f"a secret key has at least {KEY_SIZE} bytes, got {len(key)}")
    return hmac.digest(key, data, "sha256")


def fingerprint(key: bytes, canonical: bytes) -> bytes:
    """The keyed digest of a record's content: equal texts meet, strangers cannot guess it.

    Args:
        key: the corpus key K_fp, at least 32 bytes.
        canonical: the output of :func:`canonical_bytes`.

    Returns:
        32 bytes: the key of the sparse tree.

    Raises:
        FormatError: the key is too short.
    """
    return keyed(key, canonical)


def record_id(key: bytes, owner: str, source: str, position: int, fingerprint: bytes) -> bytes:
    """The row key of a record, HMAC over JCS ``[owner, source, position, hex fingerprint]``.

    Args:
        key: the corpus key K_id, at least 32 bytes.
        owner: owner id.
        source: name of the file or document inside the delivery.
        position: ordinal of the record in its source, 0 <= position.
        fingerprint: 32 bytes, from :func:`fingerprint`.

    Returns:
        32 bytes.

    Raises:
        FormatError: the key is too short, or an argument is not in canonical form.
    """
    return keyed(key, jcs([owner, source, position, fingerprint.hex()]))


def write_atomic(path: Path, data: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write a file so that a crash leaves the old or the new content, never a mixture.

    A temporary name in the same folder, fsync, rename, fsync of the folder: without the last one
    the rename itself may be lost with the power.

    Args:
        path: the file to write; its folder must exist.
        data: the whole content.
        mode: permission bits, set before the name becomes visible (0o600 for secrets).
        durable: False leaves out both fsyncs, for a copy that can be made again: other processes
            see the old or the new content, a power cut may leave an empty file.

    Raises:
        OSError: the disk refused; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    Args:
        folder: an existing folder.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(obj: Any, place: str, depth: int) -> None:
    """Refuse whatever has more than one spelling; ``place`` is a JSONPath for the message."""
    if isinstance(obj, str):
        _check_string(obj, place)
    elif isinstance(obj, int):  # bool is an int in Python, and both are allowed
        if abs(obj) > MAX_INTEGER:
            raise FormatError(f"integer beyond 2^53 - 1 at {place}: write a decimal string")
    elif isinstance(obj, dict | list | tuple):
        _check_children(obj, place, depth)
    elif isinstance(obj, float):
        raise FormatError(f"float at {place}: write an integer or a decimal string")
    elif obj is None:
        raise FormatError(f'null at {place}: leave the field out, or write "none" or an empty list')
    else:
        raise FormatError(f"{type(obj).__name__} at {place}: only int, str, bool, list and dict")


def _check_children(
    parent: dict[Any, Any] | list[Any] | tuple[Any, ...], place: str, depth: int
) -> None:
    if depth == 0:
        raise FormatError(f"nested deeper than {MAX_DEPTH} levels at {place[:80]}")
    if isinstance(parent, dict):
        for key, value in parent.items():
            if not isinstance(key, str):
                raise FormatError(f"key of type {type(key).__name__} at {place}: keys are strings")
            _check_string(key, place)
            _check(value, f"{place}.{key}", depth - 1)
    else:
        for position, value in enumerate(parent):
            _check(value, f"{place}[{position}]", depth - 1)


def _check_string(text: str, place: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError(f"lone surrogate in the string at {place}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"duplicate key {twice!r}: two readers would see two objects")
    return result


def _refuse_number(text: str) -> Any:
    raise FormatError(f"number {text[:40]}: only integers; write a decimal string")
