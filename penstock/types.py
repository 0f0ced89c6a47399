"""The types that all packages share: requests, parameters, step plans, results and outputs.

This module does not import torch; arrays are NumPy. A step plan holds every integer that a step needs, so
that no later code has to read a number back from the device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue, PenstockError

Ints = NDArray[np.int32]
Array = NDArray[np.generic]

MAX_TERMS = 1024  # terms of a sparse row when the caller sets no top_k
MAX_TOP_K = 8192  # maximum top_k in a request


class Task(enum.StrEnum):
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"
    SPARSE = "sparse"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"
    SCORE = "score"
    REWARD = "reward"
    ENTITIES = "entities"  # named entities, with the caller's labels
    ZERO_SHOT = "zero_shot"
    GENERATE = "generate"


LABELLED_TASKS = frozenset({Task.ENTITIES, Task.ZERO_SHOT})  # tasks whose labels are part of the request


class EngineSleep(enum.IntEnum):
    """Whether an engine holds its weights and caches."""

    AWAKE = 0
    FALLING_ASLEEP = 1
    ASLEEP = 2
    WAKING = 3

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


class OutputDtype(enum.StrEnum):
    """Number format of output vectors. `binary` and `ubinary` pack eight sign bits into a byte."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype of the values; bfloat16 is stored as uint16 bit patterns."""
        return np.dtype(_NUMPY_OF[self])

    @property
    def is_packed(self) -> bool:
        return self in (OutputDtype.BINARY, OutputDtype.UBINARY)


_NUMPY_OF = {
    OutputDtype.FLOAT32: "<f4",
    OutputDtype.FLOAT16: "<f2",
    OutputDtype.BFLOAT16: "<u2",
    OutputDtype.INT8: "i1",
    OutputDtype.UINT8: "u1",
    OutputDtype.BINARY: "i1",
    OutputDtype.UBINARY: "u1",
}


class PoolingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """What the pooler computes for a row. Rows with equal parameters are pooled together, so it is
    hashable."""

    task: Task = Task.EMBED
    dimensions: int | None = None  # truncate to this many, then renormalise; None keeps all
    normalize: bool | None = None  # None: the model's default; for classifiers: apply the activation
    dtype: OutputDtype = OutputDtype.FLOAT32
    top_k: int | None = None  # sparse: number of heaviest terms; None: at most `MAX_TERMS`
    lexical: bool = False  # sparse: one weight per input token; `outputs` merges tokens with equal ids
    late: bool = False  # score: late interaction of token vectors, not of one vector per row
    steps: bool = False  # reward: one value per token; `outputs` selects the values of step tags
    listwise: bool = False  # score: a row holds a whole list; `inputs.lists` compares its marker tokens
    num_labels: int = 0  # entities, zero_shot: number of labels in each row's prompt

    @property
    def per_token(self) -> bool:
        """Whether the engine returns one vector per token instead of one per row."""
        gathered = self.lexical or self.steps or self.listwise
        return gathered or self.task in (Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY, Task.ENTITIES)

    @property
    def reads_tokens(self) -> bool:
        """Whether the output is computed from the row's tokens rather than from a pooled vector."""
        return self.per_token or self.task is Task.SPARSE


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint on generated text: a JSON schema, a regular expression, or a grammar in Lark or GBNF
    notation."""

    kind: Literal["json", "regex", "lark", "gbnf"]
    text: str
    param: str | None = None  # request field that it comes from, for error messages


class SamplerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the next tokens of a row are sampled. Bad words are already token ids; `tasks` handles stop
    strings."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be generated
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the row and are left out of its text
    eos_token_ids: tuple[int, ...] = ()  # the same, unless `ignore_eos` is set
    ignore_eos: bool = False
    logprobs: int | None = None  # number of most likely tokens to report besides the chosen one
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # `inputs.constraints` computes each step's token mask from it


# Limits of one request. The engine's tables have these sizes, so that no request can make them grow.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64  # tokens of one bad word
MAX_BAD_WORDS_TOKENS = 8192  # tokens of all bad words
_INT32, _INT64 = 2**31, 2**63
# Values outside these ranges overflow or vanish in float32, or mean the same as the nearest bound.
SAMPLING_RANGES = {
    "temperature": (0.0, 1000.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
}


def check_sampling(params: SamplerParams, vocab_size: int) -> None:
    """Raise `BadValue` for numbers out of range, token ids outside the vocabulary, and lists that are too
    long."""
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high:  # also true for NaN
            raise BadValue(f"{name} is {value:g}; use {low:g} to {high:g}", param=name)
    for name, given, smallest, limit in (
        ("top_k", params.top_k, -1, _INT64),
        ("min_tokens", params.min_tokens, 0, _INT32),
        ("max_tokens", params.max_tokens, 1, _INT32),
        ("seed", params.seed or 0, -_INT64, 2 * _INT64),
    ):
        if not smallest <= given < limit:
            raise BadValue(f"{name} is {shown(given)}; use {smallest} to {limit - 1}", param=name)
    _check_ids("logit_bias", params.logit_bias, vocab_size, MAX_LOGIT_BIAS)
    if not all(map(math.isfinite, params.logit_bias.values())):
        raise BadValue("logit_bias has a bias that is not finite", param="logit_bias")
    _check_bad_words(params.bad_token_ids, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, _INT32, MAX_STOP_TOKEN_IDS)
    _check_ids("eos_token_ids", params.eos_token_ids, _INT32, MAX_STOP_TOKEN_IDS)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise BadValue(
                "allowed_token_ids is empty; give at least one token id", param="allowed_token_ids"
            )
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size, vocab_size)


def shown(number: int) -> str:
    """An integer for an error message: its digits, or its number of bits if it is too long to show."""
    return str(number) if abs(number) < 10**40 else f"a number of {number.bit_length()} bits"


def _check_bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> None:
    longest, num_tokens = max(map(len, words), default=0), sum(map(len, words))
    for count, limit, noun in (
        (len(words), 2 * MAX_BAD_WORDS, "token sequences"),
        (longest, MAX_BAD_WORD_TOKENS, "tokens in one text"),
        (num_tokens, MAX_BAD_WORDS_TOKENS, "tokens"),
    ):
        if count > limit:
            raise BadValue(f"bad_words has {count} {noun}; use at most {limit}", param="bad_words")
    _check_ids("bad_words", [token for word in words for token in word], vocab_size, MAX_BAD_WORDS_TOKENS)


def _check_ids(name: str, ids: Collection[int], vocab_size: int, max_ids: int) -> None:
    if len(ids) > max_ids:
        raise BadValue(f"{name} has {len(ids)} token ids; use at most {max_ids}", param=name)
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < vocab_size:
            raise BadValue(f"{name} has token id {shown(token)}; use 0 to {vocab_size - 1}", param=name)


ONE_ROW: Ints = np.zeros(1, dtype=np.int32)  # row number and start offset of a request with one row
ONE_ROW.flags.writeable = False


def cumulative(lengths: Ints) -> Ints:
    """Start offset of each ragged row, followed by the total: [rows] → [rows + 1]."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.add.accumulate(lengths, out=out[1:])
    return out


def ragged_arange(starts: Ints, lengths: Ints, cu_lengths: Ints) -> Ints:
    """The indices start, start + 1, …, start + length - 1 of each row, all rows concatenated."""
    shift = np.repeat(starts - cu_lengths[:-1], lengths)
    return shift + np.arange(len(shift), dtype=np.int32)


def runs(starts: Ints, lengths: Ints) -> Ints:
    """`ragged_arange` for callers without cumulative lengths."""
    return ragged_arange(starts, lengths, cumulative(lengths))


