"""Generation with the parameters and answers of Text Generation Inference, which `huggingface_hub` reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, Protocol

import msgspec

from penstock.api.call import Call, Reply, Streamed, streamed
from penstock.api.error_styles import ErrorStyle
from penstock.api.fields import NoEffect, Refused
from penstock.api.generation import Generation, TextFields, begin, event
from penstock.api.pipelines import error_type
from penstock.api.replies import json_reply
from penstock.api.run import Scheduled
from penstock.errors import BadValue, ClientError, NotPossible, PenstockError
from penstock.inputs.generation import StructuredOutputs
from penstock.outputs.logprobs import LOWEST
from penstock.tasks.generate import Generate, TextPrompts
from penstock.tasks.text_stream import TextDelta
from penstock.types import TokenLogprobs

DEFAULT_NEW_TOKENS = 100
_OFF = -1  # a top_k that filters nothing


class GrammarFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json", "regex", "json_schema"]
    value: Any


class GenerateParameters(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How a text is continued. Without sampling parameters, the likeliest token is taken each time."""

    adapter_id: str | None = None
    best_of: Annotated[int | None, Refused("one text is generated", accepts=(None, 1))] = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: Annotated[
        float | None,
        Refused("its formula differs between servers; /v1/completions has OpenAI's", accepts=(None, 0)),
    ] = None
    grammar: GrammarFields | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_n_tokens: int | None = None
    top_p: float | None = None
    truncate: int | None = None
    typical_p: Annotated[
        float | None, Refused("typical decoding is not available; use top_p", accepts=(None, 1))
    ] = None
    watermark: Annotated[bool | None, Refused("texts are not watermarked", accepts=(None, False))] = None
    use_cache: Annotated[bool | None, NoEffect("the KV cache is always used")] = None

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled: because of `do_sample`, or because another parameter needs it."""
        shaped = (self.temperature not in (None, 1), bool(self.top_k), self.top_p not in (None, 1))
        return bool(self.do_sample) or any(shaped)


class GeneratedToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None
    special: bool | msgspec.UnsetType = msgspec.UNSET


class GenerationDetails(msgspec.Struct, kw_only=True):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[GeneratedToken]
    tokens: list[GeneratedToken]
    top_tokens: list[list[GeneratedToken]] | msgspec.UnsetType = msgspec.UNSET


class GeneratedText(msgspec.Struct, kw_only=True):
    generated_text: str
    details: GenerationDetails | msgspec.UnsetType = msgspec.UNSET


_TYPES = {"Backend": "generation", "Overloaded": "overloaded", "Unhealthy": "healthcheck"}
_NAMES = (("max_tokens", "max_new_tokens"), ("truncate_prompt_tokens", "truncate"), ("prompt", "inputs"))


def _error_body(error: PenstockError) -> dict[str, Any]:
    message = error.message
    for name, own in _NAMES:
        message = message.replace(name, own)
    return {"error": message, "error_type": _TYPES.get(error_type(error), "validation")}


def _error_status(error: PenstockError) -> int:
    if isinstance(error, NotPossible) or error.status == PenstockError.status:
        return 424
    return 422 if isinstance(error, ClientError) and error.status == ClientError.status else error.status


TGI_ERRORS = ErrorStyle(_error_body, _error_status)


class PromptBody(Scheduled, Protocol):
    model: str | None
    adapter: str | None


async def generate_text(
    call: Call,
    body: PromptBody,
    prompt: str,
    parameters: GenerateParameters,
    *,
    streams: bool,
    is_listed: bool = False,
) -> Reply | Streamed:
    """Continue a prompt. `is_listed` puts the answer into a list, unless it is streamed."""
    call.errors = TGI_ERRORS
    shows_tokens = bool(parameters.details) or streams
    if parameters.decoder_input_details and streams:
        raise BadValue("decoder_input_details is not given in a stream", param="parameters")
    if parameters.top_n_tokens and not shows_tokens:
        raise BadValue("top_n_tokens needs details: true", param="parameters")
    fields = _fields(body, parameters, streams)
    task = Generate(
        source=TextPrompts(prompts=prompt),
        fields=fields,
        logprobs=(parameters.top_n_tokens or 0) if shows_tokens else None,
        default_max_tokens=DEFAULT_NEW_TOKENS,
    )
    generation = await begin(call, fields, task, kind="gen")
    text = _Text(generation, parameters, prompt)
    if streams:
        return await streamed(_events(text))
    async for deltas in generation.deltas():
        for delta in deltas:
            text.take(delta)
    answer = text.answer()
    return json_reply([answer] if is_listed else answer)


def _fields(body: PromptBody, parameters: GenerateParameters, streams: bool) -> TextFields:
    samples = parameters.samples
    if body.adapter is not None and parameters.adapter_id not in (None, body.adapter):
        raise BadValue("adapter and parameters.adapter_id name two adapters; leave one out", param="adapter")
    wants_prefill = bool(parameters.details and parameters.decoder_input_details)
    return TextFields(
        model=body.model,
        adapter=body.adapter or parameters.adapter_id,
        priority=body.priority,
        timeout=body.timeout,
        request_id=body.request_id,
        stream=streams,
        max_tokens=parameters.max_new_tokens,
        temperature=_given(parameters.temperature, 1.0) if samples else 0.0,
        top_k=(parameters.top_k or _OFF) if samples else _OFF,
        top_p=_given(parameters.top_p, 1.0) if samples else 1.0,
        min_p=0.0,
        repetition_penalty=_given(parameters.repetition_penalty, 1.0),
        seed=parameters.seed if samples else None,
        stop=parameters.stop,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=parameters.truncate,
        prompt_logprobs=0 if wants_prefill else None,
        structured_outputs=_structured(parameters.grammar),
    )


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _structured(grammar: GrammarFields | None) -> StructuredOutputs | None:
    if grammar is None:
        return None
    value = grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise BadValue("grammar.value must be a regular expression in a string", param="parameters")
        return StructuredOutputs(regex=value)
    if grammar.type == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    if not isinstance(value, dict | str):
        raise BadValue("grammar.value must be a JSON schema", param="parameters")
    return StructuredOutputs(json=value)


class _Text:
    """One text as it is generated, with its tokens."""

    def __init__(self, generation: Generation, parameters: GenerateParameters, prompt: str) -> None:
        self.generation = generation
        self._parameters = parameters
        self._prompt = generation.job.prompts[0].tolist()
        self._parts = [prompt] if parameters.return_full_text else []
        self._tokens: list[dict[str, Any]] = []
        self._tops: list[list[dict[str, Any]]] = []
        self._prefill: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.generation.completion_tokens

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def take(self, delta: TextDelta) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
        """Add a delta. Returns its tokens, and for each the likeliest tokens at its position."""
        self._parts.append(delta.text)
        if delta.prompt_logprobs is not None:
            self._prefill = self._scored_prompt(delta.prompt_logprobs)
        scores = delta.logprobs
        tokens, tops = [], []
        for at, token_id in enumerate(delta.token_ids):
            row = scores if scores is not None and at < len(scores.ids) else None
            tokens.append(self._token(token_id, None if row is None else row.values[at, 0]))
            tops.append([] if row is None else self._likeliest(row, at))
        self._tokens += tokens
        self._tops += tops
        if delta.finish_reason is not None:
            self.finish_reason = _finish_reason(delta)
        return tokens, tops

    def _likeliest(self, scores: TokenLogprobs, at: int) -> list[dict[str, Any]]:
        pairs = zip(scores.ids[at, 1:].tolist(), scores.values[at, 1:].tolist(), strict=True)
        return [self._token(token_id, value) for token_id, value in pairs]

    def _token(self, token_id: int, logprob: Any) -> dict[str, Any]:
        tokenizer = self.generation.tokenizer
        return {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": None if logprob is None else max(float(logprob), LOWEST),
            "special": tokenizer.is_special(token_id),
        }

    def _scored_prompt(self, scores: TokenLogprobs) -> list[dict[str, Any]]:
        first, *others = (self._token(token_id, None) for token_id in self._prompt)
        for token, value in zip(others, scores.values[:, 0].tolist(), strict=True):
            token["logprob"] = max(value, LOWEST)
        return [{name: token[name] for name in ("id", "text", "logprob")} for token in (first, *others)]

    def details(self) -> dict[str, Any]:
        seed = self._parameters.seed if self._parameters.samples else None
        return {"finish_reason": self.finish_reason, "generated_tokens": self.num_tokens, "seed": seed}

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"generated_text": self.text}
        if self._parameters.details:
            answer["details"] = {**self.details(), "prefill": self._prefill, "tokens": self._tokens}
            if self._parameters.top_n_tokens:
                answer["details"]["top_tokens"] = self._tops
        return answer


def _finish_reason(delta: TextDelta) -> str:
    if delta.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"


async def _events(text: _Text) -> AsyncGenerator[bytes, None]:
    """Yield one event per token. Text that is held back, such as half a character, comes with a later one."""
    index = 0
    async for deltas in text.generation.deltas():
        for delta in deltas:
            tokens, tops = text.take(delta)
            for at, (token, top) in enumerate(zip(tokens, tops, strict=True), 1):
                index += 1
                is_last = at == len(tokens)
                ends = is_last and text.finish_reason is not None
                token["text"] = delta.text if is_last else ""
                yield event(
                    {
                        "index": index,
                        "token": token,
                        "top_tokens": top,
                        "generated_text": text.text if ends else None,
                        "details": {**text.details(), "input_length": len(text.generation.job.prompts[0])}
                        if ends
                        else None,
                    }
                )
