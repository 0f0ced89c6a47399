"""`penstock bench serve` with every backend, against a Penstock server.

Models are served from folders with names that exist nowhere else, and no hub can be reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.backends import BACKENDS
from penstock.bench.options import BackendName
from tests.e2e.server import Server

NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
RANKING = ("--dataset-name", "random-rerank")
FITTING: dict[BackendName, tuple[str, ...]] = {  # the fixture of a server, and further flags
    BackendName.OPENAI_EMBEDDINGS: ("tiny_embedder",),
    BackendName.OPENAI_EMBEDDINGS_CHAT: ("generator",),
    BackendName.VLLM_POOLING: ("late",),
    BackendName.VLLM_CLASSIFY: ("classifier",),
    BackendName.VLLM_SCORE: ("reranker", *RANKING),
    BackendName.VLLM_RERANK: ("reranker", *RANKING),
    BackendName.COHERE_EMBED: ("tiny_embedder",),
    BackendName.COHERE_RERANK: ("reranker", *RANKING),
    BackendName.TEI: ("tiny_embedder",),
    BackendName.TEI_PREDICT: ("classifier",),
    BackendName.INFINITY: ("tiny_embedder",),
    BackendName.INFINITY_RERANK: ("reranker", *RANKING),
    BackendName.OLLAMA_EMBED: ("tiny_embedder",),
    BackendName.OPENAI: ("generator", "--random-output-len", "4"),
    BackendName.OPENAI_CHAT: ("generator", "--random-output-len", "4"),
    BackendName.VLLM: ("generator", "--random-output-len", "4"),
}
NUM_PROMPTS = 6
TOKENS = 16


def bench(server: Server, *flags: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--base-url", server.url]
    command += ["--num-prompts", str(NUM_PROMPTS), "--random-input-len", str(TOKENS), "--num-processes", "1"]
    saved = ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    return subprocess.run(
        [*command, *flags, *(saved if folder else ())],
        env=os.environ | NO_HUB,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_backend_is_tested() -> None:
    assert set(FITTING) == set(BACKENDS)


@pytest.mark.parametrize("name", FITTING, ids=str)
def test_every_backend_drives_a_server_of_penstock(
    name: BackendName, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fixture, *flags = FITTING[name]
    done = bench(request.getfixturevalue(fixture), "--backend", name.value, *flags, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0)
    assert result["total_input_tokens"] >= NUM_PROMPTS * TOKENS * 0.9


def test_a_batch_is_one_request(tiny_embedder: Server, tmp_path: Path) -> None:
    flags = ("--backend", "openai-embeddings", "--random-batch-size", "3")
    done = bench(tiny_embedder, *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_input_tokens"]) == (2, NUM_PROMPTS * TOKENS)


def test_prompts_of_the_servers_tokenizer_have_the_wanted_length(embedder: Server, tmp_path: Path) -> None:
    done = bench(embedder, "--backend", "openai-embeddings", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["tokenizer_id"] == f"{embedder.url}/tokenize"
    assert abs(result["total_input_tokens"] - NUM_PROMPTS * TOKENS) <= 2  # lengths may differ a little


@pytest.mark.parametrize(
    ("fixture", "flags", "said"),
    [
        ("tiny_embedder", (), ("does not generate", "--backend openai-embeddings or vllm-rerank")),
        ("tiny_embedder", ("--backend", "vllm-classify"), ("no task 'classify'", "openai-embeddings")),
        ("generator", ("--backend", "vllm-classify"), ("no task 'classify'", "or openai")),
        ("classifier", ("--backend", "vllm-rerank", *RANKING), ("cannot score", "or vllm-classify")),
        ("reranker", ("--backend", "vllm-rerank"), ("random-rerank",)),
        ("tiny_embedder", ("--backend", "openai-embeddings", "--model", "no-such"), ("no-such",)),
        ("tiny_embedder", ("--backend", "openai-embeddings", "--endpoint", "/v1/nothing"), ("--endpoint",)),
        ("tiny_embedder", ("--backend", "openai-embeddings", "--tokenizer", "no-such"), ("--tokenizer",)),
    ],
)
def test_a_backend_that_does_not_fit_is_explained(
    fixture: str, flags: tuple[str, ...], said: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    done = bench(request.getfixturevalue(fixture), *flags)
    assert done.returncode == 2, done.stdout + done.stderr
    message = " ".join(done.stderr.split())
    assert all(words in message for words in said), message
    assert "Traceback" not in message
