"""The fields of a generation request, checked and turned into `SamplerParams` and rows of tokens.

Names and limits are those of vLLM's OpenAI server, so that its clients work unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.checkpoint.files import optional_json
from penstock.checkpoint.spec import ModelSpec
from penstock.checkpoint.tokenizer_settings import special_tokens
from penstock.errors import BadValue, NotPossible
from penstock.inputs import constraints
from penstock.inputs.chat import ModelTemplate
from penstock.inputs.images.prompts import ImagePrompts, ImageRow, RowImages
from penstock.inputs.long_texts import RowLimit
from penstock.inputs.processor import split_inputs
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import Side, truncate_rows, truncation_limit
from penstock.types import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_RANGES,
    Grammar,
    Ints,
    PoolingParams,
    PreparedImage,
    Request,
    SamplerParams,
    Task,
    check_sampling,
    shown,
)

DEFAULT_MAX_TOKENS = 16  # for a completion without max_tokens
MAX_LOGPROBS = 20
_MIN_TEMPERATURE = 0.01  # lower values above 0 only lose precision
_MIN_TOP_P = 1e-6  # lower values keep the likeliest token as well, and vanish in float32
_MAX_STOPS = 64
_MAX_STOP_CHARS = 8192  # all stop strings together
_MAX_BAD_WORD_CHARS = 64 * MAX_BAD_WORD_TOKENS  # per word; a longer one has too many tokens in any vocabulary
_MAX_SALT_CHARS = 1024
MAX_COPIES = 16_384  # n


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The constraint on the generated text. Set exactly one field."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str = "schema"
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    value: dict[str, Any] | None = None  # a schema for json_object, as huggingface_hub sends it


class GenerationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How to continue a prompt. Omitted fields have the model's defaults, or no effect."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "left"
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str = ""

    @property
    def structured(self) -> bool:
        """Whether any field constrains the generated text."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        constraining = (self.response_format, self.structured_outputs, *guided)
        return any(value is not None for value in constraining)


class SamplingParams(GenerationFields, kw_only=True):
    """How `Engine.generate` continues prompts: the fields of the server's completion routes."""

    logprobs: int | None = None  # report the chosen token and this many of the likeliest tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job besides its prompts and generation fields."""

    logprobs: int | None = None
    echo: bool = False
    default_max_tokens: int | None = DEFAULT_MAX_TOKENS  # None: as many as fit
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    client: str = ""
    weight: float = 1.0
    is_background: bool = False
    adapter: int = -1  # adapter id; -1: none


