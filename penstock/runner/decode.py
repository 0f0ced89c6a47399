"""Steps in which every row goes on by one token, as CUDA graphs: one copy in, one replay, the tokens out.

Such a step has hardly any work for the device beside reading weights, and it comes again for every token
that is generated: launching its kernels one by one would take several times as long. Graphs hold the model,
the logits and, where rows ask for nothing that needs more, the choice of the token too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.sampled_tokens import insert_sampled_tokens
from penstock.kvcache.store import KVStore
from penstock.layers.batch import Batch, Memory, Paged
from penstock.models.registry import Model
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import NoGroups
from penstock.runner.capture import Capture, Captures
from penstock.runner.generator import Generator
from penstock.runner.staging import Staging
from penstock.sampling.plan import EDITS, Need
from penstock.types import Ints, SamplePlan, StepPlan

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
WIDTHS = (16, 64, 256, 1024, 4096, 16384)  # blocks of the longest row
MOST = 192  # graphs
USES = 4  # of a shape, before it is captured while others wait: on the way to many rows most come once
_BEYOND = Need.LOGPROBS | Need.TAIL | EDITS  # what is done after the graph, on its logits


class Key(NamedTuple):
    """Steps that one graph serves."""

    rows: int
    width: int
    choose: bool  # the graph ends with tokens, not with logits
    filtered: bool  # and knows top-k, top-p and min-p

    def serves(self, other: Key) -> bool:
        """Whether its graph can stand in for that of another."""
        roomy = self.rows >= other.rows and self.width >= other.width
        return roomy and self.choose == other.choose and self.filtered >= other.filtered


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step's arrays lie in one buffer of integers, each with room for the bucket's rows."""

    rows: int
    width: int
    places: dict[str, tuple[int, int]] = field(init=False)  # name → where it begins, and its room
    size: int = field(init=False)

    def __post_init__(self) -> None:
        names = ("token_ids", "fed", "positions", "token_slots", "keys", "slots")
        rooms = dict.fromkeys(names, self.rows) | {"tables": self.rows * self.width}
        places, at = {}, 0
        for name, room in rooms.items():
            places[name] = (at, room)
            at += -(-room // 4) * 4  # so that each begins at a multiple of 16 bytes
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "size", at)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        found = {name: flat[begin : begin + room] for name, (begin, room) in self.places.items()}
        found["tables"] = found["tables"].view(self.rows, self.width)
        return found

    def write(self, out: Ints, spare: int, plan: StepPlan | None) -> None:
        """The step's integers, and rows without a request behind them: the first token of the vocabulary in
        the first place, which sees one key, is kept nowhere, and is chosen for the slot `spare`."""
        parts = {name: out[begin : begin + room] for name, (begin, room) in self.places.items()}
        tables, count = parts["tables"].reshape(self.rows, self.width), 0
        parts["fed"][:] = -1
        if plan is not None:
            assert plan.kv is not None and plan.kv.paged is not None and plan.sample is not None
            paged, sample, count = plan.kv.paged, plan.sample, plan.num_rows
            parts["token_ids"][:count] = plan.token_ids
            parts["positions"][:count] = plan.positions
            parts["token_slots"][:count] = plan.kv.token_slots
            parts["keys"][:count] = paged.keys
            parts["slots"][:count] = sample.sampled_slots
            parts["fed"][sample.fed_tokens] = sample.fed_slots
            tables[:count, : paged.width] = paged.tables.reshape(count, paged.width)
        for name, value in (("token_ids", 0), ("positions", 0), ("token_slots", -1), ("keys", 1)):
            parts[name][count:] = value
        parts["slots"][count:] = spare
        tables[count:, 0] = 0


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    layout: Layout
    replay: Callable[[], None]
    output: Tensor  # int32 [rows] tokens, or [rows, vocabulary] logits
    slots: Tensor  # int32 [rows]


