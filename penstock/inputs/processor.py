"""Turns texts or token ids into a `Request` with all its rows.

It runs in the process that serves the client; the engine receives only integers. `prepare` is blocking: call
it on a worker thread. The server calls `check`, `with_prompt` and `join` itself, and tokenises the texts of
concurrent calls in batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np

from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, ModelLoadError, NotPossible, shown
from penstock.inputs.images.content import ContentRows, Rendered, content_items, images_of
from penstock.inputs.images.prompts import ImagePrompts
from penstock.inputs.images.rows import (
    DualRows,
    InputItem,
    frame_texts,
    has_images,
    input_items,
    refuse_images,
)
from penstock.inputs.instruction import InstructionEnd
from penstock.inputs.label_prompts import LabelPrompts
from penstock.inputs.labelled import LabelledInputs
from penstock.inputs.late import Framing, LateInputs
from penstock.inputs.long_texts import ExpandedTexts, RowLimit, check_expanded
from penstock.inputs.prompts import choose_adapter, choose_prompt, is_query
from penstock.inputs.static import StaticInputs
from penstock.inputs.token_rows import Rows, flat_ids, longest, row_lengths
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import Side, num_longer, truncate_rows, truncation_limit
from penstock.types import (
    MAX_TERMS,
    MAX_TOP_K,
    Content,
    Ints,
    OutputDtype,
    PoolingParams,
    PreparedImage,
    Request,
    Task,
    cumulative,
)

Texts = Sequence[str]
TokenIds = Sequence[int]
Inputs = (
    str | Texts | TokenIds | Sequence[TokenIds] | Sequence[str | int | Sequence[int]] | Sequence[InputItem]
)

MAX_PRIORITY = 1_000_000
_MAX_JOINED_CHARS = 1 << 18  # a prompt that takes more in all texts is added when texts are read
_SLICE_IDS = 1 << 16  # token ids that are checked at once
_MAX_KNOWN_PROMPTS, _MAX_KNOWN_CHARS = 64, 4096  # prompts whose number of tokens is cached


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """How inputs become rows. The names are those of the HTTP fields."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "right"
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input_type: str | None = None
    cache_salt: str = ""
    adapter: str | None = None  # for models with task adapters; also selects the prompt of this name


DEFAULT_OPTIONS = InputOptions()


