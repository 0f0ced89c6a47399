"""The types that all packages share: requests, parameters, step plans, results and outputs.

Nothing here imports torch. Arrays are NumPy. A step plan holds every integer that a step needs, so that
no later code has to read a number back from the device.
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
MAX_TOP_K = 8192  # largest top_k that a caller may set


class Task(enum.StrEnum):
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"
    SPARSE = "sparse"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"
    SCORE = "score"
    REWARD = "reward"
    ENTITIES = "entities"  # with labels of the caller's
    ZERO_SHOT = "zero_shot"
    GENERATE = "generate"


LABELLED_TASKS = frozenset({Task.ENTITIES, Task.ZERO_SHOT})  # their labels come with the request


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
        """The NumPy dtype of the values; bfloat16 is carried as its 16-bit pattern."""
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
    """What the pooler computes for a row. Hashable: rows with equal parameters are pooled together."""

    task: Task = Task.EMBED
    dimensions: int | None = None  # truncate to this many, then renormalise; None keeps all
    normalize: bool | None = None  # None: the model's default; for classifiers: apply the activation
    dtype: OutputDtype = OutputDtype.FLOAT32
    top_k: int | None = None  # sparse: number of heaviest terms; None: at most `MAX_TERMS`
    lexical: bool = False  # sparse: the model weights the input's tokens; `outputs` merges them by id
    late: bool = False  # score: late interaction of token vectors, not of one vector per row
    steps: bool = False  # reward: one value per token; `outputs` selects those of the step tags
    listwise: bool = False  # score: a row holds a whole list; `inputs.lists` compares its marker tokens
    num_labels: int = 0  # entities, zero_shot: labels in the prompt of each row

    @property
    def per_token(self) -> bool:
        """Whether the engine returns one value row per token instead of one per text."""
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
    param: str | None = None  # the field of the request that it comes from, which errors name


class SamplerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the next tokens of a row are sampled. Bad words are token ids here; stop strings are handled
    by `tasks`."""

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
    stop_token_ids: tuple[int, ...] = ()  # end the row and are left out of its text
    eos_token_ids: tuple[int, ...] = ()  # likewise, unless `ignore_eos`
    ignore_eos: bool = False
    logprobs: int | None = None  # number of likeliest tokens to report besides the chosen one
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # `inputs.constraints` computes the token mask of each step from it


# What one request may ask for. Tables of the engine are sized by these, and none grows with one request.
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64  # of one
MAX_BAD_WORDS_TOKENS = 8192  # of all
_INT32, _INT64 = 2**31, 2**63
# Values outside overflow or vanish in float32, or mean the same as the nearest bound.
SAMPLING_RANGES = {
    "temperature": (0.0, 1000.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),
}


