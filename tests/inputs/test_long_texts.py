"""Texts much longer than a row give the same rows as tokenising the whole text, or are refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadValue, BodyTooLarge
from penstock.inputs import long_texts
from penstock.inputs.long_texts import ExpandedTexts, RowLimit
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import truncate_rows
from penstock.types import Ints, PoolingParams
from tests.checkpoints import wordpiece_tokenizer
from tests.helpers import make_spec
from tests.text_models import MAKERS, tokenizer_folder

WORDS = ["the", "water", "naïve", "日本語", "的是不", "12,345", "🙂", "don't", "x" * 130, "ждать", "e\u0301a"]
WORDS += ["<mask>", "[SEP]", "<s>", "tool call", "<|im_end|>", "a\u0000b", "foo_bar", "yes.no"]
SIZE = 1500
KINDS = ["wordpiece", *MAKERS]


def texts() -> dict[str, str]:
    draw = random.Random(7)

    def chosen(among: str | list[str], count: int = SIZE, separator: str = "") -> str:
        return separator.join(draw.choice(among) for _ in range(count))

    return {
        "words": chosen(WORDS, separator=" "),
        "lines": chosen(WORDS, separator="\n"),
        "double spaces": chosen(WORDS, separator="  "),
        "no spaces": chosen(WORDS),
        "only spaces": " " * 9000,
        "one letter": "x" * 9000,
        "letters": chosen("abcdefgh", 9000),
        "digits": chosen("0123456789", 9000),
        "chinese": chosen("的是不了人我在有他这中大来上国日本語。、", 9000),
        "combining marks": "e" + "\u0301" * 9000,
        "control characters": "\x01\x02" * 4500,
        "emoji": "🙂👩‍👩‍👧" * 2000,
        "spaces before a special token": "a" + " " * 4500 + "<mask> b" * 1000,
        "special tokens": "[SEP]</s>" * 1200,
    }


def loaded(kind: str, folder: Path) -> Tokenizer:
    if kind != "wordpiece":
        return Tokenizer(tokenizer_folder(kind, folder))
    rust = wordpiece_tokenizer()
    rust.add_special_tokens(["<mask>"])
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small pieces, so that short texts have many."""
    for name in ("_PIECE_CHARS", "_MAX_UNDIVIDED_CHARS", "_SEARCH_CHARS", "_MIN_FIRST_CHARS"):
        monkeypatch.setattr(long_texts, name, getattr(long_texts, name) // 32)
    monkeypatch.setattr(long_texts, "_CONTEXT_CHARS", 257)
    monkeypatch.setattr("penstock.inputs.tokenizer.MAX_WINDOW_CHARS", 1 << 12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [8, 300])
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_rows_are_those_of_the_whole_text(
    kind: str, max_tokens: int, side: long_texts.Side, tmp_path: Path
) -> None:
    tokenizer = loaded(kind, tmp_path)
    frame = (tokenizer.prefix, tokenizer.suffix)
    refused = []
    for name, text in texts().items():
        whole = tokenizer._encode([text], True)[0]
        try:
            rows = tokenizer.encode([text], True, RowLimit(max_tokens, True, side))
        except BadValue as error:
            assert "shorten it" in error.message
            refused.append(name)
            continue
        expected, found = (truncate_rows(r, max_tokens, max_tokens, frame, side)[0] for r in ([whole], rows))
        assert np.array_equal(found, expected), name
        assert (len(rows[0]) > max_tokens) == (len(whole) > max_tokens), name
    assert not {"words", "lines", "double spaces", "no spaces", "letters", "chinese"} & (
        set(refused) - ({"letters"} if kind == "wordpiece" else set())
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_a_limit_is_divided_where_its_tokens_stay_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer, given = loaded(kind, tmp_path), texts()
    for name in ("words", "lines", "no spaces", "letters", "chinese", "special tokens"):
        text = given[name]
        try:
            (row,) = tokenizer.encode([text])
        except BadValue as error:
            assert "use spaces between words" in error.message and name != "words"
            continue
        assert np.array_equal(row, tokenizer._encode([text], True)[0]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_offsets_of_a_truncated_text_are_those_of_the_whole(
    kind: str, side: long_texts.Side, tmp_path: Path
) -> None:
    tokenizer, text = loaded(kind, tmp_path), texts()["words"]
    (found,) = tokenizer.encode_with_offsets([text], False, RowLimit(30, True, side))
    (whole,) = tokenizer._encode_located([text], False)
    kept = slice(None, 30) if side == "right" else slice(-30, None)
    assert len(found.ids) < len(whole.ids)
    assert np.array_equal(found.ids[kept], whole.ids[kept])
    assert np.array_equal(found.offsets[kept], whole.offsets[kept])
    assert np.array_equal(np.diff(found.words[kept]), np.diff(whole.words[kept]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_far_too_long_is_rejected_after_its_beginning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded(kind, tmp_path)
    encode, sizes = tokenizer._encode, []

    def counted(texts: list[str], add_special_tokens: bool) -> list[Ints]:
        sizes.append(sum(map(len, texts)))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    text = "the water is cold " * 100_000
    with pytest.raises(BadValue, match="input 1 has more than 512 tokens") as caught:
        tokenizer.encode(["fine", text], True, RowLimit(512))
    assert caught.value.status == 400 and sum(sizes) < 20_000


def test_a_prompt_is_joined_to_texts_as_they_are_read(tmp_path: Path) -> None:
    processor = InputProcessor(make_spec(max_model_len=64, vocab_size=1000), loaded("wordpiece", tmp_path))
    options = InputOptions(prompt="the water " * 20, truncate_prompt_tokens=-1)
    texts = [f"one {word}" for word in ("two", "yes", "no")]
    joined = processor.with_prompt(texts * 1000, options)
    assert isinstance(joined, ExpandedTexts) and len(joined) == 3000
    assert joined[1] == options.prompt + "one yes" and joined[-1] == options.prompt + "one no"
    assert joined[1:3] == [options.prompt + "one yes", options.prompt + "one no"]
    small = processor.prepare("a", texts, PoolingParams(), options)
    large = processor.prepare("b", texts * 1000, PoolingParams(), options)
    assert np.array_equal(large.token_ids[: small.num_tokens], small.token_ids)


@pytest.mark.parametrize("field", ["prompt", "instruction"])
def test_a_prompt_that_many_texts_multiply_is_refused(field: str, tmp_path: Path) -> None:
    spec = make_spec(max_model_len=64, vocab_size=1000, instruction_template="I: {instruction}")
    processor = InputProcessor(spec, loaded("wordpiece", tmp_path))
    options = InputOptions(**{field: "the water " * 5000})
    with pytest.raises(BodyTooLarge, match=f"{field} adds .* repeated for each text") as caught:
        processor.prepare("a", ["one"] * 2048, PoolingParams(), options)
    assert caught.value.status == 413 and caught.value.param == field


def peak_mb(folder: Path, work: str) -> tuple[list[str], int]:
    """Run `work` in a process; returns its output and the growth of its memory in MB."""
    script = f"""
import json, resource, sys
from pathlib import Path
from penstock.errors import PenstockError
from penstock.inputs.pair_options import PairOptions
from penstock.inputs.pairs import prepare_pairs
from penstock.inputs.processor import InputOptions, InputProcessor
from penstock.inputs.tokenizer import Tokenizer
from penstock.checkpoint.score import ScoreSpec
from penstock.types import PoolingParams, Task
from tests.helpers import make_spec
tokenizer = Tokenizer(Path({str(folder)!r}))
processor = InputProcessor(make_spec(max_model_len=512, vocab_size=1000), tokenizer)
processor.prepare("warm", ["the water"], PoolingParams())
status = Path("/proc/self/status")  # the peak of getrusage begins with that of the parent
peak = lambda: int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
said = []
def attempt(work):
    try:
        request = work()
        said.append(f"{{request.num_rows}} rows")
    except PenstockError as error:
        said.append(error.message)
before = peak()
{work}
print(json.dumps([said, peak() - before]))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said, grown = json.loads(done.stdout)
    return said, grown


@pytest.mark.parametrize("kind", ["wordpiece", "byte bpe"])
def test_bombs_take_little_memory(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    loaded(kind, folder)
    said, grown = peak_mb(
        folder,
        """
prepare = processor.prepare
prompt = "the water is cold " * 800
attempt(lambda: prepare("a", ["one"] * 2048, PoolingParams(), InputOptions(prompt="the water " * 5000)))
attempt(lambda: prepare("b", ["one"] * 1024, PoolingParams(), InputOptions(prompt=prompt)))
attempt(lambda: prepare("c", ["one"] * 128, PoolingParams(),
                        InputOptions(prompt=prompt, truncate_prompt_tokens=-1)))
for text in ("the water is cold " * 1_700_000, " " * 31_000_000, "的" * 10_000_000):
    attempt(lambda: prepare("d", text, PoolingParams()))
    attempt(lambda: prepare("e", text, PoolingParams(), InputOptions(truncate_prompt_tokens=-1)))
score = ScoreSpec(template=("Q: {query} D: {document}",))
spec = make_spec(max_model_len=512, vocab_size=1000, tasks=(Task.SCORE,), score=score)
pairs = InputProcessor(spec, tokenizer)
for query in ("the water " * 5000, "the water " * 1000):
    attempt(lambda: prepare_pairs(pairs, "f", [(query, "one")] * 2048, PoolingParams(Task.SCORE)))
""",
    )
    assert "adds 102400000 characters" in said[0] and "tokens" in said[1] and said[2] == "128 rows"
    assert "has more than 512 tokens" in said[3] and said[4] == "1 rows"
    assert all("shorten it" in words or words == "1 rows" for words in said[3:-2])
    assert "query adds" in said[-2] and "document 0 has " in said[-1]
    assert grown < 200
