"""Files and batches with the unmodified `openai` package."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import FLAGS, Start
from tests.e2e.llama import write_llama
from tests.e2e.server import Server, ServerPool
from tests.waiting import wait_until

openai = pytest.importorskip("openai")
TEXTS = [f"Water finds its level, for the {number}th time." for number in range(60)]


@pytest.fixture(scope="module")
def embedder(servers: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("batches")
    return servers.get(*FLAGS, "--batch-folder", str(folder), "--api-server-count", "2")


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def jsonl(url: str, bodies: list[dict[str, Any]]) -> bytes:
    rows = (
        {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def finished(client: openai.OpenAI, batch_id: str) -> Any:
    ends = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: client.batches.retrieve(batch_id).status in ends)
    return client.batches.retrieve(batch_id)


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {each["custom_id"]: each for each in found}


def test_a_batch_of_embeddings(embedder: Server, tmp_path: Path) -> None:
    client = client_of(embedder)
    path = tmp_path / "batch.jsonl"
    bodies: list[dict[str, Any]] = [{"input": text, "model": "x:latest"} for text in TEXTS]
    name = client.models.list().data[0].id
    for body in bodies:
        body["model"] = name
    bodies[7]["dimensions"] = 0
    path.write_bytes(jsonl("/v1/embeddings", bodies))
    with path.open("rb") as file:
        uploaded = client.files.create(
            file=file, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert client.files.wait_for_processing(uploaded.id).status == "processed"
    assert client.files.retrieve(uploaded.id).filename == "batch.jsonl"
    batch = client.batches.create(
        input_file_id=uploaded.id,
        endpoint="/v1/embeddings",
        completion_window="24h",
        metadata={"kind": "test"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert batch.status == "validating"
    batch = finished(client, batch.id)
    assert batch.status == "completed"
    assert batch.model == name
    assert batch.request_counts is not None and batch.usage is not None
    assert (batch.request_counts.total, batch.request_counts.failed) == (60, 1)
    assert batch.usage.total_tokens == batch.usage.input_tokens > 60
    answers = lines(client, batch.output_file_id)
    direct = client.embeddings.create(model=name, input=TEXTS, encoding_format="float").data
    for number, item in enumerate(direct):
        if number != 7:
            body = answers.pop(f"request-{number}")["response"]["body"]
            parsed = openai.types.CreateEmbeddingResponse.model_validate(body)
            np.testing.assert_allclose(parsed.data[0].embedding, item.embedding, atol=1e-5)
    assert answers == {}
    (error,) = lines(client, batch.error_file_id).values()
    assert (error["custom_id"], error["response"]["status_code"]) == ("request-7", 400)
    assert client.files.list(purpose="batch_output", limit=1).data[0].purpose == "batch_output"
    assert uploaded.id in [each.id for each in client.files.list(order="asc", limit=1)]
    assert client.files.delete(uploaded.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(uploaded.id)


def test_lists_have_pages(embedder: Server) -> None:
    client = client_of(embedder)
    content = jsonl("/v1/embeddings", [{"input": "a"}])
    uploaded = client.files.create(file=("a.jsonl", io.BytesIO(content)), purpose="batch")
    made = []
    for _ in range(3):
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        made.append(batch.id)
    assert [each.id for each in client.batches.list(limit=2)][:3] == made[::-1]
    for name in made:
        finished(client, name)


def test_errors_of_lines_and_cancel(embedder: Server) -> None:
    client = client_of(embedder)
    uploaded = client.files.create(file=("bad.jsonl", io.BytesIO(b"{}\n[\n")), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    batch = finished(client, batch.id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [(each.line, each.code) for each in batch.errors.data] == [
        (1, "missing_required_parameter"),
        (2, "invalid_json_line"),
    ]
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.batches.create(
            input_file_id=uploaded.id,
            endpoint="/v1/moderations",
            completion_window="24h",
        )
    many = jsonl("/v1/embeddings", [{"input": f"{text} {number}"} for number in range(20) for text in TEXTS])
    uploaded = client.files.create(file=("many.jsonl", io.BytesIO(many)), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert finished(client, batch.id).status == "cancelled"


def test_a_batch_of_chats(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chats")
    server = start("smollm2", write_llama, "--batch-folder", str(folder))
    client = client_of(server)
    name = client.models.list().data[0].id
    message = [{"role": "user", "content": "Say a word."}]
    body = {"model": name, "messages": message, "max_tokens": 8, "temperature": 0}
    bodies = [body, {**body, "stream": True}, {**body, "max_tokens": 3}]
    content = jsonl("/v1/chat/completions", bodies)
    uploaded = client.files.create(file=("chat.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = finished(client, batch.id)
    assert batch.usage is not None and batch.usage.output_tokens > 0
    answers = lines(client, batch.output_file_id)
    direct = client.chat.completions.create(model=name, messages=message, max_tokens=8, temperature=0)
    found = openai.types.chat.ChatCompletion.model_validate(answers["request-0"]["response"]["body"])
    assert found.choices[0].message.content == direct.choices[0].message.content
    assert set(answers) == {"request-0", "request-2"}
    assert set(lines(client, batch.error_file_id)) == {"request-1"}
