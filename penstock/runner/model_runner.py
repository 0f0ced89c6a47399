"""Runs plans with a model and a pooler or a sampler: plan → launch → collect.

On a CPU a step runs on the runner's own thread. On CUDA the caller enqueues it, small ones as a graph, and a
second thread waits for its event, so the engine loop never blocks on a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import DeviceOutOfMemory, EngineError
from penstock.kvcache.store import KVCache
from penstock.layers.adapter_state import adapting
from penstock.layers.batch import Batch
from penstock.layers.cpu_shapes import padded_size, pads_steps
from penstock.models.registry import Model
from penstock.pooling.build import Pooler
from penstock.pooling.heads import to_output
from penstock.pooling.methods import read_tokens
from penstock.runner.adapters import AdapterPool
from penstock.runner.cpu_memory import HeapTrimmer
from penstock.runner.cuda_device import use_device
from penstock.runner.decode import DecodeGraphs
from penstock.runner.decode import Key as DecodeKey
from penstock.runner.faults import typed_faults
from penstock.runner.generator import GeneratedTensors, Generator, SampleTensors
from penstock.runner.graph_history import GraphHistory
from penstock.runner.graph_keys import Key
from penstock.runner.graph_policy import GraphPolicy
from penstock.runner.graphs import MAX_PRUNED_SHARE, Graphs, HiddenGraph, PooledGraph
from penstock.runner.images import ImageRunner
from penstock.runner.inputs import (
    AdapterInputs,
    AdapterPlan,
    ImageTensors,
    OutputPlan,
    generation_arrays,
    generation_batch,
    pool_arrays,
    pool_batch,
    variant_arrays,
    variant_tensors,
)
from penstock.runner.interruptible import InterruptibleSteps
from penstock.runner.mixed import MixedGraphs
from penstock.runner.staging import Staging
from penstock.scoring.external_vectors import compare_in_parts
from penstock.types import (
    Array,
    Comparison,
    GeneratePlan,
    ImagePlan,
    Ints,
    PooledResult,
    PoolPlan,
    SampledResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
    cumulative,
)

# An eager step computes the last layer only for the output tokens if it has at least this many tokens ×
# hidden size. In a smaller step, selecting them costs more host time than it saves.
MIN_PRUNED_SIZE_EAGER = 1 << 23
HISTORY_INTERVAL_S = 60.0  # time between writes of the history of step shapes


def run_model(model: Model, batch: Batch, *, pads: bool) -> Tensor:
    """The hidden states of the batch's own tokens. `pads`: the value of `pads_steps` for the device."""
    if not pads:
        return model(batch)
    return model(batch.padded(padded_size(batch.num_tokens)))[: batch.num_tokens]


