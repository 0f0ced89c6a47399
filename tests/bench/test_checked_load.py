"""The scripts that check a server's promises under load detect each kind of broken promise."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RIGHT = [0.6, 0.8]


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    """A function that imports a script, which may import the scripts beside it."""
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def answered(
    load: Any, status: int = 200, value: Any = RIGHT, name: str | None = None, extra: bytes = b""
) -> Any:
    """The sample of one request to a server that gives this answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        sent = json.loads(await reader.readexactly(length))
        scores = [{"index": at, "relevance_score": score} for at, score in enumerate(value)]
        body = json.dumps({"results": scores} if status == 200 else {"error": {"message": "no"}}).encode()
        if status:
            lines = f"HTTP/1.1 {status} X\r\nx-request-id: {name or sent['request_id']}\r\n"
            writer.write(f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body + extra)
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            questions = load.rerank_questions("m", 1, documents=2)
            model = load.CheckedModel("m", server.sockets[0].getsockname()[1], questions)
            model.expected = [np.array(RIGHT)]
            return await model.ask()

    return asyncio.run(main())


def test_a_right_answer_and_a_refusal_are_no_complaints(script: Callable[[str], Any]) -> None:
    load = script("checked_load")
    assert answered(load).is_right
    refused = answered(load, 429)
    assert (refused.status, refused.complaint, refused.is_right) == (429, "", False)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"value": [0.6, 0.81]}, "values differ by 0.01"),
        ({"value": [0.6]}, "shape"),
        ({"value": [0.6, float("nan")]}, "values differ by nan"),
        ({"name": "m-7"}, "the answer to m-0 is that to m-7"),
        ({"status": 500}, "status 500"),
        ({"status": 0}, "closed without an answer"),
        ({"extra": b"HTTP/1.1 200 X\r\n\r\n"}, "were announced"),
    ],
)
def test_a_wrong_answer_is_found(script: Callable[[str], Any], wrong: dict[str, Any], complaint: str) -> None:
    sample = answered(script("checked_load"), **wrong)
    assert complaint in sample.complaint
    assert not sample.is_right


def test_only_a_kill_explains_a_503(script: Callable[[str], Any]) -> None:
    load, soak = script("checked_load"), script("overload_soak")
    kills = [soak.Kill(at_s=10.0)]
    samples = [
        load.Sample(8.0, 10.1, 503),  # in flight when the engine died
        load.Sample(11.0, 11.1, 503),  # before it was back
        load.Sample(11.5, 13.0, 200),
        load.Sample(9.0, 9.5, 503),
        load.Sample(20.0, 20.1, 503),
    ]
    soak.recoveries(samples, kills)
    assert kills[0].seconds == 3.0
    assert [sample.sent_s for sample in soak.late_refusals(samples, kills)] == [9.0, 20.0]


def test_an_error_of_a_model_that_was_not_killed_is_found(script: Callable[[str], Any]) -> None:
    load, mixed = script("checked_load"), script("mixed_models")
    model = load.CheckedModel("m", 0, [])
    model.samples = [load.Sample(1.0, 2.0, 200), load.Sample(11.0, 11.1, 503)]
    phases = mixed.Phases(began_s=0.0, killed_s=10.0, recovered_s=12.0, ended_s=20.0)
    assert not mixed.errors_of(model, phases, is_killed=True)
    assert mixed.errors_of(model, phases, is_killed=False)


def test_memory_that_grows_is_found_also_in_an_engine_that_replaces_another(
    script: Callable[[str], Any],
) -> None:
    memory = script("process_memory")
    rows = [
        memory.MemoryRow("engine-0 1", 500, 510, 520),
        memory.MemoryRow("API 2", 80, 140, 140),
        memory.MemoryRow("engine-0 3", 200, 530, 530),
        memory.MemoryRow("engine-0 4", 200, 560, 560),
    ]
    complaints = memory.memory_complaints(rows, bound_mib=48)
    assert [complaint.split(" ends")[0] for complaint in complaints] == ["API 2", "engine-0 4"]


def test_texts_that_were_learned_for_a_question_are_right_for_it_alone(script: Callable[[str], Any]) -> None:
    load = script("checked_load")
    model = load.CheckedModel("m", 0, load.generate_questions("m", 2), expected=["one", "other"])
    reply = load.Reply(200, {"x-request-id": "m-0"}, b'{"choices": [{"text": "a tie"}]}')
    assert "instead of 'one'" in model._complaint(reply, 0, 0)
    model._learns_texts = True
    model._complaint(reply, 0, 0)
    model._learns_texts = False
    assert model._complaint(reply, 0, 0) == ""
    assert "instead of 'other'" in model._complaint(reply, 0, 1)
