"""API keys: which are accepted, what they allow, and how they are limited and replaced."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api import app as app_module
from penstock.api.call import Call, Reply
from penstock.api.key_limits import BURST_S, CounterFolder, KeyLimits
from penstock.api.keys import ApiKey, KeyRing
from penstock.api.metrics import ApiMetrics
from penstock.api.routes import RouteSpec
from penstock.api.state import ServerState
from penstock.config import ServerConfig
from penstock.errors import Forbidden, KeyLimitReached, ModelNotAllowed, Unauthorized
from tests.api.local_app import local_app, local_state
from tests.checkpoints import write_bert

ROUTE = "/v1/embeddings"
BODY = {"input": "water finds its level"}


def ring(**config: Any) -> KeyRing:
    return KeyRing(ServerConfig(**config))


def scope(**headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": pairs}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_any_key_is_accepted_in_any_of_the_three_headers() -> None:
    keys = ring(api_keys=("one", f"sha256:{hashlib.sha256(b'two').hexdigest()}"))
    for given in ("one", "two"):
        for sent in (
            scope(authorization=f"Bearer {given}"),
            scope(authorization=f"bearer  {given} "),
            scope(x_api_key=given),
            scope(authorization="Basic abc", api_key=given),
        ):
            assert keys.check(sent).name == {"one": "api-key-1", "two": "api-key-2"}[given]
    digest = f"sha256:{hashlib.sha256(b'two').hexdigest()}"
    for wrong in ("", "on", "onee", "three", digest):
        with pytest.raises(Unauthorized):
            keys.check(scope(x_api_key=wrong))
    with pytest.raises(Unauthorized):
        keys.check(scope(authorization="one"))


def test_admin_routes_want_an_admin_key_and_say_how_to_set_one() -> None:
    with pytest.raises(Forbidden, match="PENSTOCK_ADMIN_KEY"):
        ring(api_keys=("plain",)).check(scope(x_api_key="plain"), needs_admin=True)
    keys = ring(api_keys=("plain",), admin_keys=("boss",))
    assert keys.check(scope(x_api_key="boss"), needs_admin=True).is_admin
    assert keys.check(scope(x_api_key="boss")).is_admin  # an admin key opens ordinary routes too
    with pytest.raises(Forbidden, match="key api-key-1 is none"):
        keys.check(scope(x_api_key="plain"), needs_admin=True)
    with pytest.raises(Unauthorized):
        keys.check(scope(), needs_admin=True)


def test_nothing_that_is_shown_of_a_key_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("- {name: a, key: hunter2, max_concurrent_requests: 1}")
    key = ring(api_key_file=str(file)).check(scope(x_api_key="hunter2"))
    assert "hunter2" not in repr(key) and "hunter2" not in repr(vars(KeyRing))
    assert hashlib.sha256(b"hunter2").hexdigest() not in repr(key)


class TestReload:
    def test_changes_of_a_file_take_effect_and_errors_do_not(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "keys"
        file.write_text("first-key\n")
        keys = ring(api_key_file=str(file), api_keys=("fixed",))
        assert keys.find(b"first-key") and not keys.find(b"second-key")
        file.write_text("second-key\nthird-key\n")
        keys.reload()
        assert not keys.find(b"first-key") and keys.find(b"second-key") and keys.find(b"fixed")
        with caplog.at_level(logging.INFO, logger="penstock.api"):
            for broken in ("", "second key\n", "- {key: 1"):
                file.write_text(broken)
                keys.reload()
                keys.reload()  # logs the same error only once
                assert keys.find(b"second-key") and keys.find(b"third-key")
            file.unlink()
            keys.reload()
            assert keys.find(b"second-key")
            errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
            assert len(errors) == 4 and all("its last keys stay valid" in each for each in errors)
            assert "second" not in caplog.text
            file.write_text("third-key\n")
            keys.reload()
            assert "is valid again" in caplog.text
        assert not keys.find(b"second-key") and keys.find(b"third-key")

    def test_a_process_that_starts_beside_a_broken_file_accepts_no_key_of_it(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text("a b\n")
        keys = ring(api_key_file=str(file))
        with pytest.raises(Unauthorized):
            keys.check(scope(x_api_key="a"))
        file.write_text("a\n")
        keys.reload()
        assert keys.check(scope(x_api_key="a")).name == "line-1"

    def test_requests_in_flight_count_on_when_the_file_changes(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        entry = "- {{name: a, key: one, max_concurrent_requests: {}}}\n"
        file.write_text(entry.format(1))
        keys = ring(api_key_file=str(file))
        before = keys.check(scope(x_api_key="one")).limits
        assert before is not None
        before.enter()
        file.write_text(entry.format(2))
        keys.reload()
        after = keys.check(scope(x_api_key="one")).limits
        assert after is not None
        after.enter()
        with pytest.raises(KeyLimitReached):
            after.enter()
        before.leave()
        after.enter()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["one process", "two processes"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[KeyLimits, KeyLimits, Clock]]:
    """Two views of one key's limits, in the same process or in two processes."""
    clock = Clock()
    folders = [CounterFolder()] * 2
    if request.param == "two processes":
        folders = [CounterFolder(tmp_path / "keys", index, 2) for index in range(2)]
    first, second = (KeyLimits("k", folder, 3, 100.0, clock) for folder in folders)
    yield first, second, clock


