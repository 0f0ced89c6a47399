"""Incremental detokenisation gives the whole text, in pieces that never split a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.inputs.tokenizer import Tokenizer
from penstock.outputs.detokenizer import detokenizer
from tests.text_models import KINDS, TEXTS, tokenizer_folder

BROKEN = "\N{REPLACEMENT CHARACTER}"
HARD = [
    *TEXTS,
    "日本語🙂",
    "  two  spaces \n\n new\tline",
    "é" * 20,
    "👩‍👩‍👧" * 3,
    "a",
    "…“quoted”…",
    "\u0301x",
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tokenizer_folder(request.param, tmp_path_factory.mktemp("tokenizer")))


def pieces(
    tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = (), skip: bool = True
) -> list[str]:
    writer = detokenizer(tokenizer, prompt, skip)
    return [*(writer.push(number) for number in ids), writer.finish()]


@pytest.mark.parametrize("text", HARD)
def test_the_pieces_concatenate_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode([text], add_special_tokens=False)[0].tolist()
    got = pieces(tokenizer, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(got) == whole
    if BROKEN not in whole:
        assert not any(BROKEN in piece for piece in got), "a character was split"


def test_a_continuation_keeps_the_space_before_its_first_word(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(["the water was long"], add_special_tokens=False)[0].tolist()
    for cut in range(1, len(whole)):
        before = tokenizer.decode(whole[:cut], skip_special_tokens=True)
        after = "".join(pieces(tokenizer, whole[cut:], tuple(whole[:cut])))
        assert before + after == "the water was long"


def test_special_tokens_are_left_out_or_shown(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode(["the water", "was long"], add_special_tokens=False)
    special = int(tokenizer.special_ids[-1])
    ids = [*words[0].tolist(), special, special, *words[1].tolist()]
    for skip in (True, False):
        assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=60, deadline=None)
@given(seed=st.lists(st.integers(0, 10**6), max_size=40), skip=st.booleans())
def test_any_tokens_of_a_byte_vocabulary_give_the_decoded_text(
    tmp_path_factory: pytest.TempPathFactory, seed: list[int], skip: bool
) -> None:
    tokenizer = _byte_level(tmp_path_factory)
    ids = [number % (tokenizer.max_token_id + 1) for number in seed]
    assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


_KEPT: dict[str, Tokenizer] = {}


def _byte_level(factory: pytest.TempPathFactory) -> Tokenizer:
    if "byte bpe" not in _KEPT:
        _KEPT["byte bpe"] = Tokenizer(tokenizer_folder("byte bpe", factory.mktemp("bytes")))
    return _KEPT["byte bpe"]


def test_bytes_that_never_make_a_character_are_not_held_forever(tokenizer: Tokenizer) -> None:
    half = "<0xE6>" if not tokenizer.byte_level else None
    number = (
        tokenizer.token_id(half)
        if half
        else next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe6")
    )
    if number is None:
        pytest.skip("this vocabulary has no bytes")
    writer = detokenizer(tokenizer)
    shown = [writer.push(number) for _ in range(100)]
    assert sum(map(len, shown)) >= 60 and set("".join(shown)) == {BROKEN}


def test_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, [tokenizer.max_token_id + 3])) == ""


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Tokenizer) -> None:
    """Counts the ids that are decoded per token, instead of measuring time."""
    ids = (tokenizer.encode([" ".join(TEXTS)], add_special_tokens=False)[0].tolist() * 20)[:3000]
    seen: list[int] = []

    class Counting:
        byte_level = tokenizer.byte_level
        token_bytes = staticmethod(tokenizer.token_bytes)
        is_special = staticmethod(tokenizer.is_special)

        def decode(self, some: list[int], skip_special_tokens: bool = False) -> str:
            seen.append(len(some))
            return tokenizer.decode(some, skip_special_tokens)

    writer = detokenizer(Counting(), (), True)  # type: ignore[arg-type]
    for number in ids:
        writer.push(number)
    assert max(seen, default=0) <= 70 and sum(seen) <= 25 * len(ids)


def test_a_byte_token_gives_its_byte_and_a_word_its_space(tmp_path: Path) -> None:
    pieces_of_bytes = Tokenizer(tokenizer_folder("sentence bpe", tmp_path / "s"))
    number = pieces_of_bytes.token_id("<0xE6>")
    word = pieces_of_bytes.encode(["the water"], add_special_tokens=False)[0].tolist()[-1]
    assert number is not None and pieces_of_bytes.token_raw_bytes(number) == b"\xe6"
    assert pieces_of_bytes.token_text(word).startswith(" ") or len(pieces_of_bytes.token_text(word)) == 1
