"""The dashboard and the alerts use existing metrics, in expressions that Prometheus can parse."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.dashboard_queries import DASHBOARD, queries
from docs.tools.reference import RENDERERS
from tests.docs.blocks import ROOT
from tests.waiting import PATIENCE_S

PROMETHEUS = ROOT / "deploy" / "prometheus"
SUFFIXES = ("_bucket", "_sum", "_count")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of the package prometheus"
)


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def promtool(*words: str, cwd: Path) -> None:
    done = subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def documented() -> set[str]:
    """Every metric in the reference."""
    return set(re.findall(r"`(penstock_\w+)`", RENDERERS["metrics"]()))


def named(expressions: list[str]) -> set[str]:
    names = {name for each in expressions for name in re.findall(r"\bpenstock_\w+", each)}
    known = documented()
    return {
        next((name.removesuffix(end) for end in SUFFIXES if name.removesuffix(end) in known), name)
        for name in names
    }


def test_every_metric_of_the_dashboard_and_the_alerts_is_one_of_the_reference(
    dashboard: dict[str, Any],
) -> None:
    expressions = [expression for _, expression in queries(dashboard)]
    variables = [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    used = named([*expressions, *variables, *(rule["expr"] for rule in alerts())])
    assert len(used) > 30
    assert sorted(used - documented()) == []


def test_the_dashboard_has_what_grafana_needs_to_load_it(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert dashboard["uid"] == "penstock" and dashboard["schemaVersion"] >= 36
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
    places = [(each["gridPos"]["y"], each["gridPos"]["x"]) for each in panels]
    assert places == sorted(places) and len(set(places)) == len(places)


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]


def test_every_alert_has_a_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    tried = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tried == {rule["alert"] for rule in alerts()}


@needs_promtool
def test_every_query_of_the_dashboard_can_be_parsed(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{number}", "expr": expression}
        for number, (_, expression) in enumerate(queries(dashboard))
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", cwd=tmp_path)


@needs_promtool
def test_the_configuration_and_the_alerts_hold() -> None:
    promtool("check", "config", "prometheus.yml", cwd=PROMETHEUS)
    promtool("test", "rules", "alerts_test.yml", cwd=PROMETHEUS)
