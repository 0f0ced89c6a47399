"""The process of a rank from 1 on. It holds its share of a model, and runs it for every plan of rank 0.

It ends when rank 0 orders it or is gone. It ends with an error when a step fails, because the ranks are then
out of step with one another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from threading import Lock, Thread
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.errors import ClientError
from penstock.kvcache.store import KVCache
from penstock.layers.adapter_state import StepAdapters, adapting
from penstock.layers.cpu_shapes import pads_steps
from penstock.layers.parallel import Shard
from penstock.logs import configure
from penstock.models.registry import CausalModel, Model
from penstock.runner.cpu_memory import HeapTrimmer
from penstock.runner.generator import TOKENS_AT_ONCE, SampleTensors, feed_tokens
from penstock.runner.inputs import (
    AdapterInputs,
    AdapterPlan,
    generation_arrays,
    generation_batch,
    pool_arrays,
    pool_batch,
)
from penstock.runner.load_kv_cache import allocate_cache
from penstock.runner.load_weights import adapter_sites, read_model
from penstock.runner.model_runner import run_model
from penstock.runner.parallel.adapters import RankAdapters
from penstock.runner.parallel.group import RankGroup
from penstock.runner.parallel.load import own_blocks, prepare_device
from penstock.runner.parallel.plans import RankStep, StepSlots, decode_step
from penstock.runner.parallel.processes import (
    Built,
    Failed,
    RankLaunch,
    Start,
    receive_message,
    send_message,
)
from penstock.runner.parallel.ring import PlanReader
from penstock.runner.staging import Staging
from penstock.types import GeneratePlan, PoolPlan, PromptPlan, Task

log = logging.getLogger("penstock.parallel")
EXIT_FAILED = 1
PARENT_POLL_S = 1.0


class RankRunner:
    """Runs the model for the plans of rank 0."""

    def __init__(
        self,
        model: Model,
        group: RankGroup,
        cache: KVCache | None,
        depth: int,
        num_slots: int,
        adapters: RankAdapters | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        self.group = group
        self.cache = cache
        self._staging = Staging(group.device, depth)
        self._pads_steps = pads_steps(group.device)
        # The newest token of each slot, and of one more slot for padding rows.
        self._last = torch.zeros(num_slots + 1, dtype=torch.int32, device=group.device)

    @torch.inference_mode()
    def run(self, step: RankStep) -> None:
        if step.orders is not None and self.adapters is not None:
            self.adapters.apply(step.orders)
        slots = self._adapter_plan(step.slots)
        if isinstance(step.plan, PoolPlan):
            plan, outputs = step.plan, step.outputs
            inputs = None if slots is None else AdapterInputs(slots, plan, outputs)
            sent = iter(self._staging.send(pool_arrays(plan, outputs, inputs)))
            batch = pool_batch(plan, outputs, self.cache, sent, inputs)
            with adapting(batch.adapters):
                run_model(self.model, batch, pads=self._pads_steps)
        else:
            self._generate(step.plan, slots)

    def _adapter_plan(self, slots: StepSlots | None) -> AdapterPlan | None:
        if slots is None or self.adapters is None:
            return None
        return AdapterPlan(self.adapters.sites.state, slots.rank, slots.row_slots)

    def _generate(self, plan: GeneratePlan, slots: AdapterPlan | None) -> None:
        """Run the model and this rank's share of the logits, in the order of `Generator`."""
        sample = plan.sample
        inputs = None if slots is None else AdapterInputs(slots, plan, rows=sample.sampled_rows)
        arrays = generation_arrays(plan, inputs) + SampleTensors.arrays(sample)
        sent = iter(self._staging.send(arrays))
        batch = generation_batch(plan, self.cache, sent, inputs)
        tensors = SampleTensors.take(sample, sent)
        with adapting(adapters := batch.adapters):
            hidden = run_model(self.model, feed_tokens(batch, tensors, self._last), pads=self._pads_steps)
            project = self.model.heads[Task.GENERATE].project
            if len(sample.sampled_tokens):
                if adapters is not None:
                    adapters.use("rows")
                project(hidden.index_select(0, tensors.sampled_tokens))
                self._take_tokens(tensors.sampled_slots)
            if tensors.prompts is not None and sample.prompts is not None:
                self._project_prompts(hidden, sample.prompts, tensors.prompts.tokens, adapters)

    def _project_prompts(
        self, hidden: Tensor, prompts: PromptPlan, tokens: Tensor, adapters: StepAdapters | None
    ) -> None:
        project = self.model.heads[Task.GENERATE].project
        row_slots = None if adapters is None else adapters.row_slots
        slots = None if row_slots is None else np.repeat(row_slots[prompts.rows], prompts.counts)
        for number, states in enumerate(hidden.index_select(0, tokens).split(TOKENS_AT_ONCE)):
            if adapters is not None and slots is not None:
                some = slots[number * TOKENS_AT_ONCE :][: len(states)]
                adapters.use_runs(some, np.ones_like(some))
            project(states)

    def _take_tokens(self, slots: Tensor) -> None:
        """Receive the tokens that rank 0 has sampled for these slots."""
        ids = torch.empty_like(slots)
        self.group.broadcast(ids)
        self._last.index_copy_(0, slots.long(), ids.clamp_min_(0))


