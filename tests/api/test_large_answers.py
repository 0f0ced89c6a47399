"""Answers of many megabytes are correct to the byte, and do not delay other requests."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from penstock.api.app import build_app
from penstock.api.body import json_body, sized
from penstock.api.endpoint import unless_gone
from penstock.api.state import ServedModel, ServerState
from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ServerConfig
from penstock.errors import Cancelled
from penstock.outputs.encoders import LargeRow
from penstock.tasks.model import TextModel
from penstock.types import OutputDtype, PooledOutput, Request, Timings

WIDTH = 1024
DTYPES = [OutputDtype.FLOAT32, OutputDtype.FLOAT16, OutputDtype.BFLOAT16, OutputDtype.INT8]


class NullClient:
    """An engine client that answers at once, with values that identify their row."""

    ready = True

    def start(self) -> None: ...

    def close(self) -> None: ...

    async def run(self, request: Request) -> PooledOutput:
        await asyncio.sleep(0)
        rows = request.num_tokens if request.params.per_token else request.num_rows
        values = (np.arange(rows * WIDTH) % 100).reshape(rows, WIDTH).astype(request.params.dtype.numpy)
        return PooledOutput(request.id, values, Timings())


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    spec: ModelSpec = describe(EngineConfig(device="null"))
    text = TextModel(spec)
    model = ServedModel(text, NullClient(), 0)  # type: ignore[arg-type]
    yield build_app(ServerState(ServerConfig(), {spec.name: model}))
    text.close()


class Exchange:
    """One request to an ASGI application, and the messages of its response."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.app, self.path = app, path
        self.raw = json.dumps(body).encode()
        self.status, self.headers = 0, dict[bytes, bytes]()
        self.pieces: list[bytes] = []
        self.began, self.done = asyncio.Event(), False

    async def run(self) -> None:
        unread = [{"type": "http.request", "body": self.raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], dict(message["headers"])
                return
            self.pieces.append(bytes(message["body"]))
            self.began.set()
            self.done = not message.get("more_body", False)

        scope = {"type": "http", "method": "POST", "path": self.path, "headers": []}
        await self.app(scope, receive, send)
        assert self.status == 200, b"".join(self.pieces)
        assert int(self.headers[b"content-length"]) == len(b"".join(self.pieces))
        assert self.done

    @property
    def content(self) -> Any:
        return orjson.loads(b"".join(self.pieces))


def tokens_of(texts: int, encoding: str, dtype: OutputDtype = OutputDtype.FLOAT32) -> dict[str, Any]:
    return {
        "input": ["retrieval benchmark sentence " * 40] * texts,
        "task": "token_embed",
        "encoding_format": encoding,
        "embed_dtype": dtype.value,
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_three_encodings_of_a_large_answer_agree(app: Any, dtype: OutputDtype) -> None:
    async def ask(encoding: str) -> Exchange:
        exchange = Exchange(app, "/pooling", tokens_of(4, encoding, dtype))
        await exchange.run()
        return exchange

    async def all_three() -> list[Exchange]:
        return [await ask(encoding) for encoding in ("base64", "bytes", "float")]

    text, raw, numbers = asyncio.run(all_three())
    rows = [base64.b64decode(item["data"]) for item in text.content["data"]]
    assert b"".join(rows) == b"".join(raw.pieces)
    values = np.frombuffer(b"".join(rows), dtype=dtype.numpy).reshape(-1, WIDTH)
    assert (values == (np.arange(values.size) % 100).reshape(values.shape).astype(dtype.numpy)).all()
    shown = np.concatenate([np.array(item["data"], dtype=np.float32) for item in numbers.content["data"]])
    if dtype is OutputDtype.BFLOAT16:
        expected = (values.astype(np.uint32) << 16).view(np.float32)
    else:
        expected = values.astype(np.float32)
    np.testing.assert_array_equal(shown, expected)
    assert [item["index"] for item in text.content["data"]] == [0, 1, 2, 3]
    assert text.content["usage"] == numbers.content["usage"]


@pytest.mark.parametrize("encoding", ["base64", "bytes"])
def test_a_small_request_is_answered_while_large_answers_are_sent(app: Any, encoding: str) -> None:
    async def beside() -> None:
        large = [Exchange(app, "/pooling", tokens_of(32, encoding)) for _ in range(4)]
        tasks = [asyncio.create_task(each.run()) for each in large]
        for each in large:
            await each.began.wait()
        for _ in range(3):
            small = Exchange(app, "/v1/embeddings", {"input": "short"})
            await small.run()
        unfinished = [each for each in large if not each.done]
        await asyncio.gather(*tasks)
        assert unfinished, "all that have begun are done: each was sent in one go"
        assert sum(map(len, large[0].pieces)) > 10_000_000

    asyncio.run(beside())


def test_numbers_of_a_large_answer_are_written_a_little_at_a_time(app: Any) -> None:
    """The size is unknown until the numbers are written. Other requests are answered in between."""

    async def beside() -> None:
        large = Exchange(app, "/pooling", tokens_of(8, "float"))
        task = asyncio.create_task(large.run())
        answered = 0
        while not large.began.is_set():
            await Exchange(app, "/v1/embeddings", {"input": "short"}).run()
            answered += 1
        await task
        assert answered > 5

    asyncio.run(beside())


def test_a_body_with_large_rows_is_the_json_of_its_values() -> None:
    values = np.arange(200_000, dtype=np.float32).reshape(2, -1)
    row = LargeRow(values, "float", OutputDtype.FLOAT32)
    content = {"a": [1, row, {"b": row}], "text": 'mark "quoted"', "end": np.arange(3)}
    body = json_body(content)
    assert isinstance(body, list)

    async def collect() -> tuple[int, bytes]:
        size, pieces = await sized(body)
        return size, b"".join(pieces)

    size, raw = asyncio.run(collect())
    assert size == len(raw)
    plain = values.tolist()
    expected = {"a": [1, plain, {"b": plain}], "text": 'mark "quoted"', "end": [0, 1, 2]}
    assert orjson.loads(raw) == expected


def test_a_value_that_json_cannot_hold_is_an_error() -> None:
    with pytest.raises(TypeError):
        json_body({"a": Path})


def test_a_client_that_disconnects_cancels_only_its_own_work() -> None:
    ended: list[str] = []

    async def work() -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def disconnect() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def leave() -> None:
        with pytest.raises(Cancelled):
            await unless_gone(work(), disconnect)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)  # raises if the cancellation leaked into this task

    asyncio.run(leave())
    assert ended == ["cancelled"]


def test_a_server_that_stops_cancels_running_work() -> None:
    async def stop() -> None:
        async def work() -> Any:
            await asyncio.sleep(60)

        async def forever() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        task = asyncio.create_task(unless_gone(work(), forever))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
