"""Images and LoRA adapters in the requests of one server: vectors and chat, mixed with plain requests."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import Engine
from tests.e2e.server import Server, serving, serving_here
from tests.inputs.images.pictures import encoded, noise
from tests.parity.lora import write_adapter
from tests.parity.qwen_vl import make_model, write_model

NAMES = ("one", "two")
TARGETS = r".*language_model.*(q_proj|v_proj|gate_proj|down_proj)$"
PICTURES = [noise(40, 30), noise(21, 50, seed=3)]
URIS = ["data:image/png;base64," + base64.b64encode(encoded(picture)).decode() for picture in PICTURES]


@dataclass(frozen=True)
class Models:
    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]  # merged by PEFT


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder, model = tmp_path_factory.mktemp("qwen"), make_model("qwen3_vl")
    base = write_model(folder / "base", model)
    made = Models(base, {}, {})
    for seed, name in enumerate(NAMES):
        adapted: Any = write_adapter(model, folder / name, seed, target_modules=TARGETS)
        shutil.copytree(base, folder / "merged" / name)
        adapted.merge_and_unload().save_pretrained(folder / "merged" / name)
        made.adapters[name], made.merged[name] = folder / name, folder / "merged" / name
    return made


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Server]:
    flags = ["--device", "cpu", "--threads", "1", "--dtype", "float32", "--served-model-name", "vl"]
    flags += ["--enable-lora", "--max-lora-rank", "16", "--enable-prefix-caching", "--result-cache-mb", "8"]
    flags += ["--pooler-config", '{"pooling_type": "last"}', "--enable-generation"]
    for name, path in models.adapters.items():
        flags += ["--lora-modules", f"{name}={path}"]
    with serving(str(models.base), *flags) as started:
        yield started


def message(number: int) -> list[dict[str, Any]]:
    image = {"type": "image_url", "image_url": {"url": URIS[number]}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]


def embed(server: Server, model: str, **body: Any) -> np.ndarray:
    answer = server.http.post("/v1/embeddings", json={"model": model, **body})
    assert answer.status_code == 200, answer.text
    return np.array([row["embedding"] for row in answer.json()["data"]])


def logprobs(http: httpx.Client, model: str, number: int) -> list[float]:
    body = {"model": model, "messages": message(number), "max_tokens": 5, "temperature": 0, "logprobs": True}
    answer = http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
    assert answer.status_code == 200, answer.text
    return [token["logprob"] for token in answer.json()["choices"][0]["logprobs"]["content"]]


def test_one_image_gives_each_adapter_its_own_vector_whatever_came_before(
    server: Server, models: Models
) -> None:
    wanted = {}
    for name, folder in {"vl": models.base, **models.merged}.items():
        with Engine(
            str(folder), device="cpu", dtype="float32", pooler_config={"pooling_type": "last"}
        ) as engine:
            wanted[name] = engine.embed([*PICTURES, "a text"])
    inputs = [{"image": URIS[0]}, {"image": URIS[1]}, {"text": "a text"}]
    for name in ("one", "vl", "two", "one", "vl"):  # the repeated adapters come from caches
        assert np.abs(embed(server, name, input=inputs) - wanted[name]).max() < 1e-3
    assert np.abs(wanted["one"] - wanted["two"]).max() > 1e-2


def test_chat_about_an_image_is_answered_by_the_adapter_that_it_names(server: Server, models: Models) -> None:
    seen = {name: logprobs(server.http, name, 0) for name in ("vl", "one", "two")}
    assert len({tuple(np.round(values, 3)) for values in seen.values()}) == 3
    for name in ("two", "vl", "one"):  # with the other adapters' prefixes in the cache
        assert np.abs(np.array(logprobs(server.http, name, 0)) - seen[name]).max() < 1e-4
    merged = models.merged["one"]
    with serving_here(merged, dtype="float32", enable_generation=True) as http:
        assert np.abs(np.array(logprobs(http, merged.name, 0)) - seen["one"]).max() < 1e-3