class ModelRunner:
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        device: torch.device,
        depth: int,
        cache: KVCache | None = None,
        generator: Generator | None = None,
        *,
        graphs: bool = False,
        images: ImageRunner | None = None,
        beside: ModelRunner | None = None,
    ) -> None:
        """`cache` is needed for plans that use the KV cache, `generator` for those that generate, `images`
        for those with images. `beside`: another runner on the same device, whose thread this runner shares,
        so that their steps take turns."""
        self.device = device
        self.staging = Staging(device, depth)
        self._uses_graphs = graphs
        self._graph_policy = GraphPolicy()
        self.graph_history: GraphHistory | None = None  # None: shapes are not saved for the next start
        self._history_saved_s = time.monotonic()
        self.planned_decodes: deque[DecodeKey] = deque()  # graphs of decode steps to capture in idle gaps
        self.adapters: AdapterPool | None = None  # None: no plan has adapters
        self.install(model, pooler, cache, generator, images)
        self._events: list[_Events] = []  # one pair more than there are steps in flight
        self._depth = depth
        self._turn = 0
        self._newest_events: _Events | None = None  # events of the step that was launched last
        self._no_hidden = torch.empty((0, model.hidden_size), device=device)  # for steps without tokens
        self._pads_steps = pads_steps(device)
        self._trimmer = HeapTrimmer()  # for steps on a CPU
        self._launching_thread = 0  # the thread that last launched a step
        self.background: InterruptibleSteps | None = None
        self._thread = (
            ThreadPoolExecutor(
                1, thread_name_prefix="penstock-step", initializer=use_device, initargs=(device,)
            )
            if beside is None
            else beside.thread
        )
        self._runners_beside: list[ModelRunner] = []  # closed together with this one
        if beside is not None:
            beside._runners_beside.append(self)
            self.background = beside.background
        elif device.type == "cpu":
            self.background = InterruptibleSteps(self._run_guarded, self._thread)

    @property
    def thread(self) -> ThreadPoolExecutor:
        """The thread that runs steps on a CPU, and that waits for steps on CUDA."""
        return self._thread

    def install(
        self,
        model: Model,
        pooler: Pooler,
        cache: KVCache | None,
        generator: Generator | None,
        images: ImageRunner | None = None,
    ) -> None:
        """Use these parts for all further steps. No step may be in flight."""
        self.images = images
        self.model = model
        self.pooler = pooler
        self.cache = cache
        self.generator = generator
        self.graphs: Graphs | None = None
        if self._uses_graphs:
            self.graphs = Graphs(model, pooler, self.staging, cache=cache, policy=self._graph_policy)
        self.decode: DecodeGraphs | None = None
        self.mixed: MixedGraphs | None = None  # steps with prompts and decodes
        if self.graphs is not None and generator is not None and cache is not None:
            self.decode = DecodeGraphs(model, generator, self.staging, cache.store, self.graphs.capture)
            self.mixed = MixedGraphs(model, generator, self.staging, cache.store, self.graphs.capture)

    def uninstall(self) -> None:
        """Release everything that was passed to `install`. Steps fail until it is called again."""
        if self.graphs is not None:
            self.graphs.forget()
        del self.model, self.pooler
        self.cache = self.generator = self.graphs = self.decode = self.mixed = self.images = None
        if self.adapters is not None:
            self.adapters.detach()

    def forget_adapter_graphs(self) -> None:
        """Drop the graphs of steps with adapters, because a layer has allocated memory for adapters."""
        for graphs in (self.graphs, self.decode, self.mixed):
            if graphs is not None:
                graphs.forget_where(lambda key: key.adapter_rank > 0)

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self.device.type == "cpu":
            return self._submit(lambda: self._run_on_cpu(plan))
        self._use_device()
        self._save_history()
        try:
            with typed_faults(self.device):
                return self._launch_on_cuda(plan)
        except DeviceOutOfMemory:
            for graphs in (self.graphs, self.decode, self.mixed):
                if graphs is not None:
                    graphs.drop()  # before the engine runs the rows again
            raise

    def _use_device(self) -> None:
        """Launch the kernels of this thread on the runner's device."""
        if self._launching_thread != (thread := get_ident()):
            use_device(self.device)
            self._launching_thread = thread

    def _submit(self, work: Callable[[], StepResult]) -> Future[StepResult]:
        """Run work on the runner's thread, with device errors translated."""

        def guarded() -> StepResult:
            with typed_faults(self.device):
                return work()

        offered = None if self.background is None else self.background.offer(guarded)
        return self._thread.submit(guarded) if offered is None else offered

    def compare(self, comparison: Comparison) -> Future[Array]:
        """Score in parts, which take turns with steps on the runner's thread."""
        scores: Future[Array] = Future()
        parts = compare_in_parts(comparison, self.device)

        def advance() -> None:
            if scores.cancelled():
                return
            with suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    with typed_faults(self.device), torch.inference_mode():
                        done = next(parts)
                    if done is None:
                        submit()
                    else:
                        scores.set_result(done)
                except Exception as error:
                    scores.set_exception(error)

        def submit() -> None:
            if self.background is None or self.background.offer(advance) is None:
                self._thread.submit(advance)

        submit()
        return scores

    def close(self) -> None:
        if self.background is not None:
            self.background.release()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self.adapters is not None:
            self.adapters.close()
        if self.graph_history is not None:
            self.graph_history.close(self._graph_policy.most_used())
        for runner in (self, *self._runners_beside):
            runner.release()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the device may be lost
                torch.cuda.empty_cache()

    def release(self) -> None:
        """Free the model and its caches now: a closed engine may be referenced for longer, by its owner or by
        cycles, and the next engine sizes its KV cache by the free memory."""
        if hasattr(self, "model"):  # a model that sleeps may be uninstalled already
            self.uninstall()

    @property
    def min_idle_s(self) -> float | None:
        """Required idle time before `run_idle`; None: there is no work. See `IdleWork`."""
        has_work = self.graphs is not None and self.graphs.has_idle_work
        has_work |= self.decode is not None and bool(self.planned_decodes)
        return self._graph_policy.min_idle_s if has_work else None

    def run_idle(self) -> None:
        """Capture one graph. No step may be in flight."""
        self._use_device()
        with torch.inference_mode():
            if self.graphs is not None and self.graphs.has_idle_work:
                self.graphs.capture_next()
            elif self.decode is not None and self.planned_decodes:
                self.decode.ensure(self.planned_decodes.popleft())

    def _save_history(self) -> None:
        """Save the shapes of this run now and then, because a killed process does not call `close`."""
        if self.graph_history is not None and time.monotonic() > self._history_saved_s + HISTORY_INTERVAL_S:
            self._history_saved_s = time.monotonic()
            self.graph_history.save_in_background(self._graph_policy.most_used())

    def _adapter_plan(self, plan: StepPlan) -> AdapterPlan | None:
        """Assign slots to a step's adapters. They are on the device when the step runs."""
        if plan.adapters is None:
            return None
        if self.adapters is None:
            raise EngineError("a plan with adapters needs a model that takes some")
        return self.adapters.plan(plan.adapters)

    @torch.inference_mode()
    def forward(self, plan: PoolPlan, adapters: AdapterPlan | None = None) -> list[Tensor]:
        """Run a whole pooling step on the device. Returns one tensor for each variant of the plan."""
        outputs = self._output_plan(plan)
        adapters = adapters or self._adapter_plan(plan)
        inputs = None if adapters is None else AdapterInputs(adapters, plan, outputs)
        arrays = pool_arrays(plan, outputs, inputs) + variant_arrays(plan.variants)
        tensors, images = self._send_arrays(arrays, plan.images)
        sent = iter(tensors)
        batch = self._with_images(pool_batch(plan, outputs, self.cache, sent, inputs), plan.images, images)
        variants = variant_tensors(plan.variants, sent)
        with adapting(batch.adapters):
            hidden = self._hidden(batch) if self.runs_model(plan) else self._no_hidden
            return self.pooler(hidden, batch.output_batch(), plan.variants, variants)

    def runs_model(self, plan: PoolPlan) -> bool:
        """Whether a step reads anything that the model computes."""
        return plan.num_tokens > 0 and self.pooler.reads_tokens(plan.variants)

    @torch.inference_mode()
    def generate(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> GeneratedTensors:
        """Run a whole generation step on the device."""
        generator, sample = self.generator, plan.sample
        if generator is None:
            raise ValueError("a plan that generates needs a runner with a generator")
        generator.update_slots(sample)
        adapters = adapters or self._adapter_plan(plan)
        for graphs in (self.decode, self.mixed):
            if graphs is not None and (replayed := graphs(plan, adapters)) is not None:
                return replayed
        inputs = None if adapters is None else AdapterInputs(adapters, plan, rows=sample.sampled_rows)
        if self.graphs is not None and (key := self.graphs.key_of(plan, adapters)) is not None:
            graph = self.graphs.prepare(key, plan, adapters)
            if isinstance(graph, HiddenGraph):
                hidden, _ = self.graphs.replay_hidden(graph, plan)
                arrays = SampleTensors.arrays(sample) + ([] if inputs is None else inputs.arrays())
                sent = iter(self.staging.send(arrays))
                tensors = SampleTensors.take(sample, sent)
                with adapting(of_step := None if inputs is None else inputs.take(sent)):
                    return generator(hidden, sample, tensors, of_step)
        arrays = generation_arrays(plan, inputs) + SampleTensors.arrays(sample)
        placed, images = self._send_arrays(arrays, plan.images)
        sent = iter(placed)
        batch = self._with_images(generation_batch(plan, self.cache, sent, inputs), plan.images, images)
        tensors = SampleTensors.take(sample, sent)
        with adapting(batch.adapters):
            hidden = self._hidden(generator.feed(batch, tensors))
            return generator(hidden, sample, tensors, batch.adapters)

    def _send_arrays(
        self, arrays: list[Ints], images: ImagePlan | None
    ) -> tuple[Sequence[Tensor], ImageTensors | None]:
        """Send a step's arrays and its images to the device in one copy."""
        if images is None:
            return self.staging.send(arrays), None
        if self.images is None:
            raise ValueError("a plan with images needs a model with a vision tower")
        return self.images.send(self.staging, arrays, images)

    def _with_images(self, batch: Batch, images: ImagePlan | None, tensors: ImageTensors | None) -> Batch:
        if self.images is None or images is None or tensors is None:
            return batch
        return self.images(batch, images, tensors)

    def _hidden(self, batch: Batch) -> Tensor:
        return run_model(self.model, batch, pads=self._pads_steps)

    @torch.inference_mode()
    def _step(self, plan: StepPlan, adapters: AdapterPlan | None = None) -> StepResult:
        """Run a step eagerly, or with a graph for generation steps. The result's arrays are valid once the
        device has reached this point."""
        if isinstance(plan, PoolPlan):
            return self._fetch_pooled(self.forward(plan, adapters), plan)
        return self._fetch_generated(self.generate(plan, adapters))

    def _fetch_pooled(self, values: list[Tensor], plan: PoolPlan) -> PooledResult:
        outputs, finite = to_output(values, plan.variants, quantizes=self.pooler.quantizes)
        fetched = self.staging.fetch(outputs + finite)
        return PooledResult(tuple(fetched[: len(outputs)]), tuple(fetched[len(outputs) :]))

    def _fetch_generated(self, generated: GeneratedTensors) -> SampledResult:
        arrays = iter(self.staging.fetch(generated.tensors()))
        return SampledResult(
            token_ids=next(arrays),
            logprobs=None if generated.logprobs is None else TokenLogprobs(*islice(arrays, 3)),
            prompt_logprobs=None if generated.prompt_logprobs is None else TokenLogprobs(*islice(arrays, 3)),
        )

    @torch.inference_mode()
    def _replay(
        self, graphs: Graphs, key: Key, plan: PoolPlan, adapters: AdapterPlan | None = None
    ) -> PooledResult | None:
        """Run a pooling step with a graph of the whole step or of the model only. None: run it eagerly."""
        graph = graphs.prepare(key, plan, adapters)
        if graph is None:
            return None
        if isinstance(graph, PooledGraph):
            return graphs.replay_pooled(graph, plan)
        hidden, batch = graphs.replay_hidden(graph, plan, adapters)
        tensors = variant_tensors(plan.variants, iter(self.staging.send(variant_arrays(plan.variants))))
        with adapting(batch.adapters):
            return self._fetch_pooled(self.pooler(hidden, batch, plan.variants, tensors), plan)

    def _output_plan(self, plan: PoolPlan) -> OutputPlan | None:
        """The tokens whose hidden states the pooler reads, if they are so few that it pays to compute the
        last layer only for them. Otherwise None."""
        if not self.model.prunes_last_layer or plan.kv is not None:
            return None
        if not plan.num_rows:
            return None
        if self.device.type == "cuda" and plan.num_tokens * self.model.hidden_size < MIN_PRUNED_SIZE_EAGER:
            return None
        method = self.pooler.reads(plan.variants)
        read = None if method is None else read_tokens(method, plan)
        if read is None or not 0 < len(read.tokens) <= MAX_PRUNED_SHARE * plan.num_tokens:
            return None
        return OutputPlan(read.tokens, cumulative(read.counts), read.counts)

    def _run_on_cpu(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        result = self._step(plan)
        ended = time.perf_counter()
        self._trimmer.after_step(ended)
        return result.timed(ended - began)

    def _run_guarded(self, plan: PoolPlan) -> StepResult:
        with typed_faults(self.device):
            return self._run_on_cpu(plan)

    def _launch_on_cuda(self, plan: StepPlan) -> Future[StepResult]:
        began = time.perf_counter()
        previous, events = self._newest_events, self._next_events()
        self._newest_events = events
        events.begin.record()
        graphs, adapters = self.graphs, self._adapter_plan(plan)
        key = None if graphs is None else graphs.key_of(plan, adapters)
        result, replays_before = None, 0 if graphs is None else graphs.replays
        if graphs is not None and key is not None and isinstance(plan, PoolPlan):
            result = self._replay(graphs, key, plan, adapters)
        step = self._step(plan, adapters) if result is None else result
        replayed = graphs.last_replayed if graphs is not None and graphs.replays > replays_before else None
        events.end.record()
        host_s = time.perf_counter() - began

        def collect() -> StepResult:
            events.end.synchronize()
            device_s = events.begin.elapsed_time(events.end) / 1000
            if graphs is not None and previous is not None:  # its events are not reused before these
                graphs.observe_gap(previous.end.elapsed_time(events.begin) / 1000, device_s)
            if graphs is not None and key is not None:
                if replayed is None:
                    graphs.observe(key, host_s, device_s)
                elif isinstance(plan, PoolPlan):
                    graphs.observe_replay(replayed, device_s)
            return step.timed(device_s)

        return self._submit(collect)

    def _next_events(self) -> _Events:
        """The next pair of events, which no step in flight uses."""
        self._turn = (self._turn + 1) % (self._depth + 1)
        if not self._events:
            for _ in range(self._depth + 1):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._events.append(_Events(begin, end))
        return self._events[self._turn]


class _Events(NamedTuple):
    begin: torch.cuda.Event
    end: torch.cuda.Event
