"""Draw docs/assets/versus_vllm.svg, throughput divided by vLLM's, from benchmarks/results/versus_vllm.md.

python benchmarks/versus_vllm_chart.py
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks/results/versus_vllm.md"
CHART = ROOT / "docs/assets/versus_vllm.svg"

WIDTH, LABELS, BARS, ROW, TOP = 860, 350, 350, 26, 58
TITLE = "Throughput compared with vLLM 0.26 on one H200 (higher is better)"
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 16px; font-weight: 600 }
  .note, .axis { font-size: 12px; fill: #57606a }
  .bar { fill: #2f7d95 }
  .line { stroke: #57606a; stroke-dasharray: 3 3 }
  .paper { fill: #ffffff }
"""


@dataclass(frozen=True)
class Row:
    load: str
    penstock: str
    vllm: str
    unit: str

    @property
    def ratio(self) -> float:
        return _number(self.penstock) / _number(self.vllm)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def read_rows(markdown: str) -> list[Row]:
    """The rows of the first table that has a column for each engine."""
    rows: list[Row] = []
    for line in markdown.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0] not in ("load", "---"):
            rows.append(Row(*cells[:4]))
    return rows


def draw(rows: list[Row]) -> str:
    longest = max(row.ratio for row in rows)
    scale = BARS / longest
    height = TOP + ROW * len(rows) + 34
    one = LABELS + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Throughput of Penstock divided by throughput of vLLM</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="16" y="26">{TITLE}</text>',
        f'<text class="axis" x="{one:.0f}" y="{TOP - 10}" text-anchor="middle">vLLM = 1×</text>',
    ]
    for number, row in enumerate(rows):
        y = TOP + number * ROW
        length = row.ratio * scale
        label = f"{row.ratio:.2f}×" if row.ratio < 1.5 else f"{row.ratio:.1f}×"
        parts += [
            f'<text x="{LABELS - 10}" y="{y + 16}" text-anchor="end">{escape(row.load)}</text>',
            f'<rect class="bar" x="{LABELS}" y="{y + 3}" width="{length:.1f}" height="{ROW - 8}" rx="2"/>',
            f'<text x="{LABELS + length + 8:.1f}" y="{y + 16}">{label}'
            f'<tspan class="note" dx="8">{row.penstock} {escape(row.unit)}</tspan></text>',
        ]
    bottom = TOP + ROW * len(rows)
    parts += [
        f'<line class="line" x1="{one:.1f}" y1="{TOP - 4}" x2="{one:.1f}" y2="{bottom}"/>',
        f'<text class="note" x="16" y="{bottom + 22}">Same client, loads in turn, 2026-11-15. Source: '
        "benchmarks/results/versus_vllm.md</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    CHART.parent.mkdir(parents=True, exist_ok=True)
    CHART.write_text(draw(read_rows(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {CHART.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