def check_sampling(params: SamplerParams, vocab_size: int) -> None:
    """`BadValue` for numbers outside their ranges, token ids outside the vocabulary, and lists that are too
    long."""
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(params, name)
        if not low <= value <= high:  # true of NaN as well
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
    """An integer in an error message: its digits, or how many it has about if these are too many to show."""
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
    """Start offset of each ragged row, then the total: [rows] → [rows + 1]."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.add.accumulate(lengths, out=out[1:])
    return out


def ragged_arange(starts: Ints, lengths: Ints, cu_lengths: Ints) -> Ints:
    """For each row the indices start, start + 1, … up to its length; all rows concatenated."""
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
    """One image as a vision tower reads it: resized and cut into patches. Values are still 0 to 255; the
    engine rescales and normalises them.

    A processor that splits an image gives several tiles of the same grid, one after the other.
    """

    patches: NDArray[np.uint8]  # [tiles · grid rows · grid columns, values], in the order of the tower
    grid: tuple[int, int]  # patches of one tile, down and across
    num_tokens: int  # placeholders of the image in a prompt; 0: no text is around the image
    digest: bytes  # 16 bytes over patches and geometry: equal digests mean equal images
    num_tiles: int = 1
    # Of an image that was split: tiles down and across, in front of one of the whole image. (0, 0): it was
    # not.
    split: tuple[int, int] = (0, 0)
    num_pixels: int = 0  # of the caller's image


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """One input of texts and images, in their order."""

    parts: tuple[str | PreparedImage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """The images of a request's rows, in the order of their tokens: what the vision tower runs.

    Tiles of one image that stand in different places of a prompt are images of their own here.
    """

    patches: NDArray[np.uint8]  # [patches, values], the images concatenated, in the order of the tower
    grids: Ints  # [images, 2], patches down and across
    rows: Ints  # [images], the row of the request that each is in
    starts: Ints  # [images], its first token within the row
    num_tokens: Ints  # [images], tokens of the row that stand for it
    digests: NDArray[np.uint8]  # [images, 16]; equal digests mean equal patches and grids
    # Rows with an image do not pass the text model: the tower's output, of one token, is their result.
    are_rows: bool = False
    cu_patches: Ints = field(init=False)  # [images + 1], where each image begins in `patches`

    def __post_init__(self) -> None:
        object.__setattr__(self, "cu_patches", cumulative(self.num_patches))

    @classmethod
    def of(
        cls, placed: Sequence[tuple[int, int, PreparedImage]], *, are_rows: bool = False
    ) -> RequestImages | None:
        """From (row, first token, image) in the order of rows and tokens; None if there is none. The tiles of
        an image stand one after another."""
        if not placed:
            return None
        images = [each for _, _, each in placed]
        tiles = np.array([image.num_tiles for image in images], dtype=np.int32)
        tokens = np.array([1 if are_rows else image.num_tokens for image in images], dtype=np.int32) // tiles
        within = runs(np.zeros_like(tiles), tiles)  # the number of each tile within its image
        rows, starts = (np.array(each, dtype=np.int32) for each in list(zip(*placed, strict=True))[:2])
        num_tokens = np.repeat(tokens, tiles)
        digests = np.frombuffer(b"".join(image.digest for image in images), dtype=np.uint8).reshape(-1, 16)
        digests = np.repeat(digests, tiles, axis=0)
        digests[:, :2] ^= within[:, None].astype("<u2").view(np.uint8)  # tiles differ from one another
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
        """The images of several requests as one, whose rows begin at `first_rows`; None if none has any."""
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
        """The images of some rows, in the order of these, and for each the place of its row in `rows`."""
        first = np.searchsorted(self.rows, rows, side="left").astype(np.int32)
        counts = np.searchsorted(self.rows, rows, side="right").astype(np.int32) - first
        return runs(first, counts), np.repeat(np.arange(len(rows), dtype=np.int32), counts)

    def select(self, images: Ints, rows: Ints) -> RequestImages:
        """These images, in rows of these numbers."""
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
    # [tokens], 1 where a token's vector is scored or returned; None: all. Rows with labels in their prompt
    # mark them too: see `TEXT_MARK` and `LABEL_MARK`.
    token_mask: Ints | None = None
    pairs: Ints | None = None  # [documents], the query row of each; query rows come first
    extra_params: tuple[PoolingParams, ...] = ()  # additional outputs computed from the same rows
    adapters: Ints | None = None  # [rows], id of an adapter; -1: none
    images: RequestImages | None = None
    # [tokens · 3], the position of each token in time, down and across; None: its index in the row
    rope_positions: Ints | None = None
    priority: int = 0  # lower runs sooner
    arrival_s: float = 0.0  # monotonic clock, shared by all processes of a machine
    deadline_s: float | None = None  # on the clock of `arrival_s`
    reuse_prefix: bool = False  # its rows may reuse cached prefixes
    cache_salt: str = ""  # prefixes are shared only between equal salts
    sampling: SamplerParams | None = None  # set when the rows are prompts to continue
    num_truncated: int = 0  # rows that were cut to fit; not sent to the engine
    client: str = ""  # who sent it: clients share the device by their weights
    weight: float = 1.0  # above 0
    is_background: bool = False  # runs only in what other requests leave of the device
    num_rows: int = field(init=False)
    num_tokens: int = field(init=False)
    starts: Ints = field(init=False)  # [rows], start offset of each row in token_ids

    def __post_init__(self) -> None:
        self.num_rows, self.num_tokens = len(self.lengths), len(self.token_ids)
        self.starts = ONE_ROW if self.num_rows == 1 else cumulative(self.lengths)[:-1]

    @property
    def all_params(self) -> tuple[PoolingParams, ...]:
        """The parameters of every output of a row, the first one's first."""
        return (self.params, *self.extra_params)

    @property
    def patches_of_rows(self) -> Ints:
        """[rows], patches of the images of each row."""
        if (images := self.images) is None:
            return np.zeros(self.num_rows, dtype=np.int32)
        counts = np.bincount(images.rows, weights=images.num_patches, minlength=self.num_rows)
        return counts.astype(np.int32)

    @property
    def num_queries(self) -> int:
        """Number of leading rows that are queries."""
        return 0 if self.pairs is None else self.num_rows - len(self.pairs)


