"""Routing of requests to replicas by tokens in flight, as counted by this process.

Ray Serve copies this module by value into every process that has a handle, so it must import little.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.scale.serving import replica_table


class QueuedTokensRouter(RequestRouter):  # type: ignore[misc]
    """Routes requests by the order of the replica table. Each ingress process counts its own requests."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._table = replica_table.replicas_of(self._deployment_id.app_name, self._deployment_id.name)
        self._tokens: dict[str, int] = {}  # tokens in flight at each replica
        # Tokens of each call, by (Ray's request id, replica). All calls of one HTTP request share the id.
        self._sent: dict[tuple[str, str], list[int]] = {}
        self._counted: set[Any] = set()  # futures of requests that are counted but not sent yet

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        running = {each.unique_id: replica for each, replica in self.curr_replicas.items()}
        self._tokens = {name: self._tokens.get(name, 0) for name in running}
        self._table.update({name: replica.replica_metadata for name, replica in running.items()})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None:
            return [[candidates[name]] for name in self._table.order(self._tokens) if name in candidates]
        pending_request.routing_context.should_backoff = True  # without it Serve retries immediately
        ordered = self._table.order(self._tokens, pending_request.kwargs.get("name", ""))
        if ordered and pending_request.future not in self._counted:
            self._count(ordered[0], pending_request)
        return [[candidates[name]] for name in ordered if name in candidates]

    def _count(self, replica: str, pending_request: PendingRequest) -> None:
        """Count a request's tokens before it is sent, so that the next routing decision includes them."""
        tokens = int(pending_request.kwargs.get("num_tokens", 0))
        request_id = pending_request.metadata.internal_request_id
        self._sent.setdefault((request_id, replica), []).append(tokens)
        self._tokens[replica] = self._tokens.get(replica, 0) + tokens

        def uncount(future: Any) -> None:
            self._counted.discard(future)
            failed = future.cancelled() or future.exception() is not None
            if failed or future.result().replica_id.unique_id != replica:
                self._complete(replica, request_id)

        self._counted.add(pending_request.future)
        pending_request.future.add_done_callback(uncount)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.routed.add(pending_request.kwargs.get("name", ""))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._complete(replica_id.unique_id, internal_request_id)

    def _complete(self, replica: str, request_id: str) -> None:
        if sent := self._sent.get((request_id, replica)):
            tokens = sent.pop()
            if replica in self._tokens:
                self._tokens[replica] -= tokens
            if not sent:
                del self._sent[request_id, replica]
