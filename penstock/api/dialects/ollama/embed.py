"""The dialect of Ollama: `/api/embed`, `/api/embeddings`, `/api/rerank`, and the routes that describe models.

Durations are in nanoseconds. Models stay loaded while the server runs, so loading takes no time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock import __version__
from penstock.api.call import Call, Reply
from penstock.api.dialects.ollama.errors import OLLAMA_ERRORS
from penstock.api.fields import NoEffect
from penstock.api.model_files import ModelFiles, model_files
from penstock.api.prompted import PromptedFields
from penstock.api.ranking import RankFields, score_documents
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec
from penstock.api.run import run
from penstock.api.state import DEFAULT_TAG, ServedModel
from penstock.errors import BadValue, NotServed
from penstock.inputs.pair_options import PairOptions
from penstock.outputs.encoders import encode_rows
from penstock.outputs.ranking import check_top_n, top_indices
from penstock.tasks.embed import Embed
from penstock.types import OutputDtype, PoolingParams, Task

FOREVER = datetime(2318, 1, 1, tzinfo=UTC)  # reported as the expiry of models, which stay loaded
KeepAlive = Annotated[float | str | None, NoEffect("models stay loaded as long as the server runs")]
Unused = Annotated[Any, NoEffect("vectors do not depend on it")]


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a request that computes vectors. Only `num_ctx` has an effect: it limits the texts."""

    num_ctx: int | None = None
    num_batch: Unused = None
    num_gpu: Unused = None
    main_gpu: Unused = None
    num_thread: Unused = None
    num_keep: Unused = None
    num_predict: Unused = None
    numa: Unused = None
    low_vram: Unused = None
    f16_kv: Unused = None
    use_mmap: Unused = None
    use_mlock: Unused = None
    vocab_only: Unused = None
    logits_all: Unused = None
    embedding_only: Unused = None
    seed: Unused = None
    temperature: Unused = None
    top_k: Unused = None
    top_p: Unused = None
    min_p: Unused = None
    tfs_z: Unused = None
    typical_p: Unused = None
    repeat_last_n: Unused = None
    repeat_penalty: Unused = None
    presence_penalty: Unused = None
    frequency_penalty: Unused = None
    mirostat: Unused = None
    mirostat_tau: Unused = None
    mirostat_eta: Unused = None
    penalize_newline: Unused = None
    stop: Unused = None


class OllamaEmbedRequest(PromptedFields, kw_only=True):
    """Body of `POST /api/embed`. As at Ollama, texts beyond the model's limit are cut unless `truncate` is
    false, vectors are normalised, and an empty `input` has no vectors."""

    input: str | list[str] = ""
    prompt: str | None = None
    truncate: bool = True
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(PromptedFields, kw_only=True):
    """Body of `POST /api/embeddings`, which Ollama has replaced by `/api/embed`. As at Ollama, the vector is
    not normalised."""

    prompt: str = ""
    options: OllamaOptions | None = None
    truncate_prompt_tokens: int | None = None
    keep_alive: KeepAlive = None


class OllamaRerankRequest(RankFields, kw_only=True):
    """Body of `POST /api/rerank`, which Ollama itself does not have yet. Texts beyond the model's limit are
    cut unless `truncate` is false."""

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool = True
    truncate: bool = True
    keep_alive: KeepAlive = None

    def options(self) -> PairOptions:
        options = super().options()
        cuts = self.truncate and self.truncate_prompt_tokens is None
        return replace(options, truncate_prompt_tokens=-1) if cuts else options


class ShowRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /api/show`."""

    model: str | None = None
    name: str | None = None
    verbose: Annotated[bool, NoEffect("the answer is always the same")] = False
    system: Annotated[str | None, NoEffect("it changes nothing about the model")] = None
    template: Annotated[str | None, NoEffect("it changes nothing about the model")] = None
    options: Annotated[dict[str, Any] | None, NoEffect("they change nothing about the model")] = None


class UnservedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of a route of Ollama that this server does not have. It is refused whatever it holds."""

    model: str | None = None


async def ollama_embed(call: Call, body: OllamaEmbedRequest) -> Reply:
    """Embed texts, in the dialect of Ollama."""
    model = call.model(body)
    vectors, num_tokens = [], 0
    if body.input not in ("", []):
        limit = _cut_at(body.options, model, truncates=body.truncate)
        options = body.input_options(limit, body.prompt)
        params = PoolingParams(Task.EMBED, body.dimensions or None, normalize=True)
        result = await run(call, body, model, Embed(inputs=body.input, params=params, options=options))
        vectors, num_tokens = list(result.value), result.request.num_tokens
    began = time.monotonic()
    reply = json_reply(
        {
            "model": body.model or model.name,
            "embeddings": encode_rows(vectors, "float", OutputDtype.FLOAT32),
            "total_duration": _duration_ns(call),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
    )
    record_phases(call, began)
    return reply


async def ollama_embeddings(call: Call, body: OllamaEmbeddingsRequest) -> Reply:
    """Embed one text, in the dialect of Ollama."""
    model = call.model(body)
    vectors: list[Any] = [[]]
    if body.prompt:
        limit = body.truncate_prompt_tokens
        options = body.input_options(
            _cut_at(body.options, model, truncates=False) if limit is None else limit
        )
        params = PoolingParams(Task.EMBED, normalize=False)
        result = await run(call, body, model, Embed(inputs=body.prompt, params=params, options=options))
        vectors = encode_rows(list(result.value), "float", OutputDtype.FLOAT32)
    began = time.monotonic()
    reply = json_reply({"embedding": vectors[0]})
    record_phases(call, began)
    return reply


def _cut_at(options: OllamaOptions | None, model: ServedModel, *, truncates: bool) -> int | None:
    """Where texts are truncated: at `num_ctx`, or at the model's limit (-1) if that is lower. None if longer
    texts are refused."""
    num_ctx, limit = (options or OllamaOptions()).num_ctx, model.spec.max_model_len
    if num_ctx is None or num_ctx == 0 or num_ctx >= limit:
        return -1 if truncates else None
    if num_ctx < 1:
        raise BadValue(f"options.num_ctx is {num_ctx}; it must be at least 1", param="options")
    if not truncates:
        raise BadValue(
            f"options.num_ctx is {num_ctx}, below the model's {limit} tokens, where texts are cut; use "
            "/api/embed with truncate: true, or leave num_ctx out",
            param="options",
        )
    return num_ctx


def _duration_ns(call: Call) -> int:
    return int((time.monotonic() - call.began_s) * 1e9)


async def ollama_rerank(call: Call, body: OllamaRerankRequest) -> Reply:
    """Rank documents from best to worst, in the shape that is proposed for Ollama."""
    check_top_n(body.top_n)
    model = call.model(body, may_truncate=False)
    result = await score_documents(
        call, body, model, body.query, body.documents, body.options(), activate=body.use_activation
    )
    began, scores = time.monotonic(), result.value
    rows: list[dict[str, Any]] = []
    for index in top_indices(scores, body.top_n):
        document = {"document": body.documents[index]} if body.return_documents else {}
        rows.append({"index": index, **document, "relevance_score": scores[index]})
    reply = json_reply(
        {
            "model": body.model or result.model.name,
            "results": rows,
            "total_duration": _duration_ns(call),
            "load_duration": 0,
            "prompt_eval_count": result.request.num_tokens,
        }
    )
    record_phases(call, began)
    return reply


# --- models -------------------------------------------------------------------------------------------------


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str  # weight format
    family: str
    families: list[str]
    parameter_size: str  # such as 22.7M; "" if the files do not say
    quantization_level: str  # such as F32


class TaggedModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int  # bytes of all files
    digest: str  # of the names and sizes of all files
    details: ModelDetails


class TagsAnswer(msgspec.Struct, kw_only=True):
    models: list[TaggedModel]


class RunningModel(msgspec.Struct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int  # 0: this process does not see the device
    context_length: int


class ProcessesAnswer(msgspec.Struct, kw_only=True):
    models: list[RunningModel]


class ShowAnswer(msgspec.Struct, kw_only=True):
    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["embedding", "completion"]]
    modified_at: str


class VersionAnswer(msgspec.Struct, kw_only=True):
    version: str


async def ollama_tags(call: Call) -> Reply:
    """List the models, in the dialect of Ollama."""
    models = [
        TaggedModel(
            name=tagged(name),
            model=tagged(name),
            modified_at=files.modified.isoformat(),
            size=files.num_bytes,
            digest=files.digest,
            details=_details(model, files),
        )
        for name, model, files in await _described(call)
    ]
    return Reply(msgspec.json.encode(TagsAnswer(models=models)))


async def ollama_processes(call: Call) -> Reply:
    """List the loaded models, in the dialect of Ollama."""
    models = [
        RunningModel(
            name=tagged(name),
            model=tagged(name),
            size=files.num_bytes,
            digest=files.digest,
            details=_details(model, files),
            expires_at=FOREVER.isoformat(),
            size_vram=0,
            context_length=model.spec.max_model_len,
        )
        for name, model, files in await _described(call)
    ]
    return Reply(msgspec.json.encode(ProcessesAnswer(models=models)))


async def ollama_show(call: Call, body: ShowRequest) -> Reply:
    """Describe a model, in the dialect of Ollama."""
    model = call.find(body.model or body.name)
    files = await asyncio.to_thread(model_files, _folder(model))
    answer = ShowAnswer(
        details=_details(model, files),
        model_info=_model_info(model, files),
        capabilities=_capabilities(model),
        modified_at=files.modified.isoformat(),
    )
    return Reply(msgspec.json.encode(answer))


async def ollama_version(call: Call) -> Reply:
    """Show the version of this server."""
    return Reply(msgspec.json.encode(VersionAnswer(version=__version__)))


def tagged(name: str) -> str:
    """A name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{DEFAULT_TAG}"


async def _described(call: Call) -> list[tuple[str, ServedModel, ModelFiles]]:
    found = []
    for name in call.names:
        model = call.find(name)
        found.append((name, model, await asyncio.to_thread(model_files, _folder(model))))
    return found


def _folder(model: ServedModel) -> Path:
    return Path(model.spec.root or model.spec.folder)


def _family(model: ServedModel) -> str:
    return str(model.spec.config.get("model_type") or model.spec.architecture)


def _details(model: ServedModel, files: ModelFiles) -> ModelDetails:
    family, quantization = _family(model), model.spec.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return ModelDetails(
        format=files.format,
        family=family,
        families=[family],
        parameter_size=files.parameter_size,
        quantization_level=str(method).upper() if method else files.dtype,
    )


def _model_info(model: ServedModel, files: ModelFiles) -> dict[str, str | int]:
    family, spec = _family(model), model.spec
    info: dict[str, str | int | None] = {
        "general.architecture": family,
        "general.basename": spec.name,
        "general.parameter_count": files.num_parameters,
        f"{family}.context_length": spec.max_model_len,
        f"{family}.embedding_length": spec.embed_dim or spec.hidden_size,
        f"{family}.block_count": spec.num_layers,
        "tokenizer.ggml.vocab_size": spec.vocab_size,
    }
    return {name: value for name, value in info.items() if value is not None}


def _capabilities(model: ServedModel) -> list[Literal["embedding", "completion"]]:
    found: list[Literal["embedding", "completion"]] = []
    if Task.EMBED in model.spec.tasks:
        found.append("embedding")
    if model.spec.generates:
        found.append("completion")
    return found


# --- what this server does not have -------------------------------------------------------------------------


async def unserved_models(call: Call, body: UnservedRequest) -> Reply:
    """Refuse to change the set of models: flags of `penstock serve` choose it."""
    raise NotServed(
        "this server does not pull, push, create, copy or delete models; name its models when it starts: "
        "penstock serve MODEL"
    )


class EmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OllamaRanked(msgspec.Struct, kw_only=True):
    index: int
    document: str | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class OllamaRerankAnswer(msgspec.Struct, kw_only=True):
    model: str
    results: list[OllamaRanked]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


DIALECT = "Ollama"
ROUTES = (
    RouteSpec(
        "/api/embed",
        OllamaEmbedRequest,
        ollama_embed,
        DIALECT,
        EmbedAnswer,
        OLLAMA_ERRORS,
        example={"input": ["Water finds its level."]},
    ),
    RouteSpec(
        "/api/embeddings",
        OllamaEmbeddingsRequest,
        ollama_embeddings,
        DIALECT,
        EmbeddingAnswer,
        OLLAMA_ERRORS,
        example={"prompt": "Water finds its level."},
    ),
    RouteSpec(
        "/api/rerank",
        OllamaRerankRequest,
        ollama_rerank,
        DIALECT,
        OllamaRerankAnswer,
        OLLAMA_ERRORS,
        example={"query": "water", "documents": ["a river", "a cat"]},
    ),
    RouteSpec("/api/tags", None, ollama_tags, DIALECT, TagsAnswer, OLLAMA_ERRORS),
    RouteSpec("/api/ps", None, ollama_processes, DIALECT, ProcessesAnswer, OLLAMA_ERRORS),
    RouteSpec("/api/show", ShowRequest, ollama_show, DIALECT, ShowAnswer, OLLAMA_ERRORS, example={}),
    RouteSpec("/api/version", None, ollama_version, DIALECT, VersionAnswer, OLLAMA_ERRORS),
    *(
        RouteSpec(
            path,
            UnservedRequest,
            unserved_models,
            DIALECT,
            errors=OLLAMA_ERRORS,
            methods=methods,
            is_listed=False,
        )
        for path, methods in (
            ("/api/pull", ("POST",)),
            ("/api/push", ("POST",)),
            ("/api/create", ("POST",)),
            ("/api/copy", ("POST",)),
            ("/api/delete", ("DELETE", "POST")),
        )
    ),
)