MIN_PRODUCT_WIDTH = 32  # narrower vectors take about as long to compare


@dataclass(slots=True, eq=False)
class Comparison:
    """Late-interaction scoring of vectors given by the caller."""

    id: str
    queries: Array  # [query vectors, dim]
    query_lengths: Ints  # [queries]
    documents: Array  # [document vectors, dim]
    document_lengths: Ints  # [documents]
    pairs: Ints  # [documents], the query of each
    query_scales: Array | None = None  # [query vectors], for int8 vectors
    document_scales: Array | None = None  # [document vectors]
    arrival_s: float = 0.0
    deadline_s: float | None = None  # on the clock of `arrival_s`

    @property
    def num_bytes(self) -> int:
        """Memory of its arrays."""
        arrays = (self.queries, self.documents, self.query_scales, self.document_scales)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def num_operations(self) -> float:
        """What it costs: products of values. Each pair of vectors costs at least as much as a narrow one."""
        query_lengths = self.query_lengths.astype(np.float64).take(self.pairs, mode="clip")
        vector_pairs = float(query_lengths @ self.document_lengths.astype(np.float64))
        return vector_pairs * max(int(self.queries.shape[1]), MIN_PRODUCT_WIDTH)


class Timings(NamedTuple):
    """How long a request waited and ran inside the engine."""

    queue_s: float = 0.0
    device_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CachedVectors:
    """Where the vectors of a request's rows are in the store that scores read from."""

    starts: Ints  # [rows], -1: nowhere
    lengths: Ints  # [rows], vectors of each row
    ready: NDArray[np.bool_]  # [rows], they were there before the request came


class RowSlice(NamedTuple):
    """Some rows of one request, and which rows of a step they are."""

    request: Request
    rows: Ints  # [n], row numbers within the request
    step_rows: Ints  # [n], row numbers within the step
    begins: Ints | None = None  # [n], first token of each row in this step; None: the rows run whole
    ends: Ints | None = None  # [n], one past the last
    cached: CachedVectors | None = None  # of requests with pairs
    cached_documents: Ints | None = None  # documents that this step scores without running them

    @property
    def finished(self) -> Ints:
        """Indices into this slice of the rows that end in this step."""
        if self.ends is None:
            return ONE_ROW if len(self.rows) == 1 else np.arange(len(self.rows), dtype=np.int32)
        return np.flatnonzero(self.ends == self.request.lengths[self.rows]).astype(np.int32)


class LengthGroup(NamedTuple):
    """Consecutive rows of equal length, cached length and key limit: a dense block inside the ragged run."""

    first_row: int
    num_rows: int
    length: int
    first_token: int
    num_cached: int = 0  # tokens of each row that earlier steps have run
    first_key: int = 0  # where the group begins in the run of keys, which includes the cached ones
    key_limit: int = 0  # leading tokens of each row that its tokens attend to; 0: all


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """Which vectors a step scores against each other, and which it writes to the vector store.

    A vector belongs to a token, or to a row where each row has one. Queries are read from the store; the
    queries of this step are written there first. The last `num_from_store` documents are read from the store
    too; the others come from the step's own run.
    """

    query_starts: Ints  # [queries]
    query_lengths: Ints  # [queries]
    pair_queries: Ints  # [pairs], the query of each
    document_starts: Ints  # [pairs]
    document_lengths: Ints  # [pairs]
    write_from: Ints  # [written], vectors of the run
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


