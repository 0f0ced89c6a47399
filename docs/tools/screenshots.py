"""Take the screenshots in docs/assets, in a browser that may only reach this machine.

    pip install playwright && apt-get install chromium
    penstock serve --port 8000 &
    python docs/tools/screenshots.py --server http://127.0.0.1:8000 --site build/site

Fails if a page asks another host for anything, or writes an error to its console.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_BYTES = 200_000
SIZE = {"width": 1280, "height": 720}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_site(folder: str) -> str:
    """Serve the built site on a free port of loopback, until this process ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Camera:
    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        page.route("**/*", self._guard)
        page.on("console", self._note)

    def _guard(self, route: Any) -> None:
        if urlparse(route.request.url).hostname in ("127.0.0.1", None):
            route.continue_()
        else:
            self.problems.append(f"{self.page.url} asked for {route.request.url}")
            route.abort()

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"{self.page.url}: {message.text}")

    def take(self, name: str) -> None:
        file = ASSETS / f"{name}.png"
        self.page.screenshot(path=str(file))
        if file.stat().st_size > MAX_BYTES:
            self.problems.append(f"{file.name} has {file.stat().st_size:,} bytes; at most {MAX_BYTES:,}")


def product(camera: Camera, server: str) -> None:
    camera.page.goto(server + "/", wait_until="networkidle")
    button = camera.page.get_by_role("button", name="Embed", exact=True)
    with camera.page.expect_response("**/v1/embeddings"):
        button.click()
    button.click(trial=True)  # waits until it can be clicked again: the vectors are shown
    camera.take("playground")
    camera.page.goto(server + "/docs", wait_until="networkidle")
    camera.take("api-docs")


def documentation(camera: Camera, site: str) -> None:
    """Take a picture of the first page, open every other one, and search."""
    camera.page.goto(site + "/index.html", wait_until="networkidle")
    camera.take("site")
    links = camera.page.eval_on_selector_all(
        "nav.md-nav--primary a.md-nav__link[href]", "all => all.map(a => a.href)"
    )
    for link in sorted({link.split("#")[0] for link in links}):
        camera.page.goto(link, wait_until="networkidle")
    camera.page.goto(site + "/index.html", wait_until="networkidle")
    camera.page.click(".md-search__input")
    camera.page.locator(".md-search__input").press_sequentially("prefix caching")
    camera.page.wait_for_selector(".md-search-result__item")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="address of the server, or empty")
    parser.add_argument("--site", default="build/site")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        camera = Camera(browser.new_page(viewport=SIZE))
        if options.server:
            product(camera, options.server)
        documentation(camera, serve_site(options.site))
        browser.close()
    for problem in camera.problems:
        print(problem)
    return 1 if camera.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
