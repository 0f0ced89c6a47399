"""CUDA graphs of all kinds of generation steps: one copy in, one replay, tokens out.

`GenerationGraphs` decides when a graph is captured, captures it with padding, and replays steps. `decode` and
`mixed` define which steps a graph can replay, and the batch of a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.sampled_tokens import insert_sampled_tokens
from penstock.kvcache.store import KVStore
from penstock.layers.adapter_state import StepAdapters, adapting
from penstock.layers.batch import Batch
from penstock.layers.lora import AdapterSites
from penstock.models.registry import Model
from penstock.runner.buckets import LineLayout
from penstock.runner.capture import Capture, Captures
from penstock.runner.generator import GeneratedTensors, Generator, verify_arrays
from penstock.runner.graphs import padded_lines
from penstock.runner.inputs import AdapterPlan
from penstock.runner.staging import Staging
from penstock.sampling.plan import EDITS, Need
from penstock.sampling.sampler import VerifyTensors
from penstock.types import GeneratePlan, Ints, SamplePlan

AFTER_GRAPH = Need.LOGPROBS | Need.TAIL | EDITS  # needs that are met after the graph, from its logits


class GenerationKey(Protocol):
    """The steps that one graph can replay. The smallest key that serves a step replays it."""

    @property
    def samples(self) -> bool:
        """Whether the graph returns sampled tokens instead of logits."""

    @property
    def filters(self) -> bool:
        """Whether sampling applies top-k, top-p and min-p."""

    @property
    def adapter_rank(self) -> int:
        """The bucket of the adapters' ranks; 0: no adapters."""

    def serves(self, other: Self) -> bool:
        """Whether this key's graph can replay the steps of another key."""

    def __lt__(self, other: Self, /) -> bool: ...

    def __hash__(self) -> int: ...


class GenerationLayout(Protocol):
    """Offsets of a step's arrays in one buffer of integers, each with room for the graph's shape."""

    @property
    def max_size(self) -> int:
        """Number of integers of the largest step."""

    def size(self, plan: GeneratePlan | None = None) -> int:
        """Number of integers of a step; None: of a step of padding."""

    def write(self, out: Ints, plan: GeneratePlan, padding_slot: int, adapters: AdapterPlan | None) -> None:
        """Write the step's integers, with padding after each array."""

    def write_padding(self, out: Ints, padding_slot: int) -> None:
        """Write a step of padding only: it writes nothing to the cache, and only `padding_slot` samples."""


K = TypeVar("K", bound=GenerationKey)
L = TypeVar("L", bound=GenerationLayout)


@dataclass(frozen=True, slots=True, eq=False)
class Graph(Generic[L]):
    layout: L
    replay: Callable[[], None]
    output: Tensor  # int32 [sampled] tokens, or [sampled, vocabulary] logits
    sampled_slots: Tensor  # int32 [sampled]


class GraphInputs(NamedTuple):
    """The inputs of a graph, as parts of the buffer."""

    batch: Batch
    fed_slots: Tensor  # int32 [tokens]: the slot whose last token is fed; -1: the batch holds the token
    sampled_slots: Tensor  # int32 [sampled], of the sampler
    sampled_tokens: Tensor | None  # int32 [sampled], indices of tokens; None: every token samples