# Bits of `Request.token_mask`: tokens that stand for a word of the text, and for a label.
TEXT_MARK, LABEL_MARK = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class LabelPlan:
    """The tokens of rows whose prompt names labels: those that stand for labels, and those that stand for the
    words of the text. Every row has the same number of labels."""

    label_tokens: Ints  # [rows · labels], tokens of the step
    word_tokens: Ints  # [words], tokens of the step
    word_slots: Ints  # [words], row · max_words + index within the row
    output_rows: Ints  # [words], the row of a per-token output that belongs to each word
    num_words: Ints  # [rows]
    num_labels: int
    max_words: int  # of a row, at least 1
    num_tokens: int  # of all rows

    def arrays(self) -> tuple[Ints, ...]:
        """The arrays that the device needs, in the order of the fields."""
        return (self.label_tokens, self.word_tokens, self.word_slots, self.output_rows, self.num_words)


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """The rows of a step that share pooling parameters; `rows` is None when it covers all of them.

    A task that reads tokens lists them in `tokens`, row after row; None means all tokens.
    """

    params: PoolingParams
    rows: Ints | None
    tokens: Ints | None = None
    pairs: PairPlan | None = None  # then `rows` are the documents
    labels: LabelPlan | None = None  # of rows with labels in their prompt

    @property
    def index(self) -> Ints | None:
        """What to select from the run's values; None for everything."""
        return self.rows if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class CarryPlan:
    """Rows that run over several steps and pool a running sum of their hidden states."""

    rows: Ints  # [rows that carry], rows of the step
    slots: Ints  # [rows that carry], where the sums are kept
    resumed: Ints  # [rows that carry], 1 where an earlier step has left a sum


@dataclass(frozen=True, slots=True, eq=False)
class KVPlan:
    """What a step reads from the KV cache and what it writes there.

    The keys of a step form one run, row by row, with a row's cached keys first: `new_key_at` and
    `cached_key_at` give the position of the step's own keys and of the cached keys in that run.
    """

    cu_keys: Ints  # [rows + 1]; a row that reads by block table counts only its own key
    max_keys: int
    new_key_at: Ints  # [tokens]
    cached_key_at: Ints  # [cached]
    read_slots: Ints  # [cached]
    write_tokens: Ints  # [written], tokens of the step
    write_slots: Ints  # [written]
    token_slots: Ints  # [tokens], the cache slot of each token of the step; -1: not written
    carry: CarryPlan | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedPlan:
    """The leading rows of a generation step: one token each, whose keys are read through block tables."""

    num_rows: int
    max_blocks: int  # of the longest row, which is the width of `block_tables`
    block_tables: Ints  # [rows · max_blocks]
    num_keys: Ints  # [rows], keys that each row reads, its own included
    offsets: Ints | None = None  # [rows], number of earlier rows of the same sequence; None: all 0


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A sequence takes a slot of the sampler."""

    slot: int
    params: SamplerParams
    prompt_ids: Ints  # [prompt]
    output_ids: Ints | None = None  # tokens sampled before, of a sequence that starts again
    stream: int | None = None  # noise stream of a sequence without a seed; None: the sampler's next


class Rewind(NamedTuple):
    """Reset a draft model's sequences after rejected proposals: the number of tokens that each has kept."""

    slots: Ints  # [sequences]
    num_sampled: Ints  # [sequences]


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """Prompt tokens whose successors are known and whose log probabilities were requested."""

    rows: Ints  # [rows that asked], rows of the step
    begins: Ints  # [rows that asked], position in the prompt of the first scored token
    counts: Ints  # [rows that asked], scored tokens of each
    tokens: Ints  # [scored], tokens of the step, row after row
    next_tokens: Ints  # [scored], the prompt token that follows each
    max_logprobs: int  # most top tokens that a row asked for


@dataclass(frozen=True, slots=True, eq=False)
class VerifyPlan:
    """The sampled rows of a step with proposals, in which a sequence may have several rows.

    The rows of a sequence are consecutive. A row's proposal is the input token of the next row. It is
    accepted if the row samples it and all earlier proposals were accepted.
    """

    proposed: Ints  # [sampled], the proposal that each row checks; -1: the last row of its sequence
    offsets: Ints  # [sampled], number of earlier rows of the same sequence
    firsts: Ints  # [sequences], first row of each

    @property
    def counts(self) -> Ints:
        """[sequences], number of rows of each."""
        return np.diff(self.firsts, append=np.int32(len(self.proposed)))

    def num_accepted(self, token_ids: Ints) -> Ints:
        """[sequences], number of accepted proposals: those before the first that differs from the sampled
        token. `token_ids` [sampled]."""
        equal = (token_ids == self.proposed) & (self.proposed >= 0)
        return np.minimum.reduceat(np.where(equal, np.int32(len(token_ids)), self.offsets), self.firsts)


