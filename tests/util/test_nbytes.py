"""Budgets as users write them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import ArgumentError, MemplanError
from memplan.util.nbytes import format_nbytes, is_share, parse_budget

TOTAL = 10_000_000_007


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (None, None),
        (1, 1),
        (123, 123),
        (np.int64(77), 77),
        ("123", 123),
        ("123B", 123),
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        (" 4gib ", 4 * 2**30),
        ("4GIB", 4 * 2**30),
        ("0.5GiB", 2**29),
        (".5GiB", 2**29),
        ("2.GiB", 2**31),
        ("3KiB", 3072),
        ("3MiB", 3 * 2**20),
        ("1TiB", 2**40),
        ("900 MB", 900_000_000),
        ("900mb", 900_000_000),
        ("7kB", 7_000),
        ("7KB", 7_000),
        ("7kb", 7_000),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2_000_000_000_000),
        # rounded down, and exactly: 0.1 GiB is 107374182.4 bytes
        ("0.1GiB", 107_374_182),
        ("1.9B", 1),
        ("8192TiB", 2**53),
        ("0" * 30 + "7", 7),
        (1.0, TOTAL),
        (0.5, TOTAL // 2),
        (np.float32(0.5), TOTAL // 2),
        ("100%", TOTAL),
        ("60%", TOTAL * 6 // 10),
        ("12.5 %", TOTAL // 8),
    ],
)
def test_budget(budget: int | float | str | None, nbytes: int | None) -> None:
    assert parse_budget(budget, TOTAL) == nbytes
    assert is_share(budget) == (parse_budget(budget, 2 * TOTAL) != nbytes)


def test_a_float_means_the_decimal_that_was_written() -> None:
    assert 0.29 * 100 < 29
    assert parse_budget(0.29, 100) == 29


@given(st.integers(1, 100), st.integers(100, 2**45))
def test_float_and_percentage_agree(percent: int, total: int) -> None:
    expected = int(Fraction(percent, 100) * total)
    assert parse_budget(percent / 100, total) == expected
    assert parse_budget(f"{percent}%", total) == expected


@pytest.mark.parametrize(
    "budget",
    [
        True,
        False,
        0,
        -1,
        0.0,
        -0.5,
        1.5,
        4e9,
        float("nan"),
        float("inf"),
        "",
        "much",
        "GiB",
        "-4GiB",
        "4 Gi B",
        "4Gb",
        "4Gib",
        "4G",
        "4PiB",
        "1e9",
        "1,000",
        "٤GiB",
        "0",
        "0.5B",
        "1.5",
        "2.0001",
        "0%",
        "101%",
        [4],
        1j,
        b"4GiB",
        "²",
        "9007199254740993",
        2**53 + 1,
        "8193TiB",
    ],
)
def test_anything_else_is_refused(budget: object) -> None:
    with pytest.raises(ArgumentError, match=r"4GiB.*60%") as caught:
        parse_budget(budget, TOTAL)  # type: ignore[arg-type]
    assert repr(budget) in str(caught.value)
    assert isinstance(caught.value, MemplanError)


@pytest.mark.parametrize(
    "budget", ["9" * 400, "9" * 5000, 10**400, 10**5000, Fraction(10**400)], ids=range(5)
)
def test_endless_numbers_are_refused_in_few_words(budget: object) -> None:
    with pytest.raises(ArgumentError, match=r"^the budget .* cannot be used") as caught:
        parse_budget(budget, TOTAL)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


def test_an_unknown_unit_lists_the_units() -> None:
    with pytest.raises(ArgumentError, match=r"'Gb' is no unit.*KiB.*TB"):
        parse_budget("4Gb", TOTAL)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**20, "1.00 MiB"),
        (5 * 2**28, "1.25 GiB"),
        (2**40, "1.00 TiB"),
        (2**52, "4096.00 TiB"),
        (-(2**31), "-2.00 GiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(1024, 2**50))
def test_what_is_printed_is_read_back(nbytes: int) -> None:
    back = parse_budget(format_nbytes(nbytes), TOTAL)
    assert back is not None
    assert abs(back - nbytes) <= 0.006 * nbytes


@pytest.mark.parametrize("budget", ["least", "Lowest", " min "])
def test_who_asks_for_the_least_memory_by_a_word_is_told_how(budget: str) -> None:
    with pytest.raises(ArgumentError, match=r"the least memory is that of no budget \(None; "):
        parse_budget(budget, TOTAL)
