"""LoRA adapters in Python: `Engine(enable_lora=True)`, compared with checkpoints merged by PEFT."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Engine, SamplingParams
from penstock.errors import AdapterNotFound, BadValue, ConfigError, EngineError, NotPossible
from tests.lora_models import TEXTS, Adapted, adapted_embedder, adapted_llama, adapted_reranker
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted_embedder(tmp_path_factory.mktemp("bert"), "a", "b")


@pytest.fixture(scope="module")
def engine(bert: Adapted) -> Iterator[Engine]:
    with opened(bert.base, enable_lora=True, lora_modules=bert.modules("a"), max_loras=2) as engine:
        yield engine


def opened(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


def test_an_embedder_with_an_adapter_answers_as_the_merged_checkpoint(bert: Adapted, engine: Engine) -> None:
    with opened(bert.merged["a"]) as merged, opened(bert.base) as plain:
        expected, base = merged.embed(TEXTS), plain.embed(TEXTS)
        tokens = merged.token_embed(TEXTS)
    np.testing.assert_allclose(engine.embed(TEXTS, adapter="a"), expected, atol=1e-4)
    np.testing.assert_allclose(engine.embed(TEXTS), base, atol=1e-5)
    assert np.abs(expected - base).max() > 0.01
    for mine, theirs in zip(engine.token_embed(TEXTS, adapter="a"), tokens, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_pairs_of_an_embedder_use_the_adapter_for_both_texts(bert: Adapted, engine: Engine) -> None:
    with opened(bert.merged["a"]) as merged:
        expected = merged.score(TEXTS[0], TEXTS)
    np.testing.assert_allclose(engine.score(TEXTS[0], TEXTS, adapter="a"), expected, atol=1e-4)


def test_a_cross_encoder_uses_the_head_of_its_adapter(tmp_path: Path) -> None:
    made = adapted_reranker(tmp_path, "a")
    with opened(made.base, enable_lora=True, lora_modules=made.modules("a")) as engine:
        found = engine.rerank(TEXTS[0], TEXTS, adapter="a")
        without = engine.score(TEXTS[0], TEXTS)
    with opened(made.merged["a"]) as merged:
        expected = merged.rerank(TEXTS[0], TEXTS)
    assert [each.index for each in found] == [each.index for each in expected]
    scores = [each.score for each in found]
    np.testing.assert_allclose(scores, [each.score for each in expected], atol=1e-4)
    assert np.abs(np.sort(without)[::-1] - scores).max() > 1e-3


def test_a_decoder_generates_with_its_adapter(tmp_path: Path) -> None:
    made = adapted_llama(tmp_path, "a")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with opened(made.base, enable_lora=True, lora_modules=made.modules("a")) as engine:
        (found,) = engine.generate("Hello", greedy, adapter="a")
        (base,) = engine.generate("Hello", greedy)
        streamed = "".join(delta.text for delta in engine.generate_stream("Hello", greedy, adapter="a"))
    with opened(made.merged["a"]) as merged:
        (expected,) = merged.generate("Hello", greedy)
    assert found.token_ids == expected.token_ids != base.token_ids
    assert streamed == expected.text


def test_adapters_come_and_go(bert: Adapted, engine: Engine) -> None:
    with pytest.raises(AdapterNotFound, match="adapter 'b' is not loaded; model base has: a"):
        engine.embed(TEXTS, adapter="b")
    engine.load_adapter("b", str(bert.adapters["b"]))
    assert engine.adapters == ("a", "b")
    vectors = engine.embed(TEXTS, adapter="b")
    assert np.abs(vectors - engine.embed(TEXTS, adapter="a")).max() > 0.01
    with pytest.raises(BadValue, match="loaded already; set replace=True"):
        engine.load_adapter("b", str(bert.adapters["a"]))
    engine.load_adapter("b", str(bert.adapters["a"]), replace=True)
    np.testing.assert_allclose(engine.embed(TEXTS, adapter="b"), engine.embed(TEXTS, adapter="a"), atol=1e-6)
    engine.unload_adapter("b")
    with pytest.raises(AdapterNotFound, match="'b' is not loaded"):
        engine.embed(TEXTS, adapter="b")
    with pytest.raises(AdapterNotFound, match="'b' is not loaded"):
        engine.unload_adapter("b")


def test_a_call_that_runs_keeps_its_adapter(bert: Adapted, engine: Engine) -> None:
    engine.load_adapter("c", str(bert.adapters["a"]))
    with engine.local.adapters.hold("c") as adapter_id:
        engine.unload_adapter("c")
        assert adapter_id in engine.local.engine.core.adapters._known  # type: ignore[union-attr]
    engine.embed(TEXTS)  # runs after the unload order
    assert adapter_id not in engine.local.engine.core.adapters._known  # type: ignore[union-attr]


def test_what_is_no_adapter_is_refused_with_its_path(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match="has no adapter_config"):
        engine.load_adapter("x", str(tmp_path))
    with pytest.raises(AdapterNotFound, match="there is no folder"):
        engine.load_adapter("x", str(tmp_path / "nothing"))
    assert "x" not in engine.adapters


def test_an_adapter_whose_weights_are_damaged_is_refused_and_another_may_have_its_name(
    bert: Adapted, engine: Engine, tmp_path: Path
) -> None:
    shutil.copytree(bert.adapters["a"], tmp_path / "bad")
    weights = tmp_path / "bad/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(Exception, match="adapter_model"):
        engine.load_adapter("d", str(tmp_path / "bad"))
    engine.load_adapter("d", str(bert.adapters["a"]))
    engine.unload_adapter("d")


def test_an_engine_without_lora_says_how_to_open_it(bert: Adapted) -> None:
    with opened(bert.base) as engine:
        with pytest.raises(NotPossible, match="enable_lora=True"):
            engine.embed(TEXTS, adapter="a")
        with pytest.raises(NotPossible, match="enable_lora=True"):
            engine.load_adapter("a", str(bert.adapters["a"]))
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        opened(bert.base, lora_modules=bert.modules("a"))


@pytest.fixture
def small(bert: Adapted) -> Iterator[Engine]:
    """An engine with two adapters that keeps only one in memory."""
    modules = bert.modules("a", "b")
    options: dict[str, Any] = {"max_loras": 1, "max_cpu_loras": 1, "lora_modules": modules}
    with opened(bert.base, enable_lora=True, **options) as engine:
        yield engine


def test_a_request_whose_adapter_is_read_from_disk_holds_up_no_other(
    small: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = small.local.engine.core.adapters
    read, may_read, reads = pool._read, threading.Event(), []

    def slow(spec: Any, marks: Any) -> Any:
        reads.append(spec.name)
        assert may_read.wait(PATIENCE_S)
        return read(spec, marks)

    monkeypatch.setattr(pool, "_read", slow)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(small.embed, TEXTS, adapter="a")
        wait_until(lambda: reads == ["a"])
        small.embed(TEXTS)  # other calls run meanwhile
        assert not waiting.done()
        may_read.set()
        found = waiting.result(PATIENCE_S)
    np.testing.assert_allclose(found, engine.embed(TEXTS, adapter="a"), atol=1e-5)
    small.embed(TEXTS, adapter="b")
    np.testing.assert_allclose(small.embed(TEXTS, adapter="a"), found, atol=1e-5)


def test_an_adapter_is_read_again_from_copies_of_its_files_and_not_from_others(
    small: Engine, bert: Adapted, tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(bert.adapters["a"], folder)
    small.load_adapter("changing", str(folder))
    found = small.embed(TEXTS, adapter="changing")
    small.embed(TEXTS, adapter="b")  # evicts the first adapter from device and host memory
    shutil.rmtree(folder)
    shutil.copytree(bert.adapters["a"], folder)
    os.utime(folder / "adapter_model.safetensors", (0, 0))
    np.testing.assert_allclose(small.embed(TEXTS, adapter="changing"), found, atol=1e-5)
    small.embed(TEXTS, adapter="b")
    shutil.rmtree(folder)
    shutil.copytree(bert.adapters["b"], folder)
    with pytest.raises(EngineError, match="are not those that were loaded"):
        small.embed(TEXTS, adapter="changing")
    small.embed(TEXTS, adapter="b")