@dataclass(frozen=True, slots=True, eq=False)
class SamplePlan:
    """Which rows of a step sample a token, and the sampler slots that they use.

    Token ids that an earlier step has sampled are fed on the device: the CPU may not have read them yet.
    """

    slots: Ints  # [rows], the slot of each row of the step
    epochs: Ints  # [rows], how often the slot had changed hands when the step was planned
    visits: Ints  # [rows], how often the sequence had been given or had lost its blocks by then
    ends: Ints  # [rows], tokens of the sequence that have run after this step
    sampled_rows: Ints  # [sampled], rows of the step
    sampled_tokens: Ints  # [sampled], the last token of each such row within the step
    sampled_slots: Ints  # [sampled]
    num_logprobs: Ints  # [sampled], top tokens that each asked for beside the sampled one; -1: no log probs
    fed_tokens: Ints  # [fed], tokens of the step
    fed_slots: Ints  # [fed], the slot whose last sampled token each is
    leaves: tuple[int, ...] = ()  # slots that are freed before this step
    joins: tuple[Join, ...] = ()  # slots that are taken, after the former are freed
    masks: tuple[tuple[int, Ints], ...] = ()  # slot → the tokens that it may sample next, 32 to a word
    prompts: PromptPlan | None = None  # None: no request asks for prompt log probabilities
    verify: VerifyPlan | None = None  # None: the step has no proposals
    rewind: Rewind | None = None  # applied before this step, after the joins; None: no rejected proposals


@dataclass(frozen=True, slots=True, eq=False)
class KeyLimits:
    """The rows of a step whose tokens attend only to the row's leading tokens."""

    tokens: Ints  # [tokens of these rows], tokens of the step
    cu_lengths: Ints  # [these rows + 1]
    keys: Ints  # [keys of these rows], the tokens of the step that are attended to
    cu_keys: Ints  # [these rows + 1]
    max_length: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class ImagePlan:
    """The images of a step: which of them the vision tower runs, and which tokens take its features.

    Features pass through a store on the device. The tower writes those of the images that are not there yet;
    the step's tokens read theirs, whether they were written now or by an earlier step.
    """

    patches: tuple[NDArray[np.uint8], ...]  # [patches, values] of each image that runs, fewest patches first
    grids: Ints  # [images, 2], patches down and across
    cu_patches: Ints  # [images + 1]
    groups: tuple[LengthGroup, ...]  # images of equal numbers of patches
    write_slots: Ints  # [features of the images that run], slots of the store
    tokens: Ints  # [image tokens], tokens of the step, ascending
    read_slots: Ints  # [image tokens], the slot of the store that each reads
    keys: tuple[bytes, ...]  # of the images that run, for the cache of features
    number: int = 0  # of the step, for the same
    num_text_rows: int | None = None  # where images are rows: rows before them; None: all rows are text

    @property
    def num_images(self) -> int:
        """Images that run."""
        return len(self.patches)

    @property
    def num_patches(self) -> int:
        return int(self.cu_patches[-1])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BasePlan:
    """The ragged run of tokens that every step has. Rows are ordered by length; those that are images come
    last."""

    token_ids: Ints  # [tokens]
    positions: Ints  # [tokens], 0-based within each row
    cu_lengths: Ints  # [rows + 1], where each row begins in the flat run
    lengths: Ints  # [rows]
    groups: tuple[LengthGroup, ...]
    adapters: Ints | None = None  # [rows], ids of adapters, -1: none; None: no row has one
    images: ImagePlan | None = None  # None: no row has an image
    rope_positions: Ints | None = None  # [3 · tokens], in time, down and across; None: as `positions`

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        if self.images is not None:  # rows that are images follow all others
            return int(self.lengths.max())
        return int(self.lengths[-1]) if len(self.lengths) else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolPlan(BasePlan):
    """One pooling step, described completely."""

    slices: tuple[RowSlice, ...]
    variants: tuple[Variant, ...]
    type_ids: Ints | None = None  # [tokens]; None: all zero
    skip: Ints | None = None  # [rows], number of leading tokens left out of the pooling; None: none
    kv: KVPlan | None = None  # None: every row runs whole, and nothing is cached
    limits: KeyLimits | None = None  # None: every row attends to all its tokens


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GeneratePlan(BasePlan):
    """One generation step, described completely: decodes come first, then chunks of prompts."""

    kv: KVPlan
    paged: PagedPlan
    sample: SamplePlan


