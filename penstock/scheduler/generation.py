"""Generation policy: which sequences prefill, decode, are preempted and finish.

A sequence waits, gets a slot and the KV cache blocks of its prompt, prefills in chunks, and decodes one token
per step. When no block is free the newest sequence is preempted: it keeps its slot, loses its blocks, and
starts over later with all its tokens as prompt. `SlotTable` holds the numbers that change every step.

Background sequences never share a step with others. While others run they pause: they keep their slots, and
their blocks until somebody else needs them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backlog import max_queued_of
from penstock.content import PrefixKeys
from penstock.errors import NotPossible, PenstockError, QueueFull, RowFailed
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.fair_queue import STEPS_IN_HEAD_START, FairQueue
from penstock.scheduler.generation_images import num_features, with_images
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.limits import GenerationLimits
from penstock.scheduler.logprobs import Logprobs, PromptLogprobs, split_logprobs
from penstock.scheduler.prefill_budget import PrefillBudget, PrefillDemand
from penstock.scheduler.queue import HEAD_START_S
from penstock.scheduler.sequence import Constraint, SequenceState
from penstock.scheduler.slots import SlotTable
from penstock.scheduler.speculation import ProposedRows, Proposer, Speculation, is_last_of_run
from penstock.scheduler.start_deadlines import StartDeadlines
from penstock.scheduler.steps import SamplerChanges, SequenceMemory, StepRows, generation_plan
from penstock.scheduler.suspects import MayRun, SuspectRequests
from penstock.types import (
    DecodedTokens,
    GeneratedTokens,
    GeneratePlan,
    Ints,
    Request,
    SampledResult,
    SamplePlan,
    SamplerParams,
    Timings,
)

__all__ = ["Constraint", "GenerationLimits", "GenerationScheduler"]

_BEHIND_ALL = 1e12  # seconds in the rank of a background sequence: it is preempted before any other
_LATEST_WEIGHT = 0.05  # of the latest sequence in the mean length of outputs
_NOT_FINITE = "the model gave logits that are not finite"
_ALL_FORBIDDEN = (
    "no token may follow: the grammar, allowed_token_ids, bad_words and min_tokens of the request leave none"
)
_ALL_MINUS_INFINITY = "no token may follow: the model gives −inf for all of them"


class _Allocation(NamedTuple):
    """The blocks of all tokens of a sequence; the first `num_cached` hold a prefix that is computed
    already."""

    blocks: list[int]
    num_cached: int


class _Turn(NamedTuple):
    """Whose turn the next step is, and what it may take."""

    may_run: MayRun | None  # None: all may
    admits: bool  # sequences that wait may take slots and blocks
    max_tokens: int
    is_background: bool = False  # which of the two lines sequences are admitted from


class GenerationScheduler:
    """add → schedule → collect, for requests with `SamplerParams`."""

    def __init__(
        self, pool: BlockPool, limits: GenerationLimits, image_cache: ImageCache | None = None
    ) -> None:
        """`image_cache` is for prompts with images."""
        self.pool = pool
        self.limits = limits
        self.max_adapters = 0  # different ones in one step; 0: no limit
        self.image_cache = image_cache
        self.can_mix_steps: Callable[[], bool] = lambda: True  # prompts may run beside decodes
        self.speculation: Speculation | None = None  # None: every sequence runs one token a step
        self.num_preemptions = 0
        self.queued_tokens = 0  # without those of background requests
        self.queued_background_tokens = 0
        self.num_started_tokens = 0  # of prompts that no longer wait
        self._now_s = 0.0
        self._slots = SlotTable(limits.max_rows, limits.max_length, pool.blocks_for(limits.max_length))
        self._prompt_logprobs = PromptLogprobs(self._slots)
        self._running: list[int] = []  # slots, by rank: the newest sequence is last
        self._preempted: list[SequenceState] = []  # with a slot but no blocks, by rank
        self._waiting = FairQueue[SequenceState]()  # with neither
        self._waiting.head_start_tokens = STEPS_IN_HEAD_START * limits.max_tokens
        self._background = FairQueue[SequenceState]()  # background sequences with neither
        self._background_ids: set[str] = set()  # of unfinished background requests
        self._unreplayable_ids: set[str] = set()  # of those whose prompts no graph runs beside decodes
        self._mean_output = 0.0  # tokens of finished sequences
        self._unfinished: dict[str, list[SequenceState]] = {}  # of each request
        self._failures: dict[str, PenstockError] = {}  # requests that cannot continue, until `take_failures`
        self._suspects = SuspectRequests()
        self._may_have_deadlines = False
        self._start_by = StartDeadlines(self._waits_to_start)
        self._last_was_prefill = False
        self._prefill_budget = PrefillBudget(limits.target_itl_s)
        self._count = itertools.count()

    def enable_speculation(
        self, make_proposer: Callable[[SlotTable], Proposer], *, is_adaptive: bool = True
    ) -> None:
        """Let sequences run tokens that a proposer expects; without `is_adaptive`, even where that loses."""
        proposer = make_proposer(self._slots)
        self.speculation = Speculation(self._slots, self.pool, proposer, is_adaptive=is_adaptive)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    @property
    def busy(self) -> bool:
        return bool(self._unfinished)

    def requests(self) -> list[Request]:
        """The unfinished ones."""
        return [sequences[0].request for sequences in self._unfinished.values()]

    @property
    def has_background(self) -> bool:
        """Whether background requests are unfinished."""
        return bool(self._background_ids)

    @property
    def has_interactive(self) -> bool:
        """Whether other than background requests are unfinished."""
        return len(self._unfinished) > len(self._background_ids)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    def check(self, request: Request) -> SamplerParams:
        """`BadValue` for a request that can never run, `QueueFull` if too many tokens wait."""
        if request.sampling is None:
            raise NotPossible("a request without sampling parameters cannot generate")
        self.limits.check(request, request.sampling)
        if request.images is not None:
            if self.image_cache is None:
                raise NotPossible("this model reads no images", param="images")
            self.image_cache.check(request)
        waiting, limit = self.queued_tokens, self.limits.max_queued_tokens
        if request.is_background:
            waiting = self.queued_background_tokens
        if waiting and waiting + request.num_tokens > limit:
            held = self.queued_tokens_of(request.client)
            limit = max_queued_of(limit, waiting, held, self._waiting.num_clients)
            if waiting + request.num_tokens > limit:
                raise QueueFull(
                    f"{waiting} tokens of prompts are waiting and at most {limit} may; try again shortly"
                )
        return request.sampling

    def queued_tokens_of(self, client: str) -> int:
        """Tokens of a client's prompts that wait."""
        return self._waiting.num_tokens_of(client)

    @property
    def queued_weight(self) -> float:
        """The weights of all clients whose prompts wait."""
        return self._waiting.weight

    def add(
        self, request: Request, constraints: Sequence[Constraint] = (), start_by_s: float | None = None
    ) -> None:
        """Check a request and queue it. With `constraints`, one for each row, a sequence's token is read
        before its next one is planned. `overdue` gives it up if nothing of it runs at `start_by_s`."""
        sampling, number = self.check(request), next(self._count)
        start = request.arrival_s + request.priority * HEAD_START_S
        if request.is_background:
            start += _BEHIND_ALL
            self._background_ids.add(request.id)
        if _is_unreplayable(request, sampling):
            self._unreplayable_ids.add(request.id)
        size = self.pool.block_size
        sequences = [
            SequenceState(request, sampling, row, (start, number, row), PrefixKeys(request, row, size))
            for row in range(request.num_rows)
        ]
        for sequence, constraint in zip(sequences, constraints, strict=False):
            sequence.constraint = constraint
        self._unfinished[request.id] = sequences
        self._may_have_deadlines |= request.deadline_s is not None
        line = self._background if request.is_background else self._waiting
        for sequence in sequences:
            num_tokens = len(sequence.prompt)
            sequence.client = line.add(sequence.rank, sequence, num_tokens)
            sequence.client.num_tokens += num_tokens
        self._count_queued(request, request.num_tokens)
        if start_by_s is not None:
            self._start_by.add(start_by_s, sequences)

    def _count_queued(self, request: Request, num_tokens: int) -> None:
        if request.is_background:
            self.queued_background_tokens += num_tokens
        else:
            self.queued_tokens += num_tokens

    def cancel(self, request_id: str) -> None:
        """Drop a request: its blocks and slots are free for the next step."""
        for sequence in self._unfinished.pop(request_id, ()):
            self._drop(sequence)
        self._background_ids.discard(request_id)
        self._unreplayable_ids.discard(request_id)
        self._suspects.discard(request_id)

    def clear(self) -> list[str]:
        """Drop every request and return their ids."""
        names = list(self._unfinished)
        for name in names:
            self.cancel(name)
        return names

    def expire(self, now_s: float) -> list[Request]:
        """Drop and return the requests whose deadline has passed."""
        if not self._may_have_deadlines:
            return []
        requests = [sequences[0].request for sequences in self._unfinished.values()]
        expired = [r for r in requests if r.deadline_s is not None and r.deadline_s <= now_s]
        for request in expired:
            self.cancel(request.id)
        return expired

    def overdue(self, now_s: float) -> list[Request]:
        """Drop and return the requests that should have started by now."""
        requests = [sequences[0].request for sequences in self._start_by.pop_overdue(now_s)]
        for request in requests:
            self.cancel(request.id)
        return requests

    def _waits_to_start(self, sequences: list[SequenceState]) -> bool:
        """Whether none of the sequences of a request has begun."""
        if not sequences or len(sequences) < sequences[0].request.num_rows:
            return False
        is_current = self._unfinished.get(sequences[0].request.id) is sequences
        return is_current and all(sequence.slot < 0 for sequence in sequences)

    def take_failures(self) -> dict[str, PenstockError]:
        """Drop the requests that cannot continue; their errors by id."""
        failures, self._failures = self._failures, {}
        for request_id in failures:
            self.cancel(request_id)
        return failures

    def next_deadline_s(self) -> float | None:
        start_by_s = self._start_by.next_s()
        if not self._may_have_deadlines:
            return start_by_s
        deadlines = [sequences[0].request.deadline_s for sequences in self._unfinished.values()]
        self._may_have_deadlines = any(d is not None for d in deadlines)
        return min((d for d in (start_by_s, *deadlines) if d is not None), default=None)

    def take_freed_slots(self) -> tuple[int, ...]:
        """Slots that were freed since the last step was planned; the caller tells the sampler."""
        return self._slots.take_leaves()

    def check_integrity(self) -> None:
        """Assert that every slot and block belongs to one sequence or to none."""
        preempted = [sequence.slot for sequence in self._preempted]
        self._slots.check_integrity(self._running, preempted, self.pool.block_size)
        waiting = list(self._waiting.walk())
        background = list(self._background.walk())
        assert all(not sequence.blocks for sequence in waiting + background)
        num_unfinished = sum(map(len, self._unfinished.values()))
        assert num_unfinished == len(self._running) + len(preempted) + len(waiting) + len(background)
        assert self.queued_tokens == sum(len(sequence.prompt) for sequence in waiting)
        assert self.queued_background_tokens == sum(len(sequence.prompt) for sequence in background)
        assert self._background_ids <= self._unfinished.keys()
        assert self._unreplayable_ids <= self._unfinished.keys()
        self.pool.check()
        if not self._unfinished:
            assert self.pool.available == self.pool.num_blocks, "blocks are held though no sequence is left"

    # Schedule.

    def schedule(self, now_s: float, *, admit: bool = True) -> GeneratePlan | None:
        """Plan the next step: decodes first, then chunks of prompts; None if nothing can run. Without `admit`
        no waiting sequence takes blocks."""
        self._now_s = now_s
        if not self._running and not self._preempted and not len(self._waiting):
            return None
        max_tokens = self.limits.max_tokens
        if not self._suspects:
            if not self._background_ids:
                return self._next_step(_Turn(None, admit, max_tokens))
            if not self.has_interactive:
                return None
            return self._next_step(_Turn(self._is_interactive, admit, max_tokens))
        plan = self._next_step(_Turn(self._suspects.only_first(), True, max_tokens))
        # The suspect may need blocks of running sequences. These continue, but nobody is admitted before it.
        return plan or self._next_step(_Turn(self._suspects.none(), False, max_tokens))

    def schedule_background(
        self, now_s: float, max_tokens: int, *, admit: bool = True
    ) -> GeneratePlan | None:
        """Plan a step of background sequences alone; None if none can run."""
        if not self._background_ids or self._suspects:
            return None
        self._now_s = now_s
        max_tokens = max(1, min(max_tokens, self.limits.max_tokens))
        turn = _Turn(self._background_ids.__contains__, admit, max_tokens, is_background=True)
        return self._next_step(turn)

    def _is_interactive(self, request_id: str) -> bool:
        return request_id not in self._background_ids

    def _next_step(self, turn: _Turn) -> GeneratePlan | None:
        """A step of the requests whose turn it is."""
        if self._separates_prefill:
            return self._prefill_or_decode(turn)
        decode = self._grow(self._decoding(turn))
        proposed = self._propose(decode, turn.max_tokens)
        num_decoding = len(decode) + (0 if proposed is None else proposed.total)
        max_tokens, max_rows = turn.max_tokens - num_decoding, self.limits.max_rows - len(decode)
        if self.limits.target_itl_s and not turn.is_background:
            max_tokens = self._prefill_budget.max_tokens(self._demand(num_decoding, max_tokens))
        prefill = list(self._prefill(turn, max_tokens, max_rows))
        if not prefill:
            return self._plan_decode(decode, proposed) if len(decode) else None
        slots, counts = np.array(prefill, dtype=np.int32).T
        counts = np.concatenate([np.ones(len(decode), dtype=np.int32), counts])
        return self._plan_prefill(np.concatenate([decode, slots]), counts, proposed)

    @property
    def _separates_prefill(self) -> bool:
        """Whether a step has either prompts or decodes."""
        if self.limits.separate_prefill or not self.can_mix_steps():
            return True
        return self.limits.mixed_needs_graph and bool(self._unreplayable_ids)

    def _demand(self, num_decoding: int, max_tokens: int) -> PrefillDemand:
        """The prompts that have begun, and those that could begin with the slots and blocks that are free."""
        table, pool = self._slots, self.pool
        running = np.array(self._running, dtype=np.int32)
        lengths = table.num_tokens[running]
        begun = lengths[lengths - table.num_computed[running] > 1]
        preempted = sum(int(table.num_tokens[sequence.slot]) for sequence in self._preempted)
        num_prompts, num_tokens = len(begun) + len(self._preempted), int(begun.sum()) + preempted
        if num_waiting := len(self._waiting):
            mean_length = self.queued_tokens / num_waiting
            num_fitting = pool.available // max(1, pool.blocks_for(int(mean_length)))
            num_waiting = min(num_waiting, table.num_free, num_fitting)
        return PrefillDemand(
            num_decoding,
            num_prompts + num_waiting,
            num_tokens + (int(num_waiting * mean_length) if num_waiting else 0),
            max_tokens,
        )

    def _prefill_or_decode(self, turn: _Turn) -> GeneratePlan | None:
        """A step of one kind: prefill, unless the last step was one and sequences decode."""
        for is_prefill in (not self._last_was_prefill, self._last_was_prefill, False):
            if is_prefill:
                found = self._prefill(turn, turn.max_tokens, self.limits.max_rows)
                # A sequence whose prefix is cached but for one token decodes with the others.
                several = [(slot, count) for slot, count in found if self._num_to_run(slot) > 1]
                slots, counts = np.array(several, dtype=np.int32).reshape(-1, 2).T
                plan = self._plan_prefill(slots, counts) if len(slots) else None
            else:
                slots = self._grow(self._decoding(turn))
                proposed = self._propose(slots, turn.max_tokens)
                plan = self._plan_decode(slots, proposed) if len(slots) else None
            if plan is not None:
                self._last_was_prefill = is_prefill
                return plan
        return None

    def _propose(self, decoding: Ints, max_tokens: int) -> ProposedRows | None:
        if self.speculation is None:
            return None
        room = (max_tokens - len(decoding)) // 2  # the other half is left to prompts
        return self.speculation.propose(decoding, room)

    def _plan_prefill(self, slots: Ints, counts: Ints, proposed: ProposedRows | None = None) -> GeneratePlan:
        """A step with prompts in it."""
        if self.speculation is not None:
            self.speculation.interrupted()
        return self._plan(slots, counts, proposed)

    def _plan_decode(self, slots: Ints, proposed: ProposedRows | None) -> GeneratePlan:
        """A step of sequences that decode, without prompts."""
        plan = self._plan(slots, np.ones(len(slots), dtype=np.int32), proposed)
        if self.speculation is not None:
            self.speculation.planned(self._now_s, slots, 0 if proposed is None else proposed.total)
        return plan

    def _plan(self, slots: Ints, counts: Ints, proposed: ProposedRows | None = None) -> GeneratePlan:
        """A step of these sequences; the first of them have the proposed tokens."""
        table = self._slots
        begins, prompts = table.num_computed[slots], self._prompt_logprobs.requested(slots)
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
        """The adapter of each row; None if none has one."""
        adapters: Ints = self._slots.adapter[slots]
        return adapters if (adapters >= 0).any() else None

    def _has_adapter_room(self, sequence: SequenceState) -> bool:
        """Whether a sequence can run beside those that run: all of them may be in one step. Sequences behind
        one that cannot wait too, so its turn comes."""
        adapters, table = sequence.request.adapters, self._slots
        if not self.max_adapters or adapters is None or (own := int(adapters[sequence.row])) < 0:
            return True
        is_background = sequence.request.is_background
        running = {
            int(table.adapter[slot])
            for slot in self._running
            if table[slot].request.is_background == is_background
        } - {-1}
        return own in running or len(running) < self.max_adapters

    def _masks(self, slots: Ints) -> tuple[tuple[int, Ints], ...]:
        """The tokens that constrained sequences may sample; all tokens before are known."""
        masks = []
        for slot in slots.tolist():
            sequence = self._slots[slot]
            if sequence.constraint is None:
                continue
            try:
                masks.append((slot, sequence.constraint.mask().view(np.int32).copy()))
            except PenstockError as error:
                self._failures[sequence.request.id] = error
        return tuple(masks)

    def _num_to_run(self, slot: int) -> int:
        return int(self._slots.num_tokens[slot] - self._slots.num_computed[slot])

    def _decoding(self, turn: _Turn) -> Ints:
        """Slots of the sequences that run one token, oldest first, as many as fit into a step."""
        table, chosen, may_run = self._slots, self._running, turn.may_run
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

    def _grow(self, decoding: Ints) -> Ints:
        """Give a block to each decoding sequence that needs one; preempts the newest while none is free."""
        table = self._slots
        needed = -(-table.num_tokens[decoding] // self.pool.block_size)
        short = decoding[needed > table.num_blocks[decoding]]
        if not len(short):
            return decoding
        if (blocks := self.pool.allocate(len(short))) is not None:
            table.add_block_each(short, blocks)
            return decoding
        for slot in short.tolist():
            while slot in self._running:
                if (block := self.pool.allocate(1)) is not None:
                    table.add_blocks(table[slot], block)
                    break
                self._preempt(table[self._running[-1]])
                self.num_preemptions += 1
        still_running = set(self._running)
        return np.array([slot for slot in decoding.tolist() if slot in still_running], dtype=np.int32)

    def _prefill(self, turn: _Turn, max_tokens: int, max_rows: int) -> Iterator[tuple[int, int]]:
        """Slots that prefill, with the number of tokens of each."""
        if max_tokens <= 0 or max_rows <= 0:
            return
        num_image_features, num_partial = 0, 0
        for slot in self._prefilling(turn):
            num_left = self._num_to_run(slot)
            count = min(num_left, self.limits.max_chunk_tokens, max_tokens)
            if count < num_left and (num_partial := num_partial + 1) > self.limits.max_partial_prefills > 0:
                return
            if self.image_cache is not None and self._slots.has_images[slot]:
                first = int(self._slots.num_computed[slot])
                needed = num_features(self._slots[slot], first, first + count)
                if num_image_features and num_image_features + needed > self.image_cache.size:
                    return  # it runs in the next step
                num_image_features += needed
            yield slot, count
            max_tokens, max_rows = max_tokens - count, max_rows - 1
            if max_tokens <= 0 or max_rows <= 0:
                return

    def _prefilling(self, turn: _Turn) -> Iterable[int]:
        """Slots with more than one token to run: running, then preempted, then new sequences."""
        table, may_run = self._slots, turn.may_run
        running = np.array(self._running, dtype=np.int32)
        for slot in running[table.num_tokens[running] - table.num_computed[running] > 1].tolist():
            if may_run is None or may_run(table[slot].request.id):
                yield slot
        for sequence in [s for s in self._preempted if may_run is None or may_run(s.request.id)]:
            slot = sequence.slot
            if table.num_known[slot] < table.num_tokens[slot]:
                continue  # its last token is in flight
            if not self._has_adapter_room(sequence) or not self._resume(sequence):
                return
            yield slot
        line = self._background if turn.is_background else self._waiting
        while turn.admits and table.has_free and not (turn.is_background and self._leaves_few_slots()):
            new = next((s for s in line.walk() if may_run is None or may_run(s.request.id)), None)
            if new is None or not self._has_adapter_room(new) or not self._admit(new):
                return
            yield new.slot

    def _leaves_few_slots(self) -> bool:
        """Whether background sequences hold half of all slots; the others are for those of other requests."""
        held = sum(self._slots[slot].request.is_background for slot in self._running)
        held += sum(sequence.request.is_background for sequence in self._preempted)
        return 2 * held >= self.limits.max_rows

    def _admit(self, sequence: SequenceState) -> bool:
        """Give a waiting sequence its slot and the blocks of its prompt; False if none are free."""
        if (allocation := self._allocate(sequence, sequence.prompt)) is None:
            return False
        output = min(self._mean_output, sequence.sampling.max_tokens)
        self._leave_queue(sequence, runs=len(sequence.prompt) + output)
        if not sequence.request.is_background:
            self.num_started_tokens += len(sequence.prompt)
        sequence.queued_s = max(0.0, self._now_s - sequence.request.arrival_s)
        self._slots.assign(sequence)
        self._prompt_logprobs.join(sequence)
        self._run(sequence, allocation)
        return True

    def _resume(self, sequence: SequenceState) -> bool:
        """Give a preempted sequence blocks for all its tokens; False if none are free."""
        slot = sequence.slot
        token_ids = self._slots.token_ids[slot, : int(self._slots.num_tokens[slot])]
        if (allocation := self._allocate(sequence, token_ids)) is None:
            return False
        self._preempted.remove(sequence)
        self._run(sequence, allocation)
        return True

    def _allocate(self, sequence: SequenceState, token_ids: Ints) -> _Allocation | None:
        """Blocks for these tokens, those of a cached prefix among them; the last token is always computed."""
        pool, cached = self.pool, []
        if self.limits.prefix_caching and not sequence.wants_prompt_logprobs:
            keys = sequence.prefix_keys.extend(token_ids[:-1])
            cached = pool.match(keys[: (len(token_ids) - 1) // pool.block_size])
        needed = pool.blocks_for(len(token_ids)) - len(cached)
        # Spare blocks keep the new sequence from being preempted at once.
        spare = min(len(self._running), pool.num_blocks // 64)
        while needed + spare > pool.available and self._preempt_background(sequence):
            pass
        rest = pool.allocate(needed) if needed + spare <= pool.available else None
        if rest is None:
            pool.release(cached)
            return None
        return _Allocation(cached + rest, len(cached))

    def _run(self, sequence: SequenceState, allocation: _Allocation) -> None:
        self._slots.start_visit(sequence, allocation.blocks, allocation.num_cached, self.pool.block_size)
        bisect.insort(self._running, sequence.slot, key=lambda slot: self._slots[slot].rank)

    # Collect.

    def collect(self, plan: GeneratePlan, result: SampledResult) -> list[DecodedTokens | GeneratedTokens]:
        """Take in the tokens of a step, publish the blocks that it filled, and finish sequences that end.
        Sequences that merely continue share one `DecodedTokens`."""
        sample, table = plan.sample, self._slots
        self._prefill_budget.times.record(plan.num_tokens, result.device_s)
        current = table.is_current(sample)
        table.device_s[sample.slots[current]] += result.device_s
        new = result.token_ids
        keep = current[sample.sampled_rows]
        if self.speculation is not None and sample.verify is not None:
            keep &= self.speculation.verify(sample, sample.verify, new, keep)
        if (new < 0).any():
            self._fail_without_token(sample.sampled_slots[keep & (new < 0)], new[keep & (new < 0)])
            current = table.is_current(sample)
            keep &= current[sample.sampled_rows]
        slots, token_ids = sample.sampled_slots[keep], new[keep]
        offsets = None if sample.verify is None else sample.verify.offsets[keep]
        if offsets is None:
            table.append(slots, token_ids)
        else:
            has_blocks = table.visit[slots] == sample.visits[sample.sampled_rows][keep]
            table.append_runs(slots, token_ids, offsets, has_blocks)
        if self.limits.prefix_caching:
            self._publish(sample, current)
        stopped, full = table.stopped(slots, token_ids), table.is_full(slots)
        if offsets is not None:
            full &= is_last_of_run(offsets)
        if sample.prompts is not None and result.prompt_logprobs is not None:
            for sequence in self._prompt_logprobs.store(sample.prompts, sample, result.prompt_logprobs):
                self._failures[sequence.request.id] = RowFailed(_NOT_FINITE)
        if self._suspects and len(slots):
            self._suspects.clear({request_id for request_id, _ in table.sequence_ids(slots)})
        in_detail = stopped | full | table.needs_details[slots]
        if offsets is not None:
            in_detail = np.isin(slots, slots[in_detail])  # all tokens of a sequence in their order
        if not in_detail.any():
            return [*self._decoded(slots, token_ids, offsets)]
        others = ~in_detail
        outcomes: list[DecodedTokens | GeneratedTokens] = []
        if others.any():
            outcomes += self._decoded(
                slots[others], token_ids[others], None if offsets is None else offsets[others]
            )
        logprobs = split_logprobs(result.logprobs, sample.num_logprobs, keep)
        for i in np.flatnonzero(in_detail).tolist():
            ends = bool(stopped[i]), bool(full[i])
            outcomes.append(self._output(table[int(slots[i])], token_ids[i : i + 1], *ends, logprobs[i]))
        return outcomes

    def _decoded(self, slots: Ints, token_ids: Ints, offsets: Ints | None) -> list[DecodedTokens]:
        """New tokens of sequences that merely continue: the first of each, then the second of some, …"""
        if not len(slots):
            return []
        if offsets is None or not offsets.any():
            return [DecodedTokens(self._slots.sequence_ids(slots), token_ids)]
        columns = [offsets == offset for offset in range(int(offsets.max()) + 1)]
        return [
            DecodedTokens(self._slots.sequence_ids(slots[column]), token_ids[column]) for column in columns
        ]

    def _fail_without_token(self, slots: Ints, codes: Ints) -> None:
        """Fail the requests for which no token could be sampled, and unpublish what invalid ones wrote."""
        for slot, code in zip(slots.tolist(), codes.tolist(), strict=True):
            sequence = self._slots.find(slot)
            if sequence is None:  # another sequence of its request failed before
                continue
            request_id, not_finite = sequence.request.id, code == -1
            self._failures[request_id] = RowFailed(_NOT_FINITE) if not_finite else _nothing_follows(sequence)
            for other in self._unfinished[request_id] if not_finite else ():
                self.pool.retract(other.blocks)
            self.cancel(request_id)

    def _publish(self, sample: SamplePlan, current: NDArray[np.bool_]) -> None:
        """Publish the blocks that a step has filled with known tokens, for sequences with the same prefix."""
        table, slots, size = self._slots, sample.slots, self.pool.block_size
        current = current & (table.visit[slots] == sample.visits)
        # Behind the computed tokens stand those of rejected proposals.
        ends = np.minimum(sample.ends, np.minimum(table.num_known[slots], table.num_computed[slots]))
        for i in np.flatnonzero(current & (ends // size > table.num_published[slots])).tolist():
            slot, num_full = int(slots[i]), int(ends[i]) // size
            sequence = table[slot]
            keys = sequence.prefix_keys.extend(table.token_ids[slot, : num_full * size])
            for block in range(int(table.num_published[slot]), num_full):
                self.pool.publish(sequence.blocks[block], keys[block])
            table.num_published[slot] = num_full

    def _output(
        self, sequence: SequenceState, new: Ints, stopped: bool, full: bool, logprobs: Logprobs
    ) -> GeneratedTokens:
        """One new token of a sequence, and the end if it ends. A stop token is not among those shown."""
        completed = False
        if sequence.constraint is not None and not stopped:
            completed = self._accept(sequence, sequence.constraint, int(new[0]))
        prompt_logprobs = PromptLogprobs.take(sequence)
        finish, timings = None, None
        if stopped or completed or full:
            finish = "stop" if stopped or completed else "length"
            timings = Timings(sequence.queued_s, float(self._slots.device_s[sequence.slot]))
            self._finish(sequence)
        return GeneratedTokens(
            id=sequence.request.id,
            row=sequence.row,
            token_ids=new[:0] if stopped else new,
            finish_reason=finish,
            stop_token=int(new[0]) if stopped else None,
            logprob_ids=logprobs.ids,
            logprobs=logprobs.values,
            ranks=logprobs.ranks,
            timings=timings,
            prompt_logprob_ids=prompt_logprobs.ids,
            prompt_logprobs=prompt_logprobs.values,
            prompt_ranks=prompt_logprobs.ranks,
        )

    def _accept(self, sequence: SequenceState, constraint: Constraint, token: int) -> bool:
        """Advance a constraint by a token; whether the text is complete with it."""
        try:
            constraint.accept(token)
        except PenstockError as error:
            self._failures[sequence.request.id] = error
        return constraint.done

    # Preempt, finish and recover.

    def step_failed(self, plan: GeneratePlan, *, isolate: bool = True) -> list[Request]:
        """Recover from a failed step: its sequences start over from their known tokens. With `isolate` their
        requests run one at a time; a request that was alone in the step is dropped and returned."""
        sample, table = plan.sample, self._slots
        slots = dict.fromkeys(sample.slots[table.is_current(sample)].tolist())
        sequences = [sequence for slot in slots if (sequence := table.find(slot)) is not None]
        requests = {sequence.request.id: sequence.request for sequence in sequences}
        if isolate and len(requests) == 1:
            (request,) = requests.values()
            self.cancel(request.id)
            return [request]
        for sequence in sequences:
            if sequence.slot in self._running:
                self._preempt(sequence)
            table.restart(sequence)
        if isolate:
            self._suspects.add(requests)
        return []

    def _preempt(self, sequence: SequenceState) -> None:
        """Take a sequence's blocks; it starts over with all its tokens as prompt."""
        self._running.remove(sequence.slot)
        self.pool.release(self._slots.end_visit(sequence))
        _insert(self._preempted, sequence)

    def _preempt_background(self, sequence: SequenceState) -> bool:
        """Take the blocks of the newest background sequence for one that is not; False if there is none."""
        if sequence.request.is_background or not self._background_ids or not self._running:
            return False
        newest = self._slots[self._running[-1]]
        if not newest.request.is_background:
            return False
        self._preempt(newest)
        self.num_preemptions += 1
        return True

    def _finish(self, sequence: SequenceState) -> None:
        num_generated = int(self._slots.num_known[sequence.slot]) - len(sequence.prompt)
        self._mean_output += _LATEST_WEIGHT * (num_generated - self._mean_output)
        sequences = self._unfinished[sequence.request.id]
        sequences.remove(sequence)
        if not sequences:
            del self._unfinished[sequence.request.id]
            self._background_ids.discard(sequence.request.id)
            self._unreplayable_ids.discard(sequence.request.id)
        self._drop(sequence)

    def _drop(self, sequence: SequenceState) -> None:
        """Free everything that a sequence holds."""
        if sequence.slot < 0:
            self._leave_queue(sequence)
            return
        if sequence.slot in self._running:
            self._running.remove(sequence.slot)
            self.pool.release(self._slots.end_visit(sequence))
        else:
            self._preempted.remove(sequence)
        self._prompt_logprobs.leave(sequence)
        self._slots.free(sequence)

    def _leave_queue(self, sequence: SequenceState, runs: float = 0.0) -> None:
        """Take a sequence from the queue, and charge its client for the tokens that it will run."""
        num_tokens, client = len(sequence.prompt), sequence.client
        line = self._background if sequence.request.is_background else self._waiting
        self._count_queued(sequence.request, -num_tokens)
        assert client is not None
        client.num_tokens -= num_tokens
        if runs:
            line.charge(client, runs)
        line.remove(client, sequence.rank)


def _is_unreplayable(request: Request, sampling: SamplerParams) -> bool:
    """Whether no graph runs a request's prompt beside decodes."""
    has_images = request.images is not None or request.rope_positions is not None
    return has_images or sampling.prompt_logprobs is not None


def _nothing_follows(sequence: SequenceState) -> PenstockError:
    """Why no token could be sampled: the request forbids them all, or the model gives none."""
    sampling = sequence.sampling
    forbids = sampling.grammar or sampling.allowed_token_ids or sampling.bad_token_ids or sampling.min_tokens
    return NotPossible(_ALL_FORBIDDEN) if forbids else RowFailed(_ALL_MINUS_INFINITY)


def _insert(sequences: list[SequenceState], sequence: SequenceState) -> None:
    bisect.insort(sequences, sequence, key=lambda other: other.rank)
