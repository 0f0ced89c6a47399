"""Files and batches over HTTP: what is stored, who can see it, and how every line is answered."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from penstock.api.app import ROUTES
from penstock.api.batch_run import BatchRun
from penstock.api.dialects.openai.batches import BatchObject
from penstock.api.dialects.openai.files import FileObject
from penstock.batches.records import BatchRecord
from penstock.errors import EngineUnavailable, QueueFull
from penstock.types import PooledOutput, Request
from tests.api.local_app import WholeClient, local_state
from tests.api.scripted_app import listening
from tests.checkpoints import write_bert
from tests.waiting import PATIENCE_S, wait_until

URL = "/v1/embeddings"
KEYS = ("first", "second")
OFTEN = {"COMMIT_S": 0.02, "CHECK_S": 0.02, "FIRST_DELAY_S": 0.01}


class Engine(WholeClient):
    """An engine that a test can make fail or block."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.errors: list[Exception] = []  # raised by the next requests, one each
        self.open = threading.Event()
        self.open.set()
        self.backgrounds: list[bool] = []

    async def run(self, request: Request) -> PooledOutput:
        self.backgrounds.append(request.is_background)
        while not self.open.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if self.errors:
            raise self.errors.pop(0)
        return await super().run(request)


class Site:
    """A server and its clients."""

    def __init__(self, url: str, engine: Engine, folder: Path) -> None:
        self.url = url
        self.engine = engine
        self.folder = folder

    def client(self, key: str = "first") -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S)

    def upload(self, content: bytes, **options: Any) -> httpx.Response:
        fields = {"purpose": "batch", **options.pop("fields", {})}
        name = options.pop("name", "in.jsonl")
        with self.client(**options) as http:
            return http.post("/v1/files", files={"file": (name, content)}, data=fields)

    def begin(self, content: bytes, endpoint: str = URL, **fields: Any) -> str:
        with self.client() as http:
            body = {"input_file_id": self.upload(content).json()["id"], "endpoint": endpoint, **fields}
            answer = http.post("/v1/batches", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["id"])

    def batch(self, batch_id: str) -> Any:
        with self.client() as http:
            return http.get(f"/v1/batches/{batch_id}").json()

    def ended(self, batch_id: str) -> Any:
        wait_until(lambda: self.batch(batch_id)["status"] in ("completed", "failed", "cancelled", "expired"))
        return self.batch(batch_id)

    def lines(self, file_id: str | None) -> dict[str, Any]:
        if file_id is None:
            return {}
        with self.client() as http:
            content = http.get(f"/v1/files/{file_id}/content")
            assert content.headers["content-type"] == "application/jsonl"
            found = [json.loads(line) for line in content.text.splitlines()]
        assert len({each["custom_id"] for each in found}) == len(found), "each line once"
        return {each["custom_id"]: each for each in found}


@contextmanager
def serving(folder: Path, model: Path, **server: Any) -> Iterator[Site]:
    settings = {"batch_folder": str(folder), "api_keys": KEYS, **server}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, seconds in OFTEN.items():
            patch.setattr(f"penstock.api.batch_run.{name}", seconds)
        patch.setattr("penstock.api.batch_service.POLL_S", 0.02)
        state, engine = stack.enter_context(local_state(model, client=Engine, server=settings))
        assert isinstance(engine, Engine)
        yield Site(stack.enter_context(listening(state)), engine, folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("batches"), model) as found:
        yield found


def line(name: str, url: str = URL, **body: Any) -> bytes:
    fields = {"custom_id": name, "method": "POST", "url": url, "body": {"input": f"text {name}", **body}}
    return json.dumps(fields).encode() + b"\n"


def test_without_the_flag_the_routes_say_how_to_turn_them_on(model: Path) -> None:
    with local_state(model) as (state, _), listening(state) as url, httpx.Client(base_url=url) as http:
        for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches/x"), ("DELETE", "/v1/files/x")):
            answer = http.request(method, path)
            assert answer.status_code == 404
            assert "--batch-folder" in answer.json()["error"]["message"]


