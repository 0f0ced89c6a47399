"""Deeply nested JSON is refused; brackets in texts and wide bodies are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.app import ROUTES, build_app
from penstock.api.nesting import MAX_NESTING, check_nesting
from penstock.api.routes import RouteSpec
from penstock.api.schema import kinds_of
from penstock.errors import BadValue
from tests.api.scripted_app import make_state
from tests.text_models import ScriptedEngine, write_text_model


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "raw",
    [
        nested(MAX_NESTING),
        json.dumps(["[" * 1000, '{"' * 1000, "\\" * 999 + "[" * 1000, '\\"[' * 1000]).encode(),
        json.dumps([[1, {"a": [2]}]] * 1000).encode(),
        b"",
    ],
)
def test_json_within_the_limit_passes(raw: bytes) -> None:
    check_nesting(raw)
    check_nesting(bytearray(raw))


@pytest.mark.parametrize(
    "raw",
    [
        nested(MAX_NESTING + 1),
        b'["\\\\"' + b"," + nested(MAX_NESTING) + b"]",
        b'{"a":' * (MAX_NESTING + 1) + b"1" + b"}" * (MAX_NESTING + 1),
        b"[" + b"[]," * 600_000 + nested(MAX_NESTING) + b"]",
        b"[" * 1_000_000,
    ],
)
def test_json_beyond_the_limit_is_refused(raw: bytes) -> None:
    with pytest.raises(BadValue, match="nested"):
        check_nesting(raw)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = write_text_model(tmp_path_factory.mktemp("text"))
    engine = ScriptedEngine(lambda prompt, copy: [5])
    state = make_state(folder, engine, server={"admin_keys": ("operator",)})
    with TestClient(build_app(state), headers={"Authorization": "Bearer operator"}) as client:
        yield client


WITH_BODY = [route for route in ROUTES if route.body is not None]


@pytest.mark.parametrize("route", WITH_BODY, ids=[route.path for route in WITH_BODY])
@pytest.mark.parametrize("levels", [200, 2000, 100_000])
def test_deep_json_is_refused_on_every_route(http: TestClient, route: RouteSpec, levels: int) -> None:
    wanted = {kind.errors.status(BadValue("too deep")) for kind in kinds_of(route)}  # 400 in most dialects
    for field in ("input", "query", "messages", "text_1", "texts", "guided_json"):
        raw = b'{"%s":' % field.encode() + nested(levels) + b"}"
        assert http.post(route.path, content=raw).status_code in wanted, field
