"""The nouns that every room shares: requests, parameters, the plan of a step and its result.

Nothing here imports torch. Arrays are NumPy; a `StepPlan` holds every integer that a step needs, so
that nothing after it has to ask a device for a number that was known here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue, PenstockError

Ints = NDArray[np.int32]
Array = NDArray[np.generic]

MAX_TERMS = 1024  # of a sparse row, where the caller does not say how many
MAX_TOP_K = 8192  # what the caller may say


class Task(enum.StrEnum):
    EMBED = "embed"
    TOKEN_EMBED = "token_embed"
    SPARSE = "sparse"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"
    SCORE = "score"
    REWARD = "reward"
    GENERATE = "generate"


class OutputDtype(enum.StrEnum):
    """How a vector leaves the engine. `binary` and `ubinary` pack eight signs into a byte."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    BINARY = "binary"
    UBINARY = "ubinary"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The array type on this side of the wire; bfloat16 travels as its bit pattern."""
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
    """What a row wants of the pooler. Hashable: rows with equal parameters are finished together."""

    task: Task = Task.EMBED
    dimensions: int | None = None  # cut to this many, then renormalise; None keeps all
    normalize: bool | None = None  # None: as the model says; of classifiers: whether to activate
    dtype: OutputDtype = OutputDtype.FLOAT32
    top_k: int | None = None  # sparse: so many of the heaviest terms; None: at most `MAX_TERMS`
    lexical: bool = False  # sparse: the model weighs the given tokens; they are gathered by id afterwards
    late: bool = False  # score: of token vectors, not of one vector a row
    steps: bool = False  # reward: of every token; those of the step tags are picked afterwards
    listwise: bool = False  # score: a row holds a whole list; its marked tokens are compared afterwards

    @property
    def per_token(self) -> bool:
        """Whether the engine gives a row for every token instead of one for the text."""
        gathered = self.lexical or self.steps or self.listwise
        return gathered or self.task in (Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY)

    @property
    def reads_tokens(self) -> bool:
        """Whether the finish works on the row's tokens, not on something pooled from them."""
        return self.per_token or self.task is Task.SPARSE


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a row's text must follow: a JSON schema, a regular expression, or a grammar as Lark writes it."""

    kind: Literal["json", "regex", "lark"]
    text: str


class SamplerParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a row is continued. Texts (stop strings, bad words) are token ids by the time they are here."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that must not come
    stop_token_ids: tuple[int, ...] = ()  # end the row, and are not shown
    eos_token_ids: tuple[int, ...] = ()  # the same, unless `ignore_eos`
    ignore_eos: bool = False
    logprobs: int | None = None  # so many of the likeliest besides the chosen one
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # `inputs.constraints` makes the masks of each step from it


def check_sampling(params: SamplerParams, vocab_size: int) -> None:
    """Refuses token ids that the vocabulary does not have."""
    _inside("logit_bias", params.logit_bias, vocab_size)
    _inside("bad_words", (token for word in params.bad_token_ids for token in word), vocab_size)
    if params.allowed_token_ids is not None:
        if not params.allowed_token_ids:
            raise BadValue("allowed_token_ids is empty; give at least one", param="allowed_token_ids")
        _inside("allowed_token_ids", params.allowed_token_ids, vocab_size)


