"""Every example of every route works with a suitable model, and its answer has the declared type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from penstock.api.adapters import ServedAdapter
from penstock.api.app import ROUTES, build_app
from penstock.api.routes import RouteSpec
from penstock.api.schema import Kind, kinds_of, media_of
from penstock.serving.control import Action, OrderAnswer
from penstock.serving.launch import AdapterLaunch
from tests.api.local_app import WholeClient, local_state
from tests.fuzz.fleet import KINDS

SERVER = {"enable_tokenizer_info_endpoint": True, "admin_keys": ("operator",)}
App = Callable[[str], TestClient]
STORED = ("/v1/files", "/v1/batches")  # their examples name stored files: see test_batches.py
CALLS = [
    (route, kind)
    for route in ROUTES
    if route.is_listed and not route.path.startswith(STORED)
    for kind in kinds_of(route)
]
NAMES = [f"{route.path} {'GET' if kind.body is None else kind.body.__name__}" for route, kind in CALLS]


class Obedient:
    """A supervisor that carries out every order."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def order(self, action: Action, model: str, **options: Any) -> OrderAnswer:
        states = {"load": "awake", "unload": "unloaded", "sleep": "asleep", "wake": "awake"}
        return OrderAnswer(0, model, states.get(action, ""), 0.1)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Return the application for a kind of tiny model, building it on first use."""
    made: dict[str, TestClient] = {}
    with ExitStack() as stack:

        def get(kind: str) -> TestClient:
            if kind not in made:
                folder = KINDS[kind](tmp_path_factory.mktemp("models") / kind)
                options = {"client": WholeClient, "server": SERVER, "kv_cache_gb": 0.05}
                state, _ = stack.enter_context(local_state(folder, aliases=("small",), **options))
                state.follower = Obedient()
                adapter = ServedAdapter(AdapterLaunch(0, "tenant-a", "", ""))
                for model in state.models.values():
                    model.takes_adapters, model.adapters = True, {adapter.name: adapter}
                headers = {"Authorization": "Bearer operator"}
                made[kind] = stack.enter_context(TestClient(build_app(state), headers=headers))
            return made[kind]

        yield get


def undocumented(answer: Any, decoded: Any, path: str = "") -> list[str]:
    """The fields of an answer that are missing from its type."""
    if isinstance(answer, dict) and isinstance(decoded, dict):
        extra = [f"{path}.{name}" for name in answer if name not in decoded and answer[name] is not None]
        inside = [(name, decoded[name]) for name in answer if name in decoded]
        return extra + [
            found for name, value in inside for found in undocumented(answer[name], value, f"{path}.{name}")
        ]
    if isinstance(answer, list) and isinstance(decoded, list | tuple):
        pairs = zip(answer, decoded, strict=True)
        return [found for one, other in pairs for found in undocumented(one, other, f"{path}[]")]
    return []


@pytest.mark.parametrize(("route", "kind"), CALLS, ids=NAMES)
def test_an_example_works(app: App, route: RouteSpec, kind: Kind) -> None:
    assert kind.body is None or kind.example is not None
    path = (route.prefix or route.path) + (route.path_example or "model" if route.prefix else "")
    refusals = []
    for name in KINDS:
        http = app(name)
        for method in (each for each in route.all_methods if each != "HEAD"):
            answer = http.request(method, path, json=None if kind.example is None else dict(kind.example))
        if answer.status_code == 200:
            break
        refusals.append(f"{name}: {answer.status_code} {answer.text[:200]}")
    else:
        pytest.fail("no kind of model takes the example:\n" + "\n".join(refusals))
    if not answer.headers["content-type"].startswith("application/json"):
        assert answer.headers["content-type"].partition(";")[0] in media_of(kind)
        return
    decoded = msgspec.json.decode(answer.content, type=kind.answer)
    assert undocumented(answer.json(), msgspec.to_builtins(decoded)) == []


def test_a_field_that_a_type_lacks_is_noticed() -> None:
    answer = {"data": [{"index": 0, "extra": 1}], "id": "a", "none": None}
    assert undocumented(answer, {"data": [{"index": 0}], "id": "a"}) == [".data[].extra"]