def split_rows(values: Array, lengths: Ints) -> list[Array]:
    """Split a ragged run [tokens, …] into one view per row."""
    out, first = [], 0
    for length in lengths.tolist():
        end = first + length
        out.append(values[first:end])
        first = end
    return out


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """One image for a vision tower: resized and cut into patches. Values are still 0 to 255; the engine
    rescales and normalises them.

    A processor that splits an image produces several tiles with the same grid, one after another.
    """

    patches: NDArray[np.uint8]  # [tiles · grid rows · grid columns, values], in the tower's order
    grid: tuple[int, int]  # rows and columns of patches in one tile
    num_tokens: int  # placeholder tokens of the image in a prompt; 0: the image is not part of a prompt
    digest: bytes  # 16 bytes over patches and geometry: equal digests mean equal images
    num_tiles: int = 1
    # Rows and columns of tiles if the image was split; a tile of the whole image follows them. (0, 0): it was
    # not split.
    split: tuple[int, int] = (0, 0)
    num_pixels: int = 0  # pixels of the caller's image


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """One input of texts and images, in order."""

    parts: tuple[str | PreparedImage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """The images of a request's rows for the vision tower, in the order of their tokens.

    Each tile counts as an image, because the tiles of one image may be in different places of a prompt.
    """

    patches: NDArray[np.uint8]  # [patches, values], the images concatenated, in the tower's order
    grids: Ints  # [images, 2], rows and columns of patches
    rows: Ints  # [images], row of the request that contains the image
    starts: Ints  # [images], first token of the image within its row
    num_tokens: Ints  # [images], placeholder tokens of the image in its row
    digests: NDArray[np.uint8]  # [images, 16]; equal digests mean equal patches and grids
    # Whether a row with an image is one token that skips the text model: the tower's output is its result.
    are_rows: bool = False
    cu_patches: Ints = field(init=False)  # [images + 1], where each image begins in `patches`

    def __post_init__(self) -> None:
        object.__setattr__(self, "cu_patches", cumulative(self.num_patches))

    @classmethod
    def of(
        cls, placed: Sequence[tuple[int, int, PreparedImage]], *, are_rows: bool = False
    ) -> RequestImages | None:
        """Build from (row, first token, image) in the order of rows and tokens; None if `placed` is empty.
        The tiles of an image are consecutive."""
        if not placed:
            return None
        images = [each for _, _, each in placed]
        tiles = np.array([image.num_tiles for image in images], dtype=np.int32)
        tokens = np.array([1 if are_rows else image.num_tokens for image in images], dtype=np.int32) // tiles
        within = runs(np.zeros_like(tiles), tiles)  # index of each tile within its image
        rows, starts = (np.array(each, dtype=np.int32) for each in list(zip(*placed, strict=True))[:2])
        num_tokens = np.repeat(tokens, tiles)
        digests = np.frombuffer(b"".join(image.digest for image in images), dtype=np.uint8).reshape(-1, 16)
        digests = np.repeat(digests, tiles, axis=0)
        digests[:, :2] ^= within[:, None].astype("<u2").view(np.uint8)  # a different digest for each tile
        return cls(
            images[0].patches if len(images) == 1 else np.concatenate([each.patches for each in images]),
            np.repeat(np.array([image.grid for image in images], dtype=np.int32), tiles, axis=0),
            np.repeat(rows, tiles),
            np.repeat(starts, tiles) + within * num_tokens,
            num_tokens,
            digests,
            are_rows,
        )

    @staticmethod
    def join(parts: Sequence[RequestImages | None], first_rows: Sequence[int]) -> RequestImages | None:
        """Join the images of several requests into one request; None if there are no images. The rows of each
        part begin at `first_rows`."""
        given = [(part, first) for part, first in zip(parts, first_rows, strict=True) if part is not None]
        if not given:
            return None
        return RequestImages(
            np.concatenate([part.patches for part, _ in given]),
            np.concatenate([part.grids for part, _ in given]),
            np.concatenate([part.rows + np.int32(first) for part, first in given]),
            np.concatenate([part.starts for part, _ in given]),
            np.concatenate([part.num_tokens for part, _ in given]),
            np.concatenate([part.digests for part, _ in given]),
            given[0][0].are_rows,
        )

    @property
    def num_images(self) -> int:
        return len(self.rows)

    @property
    def num_patches(self) -> Ints:
        """[images]"""
        return self.grids[:, 0] * self.grids[:, 1]

    def of_rows(self, rows: Ints) -> tuple[Ints, Ints]:
        """The images of some rows, in the order of `rows`, and for each the index of its row in `rows`."""
        first = np.searchsorted(self.rows, rows, side="left").astype(np.int32)
        counts = np.searchsorted(self.rows, rows, side="right").astype(np.int32) - first
        return runs(first, counts), np.repeat(np.arange(len(rows), dtype=np.int32), counts)

    def select(self, images: Ints, rows: Ints) -> RequestImages:
        """Select images; `rows` are their new row numbers."""
        patches = runs(self.cu_patches[:-1][images], self.num_patches[images])
        is_all = len(images) == self.num_images and bool((images[1:] > images[:-1]).all())
        return RequestImages(
            self.patches if is_all else self.patches[patches],
            self.grids[images],
            rows,
            self.starts[images],
            self.num_tokens[images],
            self.digests[images],
            self.are_rows,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One client call with all its rows, flat. Rows share parameters, priority and deadline."""

    id: str
    token_ids: Ints  # [tokens], the rows concatenated
    lengths: Ints  # [rows]
    params: PoolingParams = field(default_factory=PoolingParams)
    type_ids: Ints | None = None  # [tokens], segment ids; None: all 0
    skip: Ints | None = None  # [rows], number of leading tokens left out of the pooling
    key_limits: Ints | None = None  # [rows], number of leading tokens that are attended to; None: all
    # [tokens], 1 where a token's vector is scored or returned; None: all. In rows with labels in their prompt
    # the values are `TEXT_MARK` and `LABEL_MARK`.
    token_mask: Ints | None = None
    pairs: Ints | None = None  # [documents], query row of each document; query rows come first
    extra_params: tuple[PoolingParams, ...] = ()  # additional outputs computed from the same rows
    adapters: Ints | None = None  # [rows], adapter id; -1: none
    images: RequestImages | None = None
    # [tokens · 3], each token's position in time, down and across; None: its index in the row
    rope_positions: Ints | None = None
    priority: int = 0  # lower runs sooner
    arrival_s: float = 0.0  # monotonic clock, shared by all processes of a machine
    deadline_s: float | None = None  # on the same clock
    reuse_prefix: bool = False  # rows may reuse cached prefixes
    cache_salt: str = ""  # prefixes are shared only between requests with equal salts
    sampling: SamplerParams | None = None  # set if the rows are prompts to continue
    num_truncated: int = 0  # number of truncated rows; not sent to the engine
    client: str = ""  # sender; clients share the device by their weights
    weight: float = 1.0  # the client's weight, above 0
    is_background: bool = False  # runs only in device time that other requests leave
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)
    starts: Ints = field(init=False)  # [rows], start offset of each row in token_ids

    def __post_init__(self) -> None:
        self.num_rows, self.num_tokens = len(self.lengths), len(self.token_ids)
        self.starts = ONE_ROW if self.num_rows == 1 else cumulative(self.lengths)[:-1]

    @property
    def all_params(self) -> tuple[PoolingParams, ...]:
        """The parameters of every output of a row."""
        return (self.params, *self.extra_params)

    @property
    def patches_of_rows(self) -> Ints:
        """[rows], number of image patches in each row."""
        if (images := self.images) is None:
            return np.zeros(self.num_rows, dtype=np.int32)
        counts = np.bincount(images.rows, weights=images.num_patches, minlength=self.num_rows)
        return counts.astype(np.int32)

    @property
    def num_queries(self) -> int:
        """Number of leading rows that are queries."""
        return 0 if self.pairs is None else self.num_rows - len(self.pairs)


MIN_PRODUCT_WIDTH = 32  # narrower vectors take about as long to compare as vectors of this width


@dataclass(slots=True, eq=False)
class Comparison:
    """Late-interaction scoring of vectors given by the caller."""

    id: str
    queries: Array  # [query vectors, dim]
    query_lengths: Ints  # [queries]
    documents: Array  # [document vectors, dim]
    document_lengths: Ints  # [documents]
    pairs: Ints  # [documents], query of each document
    query_scales: Array | None = None  # [query vectors], for int8 vectors
    document_scales: Array | None = None  # [document vectors], for int8 vectors
    arrival_s: float = 0.0
    deadline_s: float | None = None  # on the same clock

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = (self.queries, self.documents, self.query_scales, self.document_scales)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_operations(self) -> float:
        """Estimated cost in multiplications. Narrow vectors count as `MIN_PRODUCT_WIDTH` wide."""
        query_lengths = self.query_lengths.astype(np.float64).take(self.pairs, mode="clip")
        vector_pairs = float(query_lengths @ self.document_lengths.astype(np.float64))
        return vector_pairs * max(int(self.queries.shape[1]), MIN_PRODUCT_WIDTH)


class Timings(NamedTuple):
    """How long a request waited and ran inside the engine."""

    queue_s: float = 0.0
    device_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CachedVectors:
    """Where the vectors of a request's rows are in the vector store."""

    starts: Ints  # [rows], offset in the store; -1: not stored
    lengths: Ints  # [rows], vectors of each row
    ready: NDArray[np.bool_]  # [rows], whether the vectors were stored before the request arrived


class RowSlice(NamedTuple):
    """The rows of one request that run in a step."""

    request: Request
    rows: Ints  # [n], row numbers within the request
    step_rows: Ints  # [n], row numbers within the step
    begins: Ints | None = None  # [n], first token of each row in this step; None: whole rows run
    ends: Ints | None = None  # [n], one past the last token of each row in this step
    cached: CachedVectors | None = None  # for requests with pairs
    cached_documents: Ints | None = None  # documents whose cached vectors this step scores

    @property
    def finished(self) -> Ints:
        """Indices, within this slice, of the rows that finish in this step."""
        if self.ends is None:
            return ONE_ROW if len(self.rows) == 1 else np.arange(len(self.rows), dtype=np.int32)
        return np.flatnonzero(self.ends == self.request.lengths[self.rows]).astype(np.int32)


class LengthGroup(NamedTuple):
    """Consecutive rows of equal length, cached length and key limit: a dense block inside the ragged run."""

    first_row: int
    num_rows: int
    length: int
    first_token: int
    num_cached: int = 0  # tokens per row whose keys are already in the KV cache
    first_key: int = 0  # start of the group in the step's run of keys, which includes cached keys
    key_limit: int = 0  # number of leading tokens of each row that are attended to; 0: all


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """Which vectors a step scores against each other, and which it writes to the vector store.

    There is one vector per token or one per row. Queries are read from the store; the queries of this step
    are written there first. The last `num_from_store` documents are also read from the store; the others are
    vectors that this step computes.
    """

    query_starts: Ints  # [queries]
    query_lengths: Ints  # [queries]
    pair_queries: Ints  # [pairs], query of each pair
    document_starts: Ints  # [pairs]
    document_lengths: Ints  # [pairs]
    write_from: Ints  # [written], indices of the step's vectors
    write_to: Ints  # [written], offsets in the store
    num_from_store: int
    max_query_length: int
    max_document_length: int

    def arrays(self) -> tuple[Ints, ...]:
        """The arrays that the device needs, in the order of the fields."""
        return (
            self.query_starts,
            self.query_lengths,
            self.pair_queries,
            self.document_starts,
            self.document_lengths,
            self.write_from,
            self.write_to,
        )


# Bits of `Request.token_mask`: the token represents a word of the text, or a label.
TEXT_MARK, LABEL_MARK = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class LabelPlan:
    """The tokens that represent labels, and words of the text, in rows with labels in their prompt. All rows
    have the same number of labels."""

    label_tokens: Ints  # [rows · labels], tokens of the step
    word_tokens: Ints  # [words], tokens of the step
    word_slots: Ints  # [words], row · max_words + index within the row
    output_rows: Ints  # [words], row of the per-token output for each word
    num_words: Ints  # [rows]
    num_labels: int
    max_words: int  # words of the longest row, at least 1
    num_tokens: int  # tokens of all rows

    def arrays(self) -> tuple[Ints, ...]:
        """The arrays that the device needs, in the order of the fields."""
        return (self.label_tokens, self.word_tokens, self.word_slots, self.output_rows, self.num_words)


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """The rows of a step that share pooling parameters; `rows` is None when it covers all of them.

    For tasks that read tokens, `tokens` lists them, row after row; None means all tokens.
    """

    params: PoolingParams
    rows: Ints | None
    tokens: Ints | None = None
    pairs: PairPlan | None = None  # if set, `rows` are the documents
    labels: LabelPlan | None = None  # for rows with labels in their prompt

    @property
    def index(self) -> Ints | None:
        """Indices to select from the step's values; None for all."""
        return self.rows if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class CarryPlan:
    """Chunked rows that pool a running sum of their hidden states over several steps."""

    rows: Ints  # [carried rows], rows of the step
    slots: Ints  # [carried rows], slots of the sums
    resumed: Ints  # [carried rows], 1 if an earlier step has stored a sum


@dataclass(frozen=True, slots=True, eq=False)
class KVPlan:
    """What a step reads from the KV cache and writes to it.

    The keys of a step form one run, row by row, with a row's cached keys first. `new_key_at` and
    `cached_key_at` are the positions of the step's own keys and of the cached keys in that run.
    """

    cu_keys: Ints  # [rows + 1]; for a row that reads through its block table, only its own key counts
    max_keys: int
    new_key_at: Ints  # [tokens]
    cached_key_at: Ints  # [cached]
    read_slots: Ints  # [cached]
    write_tokens: Ints  # [written], tokens of the step
    write_slots: Ints  # [written]
    token_slots: Ints  # [tokens], cache slot of each token of the step; -1: not written
    carry: CarryPlan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedPlan:
    """The leading rows of a generation step: one token each, whose keys are read through block tables."""

    num_rows: int
    max_blocks: int  # blocks of the longest row: the width of `block_tables`
    block_tables: Ints  # [rows · max_blocks]
    num_keys: Ints  # [rows], keys that each row reads, including its own
    offsets: Ints | None = None  # [rows], number of earlier rows of the same sequence; None: all 0


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Assign a slot of the sampler to a sequence."""

    slot: int
    params: SamplerParams
    prompt_ids: Ints  # [prompt]
    output_ids: Ints | None = None  # tokens already sampled, if a preempted sequence restarts
    stream: int | None = None  # noise stream for a sequence without a seed; None: the sampler's next


class Rewind(NamedTuple):
    """Reset sequences of a draft model after rejected proposals."""

    slots: Ints  # [sequences]
    num_sampled: Ints  # [sequences], sampled tokens that each keeps


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """Prompt tokens whose next token is scored, for requests with prompt log probabilities."""

    rows: Ints  # [scored rows], rows of the step
    begins: Ints  # [scored rows], position in the prompt of the first scored token
    counts: Ints  # [scored rows], number of scored tokens
    tokens: Ints  # [scored tokens], tokens of the step, row after row
    next_tokens: Ints  # [scored tokens], prompt token that follows each
    max_logprobs: int  # largest number of top tokens that a row requests


@dataclass(frozen=True, slots=True, eq=False)
class VerifyPlan:
    """The sampled rows of a step with proposals, in which a sequence may have several rows.

    The rows of a sequence are consecutive. A row's proposal is the input token of the next row. It is
    accepted if the row samples it and all earlier proposals were accepted.
    """

    proposed: Ints  # [sampled], proposal that each row verifies; -1: last row of its sequence
    offsets: Ints  # [sampled], number of earlier rows of the same sequence
    firsts: Ints  # [sequences], first row of each

    @property
    def counts(self) -> Ints:
        """[sequences], number of rows of each."""
        return np.diff(self.firsts, append=np.int32(len(self.proposed)))

    def num_accepted(self, token_ids: Ints) -> Ints:
        """[sequences], number of proposals before the first that differs from its sampled token.
        `token_ids` [sampled]."""
        equal = (token_ids == self.proposed) & (self.proposed >= 0)
        return np.minimum.reduceat(np.where(equal, np.int32(len(token_ids)), self.offsets), self.firsts)


@dataclass(frozen=True, slots=True, eq=False)
class SamplePlan:
    """Which rows of a step sample a token, and the sampler slots that they use.

    Token ids that an earlier step has sampled are fed on the device, because the CPU may not have read them
    yet.
    """

    slots: Ints  # [rows], slot of each row of the step
    epochs: Ints  # [rows], counter of the slot's owners when the step was planned
    visits: Ints  # [rows], counter of how often the slot had gained or lost blocks when the step was planned
    ends: Ints  # [rows], tokens of the sequence that have run after this step
    sampled_rows: Ints  # [sampled], rows of the step
    sampled_tokens: Ints  # [sampled], last token of each sampled row, as a token of the step
    sampled_slots: Ints  # [sampled]
    num_logprobs: Ints  # [sampled], requested top tokens besides the sampled one; -1: no log probabilities
    fed_tokens: Ints  # [fed], tokens of the step
    fed_slots: Ints  # [fed], slot whose last sampled token is fed
    leaves: tuple[int, ...] = ()  # slots to free before this step
    joins: tuple[Join, ...] = ()  # slots to assign after the leaves
    masks: tuple[tuple[int, Ints], ...] = ()  # slot → bit mask of its allowed next tokens, 32 per word
    prompts: PromptPlan | None = None  # None: no prompt log probabilities
    verify: VerifyPlan | None = None  # None: the step has no proposals
    rewind: Rewind | None = None  # applied before this step, after the joins; None: no rejected proposals


@dataclass(frozen=True, slots=True, eq=False)
class KeyLimits:
    """The rows of a step whose tokens attend only to the row's leading tokens: the limited rows."""

    tokens: Ints  # [tokens of limited rows], tokens of the step
    cu_lengths: Ints  # [limited rows + 1]
    keys: Ints  # [keys of limited rows], tokens of the step that are attended to
    cu_keys: Ints  # [limited rows + 1]
    max_length: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class ImagePlan:
    """The images of a step: which ones the vision tower runs, and which tokens read its features.

    Features pass through a store on the device. The tower writes the features of images that are not stored
    yet. The step's tokens read their features from the store, whichever step has written them.
    """

    patches: tuple[NDArray[np.uint8], ...]  # [patches, values] of each image to run, fewest patches first
    grids: Ints  # [images, 2], rows and columns of patches
    cu_patches: Ints  # [images + 1]
    groups: tuple[LengthGroup, ...]  # images with equal numbers of patches
    write_slots: Ints  # [features of the images to run], slots of the store
    tokens: Ints  # [image tokens], tokens of the step, ascending
    read_slots: Ints  # [image tokens], slot of the store that each token reads
    keys: tuple[bytes, ...]  # keys of the images to run, for the feature cache
    number: int = 0  # number of the step, for the feature cache
    num_text_rows: int | None = None  # text rows in front of the rows that are images; None: no row is one

    @property
    def num_images(self) -> int:
        """Number of images to run."""
        return len(self.patches)

    @property
    def num_patches(self) -> int:
        return int(self.cu_patches[-1])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BasePlan:
    """The ragged run of tokens that every step has. Rows are ordered by length; rows that are images come
    last."""

    token_ids: Ints  # [tokens]
    positions: Ints  # [tokens], 0-based within each row
    cu_lengths: Ints  # [rows + 1], start of each row in the flat run
    lengths: Ints  # [rows]
    groups: tuple[LengthGroup, ...]
    adapters: Ints | None = None  # [rows], adapter ids, -1: none; None: no row has an adapter
    images: ImagePlan | None = None  # None: no row has an image
    rope_positions: Ints | None = None  # [3 · tokens], in time, down and across; None: `positions`

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        if self.images is not None:  # rows that are images come last, so the last row may not be the longest
            return int(self.lengths.max())
        return int(self.lengths[-1]) if len(self.lengths) else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolPlan(BasePlan):
    """The complete plan of a pooling step."""

    slices: tuple[RowSlice, ...]
    variants: tuple[Variant, ...]
    type_ids: Ints | None = None  # [tokens]; None: all zero
    skip: Ints | None = None  # [rows], number of leading tokens left out of the pooling; None: none
    kv: KVPlan | None = None  # None: all rows run whole and nothing is cached
    limits: KeyLimits | None = None  # None: every row attends to all its tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GeneratePlan(BasePlan):
    """The complete plan of a generation step: decodes first, then chunks of prompts."""

    kv: KVPlan
    paged: PagedPlan
    sample: SamplePlan


StepPlan = PoolPlan | GeneratePlan


@dataclass(frozen=True, slots=True, eq=False)
class PooledResult:
    """The result of a pooling step: one array for each variant of its plan."""

    outputs: tuple[Array, ...]  # [rows or tokens of the variant, dim], in the order of plan.variants
    finite: tuple[Array, ...] = ()  # [rows or tokens], 0 where values are not finite; empty: check `outputs`
    device_s: float = 0.0
    stretch_s: float = 0.0  # interruptible steps: time that other steps usually wait for a yield point

    def timed(self, device_s: float) -> PooledResult:
        return PooledResult(self.outputs, self.finite, device_s)


class TokenLogprobs(NamedTuple):
    """Log probabilities of tokens: column 0 is the token itself, then the most likely tokens, best first."""

    ids: Ints  # [n, 1 + top]
    values: NDArray[np.float32]  # [n, 1 + top]
    ranks: Ints  # [n], rank of the token itself, from 1


@dataclass(frozen=True, slots=True, eq=False)
class SampledResult:
    """The result of a generation step."""

    token_ids: Ints  # [sampled]; -1: the logits were not finite; -2: every token was forbidden
    logprobs: TokenLogprobs | None = None  # for the sampled rows with log probabilities, in order
    prompt_logprobs: TokenLogprobs | None = None  # for the tokens of plan.sample.prompts
    device_s: float = 0.0

    def timed(self, device_s: float) -> SampledResult:
        return SampledResult(self.token_ids, self.logprobs, self.prompt_logprobs, device_s)


StepResult = PooledResult | SampledResult


@dataclass(frozen=True, slots=True, eq=False)
class PooledOutput:
    """The result of one complete request."""

    id: str
    # [rows, dim]; for per-token tasks [tokens, dim], the rows concatenated; for sparse tasks
    # [rows, terms, 2] of (token id, weight), heaviest first, padded with (-1, 0)
    values: Array
    timings: Timings
    extra_values: tuple[Array, ...] = ()  # one array for each of the request's extra_params


@dataclass(frozen=True, slots=True, eq=False)
class PooledRows:
    """Outputs of several single-row requests, in columns: the result of most pooling steps."""

    ids: Sequence[str]
    values: Array  # [requests, …]
    queue_s: Sequence[float]  # [requests]
    device_s: float  # device time of the step

    def parts(self) -> Iterator[PooledOutput]:
        """One `PooledOutput` for each request."""
        values, device_s = self.values, self.device_s
        for at, (request_id, queue_s) in enumerate(zip(self.ids, self.queue_s, strict=True)):
            yield PooledOutput(request_id, values[at : at + 1], Timings(queue_s, device_s))


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedTokens:
    """New tokens of one row of a request. The last part carries the finish reason."""

    id: str
    row: int
    token_ids: Ints  # [new]
    finish_reason: str | None = None  # "stop" | "length"
    stop_token: int | None = None  # the token that ended the row, if any
    # If requested: the chosen token first, then the most likely tokens, best first. Includes the stop token.
    logprob_ids: Ints | None = None  # [sampled, 1 + logprobs]
    logprobs: NDArray[np.float32] | None = None  # [sampled, 1 + logprobs]
    ranks: Ints | None = None  # [sampled], rank of the chosen token, from 1
    timings: Timings | None = None  # set in the last part
    # If requested, set in the first part: the same for the prompt's tokens after the first one.
    prompt_logprob_ids: Ints | None = None  # [prompt - 1, 1 + prompt_logprobs]
    prompt_logprobs: NDArray[np.float32] | None = None  # [prompt - 1, 1 + prompt_logprobs]
    prompt_ranks: Ints | None = None  # [prompt - 1]


SequenceIds = tuple[tuple[str, int], ...]  # (request id, row) of each sequence


@dataclass(frozen=True, slots=True, eq=False)
class DecodedTokens:
    """One new token for each of several unfinished sequences, in columns: the result of most decode steps."""

    rows: SequenceIds  # the same object in every step until the batch changes
    token_ids: Ints  # [rows]

    def parts(self) -> list[GeneratedTokens]:
        """Split into one `GeneratedTokens` per sequence."""
        ids = self.token_ids
        return [GeneratedTokens(name, row, ids[at : at + 1]) for at, (name, row) in enumerate(self.rows)]


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A request that ended without a result."""

    id: str
    error: PenstockError


Outcome = PooledOutput | PooledRows | DecodedTokens | GeneratedTokens | Failure


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of a request's texts, text by text. A chunk is a row or, with `spans`, part of a row."""

    counts: Ints  # [texts], number of chunks
    weights: Ints  # [chunks], number of the text's tokens in each chunk
    spans: Ints | None = None  # [chunks, 2], tokens within the text's row
    run_spans: Ints | None = None  # [chunks, 2], the same spans within the request's run of tokens
    chars: Ints | None = None  # [chunks, 2], characters within the text; None if the input is token ids
