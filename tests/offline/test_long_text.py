from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncEngine, Engine
from penstock.errors import BadValue, NotPossible
from penstock.tasks import run as task_run
from tests.checkpoints import WORDS, write_bert, write_json

LONG = " ".join(WORDS[i % len(WORDS)] for i in range(150))  # longer than the model's 64 tokens
MIDDLE = " ".join(WORDS[7:60])
TEXTS = ["the water", LONG, MIDDLE, LONG[::-1][:200]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(str(folder), device="cpu", threads=1, max_num_batched_tokens=128) as made:
        yield made


def unit(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def mean_by_hand(engine: Engine, text: str, **options: Any) -> Any:
    """The weighted mean of the vectors of a text's parts, embedded one at a time."""
    ((first, *body, last),) = engine.tokenize([text])
    parts = np.array_split(body, -(-len(body) // 62))
    vectors = np.concatenate([engine.embed([[first, *part.tolist(), last]], **options) for part in parts])
    return np.average(vectors, axis=0, weights=[len(part) for part in parts])


def test_the_mean_of_a_long_text_equals_doing_it_by_hand(engine: Engine) -> None:
    got = engine.embed(TEXTS, chunking="mean")
    assert got.shape == (4, 32)
    np.testing.assert_allclose(got, [unit(mean_by_hand(engine, text)) for text in TEXTS], atol=1e-5)
    raw = engine.embed(TEXTS, chunking="mean", normalize=False)
    wanted = [mean_by_hand(engine, text, normalize=False) for text in TEXTS]
    np.testing.assert_allclose(raw, wanted, atol=1e-5)


def test_texts_that_fit_have_the_vectors_that_they_had(engine: Engine) -> None:
    fits = ["the water", MIDDLE]
    np.testing.assert_allclose(engine.embed(fits, chunking="mean"), engine.embed(fits), atol=1e-6)
    beside_a_long_one = engine.embed([*fits, LONG], chunking="mean")[:2]
    np.testing.assert_allclose(beside_a_long_one, engine.embed(fits), atol=1e-5)


def test_cuts_and_casts_come_after_the_mean(engine: Engine) -> None:
    whole = engine.embed(TEXTS, chunking="mean")
    np.testing.assert_allclose(
        engine.embed(TEXTS, chunking="mean", dimensions=10), unit(whole[:, :10]), atol=1e-6
    )
    packed = engine.embed(TEXTS, chunking="mean", dtype="ubinary")
    np.testing.assert_array_equal(packed, np.packbits(whole > 0, axis=1))
    assert engine.embed(TEXTS, chunking="mean", dtype="int8").dtype == np.int8


def test_windows_do_not_matter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    mean = engine.embed(TEXTS, chunking="mean")
    late = engine.embed_chunks(["the water", MIDDLE, "people"], chunk_size=9)
    monkeypatch.setattr(task_run, "WINDOW_ROWS", 1)
    np.testing.assert_allclose(engine.embed(TEXTS, chunking="mean"), mean, atol=1e-5)
    again = engine.embed_chunks(["the water", MIDDLE, "people"], chunk_size=9)
    for one, other in zip(again, late, strict=True):
        np.testing.assert_allclose(one.vectors, other.vectors, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 256])
def test_late_chunks_equal_a_plain_loop_over_token_vectors(engine: Engine, chunk_size: int) -> None:
    texts = ["the water", MIDDLE, "people go"]
    tokens = engine.token_embed(texts, normalize=False)
    for text, rows, got in zip(texts, tokens, engine.embed_chunks(texts, chunk_size=chunk_size), strict=True):
        inner = list(range(1 + chunk_size, len(rows) - 1, chunk_size))
        edges = list(zip([0, *inner], [*inner, len(rows)], strict=True))
        wanted = np.stack([rows[begin:end].mean(axis=0) for begin, end in edges])
        assert got.tokens.tolist() == [list(edge) for edge in edges]
        np.testing.assert_allclose(got.vectors, unit(wanted), atol=1e-6)
        assert got.chars is not None
        words = [text[begin:end].split() for begin, end in got.chars.tolist()]
        assert sum(len(part) for part in words) == len(text.split())
        assert text.split()[:chunk_size] == words[0]


def test_all_chunks_together_are_the_text_s_own_vector(engine: Engine) -> None:
    for size in (3, 256):
        chunked = engine.embed_chunks([MIDDLE, "the water"], chunk_size=size)
        whole = engine.embed([MIDDLE, "the water"])
        np.testing.assert_allclose([text.vector for text in chunked], whole, atol=1e-6)
    np.testing.assert_allclose(chunked[0].vectors, whole[:1], atol=1e-6)


def test_a_chunk_knows_its_surroundings(engine: Engine) -> None:
    (late,) = engine.embed_chunks(["the water people go"], chunk_size=2)
    (other,) = engine.embed_chunks(["the water oil call"], chunk_size=2)
    assert np.abs(late.vectors[0] - other.vectors[0]).max() > 1e-3


def test_late_chunks_are_cut_and_cast(engine: Engine) -> None:
    (full,) = engine.embed_chunks([MIDDLE], chunk_size=20)
    (cut,) = engine.embed_chunks([MIDDLE], chunk_size=20, dimensions=8, dtype="float16")
    assert cut.vectors.dtype == np.float16
    np.testing.assert_allclose(cut.vectors, unit(full.vectors[:, :8]), atol=1e-3)


def test_late_chunks_stop_at_the_limit(engine: Engine) -> None:
    with pytest.raises(BadValue, match="152 tokens, but the model takes at most 64"):
        engine.embed_chunks([LONG])
    (cut,) = engine.embed_chunks([LONG], truncate_prompt_tokens=-1, chunk_size=31)
    assert cut.tokens.tolist() == [[0, 32], [32, 64]]


def test_several_vectors_do_not_come_from_embed(engine: Engine) -> None:
    with pytest.raises(BadValue, match="embed_chunks"):
        engine.embed(["a"], chunking="late")
    with pytest.raises(BadValue, match="early"):
        engine.embed(["a"], chunking="early")  # type: ignore[arg-type]


def test_late_chunks_are_refused_where_they_would_mean_nothing(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "cls")
    write_json(folder / "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    with Engine(str(folder), device="cpu", threads=1) as engine:
        with pytest.raises(NotPossible, match="pools by cls"):
            engine.embed_chunks(["the water"])
        np.testing.assert_allclose(
            engine.embed([LONG], chunking="mean")[0], unit(mean_by_hand(engine, LONG)), atol=1e-5
        )


def test_the_async_engine_chunks_alike(folder: Path, engine: Engine) -> None:
    async def run() -> tuple[Any, Any]:
        async with AsyncEngine(str(folder), device="cpu", threads=1) as other:
            return await other.embed(TEXTS, chunking="mean"), await other.embed_chunks([MIDDLE], chunk_size=9)

    mean, (late,) = asyncio.run(run())
    np.testing.assert_allclose(mean, engine.embed(TEXTS, chunking="mean"), atol=1e-5)
    np.testing.assert_allclose(
        late.vectors, engine.embed_chunks([MIDDLE], chunk_size=9)[0].vectors, atol=1e-5
    )


def test_spans_go_with_their_texts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_run, "WINDOW_ROWS", 1)
    first, second = engine.embed_chunks(["the water", "people go to it"], chunk_spans=[[(0, 3)], [(7, 12)]])
    tokens = engine.token_embed(["the water", "people go to it"], normalize=False)
    np.testing.assert_allclose(first.vectors, unit(tokens[0][None, :2].mean(axis=1)), atol=1e-6)
    np.testing.assert_allclose(second.vectors, unit(tokens[1][None, 2:4].mean(axis=1)), atol=1e-6)
    assert second.chars is not None and second.chars.tolist() == [[7, 12]]
    with pytest.raises(BadValue, match="2 lists for 1 texts"):
        engine.embed_chunks(["the water"], chunk_spans=[[(0, 3)], [(0, 3)]])
