"""Generation: rows that stay after their prompt and take one token a step, on blocks of key/value memory.

All that changes every step is kept in arrays by slot, a row's place in the sampler and here, so that a
step costs a few NumPy calls however many rows it has. What the device has sampled but the CPU has not read is
counted as `length` beyond `known`: positions are planned before the tokens are here.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.content import PrefixKeys
from penstock.errors import BadValue, PenstockError, QueueFull, RowFailed
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.queue import HEAD_START_S
from penstock.scheduler.steps import StepRows, generation_plan
from penstock.types import (
    DecodedTokens,
    GeneratedTokens,
    GeneratePlan,
    Ints,
    Join,
    PromptPlan,
    Request,
    SampledResult,
    SamplePlan,
    SamplerParams,
    SequenceIds,
    Timings,
    TokenLogprobs,
    check_sampling,
)

Place = tuple[float, int, int]


class Constraint(Protocol):
    """What a row's text must follow."""

    @property
    def done(self) -> bool:
        """Whether nothing but the end may come."""

    def mask(self) -> NDArray[Any]:
        """The tokens that may come next, 32 to a word; the array may be overwritten by the next call."""

    def accept(self, token: int) -> None: ...


May = Callable[[str | None], bool]  # whether a request may run
_UNSOUND = "the model gave logits that are not finite"
_NOTHING_LEFT = "no token may follow: what the request forbids leaves none, or the model gives all −inf"


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    max_rows: int  # of one step, and the number of slots
    max_tokens: int  # of one step
    max_chunk_tokens: int  # of one sequence in one step
    max_length: int  # of a sequence, prompt and output
    max_queued_tokens: int  # of prompts that wait
    prefix_caching: bool = True  # keep full blocks for sequences with the same prefix
    vocab_size: int = 1 << 31
    separate_prefill: bool = False  # prefill and decode steps alternate, because each is replayed as a graph


@dataclass(slots=True, eq=False)
class SequenceState:
    """One prompt and where it stands; what changes every step lies in the lane's arrays."""

    request: Request
    row: int
    place: Place
    slot: int = -1  # none yet
    blocks: list[int] = field(default_factory=list)
    prefix_keys: PrefixKeys | None = None  # of its full blocks, while it holds blocks
    queued_s: float = 0.0
    constraint: Constraint | None = None
    prompt_scores: TokenLogprobs | None = None  # of its prompt, where asked for, filled chunk by chunk
    scored: bool = False  # all of them have been handed out

    @property
    def prompt(self) -> Ints:
        start = int(self.request.starts[self.row])
        return self.request.token_ids[start : start + int(self.request.lengths[self.row])]

    @property
    def sampling(self) -> SamplerParams:
        assert self.request.sampling is not None
        return self.request.sampling


