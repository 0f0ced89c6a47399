"""An engine replica: the actor of a Ray Serve deployment that holds an engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.checkpoint.adapter_files import adapter_digest
from penstock.checkpoint.revision import loaded_revision, portable_revision
from penstock.errors import EngineUnavailable, ModelLoadError, PenstockError
from penstock.logs import configure
from penstock.offline.local import LocalEngine
from penstock.offline.open import DescribedModel
from penstock.scale.serving.adapters import configured_adapters
from penstock.scale.serving.config import ReplicaLaunch
from penstock.scale.serving.fingerprint import fingerprint
from penstock.scale.serving.transport import Frames, failure, pack_results, unpack_work
from penstock.serving.launch import AdapterLaunch
from penstock.types import GeneratedTokens, Outcome, Request


class EngineReplica:
    """Runs requests of ingress processes on an engine in this process."""

    def __init__(self, config: bytes) -> None:
        """`config` is an encoded `ReplicaLaunch`."""
        launch = msgspec.json.decode(config, type=ReplicaLaunch)
        engine = launch.engine
        configure(level=launch.log_level, format=launch.log_format, process="engine")
        if engine.threads is None and not launch.gpu_share:
            engine = msgspec.structs.replace(engine, threads=max(1, int(launch.cpus)))
        described = DescribedModel.of_config(engine)
        settings = described.settings
        if 0 < launch.gpu_share < 1:  # other replicas use the rest of the device's memory
            settings = msgspec.structs.replace(settings, kv_share=settings.kv_share * launch.gpu_share)
        published = msgspec.to_builtins(settings)
        loaded = loaded_revision(described.spec, published)
        adapters = configured_adapters(engine, described.spec)
        self._engine = LocalEngine(described.spec, settings)
        try:
            load_adapters(self._engine, adapters)
        except BaseException:
            self._engine.close()
            raise
        if launch.is_cached:  # replicas on several machines must compare revisions by file content
            loaded = portable_revision(described.spec, published, loaded)
        self._step_timeout_s = launch.step_timeout_s
        self._tokens_in_flight = 0
        self._fingerprint = fingerprint(described.spec, adapters)
        self._metadata = {"fingerprint": self._fingerprint, "revision": loaded, "settings": published}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the metadata for routers in ingress processes. Called once by Serve."""
        return self._metadata

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for the autoscaling policy. Called by Serve."""
        return {"queued_tokens": float(self._tokens_in_flight)}

    def check_health(self) -> None:
        """Raise if this replica can no longer serve. Called by Serve, which then replaces it."""
        if not self._engine.ready:
            raise EngineUnavailable(self._engine.unavailable_reason)
        began_s = self._engine.core.oldest_launch_s
        if self._step_timeout_s and began_s and time.monotonic() - began_s > self._step_timeout_s:
            raise EngineUnavailable(f"a step of the engine has taken more than {self._step_timeout_s:g} s")

    async def hello(self, name: str, num_tokens: int) -> None:
        """Do nothing. The call makes an ingress process fetch the list of replicas."""

    async def run(self, frames: Sequence[Any], name: str, num_tokens: int, fingerprint: str) -> Frames:
        """Run a request or a comparison and return its outcome."""
        with self._counted(num_tokens):
            try:
                self._check_fingerprint(fingerprint)
                work = unpack_work(frames)
                engine = self._engine
                output = await (engine.run(work) if isinstance(work, Request) else engine.compare(work))
                return pack_results([output])
            except Exception as error:
                return pack_results([failure(name, error)])

    async def stream(
        self, frames: Sequence[Any], name: str, num_tokens: int, fingerprint: str
    ) -> AsyncIterator[Frames]:
        """Stream the tokens of a generation request. Tokens that are waiting to be read are sent together."""
        with self._counted(num_tokens):
            try:
                self._check_fingerprint(fingerprint)
                work = unpack_work(frames)
                if not isinstance(work, Request):
                    raise EngineUnavailable("only requests can be streamed")
                tokens = TokenQueue(work.id, work.num_rows)
                unsubscribe = self._engine.stream(work, tokens)
            except Exception as error:
                yield pack_results([failure(name, error)])
                return
            try:
                while outcomes := await tokens.take():
                    yield pack_results(outcomes)
            finally:
                unsubscribe()

    def _check_fingerprint(self, wanted: str) -> None:
        if wanted != self._fingerprint:
            raise EngineUnavailable("this engine replica has another model of this name; try again")

    @contextlib.contextmanager
    def _counted(self, num_tokens: int) -> Iterator[None]:
        self._tokens_in_flight += num_tokens
        try:
            yield
        finally:
            self._tokens_in_flight -= num_tokens

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


def load_adapters(engine: LocalEngine, adapters: Sequence[AdapterLaunch]) -> None:
    """Load all adapters, or raise: routing assumes that every replica has all of them."""
    for adapter in adapters:
        engine.load_adapter(adapter.id, adapter.folder, adapter.name).result()
        if adapter_digest(adapter.folder) != adapter.digest:
            raise ModelLoadError(f"the files of adapter {adapter.name!r} changed while they were read")


class TokenQueue:
    """Collects the tokens of a request until they are taken."""

    def __init__(self, request_id: str, num_rows: int) -> None:
        self._id = request_id
        self._unfinished = set(range(num_rows))
        self._outcomes: list[Outcome] = []
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def on_token(self, row: int, token_id: int) -> None:
        self._add([GeneratedTokens(self._id, row, np.array([token_id], dtype=np.int32))])

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        self._unfinished.difference_update(part.row for part in parts if part.finish_reason is not None)
        self._add(parts)

    def on_error(self, error: PenstockError) -> None:
        self._unfinished.clear()
        self._add([failure(self._id, error)])

    def _add(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes += outcomes
        self._arrived.set()

    async def take(self) -> list[Outcome]:
        """Wait for at least one outcome and return all that have arrived. Empty after the last."""
        while not self._outcomes:
            if self.finished:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        taken, self._outcomes = self._outcomes, []
        return taken
