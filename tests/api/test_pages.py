"""The playground is self-contained, well-formed and safe, and matches the routes.

tests/docs/test_browser.py opens it in a browser; tests/docs/test_docs_page.py tests the API reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient

from penstock.api.app import ROUTES
from penstock.api.dialects import pages
from penstock.types import OutputDtype
from tests.api.local_app import local_app
from tests.checkpoints import write_bert

SERVED = {spec.path for spec in ROUTES} | {"/openapi.json"}
VOID = {"meta", "link", "input", "br", "hr", "img"}
SVG = "http://www.w3.org/2000/svg"  # an XML namespace, never fetched
OWN_PARAMS = {"second", "system"}  # fields of the page that become parts of one request field


class Outline(HTMLParser):
    """The elements of a page. Checks that tags are closed in the right order."""

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


PAGE = pages.page("playground.html").decode()
FILES = {name: content.decode() for name, content in pages.assets().items()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
EVERYTHING = {"playground.html": PAGE, **FILES}
ALL_SCRIPTS = "\n".join(SCRIPTS.values())


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_bert(tmp_path_factory.mktemp("bert")), server={"api_keys": ("secret",)}) as (
        client,
        _,
    ):
        yield client


def test_the_page_is_well_formed() -> None:
    outline = Outline(PAGE)
    assert PAGE.startswith("<!doctype html>")
    assert outline.faults == []
    ids = outline.values("id")
    assert len(ids) == len(set(ids))
    for names in ("for", "aria-controls", "aria-labelledby"):
        assert set(outline.values(names)) <= set(ids)


@pytest.mark.parametrize("name", EVERYTHING)
def test_nothing_is_loaded_from_other_hosts(name: str) -> None:
    text = EVERYTHING[name].replace(SVG, "")
    assert not re.search(r"https?://", text)
    assert not re.search(r"@import|\burl\(|\bimport\s*\(", text)


def test_the_page_names_only_files_that_exist() -> None:
    outline = Outline(PAGE)
    loaded = [
        *outline.values("src"),
        *(value for tag, key, value in outline.attributes if (tag, key) == ("link", "href")),
    ]
    files = [value.removeprefix("static/ASSETS/") for value in loaded if not value.startswith("data:")]
    assert sorted(files) == ["main.js", "playground.css"]
    imported = set(re.findall(r'from "\./([\w.-]+)"', ALL_SCRIPTS))
    assert imported | {"main.js"} == set(SCRIPTS)
    assert not re.search(r'from "(?!\./)', ALL_SCRIPTS)


@pytest.mark.parametrize("name", EVERYTHING)
def test_text_is_inserted_and_never_markup(name: str) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc"
    assert re.findall(ways, EVERYTHING[name]) == []


def test_the_page_has_neither_inline_scripts_nor_inline_styles() -> None:
    outline = Outline(PAGE)
    assert outline.values("style") == []
    assert not [name for _, name, _ in outline.attributes if name.startswith("on")]
    assert not re.search(r"<style|<script(?![^>]* src=)", PAGE)
    assert 'setAttribute("style"' not in ALL_SCRIPTS


def test_every_element_that_a_script_looks_up_exists() -> None:
    assert set(re.findall(r'\$\("([\w-]+)"\)', ALL_SCRIPTS)) <= set(Outline(PAGE).values("id"))


def test_every_route_that_the_page_uses_is_served() -> None:
    asked = set(re.findall(r'\b(?:ask|askText|path:) ?\(?"(/[^"]*)"', ALL_SCRIPTS))
    linked = {"/" + value for tag, key, value in Outline(PAGE).attributes if (tag, key) == ("a", "href")}
    assert (asked | linked) - SERVED == set()
    assert {"/rerank", "/v1/embeddings", "/tokenize", "/metrics", "/v1/models"} <= asked


def test_only_fields_that_requests_have_are_marked() -> None:
    marked = {field for value in re.findall(r'param: "([^"]+)"', ALL_SCRIPTS) for field in value.split()}
    fields = {field for spec in ROUTES if spec.body is not None for field in spec.body.__struct_fields__}
    assert marked - OWN_PARAMS
    assert marked - OWN_PARAMS <= fields


def test_every_output_type_is_offered() -> None:
    (listed,) = re.findall(r"const DTYPES = \[(.*)\];", FILES["embed.js"])
    assert re.findall(r'"(\w+)"', listed) == [dtype.value for dtype in OutputDtype]


def test_the_page_is_sent_with_a_policy(http: TestClient) -> None:
    answer = http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy


def test_the_files_are_sent_without_a_key_and_kept_by_browsers(http: TestClient) -> None:
    for file in re.findall(r'(?:src|href)="(static/[^"]+)"', http.get("/").text):
        answer = http.get(f"/{file}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        kind = "text/css" if file.endswith(".css") else "text/javascript"
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        older = re.sub(r"static/\w+/", "static/older/", file)
        assert http.get(f"/{older}").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["", "/", "/x", "/x/../docs.html", "/x/..%2fdocs.html", "/x/y/main.js", "/x/"]
)
def test_other_files_are_not_sent(http: TestClient, path: str) -> None:
    assert http.get(f"/static{path}").status_code == 404


def test_an_unclosed_tag_is_noticed() -> None:
    assert Outline("<div><p>text</div>").faults
    assert Outline("<div><br><p>text</p></div>").faults == []
