from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.inputs.batcher import MAX_INLINE_CHARS, BatchTokenizer
from penstock.types import Ints


class Letters:
    """A tokenizer that notes where it was called and with how many texts."""

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
