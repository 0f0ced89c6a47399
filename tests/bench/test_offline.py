from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench.offline.embedders import import_peer, open_embedder
from penstock.bench.offline.speed import take_turns
from penstock.bench.options import EmbedderName, EngineOptions
from penstock.bench.quality.scores import cosines
from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.errors import BadValue
from tests.checkpoints import write_bert, write_json
from tests.command_line import CliRunner

TEXTS = ["the word", "a", "what is the first number of all these people", "of " * 100]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling/config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64})
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "package"),
    [
        (EmbedderName.TRANSFORMERS, "transformers"),
        (EmbedderName.SENTENCE_TRANSFORMERS, "sentence_transformers"),
        (EmbedderName.ONNXRUNTIME, "onnxruntime"),
    ],
)
def test_peers_compute_the_same_vectors(name: EmbedderName, package: str, bert: Path) -> None:
    pytest.importorskip(package)
    options = EngineOptions(config=EngineConfig(model=str(bert), device="cpu"), batch_size=2)
    vectors = []
    for each in (EmbedderName.PENSTOCK, name):
        embedder = open_embedder(each, options)
        vectors.append(embedder.embed(TEXTS))
        embedder.close()
    assert cosines(*vectors).min() > 0.9999


def test_the_error_names_a_peer_that_is_not_installed() -> None:
    with pytest.raises(BadValue, match="pip install no-such-package"):
        import_peer("no_such_module", "no-such-package")


def bench(*args: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def test_throughput_prints_and_saves_every_round(bert: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    result = bench(
        *("throughput", "--model", bert, "--num-prompts", 6, "--random-input-len", 8, "--rounds", 2),
        *("--output-json", file),
    )
    assert result.exit_code == 0, result.output
    assert "6 texts, 48 tokens" in result.stdout
    assert len(json.loads(file.read_text())["engines"]["penstock"]["seconds"]) == 2


def test_latency_prints_percentiles(bert: Path) -> None:
    result = bench("latency", "--model", bert, "--batch-size", 2, "--input-len", 8, "--num-iters", 3)
    assert result.exit_code == 0, result.output
    assert "batches of 2 × 8 tokens" in result.stdout


def test_throughput_takes_texts_from_a_file(bert: Path, prompts: Path) -> None:
    result = bench(
        *("throughput", "--model", bert, "--dataset-name", "custom", "--dataset-path", prompts),
        *("--num-prompts", 5, "--rounds", 1),
    )
    assert result.exit_code == 0, result.output
    assert "5 texts" in result.stdout


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def embed(self, texts: Any) -> Any:
            return np.zeros((len(texts), 1), np.float32)

        def close(self) -> None:
            order.append(f"close {self.name}")

    from penstock.bench.offline import speed

    monkeypatch.setattr(speed, "open_embedder", lambda name, options: Fake(name.value))
    names = [EmbedderName.PENSTOCK, EmbedderName.VLLM]
    timed = take_turns(names, EngineOptions(), 2, lambda e: order.append(e.name) or 1.0, lambda e: None)  # type: ignore[attr-defined, func-returns-value]
    assert order == ["penstock", "vllm", "vllm", "penstock", "close penstock", "close vllm"]
    assert [one.seconds for one in timed] == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(BadValue, match="twice"):
        take_turns([names[0]] * 2, EngineOptions(), 1, lambda e: 1.0, lambda e: None)


def test_quality_compares_with_a_reference(bert: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("1\tthe word\twater\n2\ta\tb\n3\tthe oil\tthe oil\n")
    flags = ("--sts", pairs, "--reference", "transformers", "--min-cosine", 0.999)
    result = bench("quality", "--model", bert, *flags)
    assert result.exit_code == 0, result.output
    assert "cosine min:" in result.stdout
    assert "spearman:" in result.stdout
