"""Generation policy: what each step runs.

A sequence waits (`prompt_queue`) until it gets a slot and the KV cache blocks of its prompt
(`active_sequences`). It prefills in chunks (`prefill`), and then decodes one token per step until a result
ends it (`generation_results`). If no block is free, the newest sequence is preempted. `unfinished` tracks all
requests, in whatever state their sequences are, and `SlotTable` holds the numbers that change every step.

Background sequences never share a step with interactive ones. While interactive sequences run, they pause:
they keep their slots, and keep their blocks until an interactive sequence needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import NotPossible, PenstockError
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.active_sequences import ActiveSequences
from penstock.scheduler.generation_images import with_images
from penstock.scheduler.generation_results import ResultCollector
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.limits import GenerationLimits
from penstock.scheduler.prefill import Prefills, Turn
from penstock.scheduler.prompt_queue import PromptQueue
from penstock.scheduler.sequence import Constraint
from penstock.scheduler.slots import SlotTable
from penstock.scheduler.speculation import ProposedRows, Proposer, Speculation
from penstock.scheduler.steps import SamplerChanges, SequenceMemory, StepRows, generation_plan
from penstock.scheduler.unfinished import UnfinishedRequests
from penstock.types import (
    DecodedTokens,
    GeneratedTokens,
    GeneratePlan,
    Ints,
    Request,
    SampledResult,
    SamplerParams,
)

__all__ = ["Constraint", "GenerationLimits", "GenerationScheduler"]


class GenerationScheduler:
    """add → schedule → collect, for requests with `SamplerParams`."""

    def __init__(
        self, pool: BlockPool, limits: GenerationLimits, image_cache: ImageCache | None = None
    ) -> None:
        """`image_cache` is for prompts with images."""
        self.pool = pool
        self.limits = limits  # `max_tokens` may be lowered between steps
        self.image_cache = image_cache
        self.can_mix_steps: Callable[[], bool] = lambda: True  # whether prompts may run beside decodes
        self.speculation: Speculation | None = None  # None: every decoding sequence runs one token per step
        self._queue = PromptQueue(limits)
        self._active = ActiveSequences(pool, limits)
        self._slots = self._active.slots
        self._requests = UnfinishedRequests(self._queue, self._active)
        self._prefills = Prefills(self._queue, self._active, limits, image_cache)
        self._results = ResultCollector(self._requests, self._active, prefix_caching=limits.prefix_caching)
        self._last_was_prefill = False

    def enable_speculation(
        self, make_proposer: Callable[[SlotTable], Proposer], *, is_adaptive: bool = True
    ) -> None:
        """Enable speculative decoding. Without `is_adaptive`, it runs even where it makes decoding slower."""
        proposer = make_proposer(self._slots)
        self.speculation = Speculation(self._slots, self.pool, proposer, is_adaptive=is_adaptive)

    @property
    def max_adapters(self) -> int:
        """The limit of different adapters per step; 0: no limit."""
        return self._active.max_adapters

    @max_adapters.setter
    def max_adapters(self, value: int) -> None:
        self._active.max_adapters = value

    # Requests.

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def busy(self) -> bool:
        return len(self._requests) > 0

    def requests(self) -> list[Request]:
        """The unfinished requests."""
        return self._requests.requests()

    @property
    def has_background(self) -> bool:
        """Whether any background request is unfinished."""
        return bool(self._requests.background_ids)

    @property
    def has_interactive(self) -> bool:
        """Whether any interactive request is unfinished."""
        return self._requests.has_interactive

    def check(self, request: Request) -> SamplerParams:
        """Raise `BadValue` for a request that can never run, and `QueueFull` if too many tokens wait."""
        if request.sampling is None:
            raise NotPossible("a request without sampling parameters cannot generate")
        self.limits.check(request, request.sampling)
        if request.images is not None:
            if self.image_cache is None:
                raise NotPossible("this model reads no images", param="images")
            self.image_cache.check(request)
        self._queue.check_room(request)
        return request.sampling

    def add(
        self, request: Request, constraints: Sequence[Constraint] = (), start_by_s: float | None = None
    ) -> None:
        """Check a request and queue it. With `constraints`, one for each row, a sequence's token is read
        before its next one is planned. If none of its sequences runs by `start_by_s`, `overdue` drops it."""
        self._requests.add(request, self.check(request), constraints, start_by_s)

    def cancel(self, request_id: str) -> None:
        """Drop a request. Its blocks and slots are free for the next step."""
        self._requests.cancel(request_id)

    def clear(self) -> list[str]:
        """Drop every request and return their ids."""
        return self._requests.clear()

    def expire(self, now_s: float) -> list[Request]:
        """Drop and return the requests whose deadline has passed."""
        return self._requests.expire(now_s)

    def overdue(self, now_s: float) -> list[Request]:
        """Drop and return the requests that had to start by now and have not."""
        return self._requests.overdue(now_s)

    def take_failures(self) -> dict[str, PenstockError]:
        """Drop the requests that cannot continue, and return their errors by request id."""
        return self._requests.take_failures()

    def next_deadline_s(self) -> float | None:
        return self._requests.next_deadline_s()

    # Counts.

    @property
    def running(self) -> int:
        return len(self._active.running)

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._active.preempted)

    @property
    def num_preemptions(self) -> int:
        return self._active.num_preemptions

    @property
    def queued_tokens(self) -> int:
        """Tokens of waiting prompts, without background requests."""
        return self._queue.num_tokens

    @property
    def queued_background_tokens(self) -> int:
        return self._queue.num_background_tokens

    @property
    def num_started_tokens(self) -> int:
        """Tokens of prompts that no longer wait."""
        return self._queue.num_started_tokens

    def queued_tokens_of(self, client: str) -> int:
        """Tokens of a client's waiting prompts."""
        return self._queue.num_tokens_of(client)

    @property
    def queued_weight(self) -> float:
        """The total weight of clients with waiting prompts."""
        return self._queue.weight

    def take_freed_slots(self) -> tuple[int, ...]:
        """Slots that were freed since the last step was planned. The caller passes them to the sampler."""
        return self._slots.take_leaves()

    def check_integrity(self) -> None:
        """Assert that every slot and block belongs to one sequence or to none."""
        self._requests.check_integrity()

    # Schedule.

    def schedule(self, now_s: float, *, admit: bool = True) -> GeneratePlan | None:
        """Plan the next step: decodes first, then chunks of prompts; None if nothing can run. Without
        `admit`, no waiting sequence starts."""
        if not self._active and not len(self._queue):
            return None
        max_tokens, requests = self.limits.max_tokens, self._requests
        if not (suspects := requests.suspects):
            if not requests.background_ids:
                return self._next_step(Turn(now_s, None, admit, max_tokens))
            if not requests.has_interactive:
                return None
            return self._next_step(Turn(now_s, requests.is_interactive, admit, max_tokens))
        plan = self._next_step(Turn(now_s, suspects.only_first(), True, max_tokens))
        # The suspect may need blocks of running sequences. These continue, but none is admitted before it.
        return plan or self._next_step(Turn(now_s, suspects.none(), False, max_tokens))

    def schedule_background(
        self, now_s: float, max_tokens: int, *, admit: bool = True
    ) -> GeneratePlan | None:
        """Plan a step of background sequences only; None if none can run."""
        background_ids = self._requests.background_ids
        if not background_ids or self._requests.suspects:
            return None
        max_tokens = max(1, min(max_tokens, self.limits.max_tokens))
        turn = Turn(now_s, background_ids.__contains__, admit, max_tokens, is_background=True)
        return self._next_step(turn)

    def _next_step(self, turn: Turn) -> GeneratePlan | None:
        """Plan a step of the requests whose turn it is."""
        if self._separates_prefill:
            return self._prefill_or_decode(turn)
        decode = self._active.grow(self._decoding(turn))
        proposed = self._propose(decode, turn.max_tokens)
        num_proposed = 0 if proposed is None else proposed.total
        num_decoding = len(decode) + num_proposed
        max_tokens, max_rows = turn.max_tokens - num_decoding, self.limits.max_rows - len(decode)
        if self.limits.target_itl_s and not turn.is_background:
            max_tokens = self._prefills.max_tokens_beside(num_decoding, num_proposed, max_tokens)
        prefill = list(self._prefills.choose(turn, max_tokens, max_rows))
        if not prefill:
            return self._plan_decode(turn, decode, proposed) if len(decode) else None
        slots, counts = np.array(prefill, dtype=np.int32).T
        counts = np.concatenate([np.ones(len(decode), dtype=np.int32), counts])
        return self._plan_prefill(np.concatenate([decode, slots]), counts, proposed)

    @property
    def _separates_prefill(self) -> bool:
        """Whether prompts and decodes run in separate steps."""
        if self.limits.separate_prefill or not self.can_mix_steps():
            return True
        return self.limits.mixed_needs_graph and bool(self._requests.unreplayable_ids)

    def _prefill_or_decode(self, turn: Turn) -> GeneratePlan | None:
        """Plan a step of one kind: prefill, unless the last step was prefill and sequences can decode."""
        for is_prefill in (not self._last_was_prefill, self._last_was_prefill, False):
            if is_prefill:
                found = self._prefills.choose(turn, turn.max_tokens, self.limits.max_rows)
                # A sequence with all tokens but one in the prefix cache runs with the decodes.
                several = [(slot, count) for slot, count in found if self._slots.num_to_run(slot) > 1]
                slots, counts = np.array(several, dtype=np.int32).reshape(-1, 2).T
                plan = self._plan_prefill(slots, counts) if len(slots) else None
            else:
                slots = self._active.grow(self._decoding(turn))
                proposed = self._propose(slots, turn.max_tokens)
                plan = self._plan_decode(turn, slots, proposed) if len(slots) else None
            if plan is not None:
                self._last_was_prefill = is_prefill
                return plan
        return None

    def _decoding(self, turn: Turn) -> Ints:
        """Slots of the sequences that decode, oldest first, as many as fit into a step."""
        table, chosen, may_run = self._slots, self._active.running, turn.may_run
        if may_run is not None:
            chosen = [slot for slot in chosen if may_run(table[slot].request.id)]
        running = np.array(chosen, dtype=np.int32)
        length = table.num_tokens[running]
        ready = (length - table.num_computed[running] == 1) & (length < table.max_length[running])
        if self.speculation is not None and self.speculation.must_wait(running[ready]):
            return running[:0]
        if table.is_constrained.any():
            ready &= ~table.is_constrained[running] | (table.num_known[running] == length)
        decoding: Ints = running if ready.all() else running[ready]
        return decoding[: min(turn.max_tokens, self.limits.max_rows)]

    def _propose(self, decoding: Ints, max_tokens: int) -> ProposedRows | None:
        if self.speculation is None:
            return None
        room = (max_tokens - len(decoding)) // 2  # the other half is left to prompts
        return self.speculation.propose(decoding, room)

    # Plan.

    def _plan_prefill(self, slots: Ints, counts: Ints, proposed: ProposedRows | None = None) -> GeneratePlan:
        """Plan a step with prompts."""
        if self.speculation is not None:
            self.speculation.interrupted()
        return self._plan(slots, counts, proposed)

    def _plan_decode(self, turn: Turn, slots: Ints, proposed: ProposedRows | None) -> GeneratePlan:
        """Plan a step of decodes only."""
        plan = self._plan(slots, np.ones(len(slots), dtype=np.int32), proposed)
        if self.speculation is not None:
            self.speculation.planned(turn.now_s, slots, 0 if proposed is None else proposed.total)
        return plan

    def _plan(self, slots: Ints, counts: Ints, proposed: ProposedRows | None = None) -> GeneratePlan:
        """Plan a step of these sequences. Proposals belong to the first of them, which decode."""
        table = self._slots
        begins, prompts = table.num_computed[slots], self._active.prompt_logprobs.requested(slots)
        samples = table.schedule(slots, counts)
        rows = StepRows(
            slots=slots,
            begins=begins,
            counts=counts,
            samples=samples,
            num_known=table.num_known[slots],
            num_logprobs=table.num_logprobs[slots],
            epochs=table.epoch[slots],
            visits=table.visit[slots],
            adapters=self._adapters_of(slots),
        )
        if proposed is not None:
            num_proposed = np.zeros(len(slots), dtype=np.int32)
            num_proposed[: len(proposed.counts)] = proposed.counts
            rows = rows.with_proposals(num_proposed, table.token_ids)
            if prompts is not None:
                prompts = prompts._replace(lengths=np.repeat(prompts.lengths, num_proposed + 1))
        memory = SequenceMemory(table.token_ids, table.block_tables, self.pool.block_size)
        masks = self._masks(slots[samples & table.is_constrained[slots]])
        changes = SamplerChanges(table.take_leaves(), table.take_joins(), masks)
        plan = generation_plan(rows, memory, changes, prompts)
        return with_images(plan, table, self.image_cache) if table.has_images[slots].any() else plan

    def _adapters_of(self, slots: Ints) -> Ints | None:
        """The adapter of each row; None if no row has one."""
        adapters: Ints = self._slots.adapter[slots]
        return adapters if (adapters >= 0).any() else None

    def _masks(self, slots: Ints) -> tuple[tuple[int, Ints], ...]:
        """The tokens that constrained sequences may sample. The CPU has read all their earlier tokens."""
        masks = []
        for slot in slots.tolist():
            sequence = self._slots[slot]
            if sequence.constraint is None:
                continue
            try:
                masks.append((slot, sequence.constraint.mask().view(np.int32).copy()))
            except PenstockError as error:
                self._requests.fail(sequence.request.id, error)
        return tuple(masks)

    # Collect and recover.

    def collect(self, plan: GeneratePlan, result: SampledResult) -> list[DecodedTokens | GeneratedTokens]:
        """Append the tokens of a step, publish the blocks that it filled, and finish sequences that end.
        Sequences that only continue share one `DecodedTokens`."""
        self._prefills.budget.times.record(plan.num_tokens, result.device_s)
        return self._results.collect(plan.sample, result, self.speculation)

    def step_failed(self, plan: GeneratePlan, *, isolate: bool = True) -> list[Request]:
        """Recover from a failed step: its sequences start over from their known tokens. With `isolate`, their
        requests then run one at a time. A request that was alone in the step is dropped and returned."""
        sample, table, active = plan.sample, self._slots, self._active
        slots = dict.fromkeys(sample.slots[table.is_current(sample)].tolist())
        sequences = [sequence for slot in slots if (sequence := table.find(slot)) is not None]
        requests = {sequence.request.id: sequence.request for sequence in sequences}
        if isolate and len(requests) == 1:
            (request,) = requests.values()
            self.cancel(request.id)
            return [request]
        for sequence in sequences:
            if sequence.slot in active.running:
                active.preempt(sequence)
            table.restart(sequence)
        if isolate:
            self._requests.suspects.add(requests)
        return []