class DecodeGraphs(Captures[Key, Graph]):
    kind = "steps that continue rows"

    def __init__(
        self, model: Model, generator: Generator, staging: Staging, store: KVStore, capture: Capture
    ) -> None:
        super().__init__(staging, capture)
        self.model = model
        self.generator = generator
        self.store = store
        self._uses: Counter[Key] = Counter()
        # Graphs read where they were captured, so there is room for the largest from the beginning.
        most = Layout(_bucket(ROWS, generator.spare), _bucket(WIDTHS, store.keys.shape[1] // BLOCK_SIZE)).size
        self.integers = torch.zeros(most, dtype=torch.int32, device=staging.device)

    def key_of(self, plan: StepPlan, sample: SamplePlan) -> Key | None:
        """None: such a step is never replayed."""
        kv = plan.kv
        if kv is None or kv.paged is None or not plan.num_tokens == kv.paged.rows == len(sample.tokens):
            return None
        if sample.prompts is not None or plan.num_rows > ROWS[-1] or kv.paged.width > WIDTHS[-1]:
            return None
        rows, width = _bucket(ROWS, plan.num_rows), _bucket(WIDTHS, kv.paged.width)
        need = self.generator.sampler.plan.need(sample.sampled_slots)
        choose = not need & _BEYOND and use_kernel(self.generator.last)
        return Key(rows, width, choose, choose and bool(need & Need.FILTER))

    def __call__(self, plan: StepPlan, sample: SamplePlan) -> list[Tensor] | None:
        """What the generator would give for this step. None: run it without a graph."""
        key = self.key_of(plan, sample)
        graph = None if key is None else self._graph_for(key)
        if key is None or graph is None:
            return None
        sampler, count = self.generator.sampler, plan.num_rows
        sampler.flush()
        self._place(graph.layout, plan)
        graph.replay()
        self.replays += 1
        if not key.choose:
            return self.generator.choose(graph.output[:count], sample, graph.slots[:count])
        sampler.plan.step(sample.sampled_slots)
        return [graph.output[:count]]

    def _graph_for(self, key: Key) -> Graph | None:
        """Its own, another that has room for the step, or, of a shape that keeps coming, one captured now."""
        if (graph := self.captured.get(key)) is not None:
            return graph
        self._uses[key] += 1
        if self._uses[key] > USES and (graph := self._capture(key)) is not None:
            return graph
        serving = [other for other in self.captured if other.serves(key)]
        return self.captured[min(serving)] if serving else None

    def ready(self, key: Key) -> Graph | None:
        """The graph for such steps, captured now if it was not; None if it cannot be had."""
        return self.captured.get(key) or self._capture(key)

    def _place(self, layout: Layout, plan: StepPlan | None) -> None:
        pinned = self.staging.slot(layout.size)
        layout.write(pinned.numpy(), self.generator.spare, plan)
        self.integers[: layout.size].copy_(pinned, non_blocking=True)

    def _capture(self, key: Key) -> Graph | None:
        if key in self.refused or self.gave_up or len(self.captured) >= MOST:
            return None
        if self.clock() < self._not_before:
            return None
        layout = Layout(key.rows, key.width)
        return self._taken(key, lambda: self._captured(key, layout), f"steps that continue {key.rows} rows")

    def _captured(self, key: Key, layout: Layout) -> Graph:
        # What is captured runs once before, and no row may be continued by that. These integers are one more
        # use of the host's buffers than a step has, so whatever is still being copied from them comes first.
        if self.staging.device.type == "cuda":
            torch.cuda.current_stream(self.staging.device).synchronize()
        self._place(layout, None)
        views = layout.views(self.integers)
        batch, generator = self._batch(key, views), self.generator

        def work() -> list[Tensor]:
            insert_sampled_tokens(views["token_ids"], views["fed"], generator.last)
            logits = generator.head.project(self.model(batch))
            if not key.choose:
                return [logits]
            return [generator.sampler.plain(logits, views["slots"], key.filtered)]

        replay, (output,) = self.capture(work)
        return Graph(layout, replay, output, views["slots"])

    def _batch(self, key: Key, views: dict[str, Tensor]) -> Batch:
        ends = torch.arange(key.rows + 1, dtype=torch.int32, device=self.staging.device)
        nothing = views["slots"][:0]
        memory = Memory(
            self.store,
            torch.empty((0, self.model.hidden_size), device=self.staging.device),
            ends,
            1,
            read_slots=nothing,
            token_slots=views["token_slots"],
            new_at=nothing,
            old_at=nothing,
            write_tokens=nothing,
            write_slots=nothing,
            carry_rows=nothing,
            carry_slots=nothing,
            carry_old=nothing,
            paged=Paged(key.rows, views["tables"], views["keys"], BLOCK_SIZE),
        )
        return Batch(
            token_ids=views["token_ids"],
            positions=views["positions"],
            type_ids=None,
            cu_lengths=ends,
            lengths=torch.ones_like(ends[1:]),
            skip=None,
            groups=NoGroups(),
            max_length=1,
            num_tokens=key.rows,
            num_rows=key.rows,
            memory=memory,
            generates=True,
        )


def _bucket(sizes: tuple[int, ...], needed: int) -> int:
    return sizes[min(bisect_left(sizes, needed), len(sizes) - 1)]


def first_keys(rows: int) -> list[Key]:
    """Graphs for short texts of up to so many rows at a time, a few of which know filters."""
    plain = [Key(size, WIDTHS[0], True, False) for size in ROWS if size <= _bucket(ROWS, rows)]
    filtered = [Key(key.rows, WIDTHS[0], True, True) for key in (plain[0], plain[len(plain) // 2], plain[-1])]
    return [*dict.fromkeys(filtered), *reversed(plain)]
