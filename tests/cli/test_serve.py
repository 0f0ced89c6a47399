from __future__ import annotations

import pytest

from penstock.cli import flags
from penstock.cli.flags import cache_ttl, redis_url
from penstock.cli.serve import api_processes, generation
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "cores", "gpu", "processes"),
    [
        ("auto", 16, True, 8),
        ("cuda:1", 64, True, 8),
        ("null", 6, False, 3),
        ("auto", 3, True, 1),
        ("cuda", 1, True, 1),
        ("auto", 16, False, 1),  # the engine computes on these cores
        ("cpu", 16, True, 1),
    ],
)
def test_auto_starts_a_process_for_two_cores_unless_the_engine_needs_them(
    device: str, cores: int, gpu: bool, processes: int
) -> None:
    assert api_processes("auto", device, cores, gpu) == processes


def test_a_given_number_of_api_processes_is_kept() -> None:
    assert api_processes("24", "cpu", 2, False) == 24


@pytest.mark.parametrize("wanted", ["0", "-1", "1.5", "many", "", "²", "257", "9" * 5000])
def test_other_values_are_refused_with_the_accepted_ones(wanted: str) -> None:
    with pytest.raises(ConfigError, match="auto or a number from 1"):
        api_processes(wanted, "auto")


@pytest.mark.parametrize(
    ("asked", "runner", "expected"),
    [(None, "auto", None), (True, "auto", True), (None, "pooling", False), (None, "generate", True)],
)
def test_the_runner_turns_generation_on_or_off(
    asked: bool | None, runner: str, expected: bool | None
) -> None:
    assert generation(asked, runner) is expected


@pytest.mark.parametrize(("asked", "runner"), [(True, "pooling"), (False, "generate")])
def test_a_runner_that_contradicts_another_flag_is_refused(asked: bool | None, runner: str) -> None:
    with pytest.raises(ConfigError, match="--runner"):
        generation(asked, runner)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1",
        "redis://:secret@cache.internal:6379/2",
        "rediss://user:secret@[::1]:6380/0?ssl_ca_certs=/etc/ca.pem",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_an_address_of_redis_is_taken_as_it_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags.importlib.util, "find_spec", lambda name: name)
    assert redis_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "secret",
        "http://secret",
        "redis://",
        "redis:///0",
        "unix://",
        "redis://secret:port",
        "redis://[secret",
    ],
)
def test_other_addresses_are_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://HOST:PORT/DB") as refused:
        redis_url(url)
    assert "secret" not in str(refused.value)


def test_redis_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[redis\]'"):
        redis_url("redis://127.0.0.1")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e9])
def test_a_lifetime_of_results_is_a_number_of_seconds(seconds: float) -> None:
    assert cache_ttl(0.5) == 0.5
    with pytest.raises(ConfigError, match="--result-cache-ttl is"):
        cache_ttl(seconds)
