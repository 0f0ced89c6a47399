"""The site builds without broken links, loads nothing from other hosts, and covers all parts of the code."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

import penstock
from benchmarks import versus_vllm_chart
from docs.tools.reference import RENDERERS
from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the docs extra: pip install '.[docs]'")
    pytest.importorskip("material", reason="needs the docs extra: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # strict: a broken link fails
    return folder


class Loads(HTMLParser):
    """Collects the addresses that a browser loads without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [
            value for name in ("src", "srcset", "poster", "data") if (value := given.get(name))
        ]
        if tag == "link" and (address := given.get("href")) and given.get("rel") != "canonical":
            self.addresses.append(address)


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        outside = [each for each in loads.addresses if re.match(r"(https?:)?//", each)]
        assert outside == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), (
            sheet.name
        )


def test_the_search_index_finds_a_metric_a_flag_and_a_method(site: Path) -> None:
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    for word in ("penstock_batch_fill", "--max-num-batched-tokens", "embed_chunks"):
        assert word in index


def test_measured_results_are_pages_of_the_site(site: Path) -> None:
    assert (site / "results/gpu_loads.html").is_file()


def test_the_reference_has_every_route() -> None:
    from penstock.api.app import ROUTES

    text = RENDERERS["http"]()
    for route in (each for each in ROUTES if each.is_listed):
        assert f"{route.all_methods[0]} {route.path}`" in text


def test_the_reference_has_every_method_and_every_exported_type() -> None:
    text = RENDERERS["engine"]()
    methods = [name for name, member in vars(penstock.Engine).items() if inspect.isfunction(member)]
    assert [name for name in methods if not name.startswith("_") and f"`Engine.{name}`" not in text] == []
    awaited = RENDERERS["async-engine"]()
    assert [name for name in methods if not name.startswith("_") and f"`{name}`" not in awaited] == []
    types = RENDERERS["results"]()
    exported = [name for name in penstock.__all__ if isinstance(getattr(penstock, name), type)]
    elsewhere = {"AsyncEngine", "Engine", "EngineConfig"}
    assert [name for name in exported if f"### `{name}`" not in types and name not in elsewhere] == []


def test_the_reference_has_every_metric() -> None:
    text = RENDERERS["metrics"]()
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "penstock").rglob("*.py")]
    names = {
        name
        for source in sources
        for name in re.findall(r"(?:Counter|Gauge|Histogram)\(\s*\"(penstock_\w+)\"", source)
    }
    assert len(names) > 20
    assert [name for name in sorted(names) if f"`{name}" not in text] == []


def test_the_chart_is_drawn_from_the_table() -> None:
    rows = versus_vllm_chart.read_rows(versus_vllm_chart.TABLE.read_text(encoding="utf-8"))
    assert versus_vllm_chart.draw(rows) == versus_vllm_chart.CHART.read_text(encoding="utf-8")
    for row in rows:
        assert row.ratio >= 1


def test_links_of_the_readme_lead_to_files() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)", text):
            assert target.startswith("http") or (ROOT / target).exists(), f"{name} links to {target}"


def test_the_changelog_has_this_release() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" in text
    assert f"## {penstock.__version__}" in text


def test_the_table_of_dialects_has_every_route_and_field() -> None:
    from penstock.api.app import ROUTES
    from penstock.api.schema import kinds_of

    text = RENDERERS["dialects"]()
    for route in (each for each in ROUTES if each.is_listed):
        assert f" {route.path}`" in text
        for kind in kinds_of(route):
            names = (
                [] if kind.body is None else [each.encode_name for each in msgspec.structs.fields(kind.body)]
            )
            assert [name for name in names if f"`{name}`" not in text] == []
    assert "| no effect | `user`: the server does not distinguish users |" in text