class InputProcessor:
    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        if tokenizer.max_token_id >= spec.vocab_size:
            raise ModelLoadError(
                f"the tokenizer of {spec.name} has ids up to {tokenizer.max_token_id}, but the embedding "
                f"table has {spec.vocab_size} rows; take tokenizer.json and config.json from the same model",
                param="model",
            )
        if spec.lower_case:
            tokenizer.lower_case()
        if spec.dual is not None and spec.dual.strips_punctuation:
            tokenizer.strip_punctuation()
        if spec.begin_token is not None:
            tokenizer.begin_with(spec.begin_token)
        self.static = None if spec.static is None else StaticInputs(spec.static, tokenizer)
        after = spec.pooling.after
        self._instruction_end = InstructionEnd(tokenizer, after) if after is not None else None
        self._prompt_lengths: dict[tuple[str, bool], int] = {}
        self.late = None if spec.late is None else LateInputs(spec, tokenizer)
        self.labelled = None if spec.entities is None else LabelledInputs(spec, spec.entities, tokenizer)
        zero_shot = spec.zero_shot
        self.dual = None if spec.dual is None else DualRows(spec.dual)
        self.content: ContentRows | None = None
        if spec.images is not None and spec.image_prompt is not None:
            prompts = ImagePrompts(spec.image_prompt, spec.images, tokenizer)
            self.content = ContentRows(prompts, spec.max_model_len)
        self.label_prompts = None if zero_shot is None else LabelPrompts(spec, zero_shot, tokenizer)

    def prepare(
        self, request_id: str, inputs: Inputs, params: PoolingParams, options: InputOptions = DEFAULT_OPTIONS
    ) -> Request:
        """Check the parameters, add the prompt, tokenise, truncate and join. Blocking."""
        self.check(params)
        if has_images(inputs):
            return self._prepare_images(request_id, input_items(inputs), params, options)
        texts, rows = split_inputs(inputs)
        if texts is not None:
            limit = self.row_limit(params, options)
            rows = self.tokenizer.encode(self.with_prompt(texts, options), options.add_special_tokens, limit)
        return self.join(request_id, rows, params, options, from_text=texts is not None)

    def _prepare_images(
        self, request_id: str, items: list[Any], params: PoolingParams, options: InputOptions
    ) -> Request:
        """Prepare texts and images as separate rows, or in one row if the model reads both together."""
        if self.content is not None:
            return self._prepare_content(request_id, content_items(items), params, options, self.content)
        if self.dual is None:
            raise refuse_images(self.spec.name)
        texts, images = self.dual.split(items)
        rows = self.prepare(request_id, texts, params, options) if texts else None
        return self.join_images(rows, images, request_id, params, options)

    def _prepare_content(
        self,
        request_id: str,
        contents: list[Content],
        params: PoolingParams,
        options: InputOptions,
        rows_of: ContentRows,
    ) -> Request:
        special = [options.add_special_tokens and rows_of.adds_special_tokens(own) for own in contents]
        texts = zip(self.content_texts(contents, options), special, strict=True)
        rows = [self.tokenizer.encode([text], adds)[0] for text, adds in texts]
        return self.join_content(request_id, rows, contents, params, options)

    def check(self, params: PoolingParams) -> None:
        """Reject unsupported parameters before any text is tokenised."""
        if params.task not in self.spec.tasks:
            raise NotPossible(
                f"model {self.spec.name} has no task {params.task.value!r}; its tasks are: "
                + ", ".join(task.value for task in self.spec.tasks),
                param="task",
            )
        if params.task is Task.SPARSE or params.top_k is not None:
            self._check_sparse(params)
        if params.dimensions is None:
            return
        if params.task not in (Task.EMBED, Task.TOKEN_EMBED):
            raise BadValue(
                f"dimensions does not apply to task {params.task.value!r}; leave it out", param="dimensions"
            )
        if params.dimensions < 1:
            raise BadValue(
                f"dimensions is {shown(params.dimensions)}; it must be at least 1", param="dimensions"
            )
        width = self.spec.width(params.task)
        if params.dimensions > width:
            raise BadValue(
                f"dimensions is {shown(params.dimensions)}, but the model's vectors have {width}; use 1 to "
                f"{width}",
                param="dimensions",
            )
        if params.dimensions < width and (why := self.spec.why_not_sliced) is not None:
            raise NotPossible(
                f"dimensions is {params.dimensions}, but {why}; use {width} or leave it out",
                param="dimensions",
            )

    @staticmethod
    def _check_sparse(params: PoolingParams) -> None:
        """Check the parameters of a sparse task, or of another task with `top_k`."""
        top_k = params.top_k
        if params.task is not Task.SPARSE:
            raise BadValue(f"top_k does not apply to task {params.task.value!r}; leave it out", param="top_k")
        if top_k is not None and not 1 <= top_k <= MAX_TOP_K:
            raise BadValue(f"top_k is {shown(top_k)}; use 1 to {MAX_TOP_K}", param="top_k")
        if params.normalize is not None:
            raise BadValue("normalize does not apply to task 'sparse'; leave it out", param="normalize")
        if params.dtype is not OutputDtype.FLOAT32:
            raise BadValue(
                f"embed_dtype is {params.dtype.value}, but sparse weights are always float32",
                param="embed_dtype",
            )

    def engine_params(self, params: PoolingParams) -> PoolingParams:
        """Set the fields that depend on how this model computes sparse weights or rewards."""
        if params.task is Task.REWARD and self.spec.reward is not None:
            return msgspec.structs.replace(params, steps=self.spec.reward.steps)
        if params.task is not Task.SPARSE or self.spec.sparse is None:
            return params
        if self.spec.sparse.kind == "lexical":  # top_k applies after the tokens are merged by id
            return msgspec.structs.replace(params, lexical=True, top_k=None)
        return msgspec.structs.replace(params, top_k=min(params.top_k or MAX_TERMS, self.spec.vocab_size))

    def with_prompt(self, texts: Texts, options: InputOptions) -> Sequence[str]:
        """The texts to tokenise. A long prompt before many texts is added to each text when it is read."""
        prompt = self.prompt(options)
        if (end := self._text_end(options)) and options.add_special_tokens:
            texts = [text + end for text in texts]
        size = len(prompt) * len(texts)
        if size > _MAX_JOINED_CHARS:
            check_expanded(size, "instruction" if options.instruction is not None else "prompt")
            strips = self.late is not None and self.late.late.strip
            return ExpandedTexts(
                lambda index: (prompt + texts[index]).strip() if strips else prompt + texts[index],
                [len(prompt) + len(text) for text in texts],
            )
        if self.late is not None:
            return self.late.with_prompt(texts, prompt)
        return [prompt + text for text in texts] if prompt else list(texts)

    def _text_end(self, options: InputOptions) -> str:
        """The text to append to each text before it is tokenised."""
        if self.late is None and not self.spec.query_end:
            return self.spec.text_end
        if is_query(options.input_type or options.prompt_name):
            if self.late is not None:
                return self.late.late.query_end
            return self.spec.query_end or self.spec.text_end
        return self.spec.text_end

    def row_limit(self, params: PoolingParams, options: InputOptions) -> RowLimit:
        """The number of tokens of a text that `join` uses."""
        if self.late is not None and params.task is Task.TOKEN_EMBED:
            if is_query(options.input_type or options.prompt_name):
                return RowLimit(self.late.query_length, True, options.truncation_side)
            max_length = self.late.document_limit(options.truncate_prompt_tokens)
        else:
            max_length = truncation_limit(options.truncate_prompt_tokens, self.spec.max_model_len)
        if max_length is None:
            return RowLimit(self.spec.max_model_len, False, options.truncation_side)
        return RowLimit(max_length, True, options.truncation_side)

    def join(
        self,
        request_id: str,
        rows: Rows,
        params: PoolingParams,
        options: InputOptions,
        *,
        from_text: bool,
    ) -> Request:
        """Truncate rows of token ids to the limit and join them into one flat request."""
        if from_text and self.late is not None and params.task is Task.TOKEN_EMBED:
            return self._late_request(self.late, request_id, list(rows), params, options)
        spec = self.spec
        limit = spec.max_model_len
        cut_at = truncation_limit(options.truncate_prompt_tokens, limit)
        has_special_tokens = from_text and options.add_special_tokens
        num_truncated = 0
        if longest(rows) > (limit if cut_at is None else cut_at):
            frame = (self.tokenizer.prefix, self.tokenizer.suffix) if has_special_tokens else (0, 0)
            whole = list(rows)
            rows = truncate_rows(whole, cut_at, limit, frame, options.truncation_side)
            num_truncated = num_longer(whole, cut_at)
        token_ids, lengths = flat_ids(rows), row_lengths(rows)
        if self.static is not None and from_text:
            token_ids, lengths = self.static(token_ids, lengths)
        _check_not_empty(lengths)
        if not from_text:
            self._check_range(token_ids)
        if spec.dual is not None:
            token_ids, lengths = frame_texts(token_ids, lengths, spec.dual)
        params = self.engine_params(params)
        return Request(
            request_id,
            token_ids,
            lengths,
            params,
            skip=self._skip(token_ids, lengths, options, from_text),
            reuse_prefix=self.reads_last_token_only(params),
            cache_salt=options.cache_salt,
            adapters=self._adapters(len(lengths), options),
            token_mask=self.token_mask(lengths) if params.task is Task.TOKEN_EMBED else None,
            num_truncated=num_truncated,
        )

    def join_images(
        self,
        texts: Request | None,
        images: dict[int, PreparedImage],
        request_id: str,
        params: PoolingParams,
        options: InputOptions,
    ) -> Request:
        """Join the rows of `texts`, if any, with one row for each image."""
        if self.dual is None:
            raise refuse_images(self.spec.name)
        none = np.zeros(0, dtype=np.int32)
        empty = Request(request_id, none, none, self.engine_params(params), cache_salt=options.cache_salt)
        return self.dual.insert(empty if texts is None else texts, images)

    def content_texts(self, contents: Sequence[Content], options: InputOptions) -> list[str]:
        """The text to tokenise for each input. Some inputs have images."""
        if self.content is None:
            raise refuse_images(self.spec.name)
        prompt = self.prompt(options)
        end = self._text_end(options) if options.add_special_tokens else ""
        return [
            self.content.text(content, prompt, end)
            if images_of(content) or isinstance(content, Rendered)
            else self.with_prompt(["".join(map(str, content.parts))], options)[0]
            for content in contents
        ]

    def join_content(
        self,
        request_id: str,
        rows: Sequence[Ints],
        contents: Sequence[Content],
        params: PoolingParams,
        options: InputOptions,
    ) -> Request:
        """Join inputs, some of which have images, into one request."""
        if self.content is None:
            raise refuse_images(self.spec.name)
        limit = truncation_limit(options.truncate_prompt_tokens, self.spec.max_model_len)
        make = partial(self.join, request_id, params=params, options=options, from_text=True)
        pools = params.task is not Task.TOKEN_EMBED
        return self.content.join(rows, contents, limit, make, pools=pools)

    def _late_request(
        self,
        late: LateInputs,
        request_id: str,
        rows: list[Ints],
        params: PoolingParams,
        options: InputOptions,
    ) -> Request:
        """Queries or documents of a late-interaction model. Queries get the model's fixed query length."""
        special = options.add_special_tokens
        frame = (self.tokenizer.prefix, self.tokenizer.suffix) if special else (0, 0)
        framing = Framing(frame, options.truncation_side)
        if is_query(options.input_type or options.prompt_name):
            made = late.query_rows(rows, framing)
        else:
            made = late.document_rows(rows, options.truncate_prompt_tokens, framing)
        _check_not_empty(made.lengths)
        return Request(
            request_id,
            made.token_ids,
            made.lengths,
            params,
            key_limits=made.key_limits,
            token_mask=made.token_mask,
            cache_salt=options.cache_salt,
            num_truncated=made.num_truncated,
        )

    def token_mask(self, lengths: Ints) -> Ints | None:
        """The tokens with a vector in the output; for BGE-M3, all but the first of each row."""
        if self.spec.multi_vector is None:
            return None
        mask = np.ones(int(lengths.sum()), dtype=np.int32)
        mask[cumulative(lengths)[:-1]] = 0
        return mask

    def _adapters(self, num_rows: int, options: InputOptions) -> Ints | None:
        index = choose_adapter(self.spec, options.adapter, options.prompt_name, options.input_type)
        return None if index < 0 else np.full(num_rows, index, dtype=np.int32)

    def reads_last_token_only(self, params: PoolingParams) -> bool:
        """Whether the output depends only on the last token's hidden state.

        If so, a cached prefix may replace the tokens before it. The cache does not have their hidden
        states, but these are not needed.
        """
        compares_vectors = params.task is Task.SCORE and self.spec.score is None
        if params.task is Task.EMBED or compares_vectors:
            return self.spec.pooling.methods == ("last",)
        return self.spec.is_causal and not params.reads_tokens

    def prompt(self, options: InputOptions) -> str:
        """The prompt before each text. Late-interaction models have the default input type `document`."""
        is_unnamed = options.prompt_name is options.input_type is options.adapter is None
        if is_unnamed and options.prompt is options.instruction is None:
            return self._default_prompt
        return self._choose_prompt(options)

    @cached_property
    def _default_prompt(self) -> str:
        return self._choose_prompt(DEFAULT_OPTIONS)

    def _choose_prompt(self, options: InputOptions) -> str:
        explicit = (options.prompt_name, options.prompt, options.instruction, options.input_type)
        if options.adapter in self.spec.prompts and not any(explicit):
            options = replace(options, prompt_name=options.adapter)
        if options.adapter in self.spec.query_adapters and options.prompt is None:
            options = replace(options, prompt_name="query", input_type=None)
        sources = (options.prompt_name, options.prompt, options.instruction, self.spec.default_prompt_name)
        is_document = self.late is not None and all(source is None for source in sources)
        return choose_prompt(
            self.spec,
            prompt_name=options.prompt_name,
            prompt=options.prompt,
            instruction=options.instruction,
            input_type=options.input_type or ("document" if is_document else None),
        )

    def _skip(self, token_ids: Ints, lengths: Ints, options: InputOptions, from_text: bool) -> Ints | None:
        """Number of leading tokens of the prompt, for models that exclude it from pooling."""
        if self._instruction_end is not None:
            return self._instruction_end(token_ids, lengths)
        if self.spec.pooling.include_prompt or not from_text:
            return None
        prompt = self.prompt(options)
        if not prompt:
            return None
        key = (prompt, options.add_special_tokens)
        length = self._prompt_lengths.get(key)
        if length is None:
            limit = RowLimit(self.spec.max_model_len, truncates=True)  # more are never skipped
            length = len(self.tokenizer.encode([prompt], options.add_special_tokens, limit)[0])
            length -= self.tokenizer.suffix if options.add_special_tokens else 0
            if len(prompt) <= _MAX_KNOWN_CHARS and len(self._prompt_lengths) < _MAX_KNOWN_PROMPTS:
                self._prompt_lengths[key] = length
        return np.minimum(lengths - 1, length).astype(np.int32)

    def _check_range(self, token_ids: Ints) -> None:
        if np.maximum.reduce(token_ids.view(np.uint32)) >= self.spec.vocab_size:  # negative ids are large
            low, high = int(token_ids.min()), int(token_ids.max())
            wrong = low if low < 0 else high
            raise BadValue(
                f"input has token id {wrong}; the model's token ids are 0 to {self.spec.vocab_size - 1}",
                param="input",
            )


