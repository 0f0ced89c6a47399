"""Small charts as SVG: lines, bars and points, with readable axes. No scripts, no links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Points
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Position of a value along the axis, from 0 to 1."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
            return [tick for tick in steps if self.low <= tick <= self.high]
        step = _nice((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def axis(label: str, values: Sequence[float], *, zero: bool = True, log: bool = False) -> Axis:
    """An axis that covers all values, from zero by default. With `log`, it is logarithmic if the values span
    at least a factor of ten."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if log and low > 0 and high >= 10 * low:
        return Axis(label, low, high, log=True)
    low = 0.0 if zero else low
    return Axis(label, low, high if high > low else low + 1.0)


def lines(series: Sequence[Series], x: Axis, y: Axis) -> str:
    parts = [_frame(x, y)]
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in one.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if one.dots:
            parts += [_dot(x, y, a, b, colour, one.name) for a, b in one.points]
    if len(series) > 1:
        parts += [_legend(number, one.name) for number, one in enumerate(series)]
    return _svg(parts)


def bars(edges: Sequence[float], counts: Sequence[float], x: Axis, y: Axis) -> str:
    parts = [_frame(x, y)]
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        at, width = _x(x, left), max(0.5, _x(x, right) - _x(x, left) - 0.5)
        top = _y(y, count)
        title = f"<title>{left:.4g} – {right:.4g}: {count:.4g}</title>"
        parts.append(
            f'<rect x="{at:.1f}" y="{top:.1f}" width="{width:.1f}" height="{_y(y, y.low) - top:.1f}" '
            f'fill="{_COLOURS[0]}" fill-opacity="0.75">{title}</rect>'
        )
    return _svg(parts)


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _frame(x: Axis, y: Axis) -> str:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.6g}</text>')
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(
        f'<text transform="translate(14 {(bottom + _TOP) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)


def _dot(x: Axis, y: Axis, a: float, b: float, colour: str, name: str) -> str:
    title = f"<title>{escape(name)}: {a:.4g}, {b:.4g}</title>"
    return f'<circle cx="{_x(x, a):.1f}" cy="{_y(y, b):.1f}" r="3.5" fill="{colour}">{title}</circle>'


def _legend(number: int, name: str) -> str:
    at = _TOP + 12 + 15 * number
    colour = _COLOURS[number % len(_COLOURS)]
    return f'<text x="{_LEFT + 8}" y="{at}" style="fill:{colour}" class="name">— {escape(name)}</text>'


def _x(x: Axis, value: float) -> float:
    return _LEFT + x.place(value) * (WIDTH - _LEFT - _RIGHT)


def _y(y: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - y.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _nice(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)
