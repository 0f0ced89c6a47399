from __future__ import annotations

import asyncio
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint.dense import DenseSpec
from penstock.checkpoint.pooling import PoolingSpec
from penstock.errors import BadValue, NotPossible
from penstock.inputs.chunks import Chunker, ChunkOptions, divide, split_row, token_spans
from penstock.inputs.processor import InputOptions
from penstock.tasks.embed import EmbedInChunks
from penstock.tasks.model import TextModel
from penstock.types import Chunks, PoolingParams, Request, Task
from tests.checkpoints import WORDS, wordpiece_tokenizer, wordpiece_vocabulary
from tests.helpers import ints, make_spec

LONG = " ".join(WORDS[:50])  # 50 tokens; the model's limit is 16
RUST = wordpiece_tokenizer()
CLS, SEP = RUST.token_to_id("[CLS]"), RUST.token_to_id("[SEP]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_model(folder: Path, **changes: Any) -> TextModel:
    tasks = (Task.EMBED, Task.TOKEN_EMBED)
    spec = {"folder": str(folder), "vocab_size": len(wordpiece_vocabulary()), "tasks": tasks}
    return TextModel(make_spec(**(spec | changes)))


def prepare(
    model: TextModel,
    inputs: Any,
    chunking: str,
    chunk_size: int | None = None,
    chunk_spans: Any = None,
    **options: Any,
) -> tuple[Request, Chunks | None]:
    how = ChunkOptions(chunking=chunking, chunk_size=chunk_size, chunk_spans=chunk_spans)
    task = EmbedInChunks(inputs=inputs, params=PoolingParams(), options=InputOptions(**options), chunking=how)
    task.check(model)
    return asyncio.run(task.chunked_request(model, "id"))


def rows_of(request: Request) -> list[list[int]]:
    return [row.tolist() for row in np.split(request.token_ids, request.starts[1:])]


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_of_a_split_row_fit_and_cover_its_body(seed: int) -> None:
    random = np.random.default_rng(seed)
    head, tail = random.integers(0, 3, size=2).tolist()
    limit = head + tail + int(random.integers(1, 9))
    row = ints(random.integers(0, 99, size=head + tail + int(random.integers(1, 60))).tolist())
    parts, sizes = split_row(row, limit, head, tail)
    assert all(len(part) <= limit for part in parts)
    assert all(part[:head].tolist() == row[:head].tolist() for part in parts)
    assert all(part[len(part) - tail :].tolist() == row[len(row) - tail :].tolist() for part in parts)
    bodies = [part[head : len(part) - tail].tolist() for part in parts]
    assert list(chain(*bodies)) == row[head : len(row) - tail].tolist()
    assert sizes == [len(body) for body in bodies]
    assert max(sizes) - min(sizes) <= 1, "even parts"


@pytest.mark.parametrize("seed", range(30))
def test_late_chunks_cover_all_pooled_tokens(seed: int) -> None:
    random = np.random.default_rng(seed)
    pooled, before, body, after = random.integers(0, 20, size=4).tolist()
    first, end = pooled + before, pooled + before + body
    size, length = int(random.integers(1, 9)), max(end + after, pooled + 1)
    spans = divide(pooled, first, end, length, size)
    assert spans[0, 0] == pooled and spans[-1, 1] == length
    assert (spans[1:, 0] == spans[:-1, 1]).all()
    assert (spans[:, 0] < spans[:, 1]).all()
    inside = np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], first)
    assert inside.sum() == body
    assert (inside[:-1] == size).all() and inside[-1] <= size


def test_mean_chunking_splits_only_rows_that_are_too_long(folder: Path) -> None:
    request, chunks = prepare(make_model(folder), ["the water", LONG, "people"], "mean")
    assert chunks is not None
    assert chunks.counts.tolist() == [1, 4, 1]
    assert chunks.weights.tolist() == [2, 13, 13, 12, 12, 1]
    body = RUST.encode(LONG).ids[1:-1]
    assert rows_of(request)[1] == [CLS, *body[:13], SEP]
    assert list(chain(*(row[1:-1] for row in rows_of(request)[1:5]))) == body


