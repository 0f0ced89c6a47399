"""Allowed sources of images, and the reasons for refusals."""

from __future__ import annotations

import base64
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadValue
from penstock.inputs.images.decode import ImageLimits
from penstock.inputs.images.fetch import MediaDomains, is_public
from penstock.inputs.images.sources import ImageSources
from tests.inputs.images.pictures import encoded, noise

PNG = encoded(noise(9, 7))
TEXT = base64.b64encode(PNG).decode()
PLAIN = ImageSources()


@pytest.mark.parametrize(
    "source",
    [
        f"data:image/png;base64,{TEXT}",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
        f"data:;base64,{TEXT}",
        f"data:application/octet-stream;base64,{TEXT}",
        TEXT,
        TEXT.rstrip("="),
        base64.urlsafe_b64encode(PNG).decode(),
        "\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
    ],
)
def test_base64_is_read_with_and_without_a_data_uri(source: str) -> None:
    assert PLAIN.read(source) == PNG


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:text/html;base64,AAAA", "type text/html"),
        ("data:image/png,%89PNG", "has to begin like data:image/png;base64,"),
        ("data:image/png;base64,", "empty"),
        ("", "empty; use a data URI"),
        ("not base64 at all!", "not base64; use a data URI, base64"),
        ("A" * 400, "--max-image-mb"),
        ("https://example.com/a.png", "--allowed-media-domains names none. Send the image itself"),
        ("HTTP://example.com/a.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("FILE:///etc/passwd", "--allowed-local-media-path"),
        ("file-abc", "keeps no files"),
        ("ftp://example.com/a.png", "not base64"),
    ],
)
def test_other_sources_are_refused_with_what_is_accepted(source: str, message: str) -> None:
    with pytest.raises(BadValue, match=message):
        ImageSources(limits=ImageLimits(max_bytes=200)).read(source)


def test_an_uploaded_file_is_read_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "file-1").write_bytes(PNG)
    assert PLAIN.read("file-1", lambda name: tmp_path / name) == PNG
    small = ImageSources(limits=ImageLimits(max_bytes=10))
    with pytest.raises(BadValue, match="max-image-mb"):
        small.read("file-1", lambda name: tmp_path / name)


