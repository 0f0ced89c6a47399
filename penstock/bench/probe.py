"""Single requests outside the measurement: whether the server is up, and which models it lists."""

from __future__ import annotations

import http.client
import ssl
import time
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.bench.load.refusal import refusal
from penstock.bench.target import Target
from penstock.errors import BadValue

_POLL_S = 0.25


class Unreachable(BadValue):
    """Nothing answers at the address."""


class HttpReply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def json(self) -> Any:
        """The decoded body; None if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    def refusal(self) -> str:
        return refusal(self.status, self.body)


class Caller:
    """A simple blocking client that reuses its connection."""

    def __init__(self, target: Target, timeout_s: float = 60.0) -> None:
        self.target, address = target, target.address
        if address.tls:
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.server_name, address.port, timeout=timeout_s, context=ssl.create_default_context()
            )
        else:
            self._connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)

    def call(self, method: str, route: str, body: Any = None) -> HttpReply:
        """Send one request. Raises `Unreachable` if no server answers or it closes the connection twice."""
        headers = dict(self.target.headers)
        data = None if body is None else orjson.dumps(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        for last in (False, True):
            try:
                self._connection.request(method, self.target.prefix + route, data, headers)
                reply = self._connection.getresponse()
                return HttpReply(reply.status, dict(reply.headers.items()), reply.read())
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if last or isinstance(error, (ConnectionRefusedError, TimeoutError)):
                    raise Unreachable(
                        f"no server answers at {self.target.base_url}: {_error_text(error)}"
                    ) from None
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._connection.close()


def _error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def is_healthy(target: Target) -> bool:
    """Whether /health answers 200. For servers without that route: whether /v1/models does."""
    caller = Caller(target, timeout_s=5.0)
    try:
        status = caller.call("GET", "/health").status
        if status in (404, 405):
            status = caller.call("GET", "/v1/models").status
        return status == 200
    except Unreachable:
        return False
    finally:
        caller.close()


def wait_for_server(target: Target, timeout_s: float) -> None:
    """Return when the server is healthy; raise after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_healthy(target):
        if time.monotonic() > deadline:
            raise Unreachable(f"no server answers at {target.base_url} after {timeout_s:g} s")
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    tasks: tuple[str, ...] = ()  # empty if the server does not list them


def listed_models(target: Target) -> list[ListedModel]:
    """The models that the server lists at `/v1/models`; none if it does not have that route."""
    caller = Caller(target)
    try:
        listed = caller.call("GET", "/v1/models").json()
    finally:
        caller.close()
    data = listed.get("data") if isinstance(listed, dict) else None
    entries = data if isinstance(data, list) else []
    return [_listed(entry) for entry in entries if isinstance(entry, dict) and "id" in entry]


def _listed(entry: dict[str, Any]) -> ListedModel:
    tasks = entry.get("tasks")
    return ListedModel(str(entry["id"]), tuple(map(str, tasks)) if isinstance(tasks, list) else ())


def first_model(target: Target) -> str:
    """The name of the first model that the server lists."""
    if models := listed_models(target):
        return models[0].name
    raise BadValue("the server lists no model at /v1/models: give --model", param="model")
