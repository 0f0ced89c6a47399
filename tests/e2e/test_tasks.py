"""Every task of one model through one server, one at a time and concurrently."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from penstock import Engine
from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert
from tests.e2e.server import Server, serving

TEXTS = ["the water was long", "find a word", "people write many letters now", "oil"]
LABELS = {"0": "calm", "1": "angry", "2": "sad"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = BERT_CONFIG | {"architectures": ["BertForSequenceClassification"], "id2label": LABELS}
    generator = torch.Generator().manual_seed(7)
    width = config["hidden_size"]
    tensors = {f"bert.{name}": tensor for name, tensor in bert_tensors(config).items()}
    for name, shape in {"bert.pooler.dense": (width, width), "classifier": (3, width)}.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator)
    return write_bert(tmp_path_factory.mktemp("models") / "classifier", tensors=tensors, config=config)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Iterator[Server]:
    with serving(str(folder), "--device", "cpu", "--threads", "1") as running:
        yield running


def post(server: Server, route: str, **body: object) -> httpx.Response:
    return server.http.post(route, json={"input": TEXTS, **body})


def test_classify_names_the_likeliest_label(classifier: Server, engine: Engine) -> None:
    expected = engine.classify(TEXTS)
    answer = post(classifier, "/classify").json()
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], expected, atol=1e-5)
    assert [row["label"] for row in answer["data"]] == [LABELS[str(i)] for i in expected.argmax(1)]
    assert {row["num_classes"] for row in answer["data"]} == {3}
    np.testing.assert_allclose(expected.sum(1), 1, atol=1e-5)


def test_the_activation_can_be_turned_off(classifier: Server, engine: Engine) -> None:
    rows = post(classifier, "/classify", use_activation=False).json()["data"]
    scores = np.array([row["probs"] for row in rows])
    np.testing.assert_allclose(scores, engine.classify(TEXTS, use_activation=False), atol=1e-5)
    assert abs(scores.sum(1) - 1).max() > 0.01


def test_pooling_runs_the_first_task_of_the_model_by_default(classifier: Server, engine: Engine) -> None:
    rows = post(classifier, "/pooling").json()["data"]
    np.testing.assert_allclose([row["data"] for row in rows], engine.classify(TEXTS), atol=1e-5)
    rows = post(classifier, "/pooling", task="embed").json()["data"]
    np.testing.assert_allclose([row["data"] for row in rows], engine.embed(TEXTS), atol=1e-5)


@pytest.mark.parametrize("encoding", ["float", "base64", "bytes"])
def test_token_vectors_come_as_a_matrix_for_each_text(
    classifier: Server, engine: Engine, encoding: str
) -> None:
    expected = engine.token_embed(TEXTS, dimensions=8)
    response = post(classifier, "/pooling", task="token_embed", dimensions=8, encoding_format=encoding)
    if encoding == "bytes":
        got = list(
            np.split(
                np.frombuffer(response.content, "<f4").reshape(-1, 8),
                np.cumsum([len(e) for e in expected])[:-1],
            )
        )
    elif encoding == "base64":
        rows = [base64.b64decode(row["data"]) for row in response.json()["data"]]
        got = [np.frombuffer(row, "<f4").reshape(-1, 8) for row in rows]
    else:
        got = [np.array(row["data"]) for row in response.json()["data"]]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_concurrent_tasks_answer_as_each_does_alone(classifier: Server, engine: Engine) -> None:
    expected = {
        "classify": list(engine.classify(TEXTS)),
        "embed": list(engine.embed(TEXTS)),
        "token_embed": engine.token_embed(TEXTS),
    }
    wrong: list[str] = []

    def ask(task: str) -> None:
        for _ in range(15):
            rows = post(classifier, "/pooling", task=task).json()["data"]
            for row, wanted in zip(rows, expected[task], strict=True):
                if not np.allclose(row["data"], wanted, atol=1e-5):
                    wrong.append(task)

    threads = [threading.Thread(target=ask, args=(task,)) for task in list(expected) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_rows_of_several_tasks_share_one_step(engine: Engine) -> None:
    """The plan of the step contains every row, and one variant per task."""
    from penstock.scheduler.plan import build_plan
    from penstock.scheduler.scheduler import Budget, Scheduler
    from penstock.types import PoolingParams, Task

    scheduler = Scheduler(Budget(1000, 100, 10_000))
    for task in (Task.EMBED, Task.CLASSIFY, Task.TOKEN_EMBED):
        scheduler.add(engine.local.text.processor.prepare(task.value, TEXTS, PoolingParams(task)))
    plan = build_plan(scheduler.schedule())
    assert plan.num_rows == 3 * len(TEXTS)
    assert {variant.params.task for variant in plan.variants} == {Task.EMBED, Task.CLASSIFY, Task.TOKEN_EMBED}
    assert not scheduler.schedule()


def test_an_unsupported_task_is_a_422_that_names_the_supported_ones(
    classifier: Server, server: Server
) -> None:
    for refused, has in (
        (post(classifier, "/pooling", task="token_classify"), "classify, embed, token_embed"),
        (post(classifier, "/pooling", task="sparse"), "classify, embed, token_embed"),
        (post(server, "/classify"), "embed, token_embed, score"),
    ):
        assert refused.status_code == 422
        assert refused.json()["error"]["message"].endswith(f"its tasks are: {has}")
    assert post(classifier, "/pooling", task="juggle").status_code == 400
    assert post(classifier, "/pooling", task="classify", dimensions=2).status_code == 400
    too_many = post(classifier, "/pooling", task="token_embed", dimensions=33)
    assert too_many.status_code == 400 and "32" in too_many.json()["error"]["message"]
    assert post(classifier, "/classify").status_code == post(server, "/v1/embeddings").status_code == 200
