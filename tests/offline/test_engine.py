from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncEngine, Engine
from penstock.errors import BadValue, ConfigError, EngineUnavailable, ModelLoadError, NotPossible, RowFailed
from penstock.tasks import run as task_run
from penstock.types import PoolingParams
from tests.checkpoints import BERT_CONFIG, WORDS, bert_tensors, write_bert

TEXTS = [" ".join(WORDS[i % 50 : i % 50 + 1 + i % 17]) for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1, max_num_batched_tokens=128) as made:
        yield made


def test_texts_become_unit_vectors_one_a_row(engine: Engine) -> None:
    vectors = engine.embed(TEXTS)
    assert vectors.shape == (100, 32)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_one_text_is_a_batch_of_one(engine: Engine) -> None:
    np.testing.assert_allclose(engine.embed("the water"), engine.embed(["the water"]), atol=1e-6)


def test_answers_come_in_the_order_of_the_texts_whatever_their_length(engine: Engine) -> None:
    alone = np.concatenate([engine.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(engine.embed(TEXTS), alone, atol=1e-5)
    np.testing.assert_allclose(engine.embed(TEXTS[::-1]), alone[::-1], atol=1e-5)


def test_a_call_longer_than_a_window_comes_back_whole_and_in_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.embed(TEXTS)
    monkeypatch.setattr(task_run, "WINDOW_ROWS", 7)
    np.testing.assert_allclose(engine.embed(TEXTS), whole, atol=1e-5)


def test_token_ids_give_the_same_vectors_as_their_text(engine: Engine) -> None:
    ids = engine.tokenize(TEXTS[:9])
    np.testing.assert_allclose(engine.embed(ids), engine.embed(TEXTS[:9]), atol=1e-6)
    np.testing.assert_allclose(engine.embed(ids[0]), engine.embed(TEXTS[:1]), atol=1e-6)


def test_dimensions_are_cut_and_renormalised(engine: Engine) -> None:
    cut = engine.embed(TEXTS[:5])[:, :10]
    wanted = cut / np.linalg.norm(cut, axis=1, keepdims=True)
    np.testing.assert_allclose(engine.embed(TEXTS[:5], dimensions=10), wanted, atol=1e-6)


def test_normalising_can_be_declined(engine: Engine) -> None:
    raw = engine.embed(TEXTS[:5], normalize=False)
    assert np.all(np.abs(np.linalg.norm(raw, axis=1) - 1) > 0.1)
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, engine.embed(TEXTS[:5]), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "kind", "width"),
    [
        ("float32", "<f4", 32),
        ("float16", "<f2", 32),
        ("bfloat16", "<u2", 32),
        ("int8", "i1", 32),
        ("uint8", "u1", 32),
        ("binary", "i1", 4),
        ("ubinary", "u1", 4),
    ],
)
def test_each_output_type_has_its_own_array_type(engine: Engine, dtype: str, kind: str, width: int) -> None:
    vectors = engine.embed(TEXTS[:3], dtype=dtype)
    assert vectors.dtype == np.dtype(kind)
    assert vectors.shape == (3, width)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_model_that_gives_nan_fails_the_request(nan_engine: Engine, dtype: str) -> None:
    with pytest.raises(RowFailed, match="not finite"):
        nan_engine.embed("the water", dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint8", "binary", "ubinary"])
def test_a_model_that_gives_nan_fails_the_request_whatever_form_was_asked_for(
    nan_engine: Engine, dtype: str
) -> None:
    with pytest.raises(RowFailed, match="not finite"):
        nan_engine.embed("the water", dtype=dtype)


def test_a_text_without_the_damaged_row_is_still_answered(nan_engine: Engine) -> None:
    assert np.isfinite(nan_engine.embed("people")).all()


@pytest.fixture(scope="module")
def nan_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose embedding of one word is NaN."""
    tensors = bert_tensors(BERT_CONFIG)
    folder = write_bert(tmp_path_factory.mktemp("models") / "nan")
    with Engine(str(folder), device="cpu", threads=1) as reader:
        water = reader.tokenize(["water"], add_special_tokens=False)[0]
    tensors["embeddings.word_embeddings.weight"][water] = float("nan")
    write_bert(folder, tensors=tensors)
    with Engine(str(folder), device="cpu", threads=1) as made:
        yield made


def test_a_text_beyond_the_limit_is_refused_with_both_lengths_unless_cut(engine: Engine) -> None:
    text = "the " * 200
    with pytest.raises(BadValue, match="202 tokens, but the model takes at most 64"):
        engine.embed(text)
    assert engine.embed(text, truncate_prompt_tokens=-1).shape == (1, 32)


def test_max_model_len_lowers_the_limit(folder: Path) -> None:
    with Engine(str(folder), device="cpu", threads=1, max_model_len=10) as engine:
        assert engine.embed("the " * 8).shape == (1, 32)
        with pytest.raises(BadValue, match="11 tokens, but the model takes at most 10"):
            engine.embed("the " * 9)


def test_max_model_len_above_the_models_positions_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="positions for 64 tokens"):
        Engine(str(folder), device="cpu", max_model_len=65)


@pytest.mark.parametrize("inputs", [[], "", [""]])
def test_empty_lists_are_refused_but_an_empty_text_has_a_vector(engine: Engine, inputs: list[str]) -> None:
    if inputs == []:
        with pytest.raises(BadValue, match="empty"):
            engine.embed(inputs)
    else:
        assert engine.embed(inputs).shape == (1, 32)


def test_an_unknown_option_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(BadValue, match="'promt'"):
        engine.embed("the", promt="x")
    with pytest.raises(ConfigError, match="data_parallel_size is for `penstock serve`"):
        Engine(data_parallel_size=2)
    with pytest.raises(ConfigError, match="max_modle_len"):
        Engine(None, max_modle_len=3)


@pytest.mark.parametrize("given", [{"max_tokens": 4}, PoolingParams(), "greedy", 0.5], ids=repr)
def test_sampling_parameters_of_another_class_are_refused_with_the_right_one(
    engine: Engine, given: Any
) -> None:
    message = [{"role": "user", "content": "the"}]
    for call in (
        lambda: engine.generate("the", given),
        lambda: engine.generate(["the"], [given]),
        lambda: list(engine.generate_stream("the", given)),
        lambda: engine.chat(message, given),
        lambda: list(engine.chat_stream(message, given)),
    ):
        with pytest.raises(TypeError, match=rf"{type(given).__name__}; use penstock.SamplingParams"):
            call()


def test_an_unknown_output_type_is_refused_with_the_known_ones(engine: Engine) -> None:
    with pytest.raises(BadValue, match="float32"):
        engine.embed("the", dtype="float64")


def test_a_task_that_the_model_does_not_have_is_not_possible(engine: Engine) -> None:
    from penstock.types import PoolingParams, Task

    with pytest.raises(NotPossible, match="its tasks are: embed"):
        engine.local.text.processor.check(PoolingParams(task=Task.SPARSE))


def test_dummy_weights_need_no_safetensors_and_follow_the_seed(folder: Path, tmp_path: Path) -> None:
    bare = write_bert(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        Engine(str(bare), device="cpu", threads=1)

    def vector(seed: int) -> np.ndarray:
        with Engine(str(bare), device="cpu", threads=1, load_format="dummy", seed=seed) as engine:
            return engine.embed("the water")

    np.testing.assert_array_equal(vector(1), vector(1))
    assert np.abs(vector(1) - vector(2)).max() > 1e-3


def test_the_null_engine_gives_the_right_shapes_without_weights(folder: Path) -> None:
    with Engine(str(folder), device="null") as engine:
        assert engine.embed(TEXTS).shape == (100, 32)
        assert engine.embed(TEXTS, dimensions=8, dtype="int8").shape == (100, 8)
        assert engine.embed(TEXTS, dtype="binary").shape == (100, 4)


@pytest.mark.parametrize(
    ("options", "cosine"), [({"dtype": "bfloat16"}, 0.999), ({"quantization": "int8"}, 0.99)]
)
def test_lower_precision_keeps_the_direction(
    engine: Engine, folder: Path, options: dict[str, str], cosine: float
) -> None:
    with Engine(str(folder), device="cpu", threads=1, **options) as other:
        assert (engine.embed(TEXTS) * other.embed(TEXTS)).sum(1).min() >= cosine


def test_a_closed_engine_refuses_work(folder: Path) -> None:
    engine = Engine(str(folder), device="null")
    engine.close()
    engine.close()
    with pytest.raises((EngineUnavailable, RuntimeError)):
        engine.embed("the")


def test_many_tasks_share_one_async_engine_and_get_their_own_answers(engine: Engine, folder: Path) -> None:
    async def main() -> list[np.ndarray]:
        async with AsyncEngine(str(folder), device="cpu", threads=1) as shared:
            return await asyncio.gather(*(shared.embed(TEXTS[i : i + 1 + i % 3]) for i in range(40)))

    whole = engine.embed(TEXTS)
    for i, vectors in enumerate(asyncio.run(main())):
        np.testing.assert_allclose(vectors, whole[i : i + 1 + i % 3], atol=1e-5)


def test_a_cancelled_task_leaves_the_async_engine_usable(folder: Path) -> None:
    async def main() -> np.ndarray:
        async with AsyncEngine(str(folder), device="cpu", threads=1) as shared:
            tasks = [asyncio.create_task(shared.embed(TEXTS)) for _ in range(20)]
            await asyncio.sleep(0)  # all tasks have begun, and none can have finished
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, np.ndarray) for result in results[1::2])
            assert any(isinstance(result, asyncio.CancelledError) for result in results[::2])
            return await shared.embed("the water")

    assert asyncio.run(main()).shape == (1, 32)


def test_an_async_engine_outside_its_block_says_how_to_use_it() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(AsyncEngine(device="null").embed("the"))
