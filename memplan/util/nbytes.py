"""Numbers of bytes as users write and read them."""

from __future__ import annotations

import math
import numbers
import re
from fractions import Fraction

from memplan.errors import ArgumentError
from memplan.util.numbers import shown

# All bytes of a step together, and all elements: nine petabytes. Up to here a double is exact.
# Compiled code counts in 64-bit integers, the bytes times the steps of a search, or the buffers of
# a packing: what is too much for these is refused there.
MAX_NBYTES = 2**53

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_UNITS = f"the units are B, {', '.join([*_BINARY, *_DECIMAL])}"

# Besides the proper spelling all upper and all lower case: "Gb" may well mean bits.
_NBYTES_OF_UNIT = {
    spelling: nbytes
    for unit, nbytes in {"": 1, "B": 1, **_BINARY, **_DECIMAL}.items()
    for spelling in (unit, unit.upper(), unit.lower())
}

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|[A-Za-z]*)\s*", re.ASCII)

_MAX_DIGITS = 40

# What is written for the least memory by who does not know how to ask for that.
_LEAST = ("least", "lowest", "min", "minimum", "none")
_NO_BUDGET = "the least memory is that of no budget (None; 'least' for a command)"

# What every error of parse_budget says of what can be used.
ACCEPTED = (
    "a budget is a whole number of bytes (4294967296), a string with a unit of bytes ('4GiB', "
    "'900 MB'), or a share of the unplanned step (0.6 or '60%')"
)


def parse_budget(budget: int | float | str | None, unplanned_total_nbytes: int) -> int | None:
    """Bytes that ``budget`` stands for, rounded down; None stays None.

    An integer is bytes. A float in (0, 1], or a string such as "60%", is a share of
    ``unplanned_total_nbytes``. Another string is a number with one of the units B, KiB, MiB, GiB,
    TiB (powers of 1024), kB, MB, GB, TB (powers of 1000), or with none for bytes. Raises
    ArgumentError for anything else, for less than one byte and for more than MAX_NBYTES.
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        nbytes = _parse_text(budget, unplanned_total_nbytes)
    elif isinstance(budget, bool):
        raise _error(budget)
    elif isinstance(budget, numbers.Integral):
        nbytes = Fraction(int(budget))
    elif isinstance(budget, numbers.Real):
        nbytes = _share(budget, _decimal(budget), unplanned_total_nbytes)
    else:
        raise _error(budget)
    if nbytes < 1:
        raise _error(budget, "it is less than one byte")
    if nbytes > MAX_NBYTES:
        raise _error(budget, "it is more than memplan can count, 8 PiB")
    return math.floor(nbytes)


def is_share(budget: int | float | str | None) -> bool:
    """Is ``budget``, which can be used, a share of the unplanned step?"""
    if isinstance(budget, str):
        return "%" in budget
    return budget is not None and not isinstance(budget, numbers.Integral)


def format_nbytes(nbytes: int) -> str:
    """``nbytes`` for people, in powers of 1024: "1.25 GiB", "512 B"."""
    if abs(nbytes) < 2**10:
        return f"{nbytes} B"
    # What would be printed as 1024.00 belongs to the next unit.
    units = [u for u, size in _BINARY.items() if round(abs(nbytes) / size, 2) < 1024]
    unit = units[0] if units else "TiB"
    return f"{nbytes / _BINARY[unit]:.2f} {unit}"


def is_no_byte(text: str) -> bool:
    """Does ``text`` say zero bytes, with or without a unit?"""
    match = _QUANTITY.fullmatch(text)
    return match is not None and match[2] in _NBYTES_OF_UNIT and not match[1].strip("0.")


def _parse_text(text: str, unplanned_total_nbytes: int) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    if match is None and text.strip().lower() in _LEAST:
        raise ArgumentError(f"{_error(text)}; {_NO_BUDGET}")
    if match is None:
        raise _error(text)
    if len(match[1]) > _MAX_DIGITS:
        raise _error(text, f"a number has at most {_MAX_DIGITS} digits")
    number, unit = Fraction(match[1]), match[2]
    if unit == "%":
        return _share(text, number / 100, unplanned_total_nbytes)
    if unit not in _NBYTES_OF_UNIT:
        raise _error(text, f"{unit!r} is no unit of bytes; {_UNITS}")
    if not unit and number.denominator > 1:
        raise _error(text, "without a unit it is bytes, which are whole numbers")
    return number * _NBYTES_OF_UNIT[unit]


def _decimal(value: numbers.Real) -> Fraction | None:
    """What the user wrote: 0.6 is 6/10 here, not the binary number next to it."""
    try:
        share = float(value)
    except OverflowError:
        return None
    return Fraction(repr(share)) if math.isfinite(share) else None


def _share(budget: object, share: Fraction | None, unplanned_total_nbytes: int) -> Fraction:
    if share is None or not 0 < share <= 1:
        raise _error(budget, "a share of the unplanned step lies above 0 and at most at 1 (100%)")
    return share * unplanned_total_nbytes


def _error(budget: object, reason: str = "") -> ArgumentError:
    problem = f"the budget {shown(budget)} cannot be used"
    return ArgumentError(": ".join(filter(None, (problem, reason))) + f"; {ACCEPTED}")
