"""The OpenAI dialect: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
import orjson

from penstock.api.endpoint import Call, Reply
from penstock.api.work import Scheduling, note_phases, prepare, run
from penstock.core import Answer, OutputDtype, PoolingParams, Request, Task
from penstock.errors import BadValue
from penstock.inputs.processor import InputOptions
from penstock.outputs.encoders import EncodingFormat, Endianness, as_base64, as_bytes, as_numbers

OCTETS = b"application/octet-stream"


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    user: str | None = None
    embed_dtype: OutputDtype = OutputDtype.FLOAT32
    endianness: Endianness = "native"
    normalize: bool | None = None
    use_activation: bool | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    prompt_name: str | None = None
    prompt: str | None = None
    instruction: str | None = None
    input_type: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None


async def embeddings(call: Call, body: EmbeddingsRequest) -> Reply:
    """Vectors for texts or token ids."""
    call.request_id = body.request_id
    model = call.state.model(body.model)
    params = PoolingParams(Task.EMBED, body.dimensions, _normalize(body), body.embed_dtype)
    request = await prepare(call, model, body.input, params, _options(body))
    answer = await run(call, model, request, Scheduling(body.priority, body.timeout))
    began = time.monotonic()
    reply = _reply(body, model.spec.name, request, answer)
    call.encode_s = time.monotonic() - began
    note_phases(call)
    return reply


def _options(body: EmbeddingsRequest) -> InputOptions:
    return InputOptions(
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        prompt_name=body.prompt_name,
        prompt=body.prompt,
        instruction=body.instruction,
        input_type=body.input_type,
    )


def _normalize(body: EmbeddingsRequest) -> bool | None:
    if (
        body.normalize is not None
        and body.use_activation is not None
        and body.normalize != body.use_activation
    ):
        raise BadValue("normalize and use_activation contradict each other", param="use_activation")
    return body.normalize if body.normalize is not None else body.use_activation


def _reply(body: EmbeddingsRequest, model: str, request: Request, answer: Answer) -> Reply:
    usage = {"prompt_tokens": request.num_tokens, "total_tokens": request.num_tokens}
    head = {"id": f"embd-{body.request_id or request.id}", "created": int(time.time()), "model": model}
    if body.encoding_format == "bytes":
        return _bytes_reply(body, head, usage, answer)
    if body.encoding_format == "base64":
        vectors: list[Any] = as_base64(answer.values, body.endianness)
    else:
        vectors = as_numbers(answer.values, body.embed_dtype)
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    content = {"object": "list", **head, "data": data, "usage": usage}
    return Reply(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def _bytes_reply(
    body: EmbeddingsRequest, head: dict[str, Any], usage: dict[str, int], answer: Answer
) -> Reply:
    """The vectors alone as the body; what they are stands in the `metadata` header."""
    rows, width = answer.values.shape
    size = answer.values.nbytes // rows
    data = [
        {
            "index": i,
            "embed_dtype": body.embed_dtype.value,
            "endianness": body.endianness,
            "start": i * size,
            "end": (i + 1) * size,
            "shape": [width],
        }
        for i in range(rows)
    ]
    metadata = orjson.dumps({"object": "list", **head, "data": data, "usage": usage})
    return Reply(as_bytes(answer.values, body.endianness), OCTETS, headers=[(b"metadata", metadata)])


async def models(call: Call) -> Reply:
    """The models that this server holds."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "penstock",
            "max_model_len": model.spec.limit,
            "tasks": [task.value for task in model.spec.tasks],
            "dimensions": model.spec.embed_dim,
        }
        for name, model in call.state.models.items()
    ]
    return Reply(orjson.dumps({"object": "list", "data": data}))