def num_inputs(inputs: Any) -> int:
    """Number of rows of the inputs: 1 for a text or a list of token ids."""
    if isinstance(inputs, str) or not hasattr(inputs, "__len__") or len(inputs) == 0:
        return 1
    return 1 if _is_int(inputs[0]) else len(inputs)


def num_token_ids(inputs: Any) -> int:
    """Number of token ids in the inputs; 0 for texts."""
    if isinstance(inputs, str) or not hasattr(inputs, "__len__") or len(inputs) == 0:
        return 0
    if isinstance(inputs[0], str):
        return 0
    if _is_int(inputs[0]):
        return len(inputs)
    return sum(0 if isinstance(row, str) or not hasattr(row, "__len__") else len(row) for row in inputs)


def split_inputs(inputs: Any, *, allow_empty_text: bool = True) -> tuple[list[str] | None, list[Ints]]:
    """Return (texts, []) or (None, rows of token ids), depending on the form of the inputs.

    An empty text still has special tokens, so it has a vector. Dialects whose reference rejects empty texts
    set `allow_empty_text` to false.
    """
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, np.ndarray):
        inputs = inputs[()] if inputs.ndim == 0 else list(inputs)
    if not isinstance(inputs, list | tuple):
        raise BadValue(
            "input must be a text, a list of texts, a list of token ids, or a list of such lists",
            param="input",
        )
    if len(inputs) == 0:
        raise BadValue("input is empty; give at least one text", param="input")
    if isinstance(inputs[0], str):
        for index, text in enumerate(inputs):
            if not isinstance(text, str):
                raise BadValue(
                    f"input {index} is not a text, but input 0 is; give only texts or only token ids",
                    param="input",
                )
            if not text and not allow_empty_text:
                raise BadValue(f"input {index} is an empty text; give at least one character", param="input")
        return list(inputs), []
    if _is_int(inputs[0]):
        return None, [_ids(inputs, 0)]
    return None, [_ids(row, index) for index, row in enumerate(inputs)]


