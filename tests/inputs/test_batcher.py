from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.inputs.batcher import MAX_INLINE_CHARS, MAX_SLICE_CHARS, BatchTokenizer
from penstock.inputs.long_texts import RowLimit
from penstock.types import Ints


class Letters:
    """A tokenizer that records on which thread it was called, and with how many texts."""

    words = None

    def __init__(self) -> None:
        self.calls: list[tuple[bool, int]] = []  # (on the event loop, texts)

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Ints]:
        here = threading.current_thread() is threading.main_thread()
        self.calls.append((here, len(texts)))
        if any(text.startswith("bad") for text in texts):
            raise BadValue("bad text")
        return [np.array([len(text)], dtype=np.int32) for text in texts]


def encode_all(batches: list[list[str]]) -> tuple[list[object], Letters]:
    letters = Letters()

    async def run() -> list[object]:
        batcher = BatchTokenizer(letters)  # type: ignore[arg-type]
        try:
            return await asyncio.gather(*map(batcher.encode, batches), return_exceptions=True)
        finally:
            batcher.close()

    return asyncio.run(run()), letters


def test_short_texts_are_encoded_inline_and_long_ones_off_the_event_loop() -> None:
    long = "x" * (MAX_INLINE_CHARS + 1)
    rows, letters = encode_all([["ab", "c"], [long]])
    assert [[row.tolist() for row in each] for each in rows] == [[[2], [1]], [[MAX_INLINE_CHARS + 1]]]  # type: ignore[attr-defined]
    assert letters.calls == [(True, 2), (False, 1)]


def test_many_short_texts_together_count_as_a_long_input() -> None:
    _, letters = encode_all([["word " * 20] * 50])
    assert letters.calls == [(False, 50)]


def test_long_texts_that_wait_are_encoded_in_one_batch() -> None:
    long = "x" * (MAX_INLINE_CHARS + 1)
    rows, letters = encode_all([[long + "y" * n] for n in range(5)])
    assert [each[0].tolist() for each in rows] == [[MAX_INLINE_CHARS + 1 + n] for n in range(5)]  # type: ignore[index]
    assert letters.calls == [(False, 1), (False, 4)]


@pytest.mark.parametrize("text", ["bad", "bad" + "x" * MAX_INLINE_CHARS])
def test_a_bad_text_fails_only_its_own_call(text: str) -> None:
    rows, _ = encode_all([["fine" * MAX_INLINE_CHARS], [text], ["fine" * MAX_INLINE_CHARS]])
    assert isinstance(rows[1], BadValue)
    assert len(rows[0]) == len(rows[2]) == 1  # type: ignore[arg-type]


class SteppedLetters(Letters):
    """Encodes each slice only when the test allows it, and records the text lengths of each slice."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[list[int]] = []
        self.may_encode = threading.Semaphore(0)

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, limit: RowLimit | None = None
    ) -> list[Ints]:
        if threading.current_thread() is not threading.main_thread():
            self.may_encode.acquire()
        self.slices.append([len(text) for text in texts])
        return super().encode(texts, add_special_tokens)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_small_call_waits_for_one_slice_of_a_large_one() -> None:
    async def run() -> None:
        letters = SteppedLetters()
        batcher = BatchTokenizer(letters)  # type: ignore[arg-type]
        texts = ["y" * 1000 for _ in range(2048)]
        large = asyncio.create_task(batcher.encode(texts))
        await settled()
        small = asyncio.create_task(batcher.encode(["x" * 2000]))
        await settled()
        letters.may_encode.release(2)
        assert [row.tolist() for row in await asyncio.wait_for(small, 30)] == [[2000]]
        assert not large.done() and len(letters.slices) == 2
        assert all(sum(sizes) <= MAX_SLICE_CHARS + 2000 for sizes in letters.slices)
        letters.may_encode.release(100)
        assert [row.tolist() for row in await asyncio.wait_for(large, 30)] == [[1000]] * 2048
        batcher.close()

    asyncio.run(run())


def test_large_calls_share_the_slices() -> None:
    async def run() -> None:
        letters = SteppedLetters()
        batcher = BatchTokenizer(letters)  # type: ignore[arg-type]
        calls = [asyncio.create_task(batcher.encode([str(n) * 1000] * 200)) for n in range(4)]
        await settled()
        letters.may_encode.release(100)
        assert [len(rows) for rows in await asyncio.gather(*calls)] == [200] * 4
        assert all(sum(sizes) <= MAX_SLICE_CHARS + 1000 for sizes in letters.slices)
        batcher.close()

    asyncio.run(run())


def test_small_work_does_not_wait_for_large_work() -> None:
    async def run() -> None:
        batcher = BatchTokenizer(Letters())  # type: ignore[arg-type]
        held = threading.Event()
        large = [asyncio.create_task(batcher.call(held.wait, 10**6)) for _ in range(8)]
        await settled()
        assert await asyncio.wait_for(batcher.call(lambda: "done", 100), 30) == "done"
        assert not any(task.done() for task in large)
        held.set()
        assert all(await asyncio.gather(*large))
        batcher.close()

    asyncio.run(run())


def test_a_call_whose_rows_are_too_long_fails_before_the_rest_is_tokenised() -> None:
    async def run() -> None:
        letters = SteppedLetters()
        letters.may_encode.release(100)
        batcher = BatchTokenizer(letters)  # type: ignore[arg-type]
        with pytest.raises(BadValue, match="input 0 has 1 tokens, but the model takes at most 0"):
            await batcher.encode(["y" * 1000] * 2048, True, RowLimit(0))
        assert len(letters.slices) < 4
        batcher.close()

    asyncio.run(run())