def serve(launch: RankLaunch, connection: socket.socket) -> None:
    settings = msgspec.structs.replace(launch.settings, device=launch.device)
    device, dtype = prepare_device(settings), getattr(torch, settings.dtype)
    group = RankGroup(launch.rank, settings.tensor_parallel_size, device, uses_nccl=launch.uses_nccl)
    model = read_model(launch.spec, settings, device, Shard(group))
    send_message(connection, Built(own_blocks(model, settings, device)))
    if (content := receive_message(connection)) is None:
        return
    start = msgspec.json.decode(content, type=Start)
    group.connect(launch.meeting)
    cache = None
    if start.num_blocks:
        # No running sums: only rank 0 pools.
        own = msgspec.structs.replace(settings, chunked=False)
        cache = allocate_cache(cast(CausalModel, model), own, dtype, device, start.num_blocks)
    step_lock = Lock()
    adapters = _follow_adapters(launch, model, dtype, device, step_lock)
    runner = RankRunner(model, group, cache, settings.pipeline_depth, settings.max_num_seqs, adapters)
    plans, trimmer = PlanReader(launch.memory, launch.rank, connection), HeapTrimmer()
    while (message := plans.next()) is not None:
        with step_lock:
            runner.run(decode_step(message))
        if device.type == "cpu":
            trimmer.after_step(time.perf_counter())


def _follow_adapters(
    launch: RankLaunch, model: Model, dtype: torch.dtype, device: torch.device, step_lock: Lock
) -> RankAdapters | None:
    """Start a thread that reads adapters; None if the model takes none."""
    sites = adapter_sites(model)
    if sites is None or launch.adapter_connection is None:
        return None
    connection = socket.socket(fileno=launch.adapter_connection)
    adapters = RankAdapters(sites, dtype, device, connection, step_lock)
    Thread(target=adapters.follow, name="adapters", daemon=True).start()
    return adapters


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles them, and ends this process
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=RankLaunch)
    name = f"rank {launch.rank}"
    configure(level=launch.log_level, format=launch.log_format, process=name, model=launch.spec.name)
    for repeated in ("penstock.load", "penstock.models"):
        logging.getLogger(repeated).setLevel(logging.ERROR)  # rank 0 logs the same
    parent = os.getppid()
    Thread(target=_exit_when_orphaned, args=(parent,), name="parent", daemon=True).start()
    connection = socket.socket(fileno=launch.connection)
    try:
        serve(launch, connection)
    except BaseException as error:
        if os.getppid() == parent:
            log.exception("this rank failed")
            _report(connection, error)
        logging.shutdown()
        os._exit(EXIT_FAILED)
    logging.shutdown()
    os._exit(0)  # the interpreter's shutdown could wait for the device


def _report(connection: socket.socket, error: BaseException) -> None:
    words = str(getattr(error, "message", error)).strip() or type(error).__name__
    try:
        send_message(connection, Failed(words, isinstance(error, ClientError)))
    except OSError:
        log.debug("rank 0 is gone")


def _exit_when_orphaned(parent: int) -> None:
    """Exit when rank 0's process ends, even in the middle of a step. A parent-death signal would not work: it
    is sent when the thread that started this process ends."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
