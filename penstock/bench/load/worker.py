"""One load process: `python -m penstock.bench.load.worker`, started and controlled by `fleet`.

It reads its plan and then commands as lines of JSON, and writes framed reports. It exits when its input ends,
because the parent is gone then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import time

import msgspec

from penstock.bench.load.plan import Command, Go, Stop, WorkerPlan
from penstock.bench.load.samples import Block, Done, Ready, Recorder
from penstock.bench.load.sender import Sender
from penstock.bench.load.store import Store

_FLUSH_S = 0.2
_encode = msgspec.msgpack.Encoder().encode


class Worker:
    def __init__(self, plan: WorkerPlan) -> None:
        self.plan = plan
        self.store = Store(plan.store_fd)
        self.recorder = Recorder()
        self.sender: Sender | None = None
        self.over = asyncio.Event()
        self._input = b""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        os.set_blocking(0, False)
        loop.add_reader(0, self._read_commands)
        gc.collect()
        gc.freeze()
        gc.disable()  # the hot path creates no reference cycles
        report(Ready())
        await self.over.wait()
        loop.remove_reader(0)

    def _read_commands(self) -> None:
        data = os.read(0, 65536)
        if not data:
            os._exit(1)  # the parent is gone
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._obey(msgspec.json.decode(line, type=Command))

    def _obey(self, command: Command) -> None:
        match command:
            case Go(at_s=at_s):
                delay_s = at_s - time.monotonic()
                asyncio.get_running_loop().call_later(max(0.0, delay_s), self._begin, at_s)
            case Stop():
                if self.sender is None:
                    self._finish()
                else:
                    self.sender.stop()

    def _begin(self, at_s: float) -> None:
        self._cpu_s = time.process_time()
        self.sender = Sender(self.plan, self.store, self.recorder, self._finish)
        self._flush()
        self.sender.begin(at_s)

    def _flush(self) -> None:
        if len(self.recorder):
            report(self.recorder.flush())
        if not self.over.is_set():
            asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)

    def _finish(self) -> None:
        self.over.set()
        if self.sender is None:
            report(Done(0.0, 0, "stopped before it began"))
            return
        self._flush()
        report(Done(time.process_time() - self._cpu_s, self.sender.completed, self.sender.reason))


def report(message: Ready | Block | Done) -> None:
    payload = _encode(message)
    data = memoryview(len(payload).to_bytes(4, "little") + payload)
    while data:
        data = data[os.write(1, data) :]


def allow_open_files() -> int:
    """Raise this process's limit on open files as far as the system allows, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1_000_000 if limit == resource.RLIM_INFINITY else limit


def fast_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def main() -> None:
    allow_open_files()
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        plan = msgspec.json.decode(unbuffered.readline(), type=WorkerPlan)
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        runner.run(_serve(plan))


async def _serve(plan: WorkerPlan) -> None:
    await Worker(plan).run()


if __name__ == "__main__":
    main()
