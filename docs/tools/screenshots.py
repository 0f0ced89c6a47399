"""Take the screenshots in docs/assets, in a browser that may only reach this machine.

    pip install -e '.[dev]' && apt-get install chromium
    PENSTOCK_TEST_MODELS=FOLDER python -m docs.tools.screenshots

FOLDER has the models `reranker-mini`, `question-tiny`, `smollm2` and `potion-8m`; small seeded models replace
missing ones. `--only NAME …` takes some of the pictures. With `--site build/site` the script also opens every
page of the built documentation. It fails if a page requests anything from another host, or writes an error to
its console.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tests.docs.playground_page import Playground
from tests.waiting import wait_until

ASSETS = Path(__file__).resolve().parents[1] / "assets"
MAX_BYTES = 150_000
SIZE = {"width": 1280, "height": 720}
PHONE = {"width": 360, "height": 780}
MAX_HEIGHT = 1000  # CSS pixels per picture
SCALE = 1.5  # image pixels per CSS pixel
NUM_COLOURS = 200
DEFAULT_NAME = "sentence-transformers/all-MiniLM-L6-v2"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_site(folder: str) -> str:
    """Serve the built site on a free loopback port until this process ends; returns its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Camera:
    """A browser page that records requests to other hosts and errors, and takes pictures."""

    def __init__(self, page: Any, folder: Path = ASSETS) -> None:
        self.page = page
        self.folder = folder
        self.problems: list[str] = []
        page.route("**/*", self._guard)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(f"{page.url}: {error}"))

    def _guard(self, route: Any) -> None:
        if urlparse(route.request.url).hostname in ("127.0.0.1", None):
            route.continue_()
        else:
            self.problems.append(f"{self.page.url} asked for {route.request.url}")
            route.abort()

    def _note(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"{self.page.url}: {message.text}")

    def take(self, name: str, *, in_sight: bool = False) -> None:
        """Take a picture of the page from its top, or of the visible part."""
        options: dict[str, Any] = {"animations": "disabled"}
        if not in_sight:
            height = self.page.evaluate("document.documentElement.scrollHeight")
            width = self.page.viewport_size["width"]
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, MAX_HEIGHT)}
            options |= {"full_page": True, "clip": clip}
        picture = shrunk(self.page.screenshot(**options))
        file = self.folder / f"{name}.png"
        file.write_bytes(picture)
        if len(picture) > MAX_BYTES:
            self.problems.append(f"{file.name} has {len(picture):,} bytes; at most {MAX_BYTES:,}")


def shrunk(picture: bytes) -> bytes:
    """Reduce the picture to a palette that keeps the colours of small areas too."""
    from PIL import Image

    whole, method = Image.open(io.BytesIO(picture)).convert("RGB"), Image.Quantize.MAXCOVERAGE
    reduced = whole.quantize(NUM_COLOURS, method=method, dither=Image.Dither.NONE)
    out = io.BytesIO()
    reduced.save(out, "PNG", optimize=True)
    return out.getvalue()


# ── What the pictures show ────────────────────────────────────────────────────────────────────────


def show_embedding(page: Playground) -> None:
    page.choose("Embed").run()


def show_search(page: Playground) -> None:
    page.choose("Search").run()


def show_ranking(page: Playground) -> None:
    page.choose("Rerank").run()


def show_token_map(page: Playground) -> None:
    documents = page.choose("Rerank").field("documents").input_value().splitlines()
    page.fill(documents="\n".join(documents[:4])).run()


def show_labels(page: Playground) -> None:
    questions = (
        "How do turbines work?",
        "What do you think about it?",
        "What is the capital of France?",
        "What did you mean by that last comment?",
    )
    page.choose("Classify").fill(input="\n".join(questions)).run()


def show_entities(page: Playground) -> None:
    page.choose("Entities").run()


def show_chat(page: Playground) -> None:
    page.choose("Chat").run()


def show_tokens(page: Playground) -> None:
    text = "Hydroelectricity: ein Druckrohr führt das Wasser zur Turbine – Ενέργεια, энергия ♨"
    page.choose("Tokens").fill(prompt=text).run()


def show_comparison(page: Playground) -> None:
    page.page.click("#compare-toggle")
    page.page.locator("#compare input").first.check()
    page.choose("Search").run()


def show_live(page: Playground) -> None:
    with _load(page.page.url, *[_embed_texts] * 3):
        page.choose("Live")
        page.page.locator("#live[data-samples='25']").wait_for()


