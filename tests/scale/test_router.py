"""Tokens that the router counts for a replica."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from penstock.scale.serving.router import QueuedTokensRouter


@pytest.mark.parametrize("ends", ["cancelled", "failed", "routed elsewhere", "routed"])
def test_tokens_of_a_request_that_is_not_routed_to_the_replica_are_given_back(ends: str) -> None:
    router: Any = object.__new__(QueuedTokensRouter)  # without a cluster
    router._tokens, router._sent, router._counted = {"replica": 3}, {}, set()
    future: Future[Any] = Future()
    metadata = SimpleNamespace(internal_request_id="request")
    router._count("replica", SimpleNamespace(kwargs={"num_tokens": 5}, metadata=metadata, future=future))
    assert router._tokens == {"replica": 8}
    if ends == "cancelled":
        future.cancel()
    elif ends == "failed":
        future.set_exception(RuntimeError("the replica is gone"))
    else:
        name = "replica" if ends == "routed" else "another"
        future.set_result(SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)))
    assert router._tokens == {"replica": 8 if ends == "routed" else 3}
