"""Results of a fuzzing run: counts, faults with commands to repeat them, and the saved table."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.exchange import SLOW_S, Outcome
from tests.fuzz.probe import ProbeResult

MAX_SLOWDOWN = 3.0  # limit of another client's p99 relative to the idle server
MAX_SHOWN = 20
MAX_SLOWEST = 5


@dataclass(slots=True)
class Run:
    """One kind of fuzzing against one server."""

    server: str
    source: str  # own | generation | schemathesis
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)
    slowest: list[tuple[float, str, str, str]] = field(default_factory=list)  # seconds, kind, route, repeat
    idle: ProbeResult = field(default_factory=ProbeResult)
    busy: ProbeResult = field(default_factory=ProbeResult)
    memory_mb: tuple[int, int] = (0, 0)  # all processes together, before and after
    seconds: float = 0.0

    def count(self, kind: str, route: str, outcome: Outcome, repeat: str = "") -> None:
        self.kinds[kind] += 1
        self.statuses["none" if outcome.status is None else f"{outcome.status // 100}xx"] += 1
        if outcome.seconds >= SLOW_S:
            self.slowest.append((round(outcome.seconds, 2), kind, route, repeat))
            self.slowest = sorted(self.slowest, reverse=True)[:MAX_SLOWEST]
        if outcome.fault is not None:
            self.faults[outcome.fault] += 1
            detail = {"fault": outcome.fault, "kind": kind, "route": route, "detail": outcome.detail}
            self.examples.append(detail | {"repeat": repeat})

    @property
    def num_cases(self) -> int:
        return self.kinds.total()

    @property
    def slowdown(self) -> float:
        return self.busy.p99_ms / self.idle.p99_ms

    def broken(self) -> list[str]:
        """Describe the promises that this run broke."""
        found = [f"{count} × {fault}" for fault, count in self.faults.items()]
        if self.busy.num_wrong:
            found.append(f"{self.busy.num_wrong} wrong answers to another client: {self.busy.wrong}")
        if self.slowdown > MAX_SLOWDOWN:
            found.append(
                f"another client's p99 went from {self.idle.p99_ms:.1f} to {self.busy.p99_ms:.1f} ms"
            )
        return [f"{self.server}, {self.source}: {each}" for each in found]

    def as_json(self) -> dict[str, Any]:
        probes = {
            name: {
                "count": len(probe.latencies_ms),
                "p50_ms": round(probe.p50_ms, 2),
                "p99_ms": round(probe.p99_ms, 2),
            }
            for name, probe in (("idle", self.idle), ("busy", self.busy))
        }
        return {
            "server": self.server,
            "source": self.source,
            "cases": self.num_cases,
            "kinds": dict(self.kinds),
            "statuses": dict(self.statuses),
            "faults": dict(self.faults),
            "wrong_answers": self.busy.num_wrong,
            "probe": probes,
            "memory_mb": list(self.memory_mb),
            "seconds": round(self.seconds),
            "examples": self.examples[:MAX_SHOWN],
            "slowest": [each[:3] for each in self.slowest],
        }


COLUMNS = (
    "server",
    "source",
    "cases",
    "2xx",
    "4xx",
    "5xx",
    "left early",
    "closed without reply",
    "hangs",
    "wrong or odd answers",
    "p99 idle, ms",
    "p99 under fuzz, ms",
    "memory, MB",
)


def table(runs: list[Run]) -> str:
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for run in runs:
        faults, statuses = run.faults, run.statuses
        unanswered = faults["closed"] + faults["hang"]
        odd = faults["echo"] + faults["not JSON"] + faults["schema"] + run.busy.num_wrong
        rows.append(
            [
                run.server,
                run.source,
                f"{run.num_cases:,}",
                *(f"{statuses[name]:,}" for name in ("2xx", "4xx", "5xx")),
                f"{statuses['none'] - unanswered:,}",
                str(faults["closed"]),
                str(faults["hang"]),
                str(odd),
                f"{run.idle.p99_ms:.1f}",
                f"{run.busy.p99_ms:.1f}",
                "{} → {}".format(*run.memory_mb),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def save(runs: list[Run], folder: Path, options: str) -> None:
    """Write `fuzz.md` and `fuzz.json`."""
    by_source = Counter[str]()
    for run in runs:
        by_source[run.source] += run.num_cases
    total = ", ".join(f"{count:,} of {source}" for source, count in by_source.items())
    broken = [line for run in runs for line in run.broken()]
    verdict = (
        "Every promise held."
        if not broken
        else "Broken promises:\n\n" + "\n".join(f"- {line}" for line in broken)
    )
    text = f"""# Fuzzing every route

`make fuzz ARGS="{options}"` starts a server for each kind of model on the CPU and sends it hostile requests.
Meanwhile another client sends a small valid request every 50 ms and checks each answer. Cases: {total}.

{verdict}

{table(runs)}

The idle figures come from quiet phases of the same run: three seconds after every six of fuzzing.
"Left early" are requests whose client disconnected on purpose. Latency counts from when a request was due.
"""
    (folder / "fuzz.md").write_text(text)
    (folder / "fuzz.json").write_text(json.dumps([run.as_json() for run in runs], indent=1) + "\n")
