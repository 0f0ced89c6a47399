"""The playground is self-contained, well-formed and safe, and matches the routes."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser

import pytest

from penstock.api.app import ROUTES
from penstock.api.dialects import operation
from penstock.types import OutputDtype

PAGES = ("playground.html",)  # docs.html: tests/docs/test_docs_page.py
SERVED = {spec.path for spec in ROUTES} | {"/openapi.json"}
VOID = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """The elements of a page; checks that tags close in the order in which they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # (tag, name, value)
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()} closes nothing")

    def values(self, wanted: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == wanted]


def read(name: str) -> str:
    return operation.page(name).decode()


def routes_used(text: str) -> set[str]:
    """Paths that a page requests, links to, or names as needed by a panel."""
    asked = re.findall(r'\bask\("(/[^"]*)"', text)
    needed = re.findall(r'data-route="(/[^"]*)"', text)
    built = ["/" + path for path in re.findall(r"\$\{BASE\}([\w/.]+)", text)]
    links = [value for value in Outline(text).values("href") if not value.startswith(("data:", "#"))]
    linked = ["/" + value.removeprefix("./") for value in links]
    return {path for path in (*asked, *needed, *built, *linked) if path != "/v1"}  # a client's base address


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed(name: str) -> None:
    text = read(name)
    outline = Outline(text)
    assert text.startswith("<!doctype html>")
    assert outline.faults == []
    ids = outline.values("id")
    assert len(ids) == len(set(ids))
    for names in ("for", "aria-controls", "aria-labelledby"):
        assert set(outline.values(names)) <= set(ids)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_nothing_from_other_hosts(name: str) -> None:
    text = read(name)
    outline = Outline(text)
    assert not re.search(r"https?://", text)
    assert not re.search(r"@import|url\(|\bimport\s*\(|^\s*import\s", text, re.MULTILINE)
    assert outline.values("src") == outline.values("srcset") == outline.values("action") == []
    assert all(not value.startswith(("//", "/")) for value in outline.values("href"))
    icons = [value for tag, key, value in outline.attributes if (tag, key) == ("link", "href")]
    assert all(value.startswith("data:") for value in icons)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_forbids_the_browser_to_load_from_other_hosts(name: str) -> None:
    policy = next(value for value in Outline(read(name)).values("content") if "default-src" in value)
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


@pytest.mark.parametrize("name", PAGES)
def test_a_page_inserts_text_and_never_markup(name: str) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc"
    assert re.findall(ways, read(name)) == []


@pytest.mark.parametrize("name", PAGES)
def test_every_element_that_a_script_looks_up_exists(name: str) -> None:
    text = read(name)
    assert set(re.findall(r'\$\("([\w-]+)"\)', text)) <= set(Outline(text).values("id"))


@pytest.mark.parametrize("name", PAGES)
def test_every_route_that_a_page_uses_is_served(name: str) -> None:
    assert routes_used(read(name)) - SERVED == set()


def test_the_playground_uses_every_route_that_it_shows() -> None:
    wanted = {"/v1/embeddings", "/v1/models", "/tokenize", "/ready", "/version", "/openapi.json", "/docs"}
    assert wanted <= routes_used(read("playground.html"))


def test_the_playground_marks_only_fields_that_requests_have() -> None:
    marked = {
        field for value in Outline(read("playground.html")).values("data-param") for field in value.split()
    }
    fields = {field for spec in ROUTES if spec.body is not None for field in spec.body.__struct_fields__}
    assert marked
    assert marked <= fields


def test_the_playground_offers_every_output_type() -> None:
    offered = re.findall(r"<option>(\w+)</option>", read("playground.html"))
    assert sorted(offered) == sorted(dtype.value for dtype in OutputDtype)


@pytest.mark.parametrize("handler", [operation.playground, operation.docs])
def test_a_page_is_sent_as_html(handler) -> None:
    reply = asyncio.run(handler(None))
    assert reply.content_type == b"text/html; charset=utf-8"
    assert reply.body.startswith(b"<!doctype html>")


def test_an_unclosed_tag_is_noticed() -> None:
    assert Outline("<div><p>text</div>").faults
    assert Outline("<div><br><p>text</p></div>").faults == []
