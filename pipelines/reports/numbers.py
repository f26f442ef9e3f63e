"""How numbers are written on the page: one function per kind of number, no unit lost.

Typographic minus (U+2212), comma between thousands, a no-break space before a unit or a per cent
sign. Standard errors decide the decimals (`places`): two digits of the smallest error are kept, so a
table never shows digits that mean nothing.
"""

import math
import unicodedata
from collections.abc import Iterable

NBSP = "\u00a0"
MINUS = "\u2212"
# Bidirectional controls would let an id change the order of the text beside it.
_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def integer(value: int) -> str:
    """A whole number with thousands separated: 12,345."""
    return f"{value:,}".replace("-", MINUS)


def fixed(value: float, decimals: int) -> str:
    """A number with a fixed count of decimals; a rounded zero has no sign."""
    text = f"{value:,.{decimals}f}"
    if not any(digit in text for digit in "123456789"):
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def signed(value: float, decimals: int) -> str:
    """A number that always shows its sign, because the sign is the message; zero has none."""
    text = fixed(value, decimals)
    is_zero = not any(digit in text for digit in "123456789")
    return text if is_zero or text.startswith(MINUS) else f"+{text}"


def percent(share: float, decimals: int = 1) -> str:
    """A share of one as per cent: 0.046 gives 4.6 %; never rounds a positive share to zero."""
    value = 100 * share
    smallest = 10**-decimals
    if 0 < value < smallest / 2:
        return f"<{NBSP}{fixed(smallest, decimals)}{NBSP}%"
    return f"{fixed(value, decimals)}{NBSP}%"


def money(microunits: int, currency: str) -> str:
    """Integer micro-units as units with all six decimals; integer arithmetic, so exact."""
    sign = MINUS if microunits < 0 else ""
    units, rest = divmod(abs(microunits), 10**6)
    return f"{sign}{units:,}.{rest:06d}{NBSP}{currency}"


def short_money(microunits: int, currency: str) -> str:
    """The same amount without the zeros behind the second decimal."""
    amount, _, unit = money(microunits, currency).partition(NBSP)
    whole, _, part = amount.partition(".")
    return f"{whole}.{part.rstrip('0').ljust(2, '0')}{NBSP}{unit}"


def binary(num_bytes: int) -> str:
    """Bytes in the largest binary unit below the number: 512.0 MiB."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{fixed(value, 0 if units[0] == 'B' else 1)}{NBSP}{units[0]}"


def places(errors: Iterable[float | None], default: int = 4) -> int:
    """How many decimals a column deserves.

    Args:
        errors: Standard errors of the column; None and zero are passed over.
        default: Decimals when no error is known.

    Returns:
        Decimals that keep two digits of the smallest error, between 2 and 8.
    """
    known = [error for error in errors if error]
    if not known:
        return default
    return min(8, max(2, 1 - math.floor(math.log10(min(known)))))


def printable(text: str) -> str:
    """Text with control and bidirectional characters made visible as U+FFFD."""
    return "".join(
        "\ufffd" if char in _BIDI or unicodedata.category(char) in {"Cc", "Cs"} else char
        for char in text
    )