StepPlan = PoolPlan | GeneratePlan


@dataclass(frozen=True, slots=True, eq=False)
class PooledResult:
    """What a pooling step gives back: for each variant of its plan, one array."""

    outputs: tuple[Array, ...]  # [rows or tokens of the variant, dim], in the order of plan.variants
    finite: tuple[Array, ...] = ()  # [rows or tokens], 0 where values were not; empty: check the outputs
    device_s: float = 0.0
    stretch_s: float = 0.0  # of a step that others may interrupt: for how long it keeps them waiting

    def timed(self, device_s: float) -> PooledResult:
        return PooledResult(self.outputs, self.finite, device_s)


class TokenLogprobs(NamedTuple):
    """Log probabilities of tokens: column 0 is the token itself, then come the likeliest, falling."""

    ids: Ints  # [n, 1 + top]
    values: NDArray[np.float32]  # [n, 1 + top]
    ranks: Ints  # [n], of the token itself, from 1


@dataclass(frozen=True, slots=True, eq=False)
class SampledResult:
    """What a generation step gives back."""

    token_ids: Ints  # [sampled]; -1: the logits were not finite; -2: every token was forbidden
    logprobs: TokenLogprobs | None = None  # of the sampled rows that asked, in their order
    prompt_logprobs: TokenLogprobs | None = None  # of the tokens of plan.sample.prompts
    device_s: float = 0.0

    def timed(self, device_s: float) -> SampledResult:
        return SampledResult(self.token_ids, self.logprobs, self.prompt_logprobs, device_s)


StepResult = PooledResult | SampledResult


@dataclass(frozen=True, slots=True, eq=False)
class PooledOutput:
    """The result of one whole request."""

    id: str
    # [rows, dim]; for per-token tasks [tokens, dim], the rows concatenated; for sparse tasks
    # [rows, terms, 2] of (token id, weight), heaviest first, padded with (-1, 0)
    values: Array
    timings: Timings
    extra_values: tuple[Array, ...] = ()  # one for each of the request's extra_params, in the same layout


@dataclass(frozen=True, slots=True, eq=False)
class PooledRows:
    """Outputs of several single-row requests, in columns: the result of most pooling steps."""

    ids: Sequence[str]
    values: Array  # [requests, …], one row for each request
    queue_s: Sequence[float]  # one for each request
    device_s: float  # of the step

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
    stop_token: int | None = None  # the token that ended the row, if one did
    # If requested: the chosen token first, then the likeliest in falling order. A stop token has them too.
    logprob_ids: Ints | None = None  # [sampled, 1 + logprobs]
    logprobs: NDArray[np.float32] | None = None  # [sampled, 1 + logprobs]
    ranks: Ints | None = None  # [sampled], rank of the chosen token, from 1
    timings: Timings | None = None  # with the last part
    # If requested, with the first part: the same for the prompt's tokens after the first.
    prompt_logprob_ids: Ints | None = None  # [prompt - 1, 1 + prompt_logprobs]
    prompt_logprobs: NDArray[np.float32] | None = None  # [prompt - 1, 1 + prompt_logprobs]
    prompt_ranks: Ints | None = None  # [prompt - 1]


SequenceIds = tuple[tuple[str, int], ...]  # (request id, row) of each sequence


@dataclass(frozen=True, slots=True, eq=False)
class DecodedTokens:
    """One new token for each of several unfinished sequences, in columns: the result of most decode steps."""

    rows: SequenceIds  # the same object from step to step while the batch does not change
    token_ids: Ints  # [rows]

    def parts(self) -> list[GeneratedTokens]:
        """The same as one `GeneratedTokens` per sequence."""
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
    """The chunks of a request's texts, text by text. Each chunk is a row, or with `spans` part of a row."""

    counts: Ints  # [texts], number of chunks of each text
    weights: Ints  # [chunks], number of the text's tokens in each chunk
    spans: Ints | None = None  # [chunks, 2], tokens within the text's row
    run_spans: Ints | None = None  # [chunks, 2], the same spans within the request's run of tokens
    chars: Ints | None = None  # [chunks, 2], characters within the text; None for token ids
