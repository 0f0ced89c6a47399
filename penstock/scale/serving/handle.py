"""`RayEngineHandle`: an engine that runs as replicas of a Ray Serve deployment. Does not import torch.

If a replica dies, its pooling requests run once more on another replica: their results depend only on their
rows. So do streams that have not produced a token. If that replica dies too, the request fails, so that a
poisoned request cannot kill every replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from penstock.errors import BadValue, EngineError, EngineUnavailable, PenstockError, QueueFull
from penstock.handle import EngineHandle, EngineStats, StreamListener, Unsubscribe
from penstock.scale.serving.replica_table import replicas_of
from penstock.scale.serving.transport import Frames, pack_work, unpack_results
from penstock.types import Comparison, Failure, GeneratedTokens, PooledOutput, Request
from penstock.wire.group import affinity_of

log = logging.getLogger("penstock.scale")
T = TypeVar("T")
MAX_ATTEMPTS = 2  # per request, if replicas die
LOST_ERRORS = (
    *(RayActorError, NodeDiedError, WorkerCrashedError, OutOfMemoryError, ObjectLostError),
    ReplicaUnavailableError,
)
LOST = "the engine replica stopped while this request was in flight; try again"


class ReplicaLost(EngineUnavailable):
    """The replica died while it ran the request."""


class RayEngineHandle(EngineHandle):
    """The replicas of one model. Must be used on the event loop that called `start`."""

    def __init__(
        self, handle: DeploymentHandle[Any], model: str, fingerprint: str, wait_for_replica_s: float
    ) -> None:
        """`fingerprint` identifies the model: replicas with another fingerprint are not used."""
        self._handle = handle
        self._model = model
        self._fingerprint = fingerprint
        self._wait_for_replica_s = wait_for_replica_s
        self._replicas = replicas_of(handle.app_name, handle.deployment_name)
        self._replicas.wanted = fingerprint
        self._in_flight: set[str] = set()
        self._names = map(f"{secrets.token_hex(8)}-{{}}".format, itertools.count())  # unique, one per attempt
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.uses_affinity = True
        self.has_served = False  # a replica has been available at least once
        self.num_retried = 0
        self.on_retry: Callable[[], None] = lambda: None

    @property
    def ready(self) -> bool:
        is_ready = not self._closing and bool(self._replicas.serving)
        self.has_served |= is_ready
        return is_ready

    @property
    def unavailable_reason(self) -> str:
        if self._closing:
            return "the server is closing"
        if self.ready:
            return ""
        if self._replicas.running:
            return f"the engine replicas of {self._model} have another model; this server process is replaced"
        return f"no engine replica of {self._model} runs; Ray starts one as soon as a node has room for it"

    @property
    def revision(self) -> str:
        """The revision that all replicas share; empty while they differ, for example during an update."""
        revisions = {str(each.get("revision", "")) for each in self._replicas.serving}
        return revisions.pop() if len(revisions) == 1 else ""

    @property
    def engine_settings(self) -> dict[str, Any]:
        return next((each.get("settings", {}) for each in self._replicas.serving), {})

    def start(self) -> None:
        """Make a first call, with which Ray's router fetches the list of replicas."""
        self._loop = asyncio.get_running_loop()
        self._run_task(self._greet())

    async def _greet(self) -> None:
        # Only the side effect matters: the call fills the router's table.
        with contextlib.suppress(Exception):
            await self._handle.hello.remote(name="", num_tokens=0)
        if self.ready:
            log.info("%s: %d engine replicas are ready", self._model, len(self._replicas.serving))

    def stats(self) -> EngineStats:
        return EngineStats(num_requests=len(self._in_flight))

    def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()

    async def run(self, request: Request) -> PooledOutput:
        return await self._await_output(request, request.num_tokens)

    async def compare(self, comparison: Comparison) -> PooledOutput:
        return await self._await_output(comparison, 0)

    async def _await_output(self, work: Request | Comparison, num_tokens: int) -> PooledOutput:
        with self._counted(work.id):
            for attempt in range(1, MAX_ATTEMPTS + 1):
                name = self._name(work)
                response = self._remote("run", pack_work(work, name), name, num_tokens)
                try:
                    frames = await self._routed(response, name, _translated(response))
                    return self._output(work.id, frames)
                except ReplicaLost:
                    if attempt == MAX_ATTEMPTS:
                        raise
                    self._count_retry()
        raise AssertionError("every attempt returns or raises")

    def _output(self, request_id: str, frames: Frames) -> PooledOutput:
        (outcome,) = unpack_results(frames)
        if isinstance(outcome, Failure):
            raise outcome.error
        if not isinstance(outcome, PooledOutput):
            raise EngineError(f"a replica answered with {type(outcome).__name__}, not with an output")
        return replace(outcome, id=request_id)

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        if not self.ready and not self.has_served:
            raise EngineUnavailable(self.unavailable_reason)
        if request.id in self._in_flight:
            raise BadValue(f"request_id {request.id!r} is already in use", param="request_id")
        self._in_flight.add(request.id)
        task = self._run_task(self._listen(request, listener))

        def unsubscribe() -> None:
            self._in_flight.discard(request.id)
            task.cancel()

        return unsubscribe

    async def _listen(self, request: Request, listener: StreamListener) -> None:
        """Pass the tokens of a stream on to its listener, and always report its end."""
        try:
            await self._pass_on(request, listener)
        except PenstockError as error:
            listener.on_error(error)
        except Exception as error:
            log.exception("a stream failed")
            listener.on_error(EngineError(f"the tokens cannot be delivered: {error}"))

    async def _pass_on(self, request: Request, listener: StreamListener) -> None:
        has_token = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                async for outcome in self._tokens(request):
                    if isinstance(outcome, Failure):
                        raise outcome.error
                    has_token = True
                    listener.on_tokens([replace(outcome, id=request.id)])
                return
            except ReplicaLost:
                if has_token or attempt == MAX_ATTEMPTS:
                    raise
                self._count_retry()

    async def _tokens(self, request: Request) -> AsyncIterator[GeneratedTokens | Failure]:
        name = self._name(request)
        response = self._remote("stream", pack_work(request, name), name, request.num_tokens, stream=True)
        pieces = aiter(response)
        is_first = True
        try:
            while True:
                piece = _translated(anext(pieces, None))
                frames = await (self._routed(response, name, piece) if is_first else piece)
                is_first = False
                if frames is None:
                    return
                for outcome in unpack_results(frames):
                    if isinstance(outcome, GeneratedTokens | Failure):
                        yield outcome
        finally:
            response.cancel()

    def _name(self, work: Request | Comparison) -> str:
        """Name one attempt. The router finds the request's affinity to replicas under this name."""
        name = next(self._names)
        if isinstance(work, Request) and self.uses_affinity and (work.pairs is not None or work.reuse_prefix):
            settings = self.engine_settings
            self._replicas.slack_tokens = int(settings.get("max_num_batched_tokens", 0))
            if (affinity := affinity_of(work, settings)) is not None:
                self._replicas.affinities[name] = affinity
        return name

    def _remote(
        self, method: str, frames: Frames, name: str, num_tokens: int, *, stream: bool = False
    ) -> Any:
        if not self.ready and (self._closing or not self.has_served):
            raise EngineUnavailable(self.unavailable_reason)
        call = self._handle.options(method_name=method, stream=stream)
        return call.remote(frames, name=name, num_tokens=num_tokens, fingerprint=self._fingerprint)

    async def _routed(self, response: Any, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Await a call; cancel it if the caller is cancelled. Fails if no replica accepts it in time."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._wait_for_replica_s)
            if not done and name not in self._replicas.routed:
                reason = self.unavailable_reason or f"all engine replicas of {self._model} are full"
                raise EngineUnavailable(f"{reason}; the request has waited {self._wait_for_replica_s:g} s")
            return await task
        finally:
            self._replicas.routed.discard(name)
            self._replicas.affinities.pop(name, None)
            if not task.done():
                response.cancel()
                task.cancel()

    @contextlib.contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        if request_id in self._in_flight:
            raise BadValue(f"request_id {request_id!r} is already in use", param="request_id")
        self._in_flight.add(request_id)
        try:
            yield
        finally:
            self._in_flight.discard(request_id)

    def _count_retry(self) -> None:
        self.num_retried += 1
        self.on_retry()
        log.warning("%s: an engine replica stopped; a request that it had runs again", self._model)

    def _run_task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _translated(work: Awaitable[T]) -> T:
    """Await a Ray call, and translate Ray's errors to Penstock's."""
    try:
        return await work
    except (PenstockError, asyncio.CancelledError):
        raise
    except BackPressureError as error:
        raise QueueFull(f"too many requests wait for an engine replica: {error}; try again shortly") from None
    except RayTaskError as error:  # raised in the replica
        if isinstance(error.cause, PenstockError):
            raise error.cause from None
        if isinstance(error.cause, LOST_ERRORS):
            raise ReplicaLost(LOST) from None
        raise EngineError(f"an engine replica failed: {type(error.cause).__name__}: {error.cause}") from None
    except LOST_ERRORS:
        raise ReplicaLost(LOST) from None
    except (RayError, RayServeException) as error:
        raise EngineUnavailable(f"the engine replica cannot be reached: {type(error).__name__}") from None