def test_every_line_is_answered_as_a_request_would_be(site: Site) -> None:
    names = [f"n{number}" for number in range(40)]
    batch = site.ended(site.begin(b"".join(map(line, names)), metadata={"for": "test"}))
    assert msgspec.convert(batch, BatchObject).status == "completed"
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert batch["usage"]["total_tokens"] == batch["usage"]["input_tokens"] > 0
    assert (batch["metadata"], batch["error_file_id"]) == ({"for": "test"}, None)
    answers = site.lines(batch["output_file_id"])
    assert set(answers) == set(names)
    assert all(site.engine.backgrounds[-40:])
    with site.client() as http:
        direct = http.post(URL, json={"input": [f"text {name}" for name in names]}).json()["data"]
    for name, item in zip(names, direct, strict=True):
        found = answers[name]
        assert found["error"] is None
        assert found["response"]["status_code"] == 200
        assert found["response"]["body"]["data"][0]["embedding"] == pytest.approx(item["embedding"], abs=1e-5)


def test_lines_with_errors_go_to_the_error_file(site: Site) -> None:
    content = (
        line("good")
        + line("dimensions", dimensions=0)
        + line("model", model="other")
        + line("bytes", encoding_format="bytes")
        + line("stream", stream=True)
    )
    batch = site.ended(site.begin(content))
    assert batch["request_counts"] == {"total": 5, "completed": 1, "failed": 4}
    assert set(site.lines(batch["output_file_id"])) == {"good"}
    errors = {
        name: (each["response"]["status_code"], each["response"]["body"]["error"]["message"])
        for name, each in site.lines(batch["error_file_id"]).items()
    }
    assert {name: status for name, (status, _) in errors.items()} == {
        "dimensions": 400,
        "model": 404,
        "bytes": 400,
        "stream": 400,
    }
    assert "cannot be streamed" in errors["stream"][1]
    assert "encoding_format" in errors["bytes"][1]


def test_a_file_with_bad_lines_fails_as_a_whole(site: Site) -> None:
    batch = site.ended(site.begin(line("a") + b"{nonsense\n" + line("a") + line("c", url="/rerank")))
    assert batch["status"] == "failed"
    assert [(each["line"], each["code"]) for each in batch["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
    ]
    assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)


def test_files_are_described_listed_and_deleted(site: Site) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    site.upload(line("b"))
    made = site.upload(line("a"), name="../../evil.jsonl", fields=fields)
    found = msgspec.convert(made.json(), FileObject)
    assert (found.filename, found.purpose, found.bytes) == ("evil.jsonl", "batch", len(line("a")))
    assert found.expires_at == found.created_at + 3600
    with site.client() as http:
        assert http.get(f"/v1/files/{found.id}").json() == made.json()
        assert http.get(f"/v1/files/{found.id}/content").content == line("a")
        listed = http.get("/v1/files?limit=1&order=desc&purpose=batch").json()
        assert [each["id"] for each in listed["data"]] == [found.id] == [listed["last_id"]]
        assert listed["has_more"] is True
        assert http.delete(f"/v1/files/{found.id}").json() == {
            "id": found.id,
            "object": "file",
            "deleted": True,
        }
        for path in (f"/v1/files/{found.id}", f"/v1/files/{found.id}/content"):
            assert http.get(path).status_code == 404
    stored = {path.name for path in site.folder.rglob("*") if path.is_file()}
    assert not any("evil" in name for name in stored), "a client's name is never one on disk"


