"""Sizes as people write them."""
from __future__ import annotations

import operator
import re
from fractions import Fraction

_PREFIXES = ("", "K", "M", "G", "T")
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(?:([KMGT])(I?))?B\s*", re.IGNORECASE | re.ASCII)
_ACCEPTED = 'a size is a number of bytes or text such as "24GB" (10^9 bytes each) or "24GiB" (2^30 bytes each)'


def parse_bytes(size: int | str) -> int:
    """Number of bytes that a size means.

    Parameters
    ----------
    size : int or str
        Bytes, or text with a unit: B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024), in either
        case, with or without a fraction.

    Raises
    ------
    ValueError      negative, or text of another form; the message says what is accepted.
    TypeError       neither an integer nor text.
    """
    if not isinstance(size, str):
        if isinstance(size, bool) or not hasattr(size, "__index__") or getattr(size, "ndim", False):
            raise TypeError(f"{_ACCEPTED}, not {size!r}")
        value = operator.index(size)
        if value < 0:
            raise ValueError(f"{_ACCEPTED}, not {size!r}")
        return value
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"{_ACCEPTED}, not {size!r}")
    number, prefix, binary = match.groups()
    unit: int = (1024 if binary else 1000) ** _PREFIXES.index((prefix or "").upper())
    return int(Fraction(number) * unit)


def format_bytes(size: int) -> str:
    """A size with three significant digits in powers of 1000: ``"999 B"``, ``"1.50 GB"``, ``"24.0 GB"``."""
    if abs(size) < 1000:
        return f"{size} B"
    value = float(size)
    for prefix in "KMGT":
        value /= 1000
        if abs(value) < 999.5 or prefix == "T":
            break
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {prefix}B"
