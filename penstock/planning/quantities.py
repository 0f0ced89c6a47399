"""Parsing and formatting of quantities: 1e9, 250M, 1.5B, bytes, durations."""

from __future__ import annotations

import math
import re

from penstock.errors import BadValue

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_QUANTITY = re.compile(
    r"([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)(?:e\+?([0-9]{1,2}))?\s*([kmbgt]?)", re.IGNORECASE
)
_MAX_QUANTITY = 1e18
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def read_quantity(text: str, flag: str) -> float:
    """Parse a positive number such as 1e9, 250M, 1.5B or 1,000,000."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or (match[2] and match[3]):
        raise BadValue(f"{flag} is {text!r}; give a number such as 1e9, 250M or 1.5B", param=flag)
    value = float(match[1].replace("_", "").replace(",", "")) * 10.0 ** int(match[2] or 0)
    value *= _SCALES[match[3].lower()]
    if not 0 < value <= _MAX_QUANTITY:
        raise BadValue(f"{flag} is {text}; give a number above 0, up to {_MAX_QUANTITY:g}", param=flag)
    return value


def read_count(text: str, flag: str) -> int:
    """Parse a whole number like `read_quantity`."""
    value = read_quantity(text, flag)
    if value != round(value):
        raise BadValue(f"{flag} is {text}, which is no whole number; give one such as 250M", param=flag)
    return round(value)


def shown_bytes(count: float) -> str:
    """Format bytes in decimal units, such as 3.1 TB."""
    power = 0
    while count >= 999.5 and power < len(_BYTE_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{_digits(count)} {_BYTE_UNITS[power]}"


def shown_hours(hours: float) -> str:
    """Format a duration, such as 22.3 hours."""
    seconds = 3600 * hours
    for size, unit in ((365.25 * 86400, "years"), (2 * 86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{_digits(seconds / {'years': 365.25 * 86400, 'days': 86400}.get(unit, size))} {unit}"
    return f"{_digits(seconds)} seconds"


def shown_number(value: float) -> str:
    """Format a number with three significant digits, such as 2,580,000 or 0.0412."""
    return _digits(value)


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    if decimals == 0:
        return f"{round(value, 2 - math.floor(math.log10(abs(value)))):,.0f}"
    text = f"{value:,.{min(decimals, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