Pair = tuple[KeyLimits, KeyLimits, Clock]


class TestLimits:
    def test_no_more_requests_are_in_flight_than_allowed(self, pair: Pair) -> None:
        first, second, _ = pair
        for each in (first, second, first):
            each.check()
            each.enter()
        for each in (first, second):
            for refuse in (each.check, each.enter):
                with pytest.raises(KeyLimitReached, match="3 requests in flight") as refused:
                    refuse()
                assert refused.value.retry_after_s >= 1
        first.leave()
        second.enter()
        assert first.num_in_flight == second.num_in_flight == 3

    def test_a_key_may_burst_and_then_has_its_rate(self, pair: Pair) -> None:
        first, second, clock = pair
        first.take(300)
        second.take(200)
        for each in (first, second):
            with pytest.raises(KeyLimitReached, match="100 tokens per second") as refused:
                each.take(150)
            assert refused.value.retry_after_s == 2
        clock.now_s += 2  # the advertised retry-after time
        second.take(150)
        with pytest.raises(KeyLimitReached):
            first.take(100)
        clock.now_s += 1000
        first.take(int(100 * BURST_S))
        with pytest.raises(KeyLimitReached):
            second.take(1)

    def test_a_request_beyond_the_bucket_needs_a_full_one_and_is_paid_for_later(self, pair: Pair) -> None:
        first, second, clock = pair
        second.take(1)
        with pytest.raises(KeyLimitReached) as refused:
            first.take(10_000)
        clock.now_s += refused.value.retry_after_s
        first.take(10_000)
        with pytest.raises(KeyLimitReached) as refused:
            second.check()  # runs before the body is read
        assert refused.value.retry_after_s == 10_000 / 100 - BURST_S
        clock.now_s += refused.value.retry_after_s
        second.check()

    def test_generated_tokens_are_paid_for_by_the_requests_after_them(self, pair: Pair) -> None:
        first, second, clock = pair
        first.owe(700)
        with pytest.raises(KeyLimitReached) as refused:
            second.check()
        assert refused.value.retry_after_s == 2
        clock.now_s += 2
        second.check()

    def test_a_process_that_starts_again_has_nothing_in_flight(self, tmp_path: Path) -> None:
        first = KeyLimits("k", CounterFolder(tmp_path / "keys", 0, 2), 1, None)
        first.enter()
        second = KeyLimits("k", CounterFolder(tmp_path / "keys", 1, 2), 1, None)
        with pytest.raises(KeyLimitReached):
            second.enter()
        KeyLimits("k", CounterFolder(tmp_path / "keys", 0, 2), 1, None)  # the restarted first process
        second.enter()


KEYS = """
- {name: alice, key: of-alice, models: [model]}
- {name: bob, key: of-bob, models: [other]}
- {name: slow, key: of-slow, max_tokens_per_second: 1}
- {name: none, key: of-none, max_concurrent_requests: 1}
- {name: boss, key: of-boss, admin: true}
"""


async def _secret_route(call: Call) -> Reply:
    """Show the name of the key."""
    assert call.key is not None
    return Reply(call.key.name.encode())


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    route = RouteSpec("/admin/test", None, _secret_route, "operation", dict[str, Any], admin=True)
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "ROUTES", (*app_module.ROUTES, route))
        with local_app(folder, server={"api_key_file": str(file)}, aliases=("alias",)) as (client, _):
            yield client


def test_without_a_name_a_key_gets_the_first_of_its_models() -> None:
    models: Any = {
        name: SimpleNamespace(
            spec=SimpleNamespace(name=name, prompts={}),
            auto_truncate=None,
            default_chunking=None,
            adapter=None,
            adapters={},
        )
        for name in ("first", "second", "third")
    }
    state = ServerState(ServerConfig(), models, {"other": "third"})
    restricted = ApiKey("k", models=frozenset({"other", "second"}))
    call = Call(state, ApiMetrics(), 0.0)
    call.key = restricted
    assert call.find(None) is models["second"] and call.find("other") is models["third"]
    assert call.names == ["second", "third", "other"]
    with pytest.raises(ModelNotAllowed, match="its models are: second, third, other"):
        call.find("first")
    assert Call(state, ApiMetrics(), 0.0).find(None) is models["first"]


