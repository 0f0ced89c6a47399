"""The batches of a server: leader election, the order of batches, and expiry of old files."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.api.batch_run import BatchRun
from penstock.api.endpoint import Endpoint
from penstock.api.metrics import BATCHES, ApiMetrics
from penstock.api.nesting import check_nesting
from penstock.api.state import ServerState
from penstock.batches.leader import LeaderLock
from penstock.batches.lines import check_file
from penstock.batches.records import ENDED, UNFINISHED, BatchRecord, FileRecord, LineError
from penstock.batches.store import BatchStore
from penstock.errors import EngineUnavailable, NotFound, PenstockError

log = logging.getLogger("penstock.api")
P = ParamSpec("P")
T = TypeVar("T")

MAX_RUNNING = 4  # batches at a time, spread over their owners
POLL_S = 0.5  # between checks of the folder, which other API processes change too
SWEEP_S = 60.0  # between sweeps for expired files and batches
ORPHAN_S = 86_400  # age at which an unfinished upload is deleted
_STOP_S = 5.0  # time for batches to stop when the server stops


class BatchService:
    """The batch folder in this process. Runs its batches if this process is the leader."""

    def __init__(self, state: ServerState, metrics: ApiMetrics, endpoints: Mapping[str, Endpoint]) -> None:
        """`endpoints` are the endpoints that lines may name, by path."""
        assert state.config.batch_folder is not None
        self.state = state
        self.metrics = metrics
        self.endpoints = endpoints
        self.config = state.config
        self.store = BatchStore(Path(state.config.batch_folder))
        # Every API process of a server has the same parent, the supervisor.
        self._leader = LeaderLock(self.store.folder, f"{socket.gethostname()}, process {os.getppid()}")
        self._wake = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, str] = {}  # of running batches, by batch id
        self._swept_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self.num_uploads = 0  # in progress

    @property
    def max_file_bytes(self) -> int:
        return self.config.max_batch_file_mb << 20

    @property
    def quota_bytes(self) -> int:
        return int(self.config.batch_quota_gb * 2**30)

    @property
    def retention_s(self) -> int | None:
        days = self.config.batch_retention_days
        return int(days * 86_400) if days else None

    async def start(self) -> None:
        await asyncio.to_thread(self._leader.try_to_lead)
        if self._leader.other_server:
            log.warning("%s", self._other_server().message)
        self._task = asyncio.create_task(self._lead())

    async def close(self) -> None:
        """Stop. Lines in flight are abandoned, and run again when a server opens the folder."""
        tasks = [each for each in (self._task, *self._running.values()) if each is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
        self._leader.release()
        self.store.close()

    def wake(self) -> None:
        """Check the folder now, without waiting for the next poll."""
        self._wake.set()

    def check(self) -> None:
        """Raise if another server runs the batches of the folder."""
        if self._leader.other_server:
            raise self._other_server()

    def _other_server(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"another server ({self._leader.other_server}) runs the batches of --batch-folder "
            f"{self.store.folder}; give each server a folder of its own, or stop the other one"
        )

    async def call(self, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Run a method of the store off the event loop."""
        self.check()
        return await asyncio.to_thread(work, *args, **keywords)

    # --- the leader -------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        was_leader = False
        while True:
            try:
                is_leader = await asyncio.to_thread(self._leader.try_to_lead)
                if is_leader and not was_leader:
                    log.info("this process runs the batches of %s", self.store.folder)
                    await asyncio.to_thread(self.store.delete_orphans, time.time() - ORPHAN_S)
                was_leader = is_leader
                if is_leader:
                    await self._turn()
            except Exception:  # a full disk or a locked database may be temporary: do not stop
                log.exception("the batches of %s could not be continued", self.store.folder)
            try:
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            except TimeoutError:
                pass
            self._wake.clear()

    async def _turn(self) -> None:
        """Start waiting batches, and sometimes delete expired files and batches."""
        now_s = time.time()
        if now_s - self._swept_s > SWEEP_S:
            self._swept_s = now_s
            ended_before = None if self.retention_s is None else int(now_s) - self.retention_s
            await asyncio.to_thread(self.store.delete_expired, int(now_s), ended_before)
        waiting = [
            each for each in await asyncio.to_thread(self.store.unfinished) if each.id not in self._running
        ]
        for batch in self._next(waiting):
            self._owners[batch.id] = batch.owner
            self._running[batch.id] = task = asyncio.create_task(self._run(batch))
            task.add_done_callback(lambda _, name=batch.id: self._ended(name))  # type: ignore[misc]
        counts = await asyncio.to_thread(self.store.num_by_status)
        for status in (*UNFINISHED, *ENDED):
            BATCHES.labels(status).set(counts[status])

    def _next(self, waiting: list[BatchRecord]) -> list[BatchRecord]:
        """The batches to start now: owners with the fewest running batches first, then the oldest batch."""
        chosen: list[BatchRecord] = []
        while waiting and len(self._running) + len(chosen) < MAX_RUNNING:
            owners = [*self._owners.values(), *(each.owner for each in chosen)]
            first = min(waiting, key=lambda batch: owners.count(batch.owner))
            waiting.remove(first)
            chosen.append(first)
        return chosen

    def _ended(self, batch_id: str) -> None:
        self._running.pop(batch_id, None)
        self._owners.pop(batch_id, None)
        self.wake()

    async def _run(self, batch: BatchRecord) -> None:
        try:
            if batch.status == "validating":
                batch = await asyncio.to_thread(self._validate, batch)
            if batch.status == "cancelling" and not batch.total:
                await asyncio.to_thread(self.store.end, batch.id, _cancel)
            elif not batch.has_ended:
                await BatchRun(self, batch).run()
        except (OSError, sqlite3.Error, PenstockError) as error:
            if isinstance(error, NotFound):
                return  # deleted meanwhile
            log.exception("batch %s failed", batch.id)
            await asyncio.to_thread(self._fail, batch, str(error))
        except Exception as error:
            log.exception("batch %s failed", batch.id)
            await asyncio.to_thread(self._fail, batch, f"internal error: {type(error).__name__}")

    def _validate(self, batch: BatchRecord) -> BatchRecord:
        """Check the input file, and mark the batch as in progress or failed."""
        path = self.store.path(batch.input_file_id)
        found = check_file(
            path,
            batch.endpoint,
            max_lines=self.config.max_batch_lines,
            max_bytes=self.config.max_body_bytes,
            check_nesting=check_nesting,
        )

        def settle(record: BatchRecord) -> None:
            record.total, record.model = found.num_lines, found.model
            if found.errors:
                record.total = 0
                record.errors, record.status, record.failed_at = found.errors, "failed", int(time.time())
            elif record.status == "validating":  # it may have been cancelled meanwhile
                record.status, record.in_progress_at = "in_progress", int(time.time())

        return self.store.update(batch.id, settle)

    def _fail(self, batch: BatchRecord, why: str) -> None:
        """End a batch that cannot continue. Its answers so far stay readable."""

        def settle(record: BatchRecord) -> None:
            record.status, record.failed_at = "failed", int(time.time())
            record.errors = [LineError(code="server_error", message=f"the batch could not go on: {why}")]

        self.store.end(batch.id, settle, self.output_files(self.store.batch(batch.id)))

    def output_files(self, batch: BatchRecord) -> list[FileRecord]:
        """The non-empty files that a batch has written."""
        now = int(time.time())
        kept_s = batch.output_expires_s or self.retention_s
        return [
            FileRecord(
                id=file_id,
                owner=batch.owner,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                bytes=size,
                created_at=now,
                expires_at=None if kept_s is None else now + kept_s,
            )
            for kind, file_id, size in (
                ("output", batch.output_file_id, batch.output_bytes),
                ("error", batch.error_file_id, batch.error_bytes),
            )
            if size
        ]


def _cancel(record: BatchRecord) -> None:
    """End a batch that was cancelled before its lines were checked."""
    record.status, record.cancelled_at = "cancelled", int(time.time())