def test_texts_that_fit_are_not_chunked(folder: Path) -> None:
    params = PoolingParams(dimensions=4)
    task = EmbedInChunks(inputs=["the water"], params=params, chunking=ChunkOptions(chunking="mean"))
    request, chunks = asyncio.run(task.chunked_request(make_model(folder), "id"))
    assert chunks is None and request.params == params


def test_every_part_repeats_the_prompt_which_has_no_weight(folder: Path) -> None:
    request, chunks = prepare(make_model(folder), LONG, "mean", prompt="search query: ")
    head = RUST.encode("search query: ").ids[:-1]
    assert chunks is not None and chunks.weights.sum() == 50
    assert all(row[: len(head)] == head and row[-1] == SEP for row in rows_of(request))


def test_a_prompt_that_leaves_no_room_is_rejected(folder: Path) -> None:
    with pytest.raises(BadValue, match="shorten the prompt"):
        prepare(make_model(folder), LONG, "mean", prompt=" ".join(WORDS[:14]) + " ")


def test_token_ids_are_split_without_special_tokens(folder: Path) -> None:
    request, chunks = prepare(make_model(folder), [list(range(5, 45))], "mean")
    assert chunks is not None and chunks.counts.tolist() == [3]
    assert list(chain(*rows_of(request))) == list(range(5, 45))


def test_late_chunks_report_their_character_spans(folder: Path) -> None:
    text = "  The water, people GO to it"
    for prompt in (None, "search: "):
        chunker = make_model(folder)
        request, chunks = prepare(chunker, ["oil", text], "late", 3, prompt=prompt)
        assert chunks is not None and chunks.chars is not None and chunks.spans is not None
        assert chunks.counts.tolist() == [1, 3]
        places = chunks.chars.tolist()
        assert [text[begin:end] for begin, end in places[1:]] == ["The water,", "people GO to", "it"]
        before = 1 if prompt is None else 3
        assert chunks.spans[1:].tolist() == [
            [0, before + 3],
            [before + 3, before + 6],
            [before + 6, before + 8],
        ]
        assert request.params == PoolingParams(Task.TOKEN_EMBED, normalize=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_late_chunks_of_a_truncated_text_keep_their_offsets(folder: Path, side: str) -> None:
    _, chunks = prepare(make_model(folder), LONG, "late", 5, truncate_prompt_tokens=-1, truncation_side=side)
    assert chunks is not None and chunks.chars is not None
    words = " ".join(LONG[begin:end] for begin, end in chunks.chars.tolist()).split()
    assert words == (list(WORDS[:14]) if side == "right" else list(WORDS[36:50]))


def test_a_prompt_that_is_not_pooled_belongs_to_no_chunk(folder: Path) -> None:
    chunker = make_model(folder, pooling=PoolingSpec(("mean",), include_prompt=False))
    _, chunks = prepare(chunker, "the water", "late", 1, prompt="search query: ")
    assert chunks is not None and chunks.spans is not None
    assert chunks.spans.tolist() == [[4, 5], [5, 7]]


def test_late_chunks_of_token_ids_have_no_character_spans(folder: Path) -> None:
    _, chunks = prepare(make_model(folder), [[5, 6, 7]], "late", 2)
    assert chunks is not None and chunks.spans is not None and chunks.chars is None
    assert chunks.spans.tolist() == [[0, 2], [2, 3]]


def test_a_chunk_size_may_exceed_every_text(folder: Path) -> None:
    _, chunks = prepare(make_model(folder), "the water", "late", 2**70)
    assert chunks is not None and chunks.counts.tolist() == [1]


def test_an_empty_text_is_one_late_chunk(folder: Path) -> None:
    _, chunks = prepare(make_model(folder), "", "late")
    assert chunks is not None and chunks.spans is not None and chunks.chars is not None
    assert chunks.spans.tolist() == [[0, 2]] and chunks.chars.tolist() == [[0, 0]]


def test_letters_that_grow_in_lower_case_do_not_shift_the_offsets(folder: Path) -> None:
    text = "İİ to go"  # lower-casing turns the first two letters into four
    _, chunks = prepare(make_model(folder, lower_case=True), text, "late", 1)
    assert chunks is not None and chunks.chars is not None
    assert text[slice(*chunks.chars[-1].tolist())] == "go"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"chunking": "early"}, "chunking", "early"),
    "zero": ({"chunking": "late", "chunk_size": 0}, "chunk_size", "0"),
    "size without late": ({"chunking": "mean", "chunk_size": 4}, "chunk_size", "late"),
    "mean and truncation": (
        {"chunking": "mean", "truncate_prompt_tokens": -1},
        "truncate_prompt_tokens",
        "whole text",
    ),
    "spans without late": ({"chunking": "mean", "chunk_spans": [[(0, 3)]]}, "chunk_spans", "late"),
    "spans and size": ({"chunking": "late", "chunk_size": 2, "chunk_spans": []}, "chunk_spans", "exclude"),
    "late beyond the limit": ({"chunking": "late"}, "input", "52 tokens, but the model takes at most 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_bad_field(folder: Path, name: str) -> None:
    options, param, words = REFUSED[name]
    with pytest.raises(BadValue, match=words) as caught:
        prepare(make_model(folder), LONG, **options)
    assert caught.value.param == param


def test_chunking_is_rejected_for_other_tasks(folder: Path) -> None:
    with pytest.raises(BadValue, match="token_embed"):
        Chunker(make_model(folder).processor).check(
            PoolingParams(Task.TOKEN_EMBED), InputOptions(), ChunkOptions(chunking="mean")
        )


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        (PoolingSpec(("cls",)), "pools by cls"),
        (PoolingSpec(("last",)), "pools by last"),
        (PoolingSpec(("mean", "max")), r"mean \+ max"),
        (PoolingSpec(("mean",), modules=(DenseSpec("2_Dense", 8, 4, True, "tanh"),)), "Dense"),
    ],
)
def test_late_chunking_needs_mean_pooling_without_dense_modules(
    folder: Path, pooling: PoolingSpec, words: str
) -> None:
    with pytest.raises(NotPossible, match=words):
        prepare(make_model(folder, pooling=pooling), "the water", "late")