class GenerationScheduler:
    """add → schedule → collect. A row waits, runs, may be paused for want of memory, and ends."""

    def __init__(self, pool: BlockPool, limits: GenerationLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.broken: dict[str, PenstockError] = {}  # requests that cannot go on, until `take_failures`
        self.preempted = 0  # how often a row gave way
        self.queued_tokens = 0
        self._now_s = 0.0
        slots = limits.max_rows
        self._rows: list[SequenceState | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._running: list[int] = []  # slots, by place: the last one is the newest
        self._paused: list[SequenceState] = []  # with a slot but no blocks, by place
        self._waiting: list[SequenceState] = []  # with neither, by place
        self._left: dict[str, list[SequenceState]] = {}  # request → rows that have not ended
        self._dated = False  # whether some of them may have a deadline
        self._suspects: list[str] = []  # requests of failed steps, each to be run apart
        self._count = itertools.count()
        self._joins: list[Join] = []
        self._leaves: list[int] = []
        self._alone = np.zeros(slots, dtype=bool)  # slots of whose tokens there is more to tell than the id
        self._named = (np.zeros(0, dtype=np.int32),) * 2  # slots and epochs that `_names` are of
        self._names: SequenceIds = ()
        self._tokens: Ints = np.zeros((slots, limits.max_length), dtype=np.int32)
        self._tables: Ints = np.zeros((slots, pool.blocks_for(limits.max_length)), dtype=np.int32)
        self._stops: Ints = np.full((slots, 1), -1, dtype=np.int32)
        # [slots] each: tokens of the row, those that the CPU has read, those that have run or are in a step
        # on its way, those of the prompt, those that it may have, and its blocks.
        self._length, self._known, self._done, self._prompt, self._most, self._held = (
            np.zeros(slots, dtype=np.int32) for _ in range(6)
        )
        # Tokens before which nothing stops it, blocks that others may use, log probabilities that it wants
        # (-1: none), and the counts of owners of the slot and of their stays in memory.
        self._least, self._published, self._wants, self._epoch, self._visit = (
            np.zeros(slots, dtype=np.int32) for _ in range(5)
        )
        self._device_s = np.zeros(slots)
        self._constrained = np.zeros(slots, dtype=bool)
        self._prompts_last = False
        self._scored_rows = 0  # rows with a slot whose prompt is asked about

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._left

    @property
    def busy(self) -> bool:
        return bool(self._left)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._paused)

    def check(self, request: Request) -> None:
        """`BadValue` for what can never run, `QueueFull` where too much waits."""
        assert request.sampling is not None
        self._check(request, request.sampling)
        if self.queued_tokens and self.queued_tokens + request.num_tokens > self.limits.max_queued_tokens:
            raise QueueFull(
                f"{self.queued_tokens} tokens of prompts are waiting and at most "
                f"{self.limits.max_queued_tokens} may; try again shortly"
            )

    def add(self, request: Request, constraints: Sequence[Constraint] = ()) -> None:
        """Join, once checked. Rows that must follow something have a constraint each, and wait for each of
        their tokens before the next is planned."""
        self.check(request)
        number = next(self._count)
        start = request.arrival_s + request.priority * HEAD_START_S
        rows = [SequenceState(request, row, (start, number, row)) for row in range(request.num_rows)]
        for row, constraint in zip(rows, constraints, strict=False):
            row.constraint = constraint
        self._left[request.id] = rows
        self._dated |= request.deadline_s is not None
        for row in rows:
            _insert(self._waiting, row)
        self.queued_tokens += request.num_tokens

    def cancel(self, request_id: str) -> None:
        """Forget a request: its blocks and slots are free for the next step."""
        for row in self._left.pop(request_id, ()):
            self._drop(row)
        self._suspects = [suspect for suspect in self._suspects if suspect != request_id]

    def clear(self) -> list[str]:
        """Forget every request, and tell which there were."""
        names = list(self._left)
        for name in names:
            self.cancel(name)
        return names

    def expire(self, now_s: float) -> list[Request]:
        """Let go of the requests whose deadline has passed, and return them."""
        if not self._dated:
            return []
        asked = [rows[0].request for rows in self._left.values()]
        late = [r for r in asked if r.deadline_s is not None and r.deadline_s <= now_s]
        for request in late:
            self.cancel(request.id)
        return late

    def take_failures(self) -> dict[str, PenstockError]:
        """Forget the requests that cannot go on, and say why."""
        broken, self.broken = self.broken, {}
        for request_id in broken:
            self.cancel(request_id)
        return broken

    def next_deadline_s(self) -> float | None:
        if not self._dated:
            return None
        deadlines = [rows[0].request.deadline_s for rows in self._left.values()]
        self._dated = any(d is not None for d in deadlines)
        return min((d for d in deadlines if d is not None), default=None)

    def schedule(self, now_s: float, *, admit: bool = True) -> GeneratePlan | None:
        """The next step: rows that go on by a token first, then prompts; None if nothing can run. Without
        `admit` no new row takes memory."""
        self._now_s = now_s
        if not self._running and not self._paused and not self._waiting:
            return None
        if not self._suspects:
            return self._next_step(None, begin=admit)
        one, suspects = self._suspects[0], set(self._suspects)
        plan = self._next_step(lambda name: name == one)
        # It may want memory that others hold, who then go on; but nobody new begins before it.
        return plan or self._next_step(lambda name: name not in suspects, begin=False)

    def _next_step(self, may: May | None, *, begin: bool = True) -> GeneratePlan | None:
        """A step of the requests that `may` run, None for all; with `begin`, of new rows too."""
        if self.limits.separate_prefill:
            return self._in_turn(may, begin)
        decode = self._grown(self._going_on(may))
        slots, counts = [decode], [np.ones(len(decode), dtype=np.int32)]
        tokens, rows = self.limits.max_tokens - len(decode), self.limits.max_rows - len(decode)
        for slot, count in self._prompts(may, begin, tokens, rows):
            slots.append(np.array([slot], dtype=np.int32))
            counts.append(np.array([count], dtype=np.int32))
        chosen, count_of = np.concatenate(slots), np.concatenate(counts)
        return self._planned(chosen, count_of) if len(chosen) else None

    def _in_turn(self, may: May | None, begin: bool) -> GeneratePlan | None:
        """The same, of one kind: prompts, unless the last step was theirs and other rows go on."""
        for prompts in (not self._prompts_last, self._prompts_last, False):
            if prompts:
                found = self._prompts(may, begin, self.limits.max_tokens, self.limits.max_rows)
                # A row that has begun and has one token to run goes on with the others.
                several = [one for one in found if self._length[one[0]] - self._done[one[0]] > 1]
                slots, counts = np.array(several, dtype=np.int32).reshape(-1, 2).T
            else:
                slots = self._grown(self._going_on(may))
                counts = np.ones(len(slots), dtype=np.int32)
            if len(slots):
                self._prompts_last = prompts
                return self._planned(slots, counts)
        return None

    def _prompts(self, may: May | None, begin: bool, tokens: int, rows: int) -> Iterator[tuple[int, int]]:
        """Slots that run parts of prompts, with how many tokens each, within so many of both."""
        if tokens <= 0 or rows <= 0:
            return
        for slot in self._prefilling(may, begin):
            count = min(int(self._length[slot] - self._done[slot]), self.limits.max_chunk_tokens, tokens)
            yield slot, count
            tokens, rows = tokens - count, rows - 1
            if tokens <= 0 or rows <= 0:
                return

    def collect(self, plan: GeneratePlan, result: SampledResult) -> list[DecodedTokens | GeneratedTokens]:
        """Take in what a step sampled, end the rows that are done, and publish the blocks it filled. Of rows
        that merely go on it tells together."""
        sample = plan.sample
        live = self._epoch[sample.slots] == sample.epochs
        self._device_s[sample.slots[live]] += result.device_s
        new = result.token_ids
        mine = live[sample.sampled_rows]
        if (new < 0).any():
            self._give_up(sample.sampled_slots[mine & (new < 0)], new[mine & (new < 0)])
            live = self._epoch[sample.slots] == sample.epochs
            mine = live[sample.sampled_rows]
        slots, new_ids = sample.sampled_slots[mine], new[mine]
        self._tokens[slots, self._known[slots]] = new_ids
        self._known[slots] += 1
        if self.limits.prefix_caching:
            self._publish(sample, live)
        stopped = (new_ids[:, None] == self._stops[slots]).any(axis=1)
        stopped &= self._known[slots] > self._least[slots]
        full = self._known[slots] >= self._most[slots]
        if sample.prompts is not None and result.prompt_logprobs is not None:
            self._take_scores(sample.prompts, sample, result.prompt_logprobs)
        if self._suspects and len(slots):
            self._clear({name for name, _ in self._names_of(slots)})
        apart = stopped | full | self._alone[slots]
        if not apart.any():
            return [DecodedTokens(self._names_of(slots), new_ids)] if len(slots) else []
        on = ~apart
        outcomes: list[DecodedTokens | GeneratedTokens] = []
        if on.any():
            outcomes.append(DecodedTokens(self._names_of(slots[on]), new_ids[on]))
        extras = _extras(result.logprobs, sample.num_logprobs, mine)
        for i in np.flatnonzero(apart).tolist():
            new, ends = new_ids[i : i + 1], (bool(stopped[i]), bool(full[i]))
            outcomes.append(self._part(int(slots[i]), new, *ends, extras[i]))
        return outcomes

    def _give_up(self, slots: Ints, codes: Ints) -> None:
        """No token could be chosen: these requests cannot go on, and nobody is to find what they wrote."""
        for slot, code in zip(slots.tolist(), codes.tolist(), strict=True):
            row = self._rows[slot]
            if row is None:  # another row of its request was at fault too
                continue
            self.broken[row.request.id] = RowFailed(_UNSOUND if code == -1 else _NOTHING_LEFT)
            for other in self._left[row.request.id] if code == -1 else ():
                self.pool.retract(other.blocks)
            self.cancel(row.request.id)

    def step_failed(self, plan: GeneratePlan, *, isolate: bool = True) -> list[Request]:
        """A step failed: the request that stood alone in it is at fault and is let go; others begin again
        from what is known of them, one at a time. Without `isolate` all begin again, together."""
        sample = plan.sample
        live = sample.slots[self._epoch[sample.slots] == sample.epochs]
        rows = [row for slot in live if (row := self._rows[slot]) is not None]
        requests = {row.request.id: row.request for row in rows}
        if isolate and len(requests) == 1:
            (request,) = requests.values()
            self.cancel(request.id)
            return [request]
        for row in rows:
            if row.slot in self._running:
                self._pause(row)
            self._epoch[row.slot] += 1  # what is on its way is built on sand
            self._length[row.slot] = self._known[row.slot]
            self._join_again(row)
        if isolate:
            self._suspects += [name for name in requests if name not in self._suspects]
        return []

    def take_freed_slots(self) -> list[int]:
        """Slots that were given up since the last step was planned; the caller tells the sampler."""
        left, self._leaves = self._leaves, []
        return left

    def check_integrity(self) -> None:
        """Every slot and block belongs to one row or to none."""
        held = [slot for slot, row in enumerate(self._rows) if row is not None]
        assert sorted(held + self._free) == list(range(self.limits.max_rows)), "slots are lost or held twice"
        paused = [row.slot for row in self._paused]
        assert sorted(self._running + paused) == held, "a row is neither running nor paused"
        assert all(not row.blocks for row in self._paused + self._waiting)
        rows = [row for name in self._left for row in self._left[name]]
        assert len(rows) == len(held) + len(self._waiting)
        assert self.queued_tokens == sum(len(row.prompt) for row in self._waiting)
        for slot in self._running:
            row = self._rows[slot]
            assert row is not None and row.slot == slot
            assert len(row.blocks) == self._held[slot]
            assert row.blocks == self._tables[slot, : len(row.blocks)].tolist()
            assert self._done[slot] <= self._length[slot] and self._known[slot] <= self._length[slot]
            assert self._done[slot] <= len(row.blocks) * self.pool.block_size
        self.pool.check()
        if not self._left:
            assert self.pool.available == self.pool.num_blocks, "blocks are held though no row is left"

    # Choosing.

    def _going_on(self, may: May | None) -> Ints:
        """Slots of the rows that need one more token, as far as they go into a step, the oldest first."""
        chosen = self._running if may is None else [s for s in self._running if may(self._name(s))]
        running = np.array(chosen, dtype=np.int32)
        length = self._length[running]
        last = (length - self._done[running] == 1) & (length < self._most[running])
        if self._constrained.any():
            last &= ~self._constrained[running] | (self._known[running] == length)
        ready: Ints = running if last.all() else running[last]
        return ready[: min(self.limits.max_tokens, self.limits.max_rows)]

    def _grown(self, ready: Ints) -> Ints:
        """A block for each row that needs one. Where none is free, the newest row gives way."""
        needed = -(-self._length[ready] // self.pool.block_size)
        short = ready[needed > self._held[ready]]
        if not len(short):
            return ready
        if (one_each := self.pool.allocate(len(short))) is not None:
            self._tables[short, self._held[short]] = one_each
            self._held[short] += 1
            for slot, taken in zip(short.tolist(), one_each, strict=True):
                if (row := self._rows[slot]) is not None:
                    row.blocks.append(taken)
            return ready
        for slot in short.tolist():
            while self._rows[slot] is not None and slot in self._running:
                if (block := self.pool.allocate(1)) is not None:
                    self._hold(slot, block)
                    break
                newest = self._rows[self._running[-1]]
                assert newest is not None
                self._pause(newest)
                self.preempted += 1
        still = set(self._running)
        return np.array([slot for slot in ready.tolist() if slot in still], dtype=np.int32)

    def _prefilling(self, may: May | None, begin: bool) -> Iterable[int]:
        """Slots with more than a token to run: those that have begun, those that gave way, new ones."""
        running = np.array(self._running, dtype=np.int32)
        for slot in running[self._length[running] - self._done[running] > 1].tolist():
            if may is None or may(self._name(slot)):
                yield slot
        for row in [r for r in self._paused if may is None or may(r.request.id)]:
            if self._known[row.slot] < self._length[row.slot]:
                continue  # its last token is on its way
            if not self._start(row):
                return
            self._paused.remove(row)
            yield row.slot
        while begin and self._free:
            new = next((r for r in self._waiting if may is None or may(r.request.id)), None)
            if new is None or not self._admit(new):
                return
            yield new.slot

    def _admit(self, row: SequenceState) -> bool:
        """Give a new row its slot and the blocks of its prompt."""
        slot, prompt, params = self._free[-1], row.prompt, row.sampling
        row.slot = slot
        self._tokens[slot, : len(prompt)] = prompt
        self._length[slot] = self._known[slot] = self._prompt[slot] = len(prompt)
        self._most[slot] = len(prompt) + params.max_tokens
        self._least[slot] = len(prompt) + params.min_tokens
        if not self._start(row):
            row.slot = -1
            return False
        self._free.pop()
        self._rows[slot] = row
        self._waiting.remove(row)
        self.queued_tokens -= len(prompt)
        self._set_stops(slot, params)
        self._wants[slot] = -1 if params.logprobs is None else params.logprobs
        self._device_s[slot] = 0.0
        self._constrained[slot] = row.constraint is not None
        self._alone[slot] = (
            row.constraint is not None or params.logprobs is not None or params.prompt_logprobs is not None
        )
        self._scored_rows += params.prompt_logprobs is not None
        row.queued_s = max(0.0, self._now_s - row.request.arrival_s)
        self._joins.append(Join(slot, params, prompt))
        return True

    def _start(self, row: SequenceState) -> bool:
        """Blocks for all tokens of a row, those of a known prefix among them; the last token always runs."""
        slot, pool = row.slot, self.pool
        length = int(self._length[slot])
        keys = PrefixKeys(row.request, row.row, pool.block_size)
        found: list[int] = []
        if self.limits.prefix_caching and (row.scored or row.sampling.prompt_logprobs is None):
            found = pool.match(keys.extend(self._tokens[slot, : length - 1]))
        needed = pool.blocks_for(length) - len(found)
        spare = min(len(self._running), pool.num_blocks // 64)  # so that it need not give way at once
        rest = pool.allocate(needed) if needed + spare <= pool.available else None
        if rest is None:
            pool.release(found)
            return False
        row.blocks, row.prefix_keys = [], keys
        self._held[slot], self._published[slot] = 0, len(found)
        self._hold_all(row, found + rest)
        self._done[slot] = len(found) * pool.block_size
        self._visit[slot] += 1
        bisect.insort(self._running, slot, key=lambda s: row.place if s == slot else self._place(s))
        return True

    # Bookkeeping.

    def _planned(self, slots: Ints, counts: Ints) -> GeneratePlan:
        begins = self._done[slots]
        rows = StepRows(slots, begins, counts, self._epoch[slots], self._visit[slots])
        prompt_ends, most = self._asking(slots) if self._scored_rows else (None, 0)
        ends = begins + counts
        sampled = ends == self._length[slots]
        plan = generation_plan(
            rows,
            sampled,
            known=self._known[slots],
            wants=self._wants[slots],
            tokens=self._tokens,
            tables=self._tables,
            block_size=self.pool.block_size,
            leaves=tuple(self._leaves),
            joins=tuple(self._joins),
            masks=self._masks(slots[sampled & self._constrained[slots]]),
            prompt_ends=prompt_ends,
            most=most,
        )
        self._leaves, self._joins = [], []
        self._done[slots] = ends
        self._length[slots[sampled]] += 1
        return plan

    def _asking(self, slots: Ints) -> tuple[Ints | None, int]:
        """Which prompts are asked about, and how much."""
        rows = [self._rows[slot] for slot in slots.tolist()]
        asked = [
            -1
            if row is None or row.scored or row.sampling.prompt_logprobs is None
            else row.sampling.prompt_logprobs
            for row in rows
        ]
        if max(asked) < 0:
            return None, 0
        return np.where(np.array(asked) < 0, 0, self._prompt[slots]).astype(np.int32), max(asked)

    def _masks(self, slots: Ints) -> tuple[tuple[int, Ints], ...]:
        """For the rows that must follow something; all tokens before the next are known of them."""
        out = []
        for slot in slots.tolist():
            row = self._rows[slot]
            assert row is not None and row.constraint is not None
            try:
                out.append((slot, row.constraint.mask().view(np.int32).copy()))
            except PenstockError as error:
                self.broken[row.request.id] = error
        return tuple(out)

    def _accepted(self, row: SequenceState, constraint: Constraint, token: int) -> bool:
        """Whether the row's text is complete with this token."""
        try:
            constraint.accept(token)
        except PenstockError as error:
            self.broken[row.request.id] = error
        return constraint.done

    def _take_scores(self, plan: PromptPlan, sample: SamplePlan, found: TokenLogprobs) -> None:
        """What was asked about prompts, each at its place: a row that began again has them twice."""
        at = 0
        for row, begin, count in zip(
            plan.rows.tolist(), plan.begins.tolist(), plan.counts.tolist(), strict=True
        ):
            slot = int(sample.slots[row])
            owner = self._rows[slot]
            if owner is not None and self._epoch[slot] == sample.epochs[row]:
                kept = owner.prompt_scores = owner.prompt_scores or _room_for_scores(owner)
                for into, array in zip(kept, found, strict=True):
                    some = array[at : at + count]
                    if np.isnan(some).any():
                        self.broken[owner.request.id] = RowFailed(_UNSOUND)
                    into[begin : begin + count] = some if some.ndim == 1 else some[:, : into.shape[1]]
            at += count

    def _handed_out(self, row: SequenceState) -> _Extra:
        """What was asked about a prompt, with the first token after it."""
        if row.scored or row.sampling.prompt_logprobs is None:
            return _NOTHING
        row.scored = True
        return row.prompt_scores or _room_for_scores(row)

    def _part(self, slot: int, new: Ints, stopped: bool, full: bool, extra: _Extra) -> GeneratedTokens:
        """What a step adds to a row: one token, which is not among those shown if it stopped the row."""
        row = self._rows[slot]
        assert row is not None
        done = False
        if row.constraint is not None and not stopped:
            done = self._accepted(row, row.constraint, int(new[0]))
        about_prompt = self._handed_out(row)
        if not (stopped or done or full):
            return GeneratedTokens(row.request.id, row.row, new, None, None, *extra, None, *about_prompt)
        timings = Timings(row.queued_s, float(self._device_s[slot]))
        self._finish(row)
        if stopped:
            ended = (new[:0], "stop", int(new[0]), *extra)
            return GeneratedTokens(row.request.id, row.row, *ended, timings, *about_prompt)
        why = "stop" if done else "length"
        return GeneratedTokens(row.request.id, row.row, new, why, None, *extra, timings, *about_prompt)

    def _names_of(self, slots: Ints) -> SequenceIds:
        """Request and row of each; the same object as before while nothing has changed."""
        epochs = self._epoch[slots]
        before, their_epochs = self._named
        if not (np.array_equal(slots, before) and np.array_equal(epochs, their_epochs)):
            rows = [row for slot in slots.tolist() if (row := self._rows[slot]) is not None]
            self._names = tuple((row.request.id, row.row) for row in rows)
            self._named = slots, epochs
        return self._names

    def _finish(self, row: SequenceState) -> None:
        rows = self._left[row.request.id]
        rows.remove(row)
        if not rows:
            del self._left[row.request.id]
        self._drop(row)

    def _drop(self, row: SequenceState) -> None:
        """Free all that a row has; whatever of it is on its way is ignored when it comes."""
        if row.slot < 0:
            self._waiting.remove(row)
            self.queued_tokens -= len(row.prompt)
            return
        slot = row.slot
        if slot in self._running:
            self._running.remove(slot)
            self.pool.release(row.blocks)
            row.blocks = []
        else:
            self._paused.remove(row)
        self._rows[slot] = None
        self._epoch[slot] += 1
        self._scored_rows -= row.sampling.prompt_logprobs is not None
        self._free.append(slot)
        self._joins = [join for join in self._joins if join.slot != slot]
        if slot not in self._leaves:
            self._leaves.append(slot)

    def _join_again(self, row: SequenceState) -> None:
        """The sampler may have counted tokens that nobody saw."""
        start, end = int(self._prompt[row.slot]), int(self._known[row.slot])
        output = self._tokens[row.slot, start:end].copy()
        self._joins = [join for join in self._joins if join.slot != row.slot]
        self._joins.append(Join(row.slot, row.sampling, row.prompt, output))
        if row.slot not in self._leaves:
            self._leaves.append(row.slot)

    def _pause(self, row: SequenceState) -> None:
        """Take a row's blocks; it begins again with all its tokens as prompt."""
        self._running.remove(row.slot)
        self.pool.release(row.blocks)
        row.blocks, row.prefix_keys = [], None
        self._held[row.slot] = self._done[row.slot] = 0
        self._visit[row.slot] += 1
        _insert(self._paused, row)

    def _publish(self, sample: SamplePlan, live: NDArray[np.bool_]) -> None:
        """Blocks that this step has filled with tokens that are known are there for others."""
        slots = sample.slots
        live = live & (self._visit[slots] == sample.visits)
        ends = np.minimum(sample.ends, self._known[slots])
        size = self.pool.block_size
        for i in np.flatnonzero(live & (ends // size > self._published[slots])).tolist():
            slot, full = int(slots[i]), int(ends[i]) // size
            row = self._rows[slot]
            assert row is not None and row.prefix_keys is not None
            keys = row.prefix_keys.extend(self._tokens[slot, : full * size])
            for block in range(int(self._published[slot]), full):
                self.pool.publish(row.blocks[block], keys[block])
            self._published[slot] = full

    def _hold(self, slot: int, blocks: list[int]) -> None:
        row = self._rows[slot]
        assert row is not None
        self._hold_all(row, blocks)

    def _hold_all(self, row: SequenceState, blocks: list[int]) -> None:
        at = len(row.blocks)
        row.blocks += blocks
        self._tables[row.slot, at : len(row.blocks)] = blocks
        self._held[row.slot] = len(row.blocks)

    def _set_stops(self, slot: int, params: SamplerParams) -> None:
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids))
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), -1, dtype=np.int32)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def _clear(self, names: set[str]) -> None:
        """Suspects that have run well are none."""
        self._suspects = [name for name in self._suspects if name in self._left and name not in names]

    def _name(self, slot: int) -> str | None:
        row = self._rows[slot]
        return None if row is None else row.request.id

    def _place(self, slot: int) -> Place:
        row = self._rows[slot]
        assert row is not None
        return row.place

    def _check(self, request: Request, params: SamplerParams) -> None:
        longest, limit = int(request.lengths.max(initial=0)), self.limits.max_length
        if request.num_rows == 0 or int(request.lengths.min()) == 0:
            raise BadValue("a prompt has no tokens; it needs at least one", param="prompt")
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name)) is not None and not 0 <= asked <= self.limits.vocab_size:
                raise BadValue(f"{name} is {asked}; use 0 to {self.limits.vocab_size}", param=name)
        check_sampling(params, self.limits.vocab_size)
        if params.max_tokens < 1:
            raise BadValue(f"max_tokens is {params.max_tokens}; it must be at least 1", param="max_tokens")
        if params.min_tokens > params.max_tokens:
            raise BadValue(
                f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}", param="min_tokens"
            )
        if longest + params.max_tokens > limit:
            raise BadValue(
                f"a prompt of {longest} tokens and max_tokens {params.max_tokens} exceed the limit of "
                f"{limit}; at most {max(0, limit - longest)} may follow it",
                param="max_tokens",
            )