def _inside(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise BadValue(f"{name} has token {token}; the vocabulary is 0 … {vocab_size - 1}", param=name)


ONE_ROW: Ints = np.zeros(1, dtype=np.int32)  # the number, and the beginning, of the only row there is
ONE_ROW.flags.writeable = False


def cumulative(lengths: Ints) -> Ints:
    """Where each ragged row begins, and the end: [rows] → [rows + 1]."""
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.add.accumulate(lengths, out=out[1:])
    return out


def split_rows(values: Array, lengths: Ints) -> list[Array]:
    """The pooling that keeps every token: a view of the ragged run [tokens, …] for each row."""
    out, first = [], 0
    for length in lengths.tolist():
        end = first + length
        out.append(values[first:end])
        first = end
    return out


@dataclass(slots=True, eq=False)
class Request:
    """One client call: all its rows, flat. Rows share parameters, priority and deadline."""

    id: str
    token_ids: Ints  # [tokens], the rows one after another
    lengths: Ints  # [rows]
    params: PoolingParams = field(default_factory=PoolingParams)
    type_ids: Ints | None = None  # [tokens], only where segments differ from 0
    skip: Ints | None = None  # [rows], leading tokens that the pooler leaves out
    key_limits: Ints | None = None  # [rows], leading tokens that the row's tokens attend to; None: all
    token_mask: Ints | None = None  # [tokens], 1 where a token's vector takes part in a score; None: all do
    pairs: Ints | None = None  # [documents], the query row of each; queries stand before documents
    extra_params: tuple[PoolingParams, ...] = ()  # further outputs of the same rows
    adapters: Ints | None = None  # [rows], which of the model's adapters; -1: none
    priority: int = 0  # lower runs sooner
    arrival_s: float = 0.0  # monotonic clock, the same in every process of a machine
    deadline_s: float | None = None  # the same clock
    reuse_prefix: bool = False  # its rows may stand on prefixes that others have computed
    cache_salt: str = ""  # prefixes are shared only between equal salts
    sampling: SamplerParams | None = None  # its rows are prompts to be continued so
    starts: Ints = field(init=False)  # [rows], where each row begins in token_ids

    def __post_init__(self) -> None:
        self.starts = ONE_ROW if len(self.lengths) == 1 else cumulative(self.lengths)[:-1]

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def all_params(self) -> tuple[PoolingParams, ...]:
        """What is asked of every row."""
        return (self.params, *self.extra_params)

    @property
    def num_queries(self) -> int:
        """The leading rows that documents are scored against."""
        return 0 if self.pairs is None else self.num_rows - len(self.pairs)


@dataclass(slots=True, eq=False)
class Comparison:
    """Late interaction of vectors that the caller brings; `pairs` names the query of each document."""

    id: str
    queries: Array  # [query vectors, dim]
    query_lengths: Ints  # [queries]
    documents: Array  # [document vectors, dim]
    document_lengths: Ints  # [documents]
    pairs: Ints  # [documents]
    query_scales: Array | None = None  # [query vectors], of vectors in int8
    document_scales: Array | None = None  # [document vectors]
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went inside the engine, in seconds."""

    queue_s: float = 0.0
    device_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CachedVectors:
    """Where the vectors of a request's rows lie in the store that scores read from."""

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


@dataclass(frozen=True, slots=True, eq=False)
class LengthGroup:
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


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """The rows of a step that share pooling parameters; `rows` is None when it covers all of them.

    A task that reads tokens lists them in `tokens`, row after row; None means all tokens.
    """

    params: PoolingParams
    rows: Ints | None
    tokens: Ints | None = None
    pairs: PairPlan | None = None  # then `rows` are the documents

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


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A sequence takes a slot of the sampler."""

    slot: int
    params: SamplerParams
    prompt_ids: Ints  # [prompt]
    output_ids: Ints | None = None  # tokens sampled before, of a sequence that starts again


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
    prompts: PromptPlan | None = None  # None: nobody asked for prompt log probabilities


@dataclass(frozen=True, slots=True, eq=False)
class KeyLimits:
    """The rows of a step whose tokens attend only to the row's leading tokens."""

    tokens: Ints  # [tokens of these rows], tokens of the step
    cu_lengths: Ints  # [these rows + 1]
    keys: Ints  # [keys of these rows], the tokens of the step that are attended to
    cu_keys: Ints  # [these rows + 1]
    max_length: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BasePlan:
    """The ragged run of tokens that every step has. Rows are ordered by length."""

    token_ids: Ints  # [tokens]
    positions: Ints  # [tokens], 0-based within each row
    cu_lengths: Ints  # [rows + 1], where each row begins in the flat run
    lengths: Ints  # [rows]
    groups: tuple[LengthGroup, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        return int(self.lengths[-1]) if len(self.lengths) else 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolPlan(BasePlan):
    """One pooling step, described completely."""

    slices: tuple[RowSlice, ...]
    variants: tuple[Variant, ...]
    type_ids: Ints | None = None  # [tokens]; None: all zero
    skip: Ints | None = None  # [rows], leading tokens that the pooler leaves out; None: none
    adapters: Ints | None = None  # [rows], -1: none; None: no row has one
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
    # [rows, dim]; of per-token tasks [tokens, dim], the rows one after another; of sparse rows
    # [rows, terms, 2] of (token id, weight), heaviest first, absent terms (-1, 0)
    values: Array
    timings: Timings
    extra_values: tuple[Array, ...] = ()  # of the request's further outputs, alike


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedTokens:
    """Further tokens of one row of a request; the last part says why it ended."""

    id: str
    row: int
    token_ids: Ints  # [new]
    finish_reason: str | None = None  # "stop" | "length"
    stop_token: int | None = None  # the token that ended it, where one did
    # Where asked for: the chosen token first, then the likeliest, falling; what ended it has them too.
    logprob_ids: Ints | None = None  # [made, 1 + logprobs]
    logprobs: NDArray[np.float32] | None = None  # [made, 1 + logprobs]
    ranks: Ints | None = None  # [made], of the chosen token, from 1
    timings: Timings | None = None  # with the last part
    # With the first part, where asked for: the same of the prompt's tokens after the first.
    prompt_logprob_ids: Ints | None = None  # [prompt - 1, 1 + prompt_logprobs]
    prompt_logprobs: NDArray[np.float32] | None = None  # [prompt - 1, 1 + prompt_logprobs]
    prompt_ranks: Ints | None = None  # [prompt - 1]


SequenceIds = tuple[tuple[str, int], ...]  # request and row of each of some rows


@dataclass(frozen=True, slots=True, eq=False)
class DecodedTokens:
    """One further token of each of several rows that go on: what most steps give, in columns."""

    rows: SequenceIds  # the same object from step to step while the same rows go on
    token_ids: Ints  # [rows]

    def parts(self) -> list[GeneratedTokens]:
        """The same, row by row."""
        ids = self.token_ids
        return [GeneratedTokens(name, row, ids[at : at + 1]) for at, (name, row) in enumerate(self.rows)]


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A request that ended without a result."""

    id: str
    error: PenstockError


Outcome = PooledOutput | DecodedTokens | GeneratedTokens | Failure


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The parts of a request's texts. Each is a row of its own, or with `spans` a run of a text's tokens."""

    counts: Ints  # [texts], chunks of each text; they lie one after another
    weights: Ints  # [chunks], tokens that a chunk stands for
    spans: Ints | None = None  # [chunks, 2], tokens within the text's row
    chars: Ints | None = None  # [chunks, 2], characters within the text; None for token ids
    starts: Ints | None = None  # [texts], with spans: where each text's row begins in the run

    @property
    def flat_spans(self) -> Ints:
        """The spans within the whole run of tokens."""
        assert self.spans is not None and self.starts is not None
        return self.spans + np.repeat(self.starts, self.counts)[:, None]
