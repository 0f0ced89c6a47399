"""Where plan, model and pooler meet: plan → launch → collect.

On a CPU a step runs on the runner's own thread. On CUDA it is enqueued by the caller, small ones as a
graph, and a second thread waits for its event, so the engine loop never blocks on a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import DeviceOutOfMemory
from penstock.kvcache.store import KVStore
from penstock.layers.batch import Batch, Limits, Memory, Needed, Paged, read_in_place
from penstock.models.registry import Model
from penstock.pooling.build import Pooler
from penstock.pooling.heads import leave
from penstock.pooling.methods import read_tokens
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.decode import DecodeGraphs
from penstock.runner.faults import typed_faults
from penstock.runner.generator import Generator
from penstock.runner.graphs import FEWER, Graphs, Key
from penstock.runner.staging import Staging
from penstock.scoring.external_vectors import compare
from penstock.scoring.pairs import PairTensors
from penstock.types import (
    Array,
    Comparison,
    Ints,
    KeyLimits,
    KVPlan,
    PairPlan,
    SamplePlan,
    StepPlan,
    StepResult,
    Variant,
    cumulative,
)

# Tokens × hidden size from which on a last layer is finished for those tokens alone that are read, in a step
# without a graph: to pick them out takes the host more time than a small step has to spare.
NARROWED_EAGER = 1 << 23
_Results = tuple[tuple[Array, ...], tuple[Array, ...]]


class ModelRunner:
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        device: torch.device,
        depth: int,
        cache: tuple[KVStore, Tensor] | None = None,
        generator: Generator | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        """`cache` is memory for keys and values and for running sums, where rows are cut; `generator`
        continues rows, where the model does."""
        self.model = model
        self.pooler = pooler
        self.device = device
        self.cache = cache
        self.generator = generator
        self.staging = Staging(device, depth)
        self.graphs = Graphs(model, pooler, self.staging, cache=cache) if graphs else None
        self.decode: DecodeGraphs | None = None
        if self.graphs is not None and generator is not None and cache is not None:
            self.decode = DecodeGraphs(model, generator, self.staging, cache[0], self.graphs.capture)
        self._events: list[_Events] = []  # a pair more than there are steps in flight
        self._depth = depth
        self._turn = 0
        self._nothing = torch.empty((0, model.hidden_size), device=device)  # of a step that runs no tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-step")

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self.device.type == "cpu":
            return self._submit(lambda: self._run_on_cpu(plan))
        try:
            with typed_faults(self.device):
                return self._launch_on_cuda(plan)
        except DeviceOutOfMemory:
            for graphs in (self.graphs, self.decode):
                if graphs is not None:
                    graphs.drop()  # before the rows are run again
            raise

    def _submit(self, work: Callable[[], StepResult]) -> Future[StepResult]:
        """On the runner's thread, where the device may fail as well as on the caller's."""

        def guarded() -> StepResult:
            with typed_faults(self.device):
                return work()

        return self._thread.submit(guarded)

    def compare(self, comparison: Comparison) -> Future[Array]:
        return self._thread.submit(compare, comparison, self.device)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> list[Tensor]:
        """The whole step on the device: one tensor for each variant of the plan."""
        batch, index, pairs = self._prepare(plan)
        hidden = self.model(batch) if plan.num_tokens else self._nothing
        return self.pooler(hidden, batch.narrowed(), plan.variants, index, pairs)

    @torch.inference_mode()
    def generate(self, plan: StepPlan, sample: SamplePlan) -> list[Tensor]:
        """The whole step on the device: the sampled ids, and what was asked about them."""
        assert self.generator is not None, "a plan that samples needs a runner with a generator"
        self.generator.settle(sample)
        if self.decode is not None and (replayed := self.decode(plan, sample)) is not None:
            return replayed
        if self.graphs is not None and (key := self.graphs.key_of(plan)) is not None:
            graph = self.graphs.place(key, plan)
            if graph is not None:
                hidden, _ = self.graphs.hidden(graph, plan)
                return self.generator(hidden, sample, self.staging.send(self.generator.arrays(sample)))
        batch, sent = self._batch(plan, **self.generator.arrays(sample))
        batch = self.generator.feed(batch, sent)
        return self.generator(self.model(batch), sample, sent)

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> _Results:
        """Host arrays of the outputs, and of what tells whether they are finite; valid once the device
        has passed this point."""
        if plan.sample is not None:
            return tuple(self.staging.fetch(self.generate(plan, plan.sample))), ()
        return self._fetched(self.forward(plan), plan)

    def _fetched(self, values: list[Tensor], plan: StepPlan) -> _Results:
        outputs, flags = leave(values, plan.variants)
        fetched = self.staging.fetch(outputs + flags)
        return tuple(fetched[: len(outputs)]), tuple(fetched[len(outputs) :])

    @torch.inference_mode()
    def _replayed(self, graphs: Graphs, key: Key, plan: StepPlan) -> _Results | None:
        """The same by a graph, of the whole step or of the model alone. None: there is none (yet)."""
        graph = graphs.place(key, plan)
        if graph is None:
            return None
        if key.params is not None:
            return graphs.results(graph, plan)
        hidden, batch = graphs.hidden(graph, plan)
        sent = self.staging.send(_variant_arrays(plan))
        index, pairs = _chosen(plan, sent)
        return self._fetched(self.pooler(hidden, batch, plan.variants, index, pairs), plan)

    def _prepare(self, plan: StepPlan) -> tuple[Batch, list[Tensor | None], dict[int, PairTensors]]:
        needed = self._needed(plan)
        batch, sent = self._batch(plan, **needed, **_variant_arrays(plan))
        if needed:
            tokens, cu_lengths, lengths = (sent[name] for name in needed)
            longest = int(needed["needed_lengths"].max())
            batch = replace(batch, needed=Needed(tokens, cu_lengths, lengths, longest))
        index, pairs = _chosen(plan, sent)
        return batch, index, pairs

    def _needed(self, plan: StepPlan) -> dict[str, Ints]:
        """`Needed` of the tokens whose states the pooler reads, where they are few enough that the last layer
        is better finished for them alone; else nothing."""
        if (
            not self.model.prunes_last_layer
            or plan.kv is not None
            or plan.adapters is not None
            or not plan.num_rows
        ):
            return {}
        if self.device.type == "cuda" and plan.num_tokens * self.model.hidden_size < NARROWED_EAGER:
            return {}
        method = self.pooler.reads(plan.variants)
        found = None if method is None else read_tokens(method, plan)
        if found is None or not 0 < len(found[0]) <= FEWER * plan.num_tokens:
            return {}
        tokens, lengths = found
        return {
            "needed_tokens": tokens,
            "needed_cu_lengths": cumulative(lengths),
            "needed_lengths": lengths,
        }

    def _batch(self, plan: StepPlan, **more: Ints | None) -> tuple[Batch, dict[str, Tensor]]:
        """All integers of the plan, sent at once."""
        sent = self.staging.send(
            {
                "token_ids": plan.token_ids,
                "positions": plan.positions,
                "type_ids": plan.type_ids,
                "cu_lengths": plan.cu_lengths,
                "lengths": plan.lengths,
                "skip": plan.skip,
                "adapters": plan.adapters,
                **_kv_arrays(plan.kv),
                **_limit_arrays(plan.limits),
                **more,
            }
        )
        batch = Batch(
            token_ids=sent["token_ids"],
            positions=sent["positions"],
            type_ids=sent.get("type_ids"),
            cu_lengths=sent["cu_lengths"],
            lengths=sent["lengths"],
            skip=sent.get("skip"),
            adapters=sent.get("adapters"),
            groups=plan.groups,
            max_length=plan.max_length,
            num_tokens=plan.num_tokens,
            num_rows=plan.num_rows,
            memory=self._memory(plan.kv, sent),
            limits=_limits(plan.limits, sent),
            generates=plan.sample is not None,
            shares=self.device.type == "cuda",
        )
        return batch, sent

    def _memory(self, kv: KVPlan | None, sent: dict[str, Tensor]) -> Memory | None:
        if kv is None:
            return None
        assert self.cache is not None, "a plan with memory needs a runner with a cache"
        store, sums = self.cache
        index = {name: sent[name] for name in _KV_INDEX}
        if not read_in_place(store):  # the library wants longer integers than kernels do
            index = {name: array.long() for name, array in index.items()}
        paged = None
        if kv.paged is not None:
            tables = sent["paged_tables"].view(kv.paged.rows, kv.paged.width)
            paged = Paged(kv.paged.rows, tables, sent["paged_keys"], BLOCK_SIZE)
        return Memory(store, sums, sent["cu_keys"], kv.max_keys, paged=paged, **index)

    def _run_on_cpu(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        outputs, finite = self._step(plan)
        return StepResult(outputs, time.perf_counter() - began, finite)

    def _launch_on_cuda(self, plan: StepPlan) -> Future[StepResult]:
        began = time.perf_counter()
        events = self._next_events()
        events.begin.record()
        graphs = self.graphs
        key = None if graphs is None else graphs.key_of(plan)
        results, before = None, 0 if graphs is None else graphs.replays
        if graphs is not None and key is not None and plan.sample is None:
            results = self._replayed(graphs, key, plan)
        outputs, finite = self._step(plan) if results is None else results
        replayed = graphs is not None and graphs.replays > before
        events.end.record()
        host_s = time.perf_counter() - began

        def collect() -> StepResult:
            events.end.synchronize()
            device_s = events.begin.elapsed_time(events.end) / 1000
            if graphs is not None and key is not None and not replayed:
                graphs.observe(key, host_s, device_s)
            return StepResult(outputs, device_s, finite)

        return self._submit(collect)

    def _next_events(self) -> _Events:
        """A pair that no step in flight has."""
        self._turn = (self._turn + 1) % (self._depth + 1)
        if not self._events:
            for _ in range(self._depth + 1):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._events.append(_Events(begin, end))
        return self._events[self._turn]


class _Events(NamedTuple):
    begin: torch.cuda.Event
    end: torch.cuda.Event


def _variant_arrays(plan: StepPlan) -> dict[str, Ints | None]:
    """What the pooler needs to know of each variant."""
    arrays: dict[str, Ints | None] = {}
    for i, variant in enumerate(plan.variants):
        arrays[f"variant{i}"] = _index(variant)
        for name, array in _pair_arrays(variant.pairs).items():
            arrays[f"pairs{i}.{name}"] = array
    return arrays


def _chosen(plan: StepPlan, sent: dict[str, Tensor]) -> tuple[list[Tensor | None], dict[int, PairTensors]]:
    """The same on the device."""
    return [sent.get(f"variant{i}") for i in range(len(plan.variants))], _pairs(plan, sent)


def _index(variant: Variant) -> Ints | None:
    """What the pooler selects for a variant; scores say by themselves which rows they read."""
    return variant.index if variant.pairs is None else variant.tokens


_PAIR_ARRAYS = tuple(f.name for f in fields(PairPlan) if f.type != "int")


def _pair_arrays(pairs: PairPlan | None) -> dict[str, Ints]:
    if pairs is None:
        return {}
    return {name: getattr(pairs, name) for name in _PAIR_ARRAYS}


def _pairs(plan: StepPlan, sent: dict[str, Tensor]) -> dict[int, PairTensors]:
    out = {}
    for i, variant in enumerate(plan.variants):
        if (pairs := variant.pairs) is not None:
            arrays = [sent[f"pairs{i}.{name}"] for name in _pair_arrays(pairs)]
            out[i] = PairTensors(pairs, *arrays)
    return out


def _limit_arrays(limits: KeyLimits | None) -> dict[str, Ints]:
    if limits is None:
        return {}
    names = ("tokens", "cu_lengths", "keys", "cu_keys")
    return {f"limited_{name}": getattr(limits, name) for name in names}


def _limits(limits: KeyLimits | None, sent: dict[str, Tensor]) -> Limits | None:
    if limits is None:
        return None
    return Limits(
        tokens=sent["limited_tokens"].long(),
        cu_lengths=sent["limited_cu_lengths"],
        keys=sent["limited_keys"].long(),
        cu_keys=sent["limited_cu_keys"],
        max_length=limits.max_length,
        max_keys=limits.max_keys,
    )


_KV_INDEX = tuple(f.name for f in fields(KVPlan) if f.name not in ("cu_keys", "max_keys", "paged"))


def _kv_arrays(kv: KVPlan | None) -> dict[str, Ints]:
    if kv is None:
        return {}
    arrays = {name: getattr(kv, name) for name in ("cu_keys", *_KV_INDEX)}
    if kv.paged is not None:
        arrays |= {"paged_tables": kv.paged.tables, "paged_keys": kv.paged.keys}
    return arrays