def test_the_caller_may_give_the_spans_of_chunks(folder: Path) -> None:
    text = "the water, people go"
    spans = [(0, 10), (11, 20)]
    _, chunks = prepare(make_model(folder), ["oil", text], "late", chunk_spans=[[(0, 3)], spans])
    assert chunks is not None and chunks.chars is not None and chunks.spans is not None
    assert chunks.spans.tolist() == [[0, 3], [0, 4], [4, 7]]
    assert chunks.chars.tolist()[1:] == [list(span) for span in spans]
    _, part = prepare(make_model(folder), text, "late", chunk_spans=[[(4, 9)]], prompt="search: ")
    assert part is not None and part.spans is not None
    assert part.spans.tolist() == [[4, 5]]


@pytest.mark.parametrize("seed", range(20))
def test_spans_that_cover_the_text_cover_the_row(seed: int) -> None:
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(1, 6, size=12))
    chars = ints([0, 0, *chain(*zip([0, *ends[:-1]], ends, strict=True)), 0, 0]).reshape(-1, 2)
    edges = [0, *sorted(random.choice(ends[:-1], size=3, replace=False).tolist()), int(ends[-1])]
    wanted = ints(list(chain(*pairwise(edges)))).reshape(-1, 2)
    spans = token_spans(0, wanted, chars, 0, (1, 13), 14)
    assert spans[0, 0] == 0 and spans[-1, 1] == 14
    assert (spans[1:, 0] == spans[:-1, 1]).all()
    assert chars[spans[:-1, 1] - 1, 1].tolist() == edges[1:-1]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([], "0 lists for 1 texts"),
        ([[]], "at least one"),
        ([[(3, 3)]], "ascending"),
        ([[(0, 4), (3, 9)]], "overlap"),
        ([[(-1, 4)]], "from 0 to 9"),
        ([[(0, 10)]], "from 0 to 9"),
        ([[(3, 4)]], "no token ends from 3 to 4"),
    ],
)
def test_invalid_spans_are_rejected(folder: Path, spans: Any, words: str) -> None:
    with pytest.raises(BadValue, match=words) as caught:
        prepare(make_model(folder), "the water", "late", chunk_spans=spans)
    assert caught.value.param == "chunk_spans"


def test_spans_are_rejected_for_token_ids(folder: Path) -> None:
    with pytest.raises(BadValue, match="token ids"):
        prepare(make_model(folder), [[5, 6]], "late", chunk_spans=[[(0, 1)]])
