"""The access log: one line per request, which contains the inputs only if they are requested."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.api.access_log import MAX_BODY_CHARS
from tests.api.local_app import local_app
from tests.checkpoints import write_bert

SECRET = "water that nobody may read"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def logged(folder: Path, caplog: pytest.LogCaptureFixture, body: Any, **server: Any) -> list[Any]:
    """Send one request and return its access log lines."""
    caplog.set_level(logging.INFO)
    with local_app(folder, server={"access_log": True, "root_path": "/api", **server}) as (http, _):
        headers = {"x-request-id": "r1", "authorization": "Bearer hunter2"}
        http.post("/api/v1/embeddings?secret=1", json=body, headers=headers)
    lines = [each for each in caplog.records if each.name == "penstock.access"]
    return [each for each in lines if vars(each)["fields"].get("request_id") == "r1"]


def test_a_line_tells_what_a_request_was_and_took(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = logged(folder, caplog, {"input": [SECRET, "b"]}, api_keys=("hunter2",))
    assert line.getMessage() == "POST /v1/embeddings 200"
    assert line.json_fields == {"method": "POST", "path": "/v1/embeddings", "status": 200}
    assert line.fields["model"] == "model" and line.fields["rows"] == 2 and line.fields["tokens"] > 2
    assert line.fields["key"] and line.fields["ms"] > 0 and line.fields["request_id"] == "r1"
    own = [str(vars(each)) for each in caplog.records if each.name.startswith("penstock")]
    assert not any(word in text for text in own for word in (SECRET, "hunter2", "secret="))


def test_a_refused_request_has_the_code_of_its_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = logged(folder, caplog, {"input": SECRET, "model": "other"})
    assert line.fields["error"] == "model_not_found" and line.json_fields["status"] == 404


def test_inputs_are_logged_where_the_operator_asks_for_them(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"input": [SECRET, "x" * 5000]}
    (line,) = logged(folder, caplog, body, access_log=False, log_inputs=True)
    assert SECRET in line.fields["body"] and len(line.fields["body"]) == MAX_BODY_CHARS


def test_nothing_is_logged_by_default(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(folder, caplog, {"input": SECRET}, access_log=False) == []


def test_a_bug_is_logged_with_the_id_of_its_request(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.run.Result", None)
    (line,) = logged(folder, caplog, {"input": SECRET})
    assert line.json_fields["status"] == 500 and line.fields["error"] == "internal_error"
    records = [each for each in caplog.records if each.name.startswith("penstock")]
    (failure,) = [each for each in records if each.levelno == logging.ERROR]
    assert failure.fields == {"request_id": "r1"}  # type: ignore[attr-defined]