def _check_not_empty(lengths: Ints) -> None:
    if 0 in lengths.tolist():
        raise BadValue(f"input {int(np.argmin(lengths))} has no tokens; give at least one", param="input")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _are_ints(row: Any) -> bool:
    """Whether all values are integers. A decoded list is checked without a Python loop."""
    return set(map(type, row)) <= {int} or all(_is_int(value) for value in row)


def _ids(row: Any, index: int) -> Ints:
    if not isinstance(row, list | tuple | np.ndarray):
        raise BadValue(f"input {index} is neither a text nor a list of token ids", param="input")
    if len(row) <= _SLICE_IDS:
        return _id_slice(row, index)
    slices = (row[first : first + _SLICE_IDS] for first in range(0, len(row), _SLICE_IDS))
    return np.concatenate([_id_slice(part, index) for part in slices])


def _id_slice(row: Any, index: int) -> Ints:
    """Convert at most one slice of token ids, because it holds the GIL."""
    if not _are_ints(row):
        raise BadValue(f"input {index} is neither a text nor a list of token ids", param="input")
    try:
        wide = np.array(row, dtype=np.int64)
        ids = wide.astype(np.int32)
        if not np.count_nonzero(wide != ids):
            return ids
    except OverflowError:
        pass
    raise BadValue(f"input {index} has a token id that does not fit into 32 bits", param="input")
