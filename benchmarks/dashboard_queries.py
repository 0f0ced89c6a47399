"""Run every query of the Grafana dashboard on a real Prometheus, and list the queries without data.

Start a server, put load on it, and start a Prometheus that scrapes it. Then:

    python benchmarks/dashboard_queries.py --prometheus http://127.0.0.1:9090
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "penstock.json"
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and expression of every query, with the variables filled in."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], filled(target["expr"])
    for annotation in dashboard["annotations"]["list"]:
        if "expr" in annotation:
            yield f"annotation {annotation['name']}", filled(annotation["expr"])


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def ask(prometheus: str, expression: str) -> int:
    """The number of series that a query returns."""
    url = f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url) as answer:
        return len(json.load(answer)["data"]["result"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    options = parser.parse_args()
    found = [
        (title, expression, ask(options.prometheus, expression))
        for title, expression in queries(json.loads(DASHBOARD.read_text()))
    ]
    empty = [(title, expression) for title, expression, count in found if count == 0]
    for title, expression in empty:
        print(f"empty: {title}: {expression}")
    print(f"{len(found) - len(empty)} of {len(found)} queries return data")
    sys.exit(1 if empty else 0)


if __name__ == "__main__":
    main()