def test_another_key_sees_nothing_of_it(site: Site) -> None:
    batch_id = site.begin(line("a"))
    file_id = site.ended(batch_id)["output_file_id"]
    with site.client("second") as http:
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ):
            assert http.request(method, path).status_code == 404, path
        assert http.get("/v1/files").json()["data"] == http.get("/v1/batches").json()["data"] == []
    with httpx.Client(base_url=site.url) as nobody:
        assert nobody.get("/v1/files").status_code == 401


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"endpoint": "/v1/nowhere"}, "endpoint", "/v1/embeddings, "),
        ({"endpoint": "/v1/batches"}, "endpoint", "use one of"),
        ({"endpoint": "/v1/admin/models/load"}, "endpoint", "use one of"),
        ({"completion_window": "soon"}, "completion_window", "such as 24h"),
        ({"input_file_id": "file-../../x"}, "input_file_id", "no file"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k" * 65: "x"}}, "metadata", "up to 64 characters"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None, "3600"),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused(
    site: Site, fields: dict[str, Any], param: str | None, words: str
) -> None:
    file_id = site.upload(line("a")).json()["id"]
    with site.client() as http:
        answer = http.post("/v1/batches", json={"input_file_id": file_id, "endpoint": URL, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/files?after=file-9", "not in the list"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?colour=red", "colour"),
    ],
)
def test_parameters_that_are_wrong_are_refused(site: Site, path: str, words: str) -> None:
    with site.client() as http:
        answer = http.get(path)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "content", "words"),
    [
        ({"purpose": "fine-tune"}, b"x", "purpose 'batch'"),
        ({"expires_after[seconds]": "60"}, b"x", "3600"),
        ({"expires_after[anchor]": "never"}, b"x", "expires_after"),
        ({}, b"", "the file is empty"),
    ],
)
def test_a_form_that_is_not_accepted_is_refused(
    site: Site, fields: dict[str, str], content: bytes, words: str
) -> None:
    answer = site.upload(content, fields=fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert list((site.folder / "uploads").iterdir()) == []


def test_a_body_that_is_no_form_is_refused(site: Site) -> None:
    with site.client() as http:
        for body, kind in ((b"{}", "application/json"), (b"--x\r\n", "multipart/form-data; boundary=x")):
            answer = http.post("/v1/files", content=body, headers={"Content-Type": kind})
            assert answer.status_code == 400


def test_a_declared_size_beyond_the_limit_is_refused_at_once(site: Site) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        client.sendall(
            b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer first\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1073741824\r\n\r\n"
        )
        assert client.recv(64).startswith(b"HTTP/1.1 413")


def test_an_upload_is_not_held_in_memory(tmp_path: Path, model: Path) -> None:
    size = 96 << 20

    def body() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(size >> 20):
            yield b"y" * (1 << 20)
        yield b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'

    with serving(tmp_path, model, max_body_bytes=1 << 20) as small, small.client() as http:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = http.post("/v1/files", content=body(), headers=kind)
        assert answer.json()["bytes"] == size
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10
        batch = small.ended(small.begin(line("a")))
        assert batch["status"] == "completed"
        refused = http.post(
            "/v1/batches", json={"input_file_id": answer.json()["id"], "endpoint": URL}
        ).json()
        assert [each["code"] for each in small.ended(refused["id"])["errors"]["data"]] == ["line_too_long"]


def test_files_beyond_the_limits_are_refused(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model, max_batch_file_mb=1, batch_quota_gb=0.001, max_batch_lines=2) as small:
        answer = small.upload(b"x" * (1 << 20) + b"x")
        assert answer.status_code == 413
        assert "--max-batch-file-mb" in answer.json()["error"]["message"]
        assert small.upload(b"x" * (1 << 20)).status_code == 200
        answer = small.upload(b"x" * (1 << 20))
        assert answer.status_code == 422
        assert "--batch-quota-gb" in answer.json()["error"]["message"]
        batch = small.ended(small.begin(line("a") + line("b") + line("c")))
        assert batch["errors"]["data"][0]["code"] == "too_many_lines"


def test_a_line_waits_for_an_engine_that_is_full_or_down(site: Site) -> None:
    site.engine.errors = [QueueFull("full"), EngineUnavailable("restarting")]
    batch = site.ended(site.begin(line("a") + line("b")))
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_a_line_that_stops_the_engine_each_time_is_given_up(site: Site) -> None:
    site.engine.errors = [EngineUnavailable("the engine stopped")] * 4
    batch = site.ended(site.begin(line("a")))
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    (error,) = site.lines(batch["error_file_id"]).values()
    assert "stopped each time" in error["response"]["body"]["error"]["message"]


def test_a_cancelled_batch_keeps_what_is_answered(site: Site) -> None:
    site.engine.open.clear()
    batch_id = site.begin(b"".join(line(str(number)) for number in range(5)))
    wait_until(lambda: site.batch(batch_id)["status"] == "in_progress")
    with site.client() as http:
        assert http.post(f"/v1/batches/{batch_id}/cancel").json()["status"] in ("cancelling", "cancelled")
        batch = site.ended(batch_id)
        again = http.post(f"/v1/batches/{batch_id}/cancel")
    site.engine.open.set()
    assert batch["status"] == "cancelled"
    assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 5}
    codes = {each["error"]["code"] for each in site.lines(batch["error_file_id"]).values()}
    assert codes == {"batch_cancelled"}
    assert again.status_code == 400