def show_models(page: Playground) -> None:
    """Show an operator's live view while one of the models sleeps."""
    url, models = page.page.url, page.page.locator("#live-models")
    page.page.click("#key-toggle")
    page.page.fill("#key", ADMIN_KEY)
    page.page.click("#key-form button")
    page.choose("Live")
    models.get_by_role("button", name="Sleep spare").click()
    models.locator(".badge[data-state=asleep]").wait_for()
    with _load(url, _embed_texts, _embed_texts, _rank, _complete):
        page.page.locator("#live[data-samples='20']").wait_for()


Load = Callable[[int], tuple[str, dict[str, Any]]]  # thread number → path and body of a request


def _embed_texts(number: int) -> tuple[str, dict[str, Any]]:
    texts = [f"The {number}th pipe carries water to turbine {row}." for row in range(24)]
    return "/v1/embeddings", {"input": texts, "user": str(number)}


def _rank(number: int) -> tuple[str, dict[str, Any]]:
    documents = [f"Pipe {row} carries water." for row in range(8)]
    return "/rerank", {"model": "rerank", "query": f"Where does pipe {number} lead?", "documents": documents}


def _complete(number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "chat", "prompt": f"Pipe {number} is", "max_tokens": 24}


@contextmanager
def _load(url: str, *requests: Load) -> Iterator[None]:
    """Send a varying number of requests per second until the block ends, with a thread for each kind."""
    import math
    import time

    import httpx

    done = threading.Event()

    def send(number: int, request: Load) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not done.wait(0.02 + 0.15 * (1 + math.sin(time.monotonic() / 3))):
                path, body = request(number)
                client.post(path, json=body)

    threads = [threading.Thread(target=send, args=each, daemon=True) for each in enumerate(requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


Show = Callable[[Playground], None]


@dataclass(frozen=True)
class Subject:
    """A model to take pictures of. `published` is its name in the folder of models. `made` names the function
    that writes it from the default model, and `stand_in` is the kind of the seeded model that replaces it."""

    name: str
    stand_in: str | None = None
    published: str | None = None
    made: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # engine options of the published model
    beside: str | None = None  # another model in the same server
    with_others: bool = False  # its own server, with all of `OTHERS`


SUBJECTS = {
    "embedder": Subject(DEFAULT_NAME),
    "reranker": Subject(
        "reranker-mini", "cross-encoder", "reranker-mini", options={"pooler_config": {"score_labels": [1, 0]}}
    ),
    "late": Subject("minilm-late-interaction", "colbert", made="write_late_model"),
    "classifier": Subject("question-tiny", "classifier", "question-tiny"),
    "token-classifier": Subject("minilm-entities", "tagger", made="write_entity_model"),
    "generator": Subject("smollm2", "llama", "smollm2"),
    "pair": Subject(DEFAULT_NAME, beside="potion-8m"),
    "models": Subject("embed", with_others=True),
}
OTHERS = {  # the models beside a `with_others` subject, by name
    "chat": Subject("chat", "llama", "smollm2"),
    "rerank": Subject("rerank", "cross-encoder", made="write_late_model"),
    "spare": Subject("spare", "classifier", "question-tiny"),
}
ADMIN_KEY = "operator"


@dataclass(frozen=True)
class Picture:
    subject: str
    show: Show
    dark: bool = False
    phone: bool = False


PICTURES = {
    "playground": Picture("embedder", show_embedding),
    "playground-search": Picture("embedder", show_search),
    "playground-reranker": Picture("reranker", show_ranking),
    "playground-late": Picture("late", show_token_map),
    "playground-classifier": Picture("classifier", show_labels),
    "playground-entities": Picture("token-classifier", show_entities),
    "playground-chat": Picture("generator", show_chat),
    "playground-tokens": Picture("generator", show_tokens),
    "playground-compare": Picture("pair", show_comparison),
    "playground-live": Picture("embedder", show_live),
    "playground-models": Picture("models", show_models),
    "playground-dark": Picture("late", show_token_map, dark=True),
    "playground-phone": Picture("token-classifier", show_entities, phone=True),
}


@dataclass(frozen=True)
class ApiPicture:
    """A picture of /docs, at the main route of the model."""

    subject: str
    operation: str  # the last part of the route's anchor in the page


API_PICTURES = {
    "api-docs": ApiPicture("embedder", "openai/POST/v1/embeddings"),
    "api-docs-reranker": ApiPicture("reranker", "vllm/POST/rerank"),
    "api-docs-late": ApiPicture("late", "native/POST/v1/maxsim"),
    "api-docs-classifier": ApiPicture("classifier", "vllm/POST/classify"),
    "api-docs-token-classifier": ApiPicture("token-classifier", "native/POST/v1/entities"),
    "api-docs-generator": ApiPicture("generator", "openai/POST/v1/chat/completions"),
}


def take_picture(browser: Any, url: str, name: str, folder: Path, model: str | None = None) -> list[str]:
    """Take one picture; return what went wrong. `model` is selected first if the server has several."""
    picture = PICTURES[name]
    page = browser.new_page(
        viewport=PHONE if picture.phone else SIZE,
        color_scheme="dark" if picture.dark else "light",
        device_scale_factor=SCALE,
    )
    camera = Camera(page, folder)
    try:
        picture.show(Playground(page).open(url, model=model))
        page.mouse.move(0, 0)
        camera.take(name)
    finally:
        page.close()
    return [f"{name}: {problem}" for problem in camera.problems]


def take_api_picture(browser: Any, url: str, name: str, folder: Path) -> list[str]:
    """Take a picture of one route on /docs; return what went wrong."""
    operation = API_PICTURES[name].operation
    page = browser.new_page(viewport={**SIZE, "height": 900}, device_scale_factor=SCALE)
    camera = Camera(page, folder)
    try:
        page.goto(f"{url}/docs#tag/{operation}")
        place = page.locator(f'[id$="{operation}"]').first
        place.wait_for()
        wait_until(lambda: abs(place.bounding_box()["y"]) < 2)  # the page has scrolled there
        page.wait_for_load_state("networkidle")
        page.evaluate("document.activeElement.blur()")
        camera.take(name, in_sight=True)
    finally:
        page.close()
    return [f"{name}: {problem}" for problem in camera.problems]


# ── The models ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def serving_subject(subject: Subject, models: Path | None, scratch: Path) -> Iterator[str]:
    from penstock.checkpoint.find import default_folder
    from tests.api.model_server import serving_models
    from tests.e2e.server import serving

    if subject.with_others:
        folders = {name: _folder(other, models, scratch)[0] for name, other in OTHERS.items()}
        named = [f"{subject.name}={default_folder()}", *(f"{name}={path}" for name, path in folders.items())]
        environment = {**os.environ, "PENSTOCK_ADMIN_KEY": ADMIN_KEY}
        with serving(*named, "--device", "cpu", "--kv-cache-gb", "0.2", environment=environment) as server:
            yield server.url
        return
    # A real server, because the pictures need the metrics of its engine.
    if subject.stand_in is None and subject.beside is None:
        with serving("--device", "cpu") as server:
            yield server.url
        return
    folder, options = _folder(subject, models, scratch)
    held = {subject.name: folder}
    if subject.beside is not None:
        published = None if models is None else models / subject.beside
        stand_in = _stand_in("prompts", scratch)
        held[subject.beside] = published if published is not None and published.is_dir() else stand_in
    with serving_models(held, {subject.name: options}) as url:
        yield url


def _folder(subject: Subject, models: Path | None, scratch: Path) -> tuple[Path | None, dict[str, Any]]:
    if subject.stand_in is None:
        return None, {}
    if subject.made is not None:
        from docs.tools import picture_models
        from penstock.offline.open import DescribedModel

        source = DescribedModel.of(None, {"device": "cpu"}).spec.path
        return getattr(picture_models, subject.made)(source, scratch / subject.name), {}
    published = None if models is None else models / str(subject.published)
    if published is not None and published.is_dir():
        return published, subject.options
    return _stand_in(subject.stand_in, scratch), {}


def _stand_in(kind: str, scratch: Path) -> Path:
    from tests.docs.stand_ins import STAND_INS

    return STAND_INS[kind](scratch / kind)


def take_all(browser: Any, models: Path | None, only: list[str]) -> list[str]:
    """Take every picture, one server after another; return what went wrong."""
    problems: list[str] = []
    wanted = {name: picture.subject for name, picture in PICTURES.items()}
    wanted |= {name: picture.subject for name, picture in API_PICTURES.items()}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, subject in SUBJECTS.items():
            names = [name for name, of in wanted.items() if of == kind and (not only or name in only)]
            if not names:
                continue
            with serving_subject(subject, models, Path(scratch)) as url:
                for name in names:
                    take = take_api_picture if name in API_PICTURES else take_picture
                    problems += take(browser, url, name, ASSETS)
                    print(f"{name}.png", flush=True)
    return problems


def documentation(camera: Camera, site: str) -> None:
    """Take a picture of the first page, open all other pages, and use the search."""
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


@contextmanager
def chromium() -> Iterator[Any]:
    """Run Debian's Chromium headless."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="pictures to take; all by default"
    )
    parser.add_argument("--site", help="folder of the built documentation, to open all of its pages")
    options = parser.parse_args()
    models = os.environ.get("PENSTOCK_TEST_MODELS")
    with chromium() as browser:
        problems = take_all(browser, Path(models) if models else None, options.only)
        if options.site:
            camera = Camera(browser.new_page(viewport=SIZE))
            documentation(camera, serve_site(options.site))
            problems += camera.problems
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