class TestRoutes:
    def test_a_key_that_names_its_models_sees_no_others(self, http: TestClient) -> None:
        assert http.post(ROUTE, json=BODY, headers=bearer("of-alice")).status_code == 200
        for model in (None, "model", "alias", "nothing"):
            refused = http.post(ROUTE, json={**BODY, "model": model}, headers=bearer("of-bob"))
            assert refused.status_code == 404 and "key bob may use" in refused.text
            assert refused.json()["error"]["reason"] == "model_not_found"
            assert "its models are: none" in refused.text
        unknown = http.post(ROUTE, json={**BODY, "model": "nothing"}, headers=bearer("of-alice"))
        assert unknown.status_code == 404 and "its models are: model, alias" in unknown.text
        for path in ("/v1/models", "/models", "/api/tags"):
            assert "alias" in http.get(path, headers=bearer("of-alice")).text
            assert "alias" not in http.get(path, headers=bearer("of-bob")).text
        for path in ("/v1/models/model", "/info"):
            assert http.get(path, headers=bearer("of-bob")).status_code == 404
        sent = {"json": {"input": "a"}, "headers": bearer("of-bob")}
        assert http.post("/invocations", **sent).status_code == 404

    def test_tokens_beyond_the_rate_of_a_key_get_429_and_when_to_retry(self, http: TestClient) -> None:
        headers = bearer("of-slow")
        assert http.post(ROUTE, json={"input": ["a"] * 4}, headers=headers).status_code == 200
        refused = http.post(ROUTE, json=BODY, headers=headers)
        assert refused.status_code == 429 and refused.json()["error"]["reason"] == "key_limit_reached"
        assert 1 <= int(refused.headers["retry-after"]) <= 12
        assert http.post(ROUTE, json=BODY, headers=bearer("of-alice")).status_code == 200

    def test_a_finished_or_failed_request_leaves_its_place(self, http: TestClient) -> None:
        for body, status in ((BODY, 200), ({"input": 1.5}, 400), (BODY, 200)):
            assert http.post(ROUTE, json=body, headers=bearer("of-none")).status_code == status

    def test_an_admin_route_takes_admin_keys_only(self, http: TestClient) -> None:
        answers = [http.get("/admin/test", headers=bearer(key)) for key in ("of-boss", "of-alice", "eve")]
        assert [each.status_code for each in answers] == [200, 403, 401]
        assert answers[0].text == "boss" and answers[1].json()["error"]["type"] == "PermissionDeniedError"
        assert http.get("/admin/test").headers["www-authenticate"] == "Bearer"

    def test_metrics_have_names_of_keys_and_no_keys(self, http: TestClient) -> None:
        http.post(ROUTE, json=BODY, headers=bearer("of-alice"))
        http.post(ROUTE, json=BODY, headers=bearer("of-bob"))
        text = http.get("/metrics").text
        for name in ("requests_total{key=", "tokens_total{key="):
            assert f'penstock_key_{name}"alice"' in text
        assert 'penstock_key_refused_total{key="bob",reason="model"}' in text
        assert "of-" not in text


def test_the_admin_port_takes_the_operation_routes_over(tmp_path: Path) -> None:
    config = {"admin_port": 0, "api_keys": ("k",), "admin_keys": ("boss",)}
    with local_state(write_bert(tmp_path), server=config) as (state, _):
        metrics = app_module.ApiMetrics()
        with TestClient(app_module.build_app(state, metrics)) as public:
            admin = TestClient(app_module.build_admin_app(state, metrics))
            for path in ("/live", "/ready", "/health", "/ping"):
                assert public.get(path).status_code == admin.get(path).status_code == 200, path
            for path in ("/metrics", "/version", "/load", "/server_info", "/metrics/"):
                moved = public.get(path, headers=bearer("boss"))
                assert moved.status_code == 404 and "--admin-port" in moved.text, path
                assert admin.get(path, headers=bearer("boss")).status_code == 200, path
            assert admin.get("/metrics").status_code == 200
            assert admin.get("/server_info").status_code == 401
            assert admin.post(ROUTE, json=BODY, headers=bearer("k")).status_code == 404
            assert public.post(ROUTE, json=BODY, headers=bearer("k")).status_code == 200
            assert "/metrics" not in public.get("/openapi.json").json()["paths"]