def test_local_files_are_read_below_the_allowed_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "media", tmp_path / "secret.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(PNG)
    outside.write_bytes(PNG)
    (inside / "link.png").symlink_to(outside)
    (inside / "near.png").symlink_to(inside / "a b.png")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "c.png").write_bytes(PNG)
    sources = ImageSources(local_folder=inside)
    assert sources.read(f"file://{inside}/a%20b.png") == PNG
    assert sources.read(f"file://localhost{inside}/near.png") == PNG
    for path in ("link.png", "../secret.png", "..%2fsecret.png", "../media2/c.png", "../missing.png"):
        with pytest.raises(BadValue, match="not below"):
            sources.read(f"file://{inside}/{path}")
    with pytest.raises(BadValue, match="does not exist"):
        sources.read(f"file://{inside}/missing.png")
    with pytest.raises(BadValue, match="does not exist"):
        sources.read(f"file://{inside}")
    with pytest.raises(BadValue, match="use file:///PATH"):
        sources.read("file://other.host/a.png")


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def web_server(answer: Answer) -> Iterator[int]:
    """A web server on a loopback address; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {"Content-Length": str(len(body)), **named}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def _fetch(names: tuple[str, ...], url: str, **options: Any) -> bytes:
    return ImageSources(
        limits=ImageLimits(max_bytes=options.pop("max_bytes", 10_000)), domains=MediaDomains(names, **options)
    ).read(url)


def test_an_image_is_fetched_from_a_host_that_is_named() -> None:
    asked = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.append((handler.path, handler.headers["Host"]))
        _send(handler, PNG)

    with web_server(answer) as port:
        assert _fetch((f"127.0.0.1:{port}",), f"http://127.0.0.1:{port}/a.png?b=1") == PNG
        assert asked == [("/a.png?b=1", f"127.0.0.1:{port}")]
        assert _fetch((f"127.0.0.1:{port}",), f"http://127.0.0.1:{port}/ä%20b.png?c=ü") == PNG
        assert asked.pop()[0] == "/%C3%A4%20b.png?c=%C3%BC"
        with pytest.raises(BadValue, match=r"names 127\.0\.0\.1\. Send"):
            _fetch(("127.0.0.1",), f"http://127.0.0.1:{port}/a.png")  # not HTTP's default port
        assert len(asked) == 1


def test_a_private_address_is_refused_unless_its_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name resolves to a private address, as an attacker's name could."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ADDRESSES[host]]

    ADDRESSES = {
        "images.example.com": ["93.184.216.34", "10.0.0.8"],
        "meta.example.com": ["169.254.169.254"],
        "six.example.com": ["::ffff:127.0.0.1"],
    }
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for host, address in (("images", "10.0.0.8"), ("meta", "169.254.169.254"), ("six", "::ffff:7f00:1")):
        for names in (("*",), ("*.example.com",)):
            with pytest.raises(BadValue, match=f"private address .*{address}"):
                _fetch(names, f"http://{host}.example.com/a.png")
    with pytest.raises(BadValue, match=r"names \*\.example\.com\. Send"):
        _fetch(("*.example.com",), "http://example.com.evil.net/a.png")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *(
            (private, False)
            for private in ("127.0.0.1", "10.1.1.1", "192.168.0.1", "169.254.169.254", "0.0.0.0")
        ),
        *((private, False) for private in ("100.64.0.1", "::1", "fe80::1", "fc00::1", "224.0.0.1", "::")),
        ("::ffff:8.8.8.8", True),
        *((wrapped, False) for wrapped in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1")),
    ],
)
def test_public_addresses_are_told_from_private_ones(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda h: _send(h, b"", 302, Location="http://elsewhere.example/a.png"),
            "another host, elsewhere.example",
        ),
        (lambda h: _send(h, b"", 302, Location="http://[::1]/a.png"), "another host, ::1"),
        (lambda h: _send(h, b"", 302, Location="file:///etc/passwd"), "http:// or https://"),
        (lambda h: _send(h, b"", 302, Location="/again"), "redirects more than 3 times"),
        (lambda h: _send(h, b"gone", 404), "status 404"),
        (lambda h: _send(h, bytes(20_000)), "max-image-mb"),
        (lambda h: _send(h, PNG, Content_Encoding="gzip"), "compressed body"),
        (lambda h: _send(h, PNG, Content_Length="9999"), f"ended after {len(PNG)} of 9,999 bytes"),
    ],
)
def test_answers_that_are_not_accepted_name_the_reason(answer: Answer, message: str) -> None:
    with web_server(answer) as port, pytest.raises(BadValue, match=message):
        _fetch((f"127.0.0.1:{port}",), f"http://127.0.0.1:{port}/a.png?token=secret")


def test_a_body_without_a_length_is_bounded() -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(4096))
        except OSError:
            pass

    with web_server(endless) as port, pytest.raises(BadValue, match="max-image-mb"):
        _fetch((f"127.0.0.1:{port}",), f"http://127.0.0.1:{port}/a.png")


def test_a_slow_host_is_given_up() -> None:
    released = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        """Send a header byte by byte. Each byte resets a socket timeout."""
        try:
            while not released.wait(0.02):
                handler.wfile.write(b"H")
        except OSError:
            pass

    with web_server(slow) as port:
        try:
            with pytest.raises(BadValue, match=r"cannot be fetched|too long"):
                _fetch((f"127.0.0.1:{port}",), f"http://127.0.0.1:{port}/a.png", timeout_s=0.2)
        finally:
            released.set()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pass@127.0.0.1/a",
        "http://127.0.0.1:99999/",
        "http:///a.png",
        "http://[::1/a",
        "http://a b/c",
    ],
)
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(BadValue, match="the URL of an image"):
        _fetch(("*",), url)
