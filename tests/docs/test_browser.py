"""Every page opens in a real browser, without an error and without a request to another host."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from docs.tools.screenshots import SIZE, Camera

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium package")


@pytest.fixture(scope="module")
def camera() -> Iterator[Camera]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Camera(browser.new_page(viewport=SIZE))
        browser.close()


def opened(camera: Camera, address: str) -> Any:
    camera.problems.clear()
    camera.page.goto(address, wait_until="networkidle")
    assert camera.problems == []
    return camera.page


def test_the_playground_embeds(camera: Camera, url_of: Callable[[str | None], str]) -> None:
    page = opened(camera, url_of(None) + "/")
    with page.expect_response("**/v1/embeddings") as answer:
        page.get_by_role("button", name="Embed", exact=True).click()
    assert answer.value.status == 200
    assert camera.problems == []