DEFAULT_JOB_OPTIONS = JobOptions()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationJob:
    """Prompts with one set of parameters, each continued `n` times."""

    id: str
    prompts: list[Ints]
    sampling: SamplerParams
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    client: str = ""
    weight: float = 1.0
    is_background: bool = False
    adapter: int = -1  # adapter id; -1: none
    images: JobImages | None = None

    @property
    def num_rows(self) -> int:
        """Number of continuations. Copy c of prompt p is row p · n + c."""
        return len(self.prompts) * self.n

    def requests(self) -> list[tuple[Request, list[int]]]:
        """The engine requests of this job, each with the rows of the job that it contains.

        All rows go into one request, with two exceptions. With a seed, copies need different seeds, but a
        request has only one. With stop strings, rows have to end independently of each other.
        """
        rows = range(self.num_rows)
        if self.stops:
            groups = [[row] for row in rows]
        elif self.sampling.seed is not None and self.n > 1:
            groups = [list(rows[copy :: self.n]) for copy in range(self.n)]
        else:
            groups = [list(rows)]
        is_single = len(groups) == 1
        return [
            (self._request(self.id if is_single else f"{self.id}-{at}", group), group)
            for at, group in enumerate(groups)
        ]

    def _request(self, request_id: str, rows: list[int]) -> Request:
        prompts = [self.prompts[row // self.n] for row in rows]
        sampling, copy = self.sampling, rows[0] % self.n
        if sampling.seed is not None and copy:
            sampling = msgspec.structs.replace(sampling, seed=_wrap_int64(sampling.seed + copy))
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        images = None if self.images is None else self.images.of([row // self.n for row in rows], lengths)
        return Request(
            request_id,
            prompts[0] if len(prompts) == 1 else np.concatenate(prompts),
            lengths,
            PoolingParams(Task.GENERATE),
            images=None if images is None else images.images,
            rope_positions=None if images is None else images.rope_positions,
            priority=self.priority,
            arrival_s=self.arrival_s,
            deadline_s=self.deadline_s,
            client=self.client,
            weight=self.weight,
            is_background=self.is_background,
            reuse_prefix=sampling.prompt_logprobs is None,  # the cache does not contain the prompt's logits
            cache_salt=self.cache_salt,
            sampling=sampling,
            adapters=None if self.adapter < 0 else np.full(len(prompts), self.adapter, dtype=np.int32),
        )


def _wrap_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(frozen=True, slots=True, eq=False)
class JobImages:
    """The images of a job's prompts."""

    prompts: ImagePrompts
    rows: tuple[ImageRow | None, ...]  # one for each prompt

    def of(self, prompts: Sequence[int], lengths: Ints) -> RowImages:
        """The images of a request with these prompts."""
        return self.prompts.request_images([self.rows[prompt] for prompt in prompts], lengths)


class GenerationInputs:
    """Builds the generation jobs of one model from its tokenizer, chat template, end tokens and
    generation_config.json."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        if Task.GENERATE not in spec.tasks:
            tasks = ", ".join(task.value for task in spec.tasks)
            raise NotPossible(
                f"model {spec.name} does not generate text; its tasks are: {tasks}", param="model"
            )
        self.spec = spec
        self.tokenizer = tokenizer
        self.chat = ModelTemplate(spec.path, chat_template)
        self.image_prompts: ImagePrompts | None = None
        if spec.images is not None and spec.image_prompt is not None:
            self.image_prompts = ImagePrompts(spec.image_prompt, spec.images, tokenizer)
        config = optional_json(spec.path / "generation_config.json")
        self.eos_token_ids = eos_token_ids(spec, tokenizer, config)
        self.defaults = _defaults(config)

    def rows(self, prompt: Any, fields: GenerationFields, add_special_tokens: bool = True) -> list[Ints]:
        """Turn prompts (texts or token ids) into rows. Blocking: call this on a worker thread."""
        try:
            texts, rows = split_inputs(prompt)
        except BadValue as error:
            raise BadValue(error.message.replace("input", "prompt"), param="prompt") from None
        if texts is not None:
            truncates = fields.truncate_prompt_tokens is not None
            limit = RowLimit(self.spec.max_model_len, truncates, fields.truncation_side, "prompt", "prompt")
            rows = self.tokenizer.encode(texts, add_special_tokens, limit)
            if add_special_tokens and self.tokenizer.suffix:  # trailing special tokens would end the sequence
                rows = [row[: len(row) - self.tokenizer.suffix] for row in rows]
        else:
            self._check_ids(np.concatenate(rows), "prompt")
        return self._truncate(rows, fields)

    def image_rows(
        self, text: str, images: Sequence[PreparedImage], add_special_tokens: bool
    ) -> tuple[list[Ints], JobImages]:
        """Turn a rendered conversation with images into a row, which is never truncated. Blocking."""
        if self.image_prompts is None:
            raise NotPossible(f"model {self.spec.name} reads texts, not images", param="messages")
        filled = self.image_prompts.fill(text, images)
        (ids,) = self.tokenizer.encode([filled], add_special_tokens)
        row = self.image_prompts.row(ids, images)
        if len(row.token_ids) >= self.spec.max_model_len:
            raise BadValue(
                f"the messages have {len(row.token_ids)} tokens with their images, but the model takes at "
                f"most {self.spec.max_model_len}; send smaller images or fewer",
                param="messages",
            )
        return [row.token_ids], JobImages(self.image_prompts, (row,))

    def _truncate(self, rows: list[Ints], fields: GenerationFields) -> list[Ints]:
        if fields.truncate_prompt_tokens is not None:
            room = self.spec.max_model_len - (fields.max_tokens or 1)
            cut_at = truncation_limit(fields.truncate_prompt_tokens, self.spec.max_model_len)
            cut_at = max(1, room) if fields.truncate_prompt_tokens == -1 else cut_at
            rows = truncate_rows(rows, cut_at, self.spec.max_model_len, (0, 0), fields.truncation_side)
        for index, row in enumerate(rows):
            if len(row) == 0:
                raise BadValue(f"prompt {index} has no tokens; give at least one", param="prompt")
        return rows

    def job(
        self,
        request_id: str,
        rows: list[Ints],
        fields: GenerationFields,
        options: JobOptions = DEFAULT_JOB_OPTIONS,
        images: JobImages | None = None,
    ) -> GenerationJob:
        """Check all fields, and create the job for these rows."""
        if len(fields.cache_salt) > _MAX_SALT_CHARS:
            raise BadValue(
                f"cache_salt has {len(fields.cache_salt)} characters; use at most {_MAX_SALT_CHARS}",
                param="cache_salt",
            )
        return GenerationJob(
            request_id,
            rows,
            self.sampling(fields, rows, options),
            _num_copies(fields.n),
            _stops(fields.stop),
            fields.include_stop_str_in_output,
            fields.skip_special_tokens,
            fields.cache_salt,
            priority=options.priority,
            arrival_s=options.arrival_s,
            deadline_s=options.deadline_s,
            client=options.client,
            weight=options.weight,
            is_background=options.is_background,
            adapter=options.adapter,
            images=images,
        )

    def sampling(
        self, fields: GenerationFields, rows: Sequence[Ints], options: JobOptions = DEFAULT_JOB_OPTIONS
    ) -> SamplerParams:
        """Create the engine's parameters: check ranges, and fill in the model's defaults."""
        _num_copies(fields.n)
        logprobs, echo = options.logprobs, options.echo
        longest = max(len(row) for row in rows)
        max_tokens = self._max_tokens(fields, longest, echo, options.default_max_tokens)
        _check_min_tokens(fields.min_tokens, max_tokens)
        grammar = grammar_of(fields)
        if grammar is not None and fields.ignore_eos:
            raise BadValue(
                "ignore_eos and structured output contradict each other; leave one of them out",
                param="ignore_eos",
            )
        params = SamplerParams(
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens,
            temperature=self._temperature(fields.temperature),
            top_k=self._top_k(fields.top_k),
            top_p=self._top_p(fields.top_p),
            min_p=self._within("min_p", fields.min_p),
            seed=_seed(fields.seed),
            presence_penalty=self._within("presence_penalty", fields.presence_penalty),
            frequency_penalty=self._within("frequency_penalty", fields.frequency_penalty),
            repetition_penalty=self._within("repetition_penalty", fields.repetition_penalty),
            logit_bias=self._bias(fields.logit_bias),
            allowed_token_ids=self._allowed(fields.allowed_token_ids),
            bad_token_ids=self._bad_words(fields.bad_words),
            stop_token_ids=self._ids(fields.stop_token_ids or (), "stop_token_ids", MAX_STOP_TOKEN_IDS),
            eos_token_ids=self.eos_token_ids,
            ignore_eos=fields.ignore_eos,
            logprobs=_logprobs("logprobs", logprobs),
            prompt_logprobs=_logprobs(
                "prompt_logprobs",
                logprobs if echo and fields.prompt_logprobs is None else fields.prompt_logprobs,
            ),
            grammar=grammar,
        )
        check_sampling(params, self.spec.vocab_size)  # the engine checks the same
        return params

    def _max_tokens(self, fields: GenerationFields, prompt: int, echo: bool, default: int | None) -> int:
        limit, given = self.spec.max_model_len, fields.max_tokens
        if given is not None and (given < 0 or (given == 0 and not echo)):
            raise BadValue(f"max_tokens is {shown(given)}; it must be at least 1", param="max_tokens")
        # With echo, max_tokens may be 0. One token is then generated and dropped.
        max_tokens = max(given, 1) if given is not None else None
        needed = max_tokens or 1
        if prompt + needed > limit:
            raise BadValue(
                f"the model takes at most {limit} tokens; the prompt has {prompt} and max_tokens is "
                f"{shown(needed)}, together {shown(prompt + needed)}; shorten the prompt or lower max_tokens",
                param="prompt" if prompt >= limit else "max_tokens",
            )
        room = limit - prompt
        if max_tokens is not None:
            return max_tokens
        return min(room, default or self.defaults.get("max_new_tokens") or room)

    def _temperature(self, given: float | None) -> float:
        value = self._within("temperature", given)
        return _MIN_TEMPERATURE if 0 < value < _MIN_TEMPERATURE else value

    def _top_k(self, given: int | None) -> int:
        value = int(self.defaults.get("top_k", 0)) if given is None else given
        if not -1 <= value < 2**63:
            raise BadValue(
                f"top_k is {shown(value)}; use 1 or more, or 0 or -1 for all tokens", param="top_k"
            )
        return value if 0 < value < self.spec.vocab_size else 0

    def _top_p(self, given: float | None) -> float:
        value = float(self.defaults.get("top_p", 1.0)) if given is None else given
        if not 0 < value <= 1:
            raise BadValue(f"top_p is {value:g}; use a value above 0, at most 1", param="top_p")
        return max(value, _MIN_TOP_P)

    def _within(self, name: str, given: float | None) -> float:
        value = float(self.defaults.get(name, _NEUTRAL[name])) if given is None else given
        low, high = SAMPLING_RANGES[name]
        if not low <= value <= high:  # also true of NaN
            raise BadValue(f"{name} is {value:g}; use {low:g} to {high:g}", param=name)
        return value

    def _bias(self, given: dict[str, float] | None) -> dict[int, float]:
        if given and len(given) > MAX_LOGIT_BIAS:
            raise BadValue(
                f"logit_bias has {len(given)} tokens; use at most {MAX_LOGIT_BIAS}, or allowed_token_ids",
                param="logit_bias",
            )
        bias: dict[int, float] = {}
        for key, value in (given or {}).items():
            digits = key.strip()
            if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
                raise BadValue(
                    f"logit_bias has the key {key[:40]!r}; keys must be token ids", param="logit_bias"
                )
            if not math.isfinite(value):
                raise BadValue(
                    f"logit_bias of token {digits} is {value}; use a finite number", param="logit_bias"
                )
            bias[int(digits)] = min(100.0, max(-100.0, value))
        self._ids(bias, "logit_bias", MAX_LOGIT_BIAS)
        return bias

    def _allowed(self, given: list[int] | None) -> tuple[int, ...] | None:
        if given is None:
            return None
        if not given:
            raise BadValue(
                "allowed_token_ids is empty; give at least one token id", param="allowed_token_ids"
            )
        return self._ids(given, "allowed_token_ids", self.spec.vocab_size)

    def _bad_words(self, given: list[str] | None) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the start of a text and, if they differ, after a space."""
        words = [word.strip() for word in dict.fromkeys(given or ())]
        if not words:
            return ()
        if not all(words):
            raise BadValue("bad_words has an empty text", param="bad_words")
        if len(words) > MAX_BAD_WORDS:
            raise BadValue(
                f"bad_words has {len(words)} texts; use at most {MAX_BAD_WORDS}", param="bad_words"
            )
        if max(map(len, words)) > _MAX_BAD_WORD_CHARS:
            raise BadValue(
                f"bad_words has a text of more than {_MAX_BAD_WORD_CHARS} characters; use shorter ones",
                param="bad_words",
            )
        rows = self.tokenizer.encode([*words, *(f" {word}" for word in words)], add_special_tokens=False)
        found: list[tuple[int, ...]] = []
        for first, spaced in zip(rows[: len(words)], rows[len(words) :], strict=True):
            found.append(tuple(first.tolist()))
            if len(spaced) == len(first) and len(spaced) and spaced[0] != first[0]:
                found.append(tuple(spaced.tolist()))
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def _ids(self, given: Collection[int], name: str, max_ids: int) -> tuple[int, ...]:
        """Check token ids and remove duplicates; the order is kept."""
        vocab_size = self.spec.vocab_size
        if given:
            for token_id in (min(given), max(given)):
                if not 0 <= token_id < vocab_size:
                    raise BadValue(
                        f"{name} has {shown(token_id)}; the model's token ids are 0 to {vocab_size - 1}",
                        param=name,
                    )
        ids = tuple(dict.fromkeys(given))
        if len(ids) > max_ids:
            raise BadValue(f"{name} has {len(ids)} token ids; use at most {max_ids}", param=name)
        return ids

    def _check_ids(self, ids: Ints, name: str) -> None:
        if len(ids):
            self._ids((int(ids.min()), int(ids.max())), name, 2)


_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "max_new_tokens")


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults of a model's generation_config.json."""
    known = {name: config.get(name) for name in _NUMBERS}
    return {
        name: value
        for name, value in known.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def eos_token_ids(
    spec: ModelSpec, tokenizer: Tokenizer, generation_config: Mapping[str, Any]
) -> tuple[int, ...]:
    """The end tokens from tokenizer_config.json, generation_config.json and config.json."""
    token = special_tokens(optional_json(spec.path / "tokenizer_config.json")).get("eos_token")
    found = [tokenizer.token_id(token)] if token is not None else []
    for source in (generation_config, spec.config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < spec.vocab_size))


def _num_copies(given: int | None) -> int:
    n = 1 if given is None else given
    if n < 1:
        raise BadValue(f"n is {shown(n)}; it must be at least 1", param="n")
    if n > MAX_COPIES:
        raise BadValue(f"n is {shown(n)}; one request takes at most {MAX_COPIES} sequences", param="n")
    return n


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens < 0:
        raise BadValue(f"min_tokens is {shown(min_tokens)}; use 0 or more", param="min_tokens")
    if min_tokens > max_tokens:
        raise BadValue(
            f"min_tokens is {shown(min_tokens)}, above max_tokens; use 0 to {max_tokens}", param="min_tokens"
        )


def _seed(given: int | None) -> int | None:
    if given is None or given == -1:
        return None
    if not -(2**63) <= given < 2**63:
        raise BadValue(f"seed is {shown(given)}; it must fit into 64 bits", param="seed")
    return given


def _logprobs(name: str, given: int | None) -> int | None:
    if given is not None and not 0 <= given <= MAX_LOGPROBS:
        raise BadValue(f"{name} is {shown(given)}; use 0 to {MAX_LOGPROBS}", param=name)
    return given


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if "" in stops:
        raise BadValue("stop has an empty text; give at least one character", param="stop")
    if len(stops) > _MAX_STOPS:
        raise BadValue(f"stop has {len(stops)} texts; give at most {_MAX_STOPS}", param="stop")
    if sum(map(len, stops)) > _MAX_STOP_CHARS:
        raise BadValue(f"stop has more than {_MAX_STOP_CHARS} characters; use shorter texts", param="stop")
    return tuple(dict.fromkeys(stops))


def grammar_of(fields: GenerationFields) -> Grammar | None:
    """The grammar that the fields request, checked; None if they request none. Several are an error."""
    outputs = fields.structured_outputs or StructuredOutputs()
    values = {
        "guided_json": fields.guided_json,
        "guided_regex": fields.guided_regex,
        "guided_choice": fields.guided_choice,
        "guided_grammar": fields.guided_grammar,
        "structured_outputs.json": outputs.json,
        "structured_outputs.regex": outputs.regex,
        "structured_outputs.choice": outputs.choice,
        "structured_outputs.grammar": outputs.grammar,
        "structured_outputs.json_object": outputs.json_object or None,
        "response_format": _constraining_format(fields.response_format),
    }
    given = [name for name, value in values.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise BadValue(f"{' and '.join(given)} contradict each other; give only one", param=_field(given[1]))
    name = given[0]
    try:
        grammar = _grammar(name.split(".")[-1].removeprefix("guided_"), values[name], name)
        constraints.check(grammar)
    except BadValue as error:
        raise BadValue(error.message, param=_field(name)) from None
    return Grammar(grammar.kind, grammar.text, _field(name))


def _constraining_format(given: ResponseFormat | None) -> ResponseFormat | None:
    return None if given is None or given.type == "text" else given


def _grammar(kind: str, value: Any, name: str) -> Grammar:
    if isinstance(value, ResponseFormat):
        if value.type == "json_object":
            return (
                constraints.JSON_OBJECT if value.value is None else constraints.json_schema(value.value, name)
            )
        if value.value is not None:
            raise BadValue("response_format.value is for type json_object; use json_schema.schema")
        if value.json_schema is None or value.json_schema.schema is None:
            raise BadValue("response_format of type json_schema needs json_schema.schema")
        return constraints.json_schema(value.json_schema.schema, name)
    if kind == "json":
        return constraints.json_schema(value, name)
    if kind == "json_object":
        return constraints.JSON_OBJECT
    if kind == "regex":
        return Grammar("regex", value)
    return constraints.choice(value, name) if kind == "choice" else constraints.lark_or_gbnf(value)


def _field(name: str) -> str:
    return name.split(".")[0]
