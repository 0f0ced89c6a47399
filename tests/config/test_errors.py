from __future__ import annotations

import pytest

from penstock.errors import (
    BY_NAME,
    BadValue,
    ClientError,
    EngineError,
    EngineUnavailable,
    PenstockError,
    QueueFull,
    revive,
)


def test_every_error_is_a_client_error_or_an_engine_error() -> None:
    for cls in BY_NAME.values():
        if cls is not PenstockError:
            assert issubclass(cls, ClientError) != issubclass(cls, EngineError)
            is_refused = cls.status < 500 or cls.status == 501  # 501: the route is not served to anyone
            assert is_refused == issubclass(cls, ClientError)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("BadValue", 400),
        ("Unauthorized", 401),
        ("Forbidden", 403),
        ("NotFound", 404),
        ("ModelNotFound", 404),
        ("ModelNotAllowed", 404),
        ("DeadlineExceeded", 408),
        ("BodyTooLarge", 413),
        ("NotPossible", 422),
        ("QueueFull", 429),
        ("KeyLimitReached", 429),
        ("RowFailed", 500),
        ("EngineUnavailable", 503),
    ],
)
def test_each_error_has_its_documented_status(name: str, status: int) -> None:
    assert BY_NAME[name].status == status


@pytest.mark.parametrize("cls", BY_NAME.values())
def test_an_error_survives_a_process_boundary(cls: type[PenstockError]) -> None:
    error = revive(cls.__name__, "what happened", "input")
    assert type(error) is cls
    assert (str(error), error.message, error.param) == ("what happened", "what happened", "input")


def test_an_unknown_error_becomes_an_engine_error() -> None:
    assert type(revive("Surprise", "boo", None)) is EngineError


@pytest.mark.parametrize("cls", [QueueFull, EngineUnavailable])
def test_temporary_errors_say_when_to_retry(cls: type[QueueFull]) -> None:
    assert cls.retry_after_s > 0


def test_names_are_unique() -> None:
    assert BY_NAME["BadValue"] is BadValue
    assert len({cls.__name__ for cls in BY_NAME.values()}) == len(BY_NAME)
