"""The API reference at /docs shows every route in a browser, sends requests, and contacts no other host."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.tools.screenshots import Camera
from penstock.api.app import ROUTES
from penstock.api.dialects import pages
from tests.api.local_app import local_app
from tests.api.model_server import serving_models
from tests.checkpoints import write_bert

PAGES = Path(pages.__file__).parents[1] / "pages"
CHROMIUM = shutil.which("chromium")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium package")
KEY = "secret-17"
Url = Callable[[str | None], str]


# --- files --------------------------------------------------------------------------------------------------


def test_the_script_is_the_one_that_is_recorded() -> None:
    (script,) = (PAGES / "reference").glob("scalar-*.js.gz")
    record = (PAGES / "reference/README.md").read_text()
    assert script.name in record
    assert hashlib.sha256(gzip.decompress(script.read_bytes())).hexdigest() in record
    assert "MIT" in (PAGES / "reference/LICENSE").read_text()
    assert script.stat().st_size < 2 << 20


def test_the_page_names_files_that_are_served_and_kept_by_browsers(tmp_path: Path) -> None:
    scripts = re.findall(r'<script src="([^"]+)">', (PAGES / "docs.html").read_text())
    assert len(scripts) == 2
    with local_app(write_bert(tmp_path)) as (http, _):
        for script in scripts:
            for path in (f"/{script}", f"/docs/{script}"):  # as requested by /docs and by /docs/
                answer = http.get(path)
                assert answer.status_code == 200, path
                assert answer.headers["content-type"].startswith("text/javascript")
        assert "immutable" in http.get(f"/{scripts[0]}").headers["cache-control"]
        assert http.get(f"/{scripts[0]}").headers["content-encoding"] == "gzip"
        assert "createApiReference" in http.get(f"/{scripts[0]}").text
        assert http.get("/docs/other.js").status_code == 404
        assert http.get("/docs/../../fields.toml").status_code == 404
        assert "/docs/{file}" not in http.get("/openapi.json").json()["paths"]


def test_the_page_forbids_the_browser_to_reach_other_hosts() -> None:
    text = (PAGES / "docs.html").read_text()
    policy = re.search(r'content="(default-src[^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1] and "connect-src 'self'" in policy[1]
    assert "http" not in policy[1] and "*" not in policy[1] and "unsafe-eval" not in policy[1]


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, address: str, scheme: str = "light") -> Camera:
    size = {"width": 1280, "height": 24_000}  # the page renders only its visible part
    camera = Camera(browser.new_context(viewport=size, color_scheme=scheme).new_page())
    camera.page.on("pageerror", lambda error: camera.problems.append(str(error)))
    camera.page.goto(address)
    camera.page.get_by_text("/version").first.wait_for()  # the last route
    return camera


def is_dark(camera: Camera) -> bool:
    colour = camera.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return int(re.findall(r"\d+", colour)[0]) < 128


@in_a_browser
def test_the_page_lists_every_route_in_the_dark_too(browser: Any, url_of: Url) -> None:
    camera = opened(browser, url_of(None) + "/docs", "dark")
    text = camera.page.inner_text("body")
    assert [route.path for route in ROUTES if route.is_listed and route.path not in text] == []
    assert is_dark(camera)
    assert camera.problems == []


@in_a_browser
def test_an_operation_shows_its_fields_and_example(browser: Any, url_of: Url) -> None:
    camera = opened(browser, url_of(None) + "/docs/#tag/openai/POST/v1/embeddings")  # /docs/ works too
    camera.page.get_by_text("Put this text before the input.").first.wait_for()
    camera.page.get_by_text("Water finds its level.").first.wait_for()
    assert not is_dark(camera)
    assert camera.problems == []


@in_a_browser
def test_a_request_is_sent_with_a_key(browser: Any, tmp_path: Path) -> None:
    with serving_models({"model": write_bert(tmp_path)}, api_keys=(KEY,)) as address:
        camera = opened(browser, address + "/docs#tag/openai/POST/v1/embeddings")
        page = camera.page
        page.get_by_placeholder("Token").first.fill(KEY)
        page.get_by_role("button", name="Test Request").first.click()
        with page.expect_response("**/v1/embeddings") as answer:
            page.get_by_role("button", name="Send").first.click()
        assert answer.value.request.headers["authorization"] == f"Bearer {KEY}"
        assert answer.value.status == 200
        assert camera.problems == []
