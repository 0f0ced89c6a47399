"""Which model answers a request that does not name one."""

from __future__ import annotations

import msgspec
import pytest

from penstock.api.app import ROUTES
from penstock.api.default_model import _USES, choose, use_of
from penstock.checkpoint.describe import describe
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig
from penstock.types import Task

SPEC = describe(EngineConfig(device="null"))
EMBEDDER = msgspec.structs.replace(SPEC, tasks=(Task.EMBED, Task.TOKEN_EMBED, Task.SCORE))
CLASSIFIER = msgspec.structs.replace(SPEC, tasks=(Task.CLASSIFY, Task.EMBED))
GENERATOR = msgspec.structs.replace(SPEC, tasks=(Task.EMBED, Task.GENERATE), why_not_score="unmarked")
SPARSE = msgspec.structs.replace(SPEC, tasks=(Task.SPARSE,))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/embed", EMBEDDER),
        ("/v1/embeddings", EMBEDDER),
        ("/classify", CLASSIFIER),
        ("/predict", CLASSIFIER),
        ("/v1/chat/completions", GENERATOR),
        ("/embed_sparse", SPARSE),
        ("/tokenize", GENERATOR),
        ("/v1/entities", GENERATOR),
    ],
)
def test_a_request_without_a_name_goes_to_the_model_that_is_made_for_it(
    path: str, expected: ModelSpec
) -> None:
    models = [GENERATOR, CLASSIFIER, SPARSE, EMBEDDER]
    assert models[choose(models, use_of(path))] is expected


def test_the_first_of_equals_is_chosen_and_one_that_can_before_one_that_cannot() -> None:
    assert choose([EMBEDDER, SPEC], Task.EMBED) == 0
    assert choose([SPARSE, GENERATOR], Task.EMBED) == 1
    assert choose([], Task.EMBED) == 0


def test_an_embedder_ranks_only_where_no_reranker_is() -> None:
    assert EMBEDDER.score_kind == "bi"
    assert choose([SPARSE, EMBEDDER], "rank") == 1


def test_every_path_with_a_use_is_a_route() -> None:
    assert _USES.keys() <= {route.path for route in ROUTES}
