"""Read the files of a model: its layers, its pooler, and the store of vectors that its scores read from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import torch

from penstock.checkpoint.adapters import read_lora
from penstock.checkpoint.files import usable_values
from penstock.checkpoint.quantization import stored_format
from penstock.checkpoint.sizes import check_memory, check_weight_files
from penstock.checkpoint.spec import ModelSpec
from penstock.checkpoint.static import StaticSpec
from penstock.config import Resolved
from penstock.errors import ConfigError, ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.layers.parallel import Shard
from penstock.models.registry import Model, build_model
from penstock.models.static import StaticModel, build_static_model
from penstock.pooling.build import Pooler, build_pooler
from penstock.runner.base import LATE_VECTORS
from penstock.runner.device_memory import device_bytes
from penstock.scoring.pairs import PairScorer
from penstock.weights.merged import PeftMergedSource
from penstock.weights.stream import WeightSource, open_weights

log = logging.getLogger("penstock.load")

_ROW_VECTORS = 4096  # capacity for queries with one vector each: the most that a request may have


def build_weights(
    spec: ModelSpec, settings: Resolved, device: torch.device, shard: Shard | None = None
) -> tuple[Model, Pooler]:
    """The model, and the pooler that reads its states."""
    dtype = getattr(torch, settings.dtype)
    model = read_model(spec, settings, device, shard)
    with torch.inference_mode(), _buildable(spec, device):
        pooler = build_pooler(spec, model.heads, settings.load_format, settings.seed, device, dtype)
        pooler.row_means = getattr(model, "row_means", None)
    pooler.scorer = _scorer(spec, settings, device)
    return model, pooler


def read_model(
    spec: ModelSpec, settings: Resolved, device: torch.device, shard: Shard | None = None
) -> Model:
    """Read the model's files. `shard`: one rank's share of the model."""
    with torch.inference_mode(), _buildable(spec, device):
        return _model(spec, settings, getattr(torch, settings.dtype), device, shard)


def _model(
    spec: ModelSpec,
    settings: Resolved,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
) -> Model:
    if settings.model_impl == "transformers":
        from penstock.models.hf import TransformersModel

        return TransformersModel(spec, dtype, device)
    if spec.static is not None:
        return _static_model(spec, spec.static, settings, device)
    _check_layers(spec, settings)
    sizes = spec.sizes
    stored = stored_format(spec.config)
    min_bits = 8 if stored is None else min(stored.min_bits, 8)
    is_small = settings.quantization is not None or (stored is not None and device.type == "cuda")
    ranks = settings.tensor_parallel_size
    total_bytes = device_bytes(device) // (ranks if device.type == "cpu" else 1)  # ranks share a CPU's memory
    check_memory(sizes, min_bits / 8 if is_small else dtype.itemsize, total_bytes, ranks=ranks)
    splade = spec.sparse is not None and spec.sparse.kind == "splade"
    tokens = () if spec.score is None else spec.score.tokens
    with closing(open_weights(spec.path, settings.load_format, settings.seed, dtype, device)) as weights:
        if settings.load_format != "dummy":
            check_weight_files(spec.path, sizes, min_bits)
        if spec.merges_adapter and settings.load_format != "dummy":
            weights = _with_adapter(spec, weights)
        build = LayerBuilder(weights, settings.quantization, settings.unquantized_layers)
        build.folder = spec.path
        build.shard = shard
        if settings.max_loras:
            build.adapters = AdapterSites(settings.max_loras, settings.max_lora_rank)
        return build_model(
            spec.architecture,
            spec.config,
            build,
            splade=splade,
            score_tokens=tokens,
            generates=settings.generates,
        )


def _with_adapter(spec: ModelSpec, weights: WeightSource) -> WeightSource:
    """The weights, merged with the adapter in the model's folder."""
    return PeftMergedSource(weights, read_lora(spec.root_path, spec.name))


def _static_model(
    spec: ModelSpec, static: StaticSpec, settings: Resolved, device: torch.device
) -> StaticModel:
    """The table stays in fp32 whatever the dtype, because a mean costs no more than its memory reads."""
    check_memory(spec.sizes, torch.float32.itemsize, device_bytes(device))
    if settings.load_format == "dummy":
        static = msgspec.structs.replace(static, has_mapping=False, has_weights=False, rows=static.vocab_size)
    source = open_weights(spec.path, settings.load_format, settings.seed, torch.float32, device)
    with closing(source) as weights:
        return build_static_model(static, weights)


@contextmanager
def _buildable(spec: ModelSpec, device: torch.device) -> Iterator[None]:
    """Raise `ModelLoadError` if a model cannot be built from its files. GPU errors pass unchanged, because
    they may be gone after a restart."""
    try:
        with usable_values(spec.path):
            yield
    except (RuntimeError, MemoryError) as error:
        if device.type != "cpu":
            raise
        log.debug("%s cannot be built", spec.folder, exc_info=True)
        raise ModelLoadError(f"the model in {spec.folder} cannot be built: {error}", param="model") from error


def _check_layers(spec: ModelSpec, settings: Resolved) -> None:
    layers = spec.num_layers
    if layers is not None and (beyond := [n for n in settings.unquantized_layers if n >= layers]):
        raise ConfigError(
            f"unquantized_layers has {beyond[0]}, but the model's layers are 0 to {layers - 1}",
            param="unquantized_layers",
        )


def _scorer(spec: ModelSpec, settings: Resolved, device: torch.device) -> PairScorer | None:
    """The scorer and its vector store, if the model scores rows by their vectors. Token vectors have unit
    length and are multiplied in fp16 on a GPU; one vector per row costs so little that it stays in fp32."""
    if (kind := spec.score_kind) not in ("late", "bi"):
        if settings.document_cache_bytes:
            raise ConfigError(
                f"document_cache_gb needs a model that scores by vectors; {spec.architecture} does not",
                param="document_cache_gb",
            )
        return None
    late = kind == "late"
    dim = spec.token_dim if late else spec.embed_dim
    dtype = torch.float16 if late and device.type == "cuda" else torch.float32
    capacity = LATE_VECTORS if late else _ROW_VECTORS
    capacity += settings.document_cache_bytes // (dim * dtype.itemsize)
    store = torch.empty((capacity, dim), dtype=dtype, device=device)
    return PairScorer(store, late=late, similarity=spec.similarity)


def num_vectors(pooler: Pooler) -> int:
    """Vectors in the store that scores read from."""
    return 0 if pooler.scorer is None else len(pooler.scorer.store)


def adapter_sites(model: Model) -> AdapterSites | None:
    """The layers of a model that adapters may change; None if it takes none."""
    return getattr(model, "adapter_sites", None)
