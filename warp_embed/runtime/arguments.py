"""Checks of numbers that a program hands over. An array is no number, not even one with a single element."""
from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np

FINITE = sys.float_info.max
_NO_NUMBERS = (bool, np.bool_)


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """The value as an int of [low, high]. TypeError: no integer (bool is none). ValueError: out of range."""
    if type(value) is int:
        number = value
    elif isinstance(value, _NO_NUMBERS) or not hasattr(value, "__index__") or getattr(value, "ndim", False):
        raise TypeError(f"{name} is an integer, not {value!r}")
    else:
        number = operator.index(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} is {number}; it must be " + (f"in [{low}, {high}]" if high is not None else
                                                               f"at least {low}"))
    return number


def number(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """The value as a float of [low, high]. TypeError: no number (bool is none). ValueError: out of range, or NaN."""
    if isinstance(value, _NO_NUMBERS) or not hasattr(value, "__float__") or getattr(value, "ndim", False):
        raise TypeError(f"{name} is a number, not {value!r}")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf if value > 0 else -math.inf
    if not low <= real <= high:
        limits = {math.inf: "", FINITE: " and finite"}.get(high, f" and at most {high:g}")
        raise ValueError(f"{name} is {real}; it must be at least {low:g}{limits}")
    return real
