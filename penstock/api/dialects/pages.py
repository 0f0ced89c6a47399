"""The pages that the server shows in a browser: the playground, and the API reference."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from pathlib import PurePosixPath

from penstock.api.call import Call, Reply
from penstock.api.routes import RouteSpec
from penstock.errors import NotFound, shown

HTML = b"text/html; charset=utf-8"
JAVASCRIPT = b"text/javascript; charset=utf-8"
ASSETS = "playground"  # the folder of the playground's scripts and style sheet
_ASSET_TYPES = {".css": b"text/css; charset=utf-8", ".js": b"text/javascript; charset=utf-8"}
_SAFE = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FOREVER = (b"cache-control", b"public, max-age=31536000, immutable")
_NEVER = (b"cache-control", b"no-cache")


def page(name: str) -> bytes:
    return (resources.files("penstock.api") / "pages" / name).read_bytes()


@cache
def assets() -> dict[str, bytes]:
    """The files of the playground, by name."""
    folder = resources.files("penstock.api") / "pages" / ASSETS
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if PurePosixPath(file.name).suffix in _ASSET_TYPES
    }


@cache
def assets_version() -> str:
    """A digest of all files, for URLs that browsers may cache."""
    digest = hashlib.sha256()
    for name, content in sorted(assets().items()):
        digest.update(b"%s %d " % (name.encode(), len(content)) + content)
    return digest.hexdigest()[:16]


async def playground(call: Call) -> Reply:
    """Show a page to try the server from."""
    body = page("playground.html").replace(b"static/ASSETS/", b"static/%s/" % assets_version().encode())
    return Reply(body, HTML, headers=[*_SAFE, _NEVER, (b"content-security-policy", _POLICY)])


async def static(call: Call) -> Reply:
    """Send a script or style sheet of the playground."""
    version, _, name = call.path_value.partition("/")
    content = assets().get(name)
    if content is None:
        raise NotFound("no such file; / is the page")
    lasting = _FOREVER if version == assets_version() else _NEVER
    return Reply(content, _ASSET_TYPES[PurePosixPath(name).suffix], headers=[*_SAFE, lasting])


async def docs(call: Call) -> Reply:
    """Show the API reference."""
    return Reply(page("docs.html"), HTML)


_GZIP = (b"content-encoding", b"gzip")  # supported by all browsers
_DOCS_FILES: dict[str, list[tuple[bytes, bytes]]] = {
    "docs.js": [(b"cache-control", b"no-cache")],
    "scalar-1.72.1.js": [_FOREVER, _GZIP],
}


async def docs_file(call: Call) -> Reply:
    """Show a file of the API reference's page."""
    name = call.path_value.rpartition("/")[2]
    if (headers := _DOCS_FILES.get(name)) is None:
        raise NotFound(f"/docs has no file {shown(name)}")
    stored = f"reference/{name}.gz" if _GZIP in headers else f"reference/{name}"
    return Reply(page(stored), JAVASCRIPT, headers=list(headers))


ROUTES = (
    RouteSpec("/", None, playground, "operation", open_to_all=True, media=("text/html",)),
    RouteSpec("/docs", None, docs, "operation", open_to_all=True, media=("text/html",)),
    RouteSpec("/docs/{file}", None, docs_file, "operation", open_to_all=True, is_listed=False),
    RouteSpec("/static/{file}", None, static, "operation", open_to_all=True, is_listed=False),
)
