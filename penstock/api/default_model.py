"""Which model answers a request that names none: the first one that is made for the route.

Many clients, such as TEI's, name no model. A server with an embedder and a reranker sends their `/embed` to
one and their `/rerank` to the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from penstock.checkpoint.spec import ModelSpec
from penstock.types import Task

Use = Task | Literal["rank"]
_RANKERS = ("cross", "list", "late")  # kinds of scores made to rank; an embedder can rank, too

_EMBED = (
    "/v1/embeddings",
    "/embeddings",
    "/embed",
    "/embed_all",
    "/similarity",
    "/v1/embed",
    "/v2/embed",
    "/api/embed",
    "/api/embeddings",
    "/v1/contextualizedembeddings",
    "/v1/multimodalembeddings",
)
_RANK = (
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/api/rerank",
    "/score",
    "/v1/score",
)
_CLASSIFY = ("/classify", "/v1/classify", "/predict")
_GENERATE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v2/chat",
    "/api/chat",
    "/api/generate",
    "/generate",
    "/generate_stream",
)
_USES: dict[str, Use] = {
    **dict.fromkeys(_EMBED, Task.EMBED),
    **dict.fromkeys(_RANK, "rank"),
    **dict.fromkeys(_CLASSIFY, Task.CLASSIFY),
    **dict.fromkeys(_GENERATE, Task.GENERATE),
    "/embed_sparse": Task.SPARSE,
    "/v1/sparse": Task.SPARSE,
    "/v1/entities": Task.ENTITIES,
    "/v1/zero-shot": Task.ZERO_SHOT,
    "/v1/maxsim": Task.TOKEN_EMBED,
}


def use_of(path: str) -> Use | None:
    """What a route uses a model for; None if any model will do."""
    return _USES.get(path)


def choose(specs: Iterable[ModelSpec], use: Use | None) -> int:
    """The index of the best model for a use; 0 if none can do it, or if there is no use."""
    fits = [fitness(spec, use) for spec in specs]
    return fits.index(max(fits)) if fits else 0


def fitness(spec: ModelSpec, use: Use | None) -> int:
    """2: the model is made for the use. 1: it can do it. 0: it cannot."""
    if use is None:
        return 0
    if use == "rank":
        return 0 if spec.score_kind is None else 2 if spec.score_kind in _RANKERS else 1
    if use not in spec.tasks:
        can_infer = Task.CLASSIFY in spec.tasks or spec.labels_images
        return 1 if use is Task.ZERO_SHOT and can_infer else 0
    if use is Task.EMBED:
        return 2 if spec.tasks[0] is Task.EMBED and not spec.is_unmarked else 1
    return 2
