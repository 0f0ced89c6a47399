"""Parsing and formatting of quantities."""

from __future__ import annotations

import pytest

from penstock.errors import BadValue
from penstock.planning.quantities import read_count, read_quantity, shown_bytes, shown_hours, shown_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1E+9", 1e9),
        ("250M", 250e6),
        ("1.5B", 1.5e9),
        ("20k", 20e3),
        ("2T", 2e12),
        ("3g", 3e9),
        ("1,000,000", 1e6),
        ("1_000", 1e3),
        (" 7 ", 7),
        ("2.5e3", 2500),
        (".5k", 500),
    ],
)
def test_quantities_are_read_as_people_write_them(text: str, value: float) -> None:
    assert read_quantity(text, "--docs") == value


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "1e", "1e9M", "nan", "inf", "0", "1e400", "1 2", "0x10", "1e-3"]
)
def test_a_wrong_quantity_names_its_flag(text: str) -> None:
    with pytest.raises(BadValue, match="--docs"):
        read_quantity(text, "--docs")


def test_a_count_is_a_whole_number() -> None:
    assert read_count("1.5k", "--docs") == 1500
    with pytest.raises(BadValue, match="whole number"):
        read_count("1.5", "--docs")


def test_numbers_are_shown_with_three_digits() -> None:
    assert shown_number(2_576_099) == "2,580,000"
    assert shown_number(0.04119) == "0.0412"
    assert shown_number(29.24) == "29.2"
    assert shown_number(8) == "8"


def test_bytes_and_hours_are_shown_in_fitting_units() -> None:
    assert shown_bytes(3.072e12) == "3.07 TB"
    assert shown_bytes(96) == "96 B"
    assert shown_bytes(999_999) == "1 MB"
    assert [shown_hours(hours) for hours in (1 / 3600, 0.5, 47.9, 72, 8766 * 2)] == [
        "1 seconds",
        "30 minutes",
        "47.9 hours",
        "3 days",
        "2 years",
    ]