def test_lines_that_are_left_when_the_window_ends_expire(site: Site) -> None:
    site.engine.open.clear()
    batch = site.ended(site.begin(line("a") + line("b"), completion_window="1s"))
    site.engine.open.set()
    assert batch["status"] == "expired"
    errors = site.lines(batch["error_file_id"])
    assert {name: each["error"]["code"] for name, each in errors.items()} == dict.fromkeys(
        "ab", "batch_expired"
    )


def test_a_batch_goes_on_in_the_next_server(tmp_path: Path, model: Path) -> None:
    names = [str(number) for number in range(30)]
    with serving(tmp_path, model) as first:
        batch_id = first.begin(b"".join(map(line, names[:1])))
        first.ended(batch_id)
        first.engine.open.clear()
        batch_id = first.begin(b"".join(map(line, names)))
        wait_until(lambda: first.batch(batch_id)["status"] == "in_progress")
    with serving(tmp_path, model) as second:
        batch = second.ended(batch_id)
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert set(second.lines(batch["output_file_id"])) == set(names)


def test_a_second_server_on_the_folder_says_so(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as first:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getppid", lambda: 1)
            with serving(tmp_path, model) as second:
                answer = second.upload(line("a"))
                assert answer.status_code == 503
                assert "another server" in answer.json()["error"]["message"]
        assert first.upload(line("a")).status_code == 200


def test_metrics_count_lines_and_batches(site: Site) -> None:
    site.ended(site.begin(line("a") + line("b", dimensions=0)))
    with site.client() as http:
        found = http.get("/metrics").text
    assert 'penstock_batch_lines_total{endpoint="/v1/embeddings",result="completed"}' in found
    assert 'penstock_batch_lines_total{endpoint="/v1/embeddings",result="failed"}' in found
    assert 'penstock_batches{status="completed"}' in found


def test_the_document_describes_forms_and_parameters(site: Site) -> None:
    with site.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
    form = paths["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["$ref"].endswith("/FileForm")
    names = [each["name"] for each in paths["/v1/files"]["get"]["parameters"]]
    assert names == ["purpose", "limit", "order", "after"]
    assert paths["/v1/batches/{batch_id}/cancel"]["post"]["parameters"][0]["name"] == "batch_id"
    assert {route.path for route in ROUTES if route.form is not None} == {"/v1/files"}


def test_a_url_with_too_many_parameters_is_refused(site: Site) -> None:
    with site.client() as http:
        answer = http.get("/v1/files?" + "&".join(f"a{number}=1" for number in range(65)))
    assert answer.status_code == 400 and "more than 64 parameters" in answer.text


def test_a_record_read_before_a_commit_does_not_replace_the_committed_one() -> None:
    record = BatchRecord(
        id="batch_1",
        owner="",
        endpoint=URL,
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=1 << 40,
        total=2,
        output_file_id="file-2",
        error_file_id="file-3",
    )
    service: Any = SimpleNamespace(state=None, endpoints={})
    run = BatchRun(service, msgspec.structs.replace(record, completed=1, failed=1))
    run._take(record)
    assert run.batch.num_answered == 2
    run._take(msgspec.structs.replace(run.batch, status="cancelling"))
    assert run.batch.status == "cancelling"