_Extra = tuple[Ints | None, NDArray[np.float32] | None, Ints | None]  # TokenLogprobs, or nothing
_NOTHING: _Extra = (None, None, None)


def _room_for_scores(row: SequenceState) -> TokenLogprobs:
    count, wide = len(row.prompt) - 1, 1 + (row.sampling.prompt_logprobs or 0)
    ids, values = np.zeros((count, wide), np.int32), np.zeros((count, wide), np.float32)
    return TokenLogprobs(ids, values, np.zeros(count, np.int32))


def _insert(rows: list[SequenceState], row: SequenceState) -> None:
    bisect.insort(rows, row, key=lambda other: other.place)


def _extras(found: TokenLogprobs | None, asked: Ints, mine: NDArray[np.bool_]) -> list[_Extra]:
    """Log probabilities and ranks for each sampled row that is `mine`; a step gives them only of the rows
    that asked, as many columns as the most that one did."""
    if found is None:
        return [_NOTHING] * int(mine.sum())
    out: list[_Extra] = []
    at = 0
    for count, keep in zip(asked.tolist(), mine.tolist(), strict=True):
        extra: _Extra = _NOTHING
        if count >= 0:
            own = slice(at, at + 1), slice(0, 1 + count)
            extra = TokenLogprobs(
                found.ids[own].copy(), found.values[own].copy(), found.ranks[at : at + 1].copy()
            )
            at += 1
        if keep:
            out.append(extra)
    return out
