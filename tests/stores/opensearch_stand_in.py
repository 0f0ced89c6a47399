"""A fake OpenSearch server: the part of its REST API that the store uses, in memory.

It records every request. Scores follow OpenSearch's documentation for exact searches.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np


class StandIn:
    def __init__(self) -> None:
        self.indices: dict[str, dict[str, Any]] = {}  # name → settings and mappings
        self.rows: dict[str, dict[str, Any]] = {}  # index → id → source
        self.aliases: dict[str, str] = {}
        self.scrolls: dict[str, list[Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.busy_writes = 0  # number of bulk requests to refuse with 429
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                stand_in.requests.append((self.command, self.path))
                stand_in.headers.append(dict(self.headers))
                status, answer = stand_in.answer(self.command, self.path, body)
                payload = b"" if self.command == "HEAD" else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

        return Handler

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        names = [name for name in parts.path.split("/") if name]
        if names == ["_aliases"]:
            return 200, self._switch(json.loads(body)["actions"])
        if names[0] == "_alias":
            target = self.aliases.get(names[1])
            return (200, {target: {"aliases": {names[1]: {}}}}) if target else (404, {})
        if names[:2] == ["_search", "scroll"]:
            return 200, self._scroll(method, json.loads(body or b"{}"))
        index = self.aliases.get(names[0], names[0])
        action = names[1] if len(names) > 1 else ""
        if index not in self.indices and not (method == "PUT" and not action):
            return 404, {"error": {"type": "index_not_found_exception", "reason": f"no index [{index}]"}}
        return self._index_call(method, index, action, query, body)

    def _index_call(self, method: str, index: str, action: str, query: Any, body: bytes) -> tuple[int, Any]:
        if action == "":
            if method == "PUT":
                self.indices[index] = json.loads(body)
                self.rows[index] = {}
            return 200, {index: self.indices[index]}
        if action == "_mapping":
            self.indices[index]["mappings"].update(json.loads(body))
        elif action == "_count":
            return 200, {"count": len(self.rows[index])}
        elif action == "_bulk":
            return self._bulk(index, body)
        elif action == "_mget":
            rows = self.rows[index]
            ids = json.loads(body)["ids"]
            return 200, {"docs": [_found(each, rows.get(each)) for each in ids]}
        elif action == "_search":
            return 200, self._search(index, json.loads(body), query)
        return 200, {}

    def _bulk(self, index: str, body: bytes) -> tuple[int, Any]:
        if self.busy_writes:
            self.busy_writes -= 1
            return 429, {"error": {"type": "rejected", "reason": "busy"}}
        lines = [json.loads(line) for line in body.splitlines()]
        vectors = [
            (name, about["dimension"])
            for name, about in self.indices[index]["mappings"]["properties"].items()
            if about["type"] == "knn_vector" and about.get("data_type") != "binary"
        ]
        items = []
        for action, source in zip(lines[::2], lines[1::2], strict=True):
            each = action["index"]["_id"]
            if any(len(source[name]) != dimension for name, dimension in vectors):
                items.append({"index": {"_id": each, "status": 400, "error": {"reason": "bad dimension"}}})
                continue
            self.rows[index][each] = source
            items.append({"index": {"_id": each, "status": 201}})
        return 200, {"errors": any(item["index"]["status"] > 299 for item in items), "items": items}

    def _search(self, index: str, body: Any, query: Any) -> Any:
        hits = [{"_id": each, "_source": source} for each, source in self.rows[index].items()]
        if "scroll" in query:
            hits = [{**hit, "_source": _filtered(hit["_source"], body["_source"])} for hit in hits]
            pages = [hits[at : at + body["size"]] for at in range(0, len(hits), body["size"])]
            self.scrolls["s1"] = [*pages[1:], []]
            return {"_scroll_id": "s1", "hits": {"hits": pages[0] if pages else []}}
        for hit in hits:
            hit["_score"] = self._score(hit["_source"], body["query"])
        hits.sort(key=lambda hit: -hit["_score"])
        return {"hits": {"hits": hits[: body["size"]]}}

    def _score(self, source: Any, query: Any) -> float:
        if "bool" in query:
            terms = [each["rank_feature"] for each in query["bool"]["should"]]
            return sum(term["boost"] * source["sparse"].get(term["field"].split(".")[1], 0) for term in terms)
        params = query["script_score"]["script"]["params"]
        row, wanted = np.array(source[params["field"]]), np.array(params["query_value"])
        if params["space_type"] == "cosinesimil":
            return float(1 + row @ wanted / np.linalg.norm(row) / np.linalg.norm(wanted))
        if params["space_type"] == "hamming":
            flipped = row.astype(np.int8).view(np.uint8) ^ wanted.astype(np.int8).view(np.uint8)
            return float(1 / (1 + np.unpackbits(flipped).sum()))
        return (
            float(row @ wanted)
            if params["space_type"] == "innerproduct"
            else float(-np.sum((row - wanted) ** 2))
        )

    def _scroll(self, method: str, body: Any) -> Any:
        if method == "DELETE":
            self.scrolls.clear()
            return {}
        pages = self.scrolls[body["scroll_id"]]
        return {"_scroll_id": body["scroll_id"], "hits": {"hits": pages.pop(0) if pages else []}}

    def _switch(self, actions: list[Any]) -> Any:
        for action in actions:
            ((kind, about),) = action.items()
            if kind == "add":
                self.aliases[about["alias"]] = about["index"]
            else:
                self.aliases.pop(about["alias"])
        return {"acknowledged": True}


def _filtered(source: Any, wanted: Any) -> Any:
    if "includes" in wanted:
        return {name: value for name, value in source.items() if name in wanted["includes"]}
    return {name: value for name, value in source.items() if name not in wanted["excludes"]}


def _found(each: str, source: Any) -> Any:
    return {"_id": each, "found": source is not None, **({"_source": source} if source is not None else {})}