class GenerationGraphs(Captures[K, Graph[L]], ABC, Generic[K, L]):
    """Graphs of one kind of generation step."""

    max_graphs: ClassVar[int]
    uses_before_capture: ClassVar[int]  # uses of a shape before it is captured

    def __init__(
        self, model: Model, generator: Generator, staging: Staging, store: KVStore, capture: Capture
    ) -> None:
        super().__init__(staging, capture)
        self.model = model
        self.generator = generator
        self.store = store
        self._uses: Counter[K] = Counter()
        # None: the model takes no adapters.
        self.adapter_sites: AdapterSites | None = getattr(model, "adapter_sites", None)
        # Graphs read from fixed addresses, so the buffer has room for the largest layout from the start.
        size = self._layout(self._largest_key(), self._num_slots).max_size
        self.integers = torch.zeros(size, dtype=torch.int32, device=staging.device)

    # What each kind of step defines.

    @abstractmethod
    def key_of(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> K | None:
        """The key of a step; None: the step always runs eagerly."""

    @abstractmethod
    def _largest_key(self) -> K:
        """The key with the largest layout."""

    @abstractmethod
    def _layout(self, key: K, num_slots: int) -> L:
        """`num_slots`: adapter slots; 0: no adapters."""

    @abstractmethod
    def _inputs(self, key: K, layout: L) -> GraphInputs:
        """The whole bucket: rows of the step, and padding rows."""

    @abstractmethod
    def _describe(self, key: K) -> str:
        """The steps of a key, for the log."""

    # What all kinds share.

    @property
    def _num_slots(self) -> int:
        return 0 if self.adapter_sites is None else self.adapter_sites.num_slots

    def __call__(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> GeneratedTensors | None:
        """Replay the step and return what the generator would return. None: run it eagerly."""
        key = self.key_of(plan, adapters)
        graph = None if key is None else self._graph_for(key)
        if key is None or graph is None:
            return None
        sampler, sample, count = self.generator.sampler, plan.sample, len(plan.sample.sampled_tokens)
        sampler.flush()
        size = graph.layout.size(plan)
        pinned = self.staging.pinned_ints(size)
        graph.layout.write(pinned.numpy(), plan, self.generator.padding_slot, adapters)
        self.integers[:size].copy_(pinned, non_blocking=True)
        graph.replay()
        self.replays += 1
        if not key.samples:
            return self._choose(graph.output[:count], sample, graph.sampled_slots[:count])
        sampler.plan.step(sample.sampled_slots)
        return GeneratedTensors(graph.output[:count])

    def ensure(self, key: K) -> Graph[L] | None:
        """The graph of this key, captured now if necessary; None if the capture fails."""
        return self.captured.get(key) or self._capture(key)

    def _graph_for(self, key: K) -> Graph[L] | None:
        """The key's own graph, captured now if its shape is frequent, or a larger graph that can replay
        it."""
        if (graph := self.captured.get(key)) is not None:
            return graph
        self._uses[key] += 1
        if self._uses[key] > self.uses_before_capture and (graph := self._capture(key)) is not None:
            return graph
        serving = [other for other in self.captured if other.serves(key)]
        return self.captured[min(serving)] if serving else None

    def _capture(self, key: K) -> Graph[L] | None:
        if key in self.refused or self.gave_up or len(self.captured) >= self.max_graphs:
            return None
        if self.clock() < self._not_before:
            return None
        return self._try_capture(key, lambda: self._make_graph(key), self._describe(key))

    def _make_graph(self, key: K) -> Graph[L]:
        layout = self._layout(key, self._num_slots if key.adapter_rank else 0)
        # A capture first runs its work once, on padding, which must not change any sequence. The padding
        # needs one more pinned buffer than a step, so wait for in-flight copies first.
        if self.staging.device.type == "cuda":
            torch.cuda.current_stream(self.staging.device).synchronize()
        pinned = self.staging.pinned_ints(layout.size())
        layout.write_padding(pinned.numpy(), self.generator.padding_slot)
        self.integers[: layout.size()].copy_(pinned, non_blocking=True)
        generator = self.generator
        batch, fed_slots, sampled_slots, sampled_tokens = self._inputs(key, layout)

        def work() -> list[Tensor]:
            insert_sampled_tokens(batch.token_ids, fed_slots, generator.last)
            with adapting(batch.adapters):
                hidden = self.model(batch)  # [tokens, hidden]
                if sampled_tokens is not None:
                    if batch.adapters is not None:
                        batch.adapters.use("rows")
                    hidden = hidden.index_select(0, sampled_tokens)
                logits = generator.head.project(hidden)
            return [generator.sampler.plain(logits, sampled_slots, key.filters) if key.samples else logits]

        replay, (output,) = self.capture(work)
        return Graph(layout, replay, output, sampled_slots)

    def _sampling(self, sample: SamplePlan) -> tuple[bool, bool]:
        """Whether the graph of a step samples, and whether it filters."""
        need = self.generator.sampler.plan.need(sample.sampled_slots)
        samples = not need & AFTER_GRAPH and sample.verify is None and use_kernel(self.generator.last)
        return samples, samples and bool(need & Need.FILTER)

    def _choose(self, logits: Tensor, sample: SamplePlan, slots: Tensor) -> GeneratedTensors:
        """Sample from the logits of a graph, and verify proposals if the step has any."""
        verify = None
        if sample.verify is not None:
            verify = VerifyTensors(*self.staging.send(verify_arrays(sample.verify)))
        return self.generator.choose(logits, sample, slots, verify)

    def _adapters(self, key: K, tokens: LineLayout | None, sampled: LineLayout | None) -> StepAdapters | None:
        """The adapters of the whole bucket. None: the graph has no adapters."""
        if tokens is None or sampled is None or self.adapter_sites is None:
            return None
        lines = padded_lines(tokens, self.integers), padded_lines(sampled, self.integers)
        return StepAdapters(self.adapter_sites.state, key.adapter_rank, *lines)
