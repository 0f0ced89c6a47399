"""Which replica gets a request: the one with the fewest tokens in flight, as this process counts them.

Ray Serve copies this module by value into every process that has a handle, so it imports little.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.scale.serving import replica_table


class QueuedTokensRouter(RequestRouter):  # type: ignore[misc]
    """Prefers the replica with the fewest tokens in flight. Each ingress process counts its own requests."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._table = replica_table.replicas_of(self._deployment_id.app_name, self._deployment_id.name)
        self._tokens: dict[ReplicaID, int] = {}  # in flight
        # By Ray's request id, which all that one HTTP request sends have in common.
        self._sent: dict[tuple[str, ReplicaID], list[int]] = {}
        self._counted: set[Any] = set()  # futures of requests that are counted and not sent yet

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tokens = {each.replica_id: self._tokens.get(each.replica_id, 0) for each in replicas}
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tokens.pop(replica_id, None)
        self._publish()

    def _publish(self) -> None:
        self._table.running = {
            replica_id.unique_id: replica.replica_metadata
            for replica_id, replica in self.curr_replicas.items()
        }

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # without it Serve asks again at once
        usable = [each for each in candidate_replicas if self._table.serves(each.replica_metadata)]
        usable.sort(key=lambda each: (self._tokens.get(each.replica_id, 0), random.random()))
        if usable and pending_request is not None and pending_request.future not in self._counted:
            self._count(usable[0].replica_id, pending_request)
        return [[each] for each in usable]

    def _count(self, replica_id: ReplicaID, pending_request: PendingRequest) -> None:
        """Count a request in before it is sent, so that those behind it see it."""
        tokens = int(pending_request.kwargs.get("num_tokens", 0))
        key = pending_request.metadata.internal_request_id, replica_id
        self._sent.setdefault(key, []).append(tokens)
        self._tokens[replica_id] = self._tokens.get(replica_id, 0) + tokens

        def uncount(future: Any) -> None:
            self._counted.discard(future)
            if future.cancelled() or future.result().replica_id != replica_id:
                self.on_request_completed(replica_id, key[0])

        self._counted.add(pending_request.future)
        pending_request.future.add_done_callback(uncount)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.routed.add(pending_request.kwargs.get("name", ""))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        key = internal_request_id, replica_id
        if sent := self._sent.get(key):
            tokens = sent.pop()
            if replica_id in self._tokens:
                self._tokens[replica_id] -= tokens
            if not sent:
                del self._sent[key]
