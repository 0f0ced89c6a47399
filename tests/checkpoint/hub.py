"""A fake model hub on loopback, with the routes that a snapshot download uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    """`repos`: id → revision → files. `asked` records the paths of all requests."""

    repos: dict[str, dict[str, Files]]
    address: str = ""
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)  # the Range headers of all requests
    break_downloads: str | None = None  # "refuse": status 500; "cut": close one byte early; every time
    cut_once: set[str] = field(default_factory=set)  # names of files whose first download ends halfway
    gated: bool = False  # files need `token`, and its account has no access
    token: str = "hf_valid"

    def files(self, repo: str, revision: str) -> Files | None:
        for name, files in self.repos[repo].items():
            if revision in (name, commit_of(name)):
                return files
        return None

    def commit(self, repo: str, revision: str) -> str:
        return commit_of(revision) if revision in self.repos[repo] else revision

    def downloads(self) -> set[str]:
        """The files that were downloaded, not only queried."""
        fetched = [path for path in self.asked if path.startswith("GET") and "/resolve/" in path]
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in fetched}


@contextmanager
def serve(repos: dict[str, dict[str, Files]]) -> Iterator[Hub]:
    hub = Hub(repos)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return None

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            match parts:
                case ["api", "models", owner, name, kind, revision]:
                    self._api(f"{owner}/{name}", kind, revision)
                case [owner, name, "resolve", revision, *file]:
                    self._file(f"{owner}/{name}", revision, "/".join(file), body)
                case _:
                    self._send(404, b"{}")

        def _api(self, repo: str, kind: str, revision: str) -> None:
            if self._token() not in (None, hub.token):
                message = {"X-Error-Message": "Invalid credentials in Authorization header"}
                return self._send(401, b"{}", message)
            if repo not in hub.repos:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = hub.files(repo, revision)
            if files is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if kind == "tree":
                rows = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self._send(200, json.dumps(rows).encode())
            info = {
                "_id": "0",
                "id": repo,
                "modelId": repo,
                "sha": hub.commit(repo, revision),
                "private": False,
                "siblings": [{"rfilename": name, "size": len(data)} for name, data in files.items()],
            }
            return self._send(200, json.dumps(info).encode())

        def _token(self) -> str | None:
            return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

        def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
            if hub.gated:
                status = 401 if self._token() is None else 403
                return self._send(status, b"", {"X-Error-Code": "GatedRepo"})
            files = hub.files(repo, revision) or {}
            if name not in files:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            headers = {
                "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"',
                "X-Repo-Commit": hub.commit(repo, revision),
            }
            if body and hub.break_downloads == "refuse":
                return self._send(500, b"", headers)
            data, status = files[name], 200
            if (asked := self.headers.get("Range")) is not None:
                hub.ranges.append(asked)
                first = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
                data, status = data[first:], 206
            cut = 1 if body and hub.break_downloads == "cut" else 0
            if body and name in hub.cut_once:
                hub.cut_once.remove(name)
                cut = len(data) // 2
            return self._send(status, data, headers, body, cut)

        def _send(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str] | None = None,
            body: bool = True,
            cut: int = 0,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(data[: len(data) - cut])

    return Handler
