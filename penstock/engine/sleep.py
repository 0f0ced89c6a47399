"""Puts an engine to sleep and wakes it: an idle model gives its memory back until a request arrives.

`SleepController` runs on the thread of the engine's loop. Weights move on a separate thread, so the loop
continues. Work that arrives while the engine is not awake is held here in order of arrival. It wakes the
engine, and then joins the engine's queues.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread

from penstock.engine.comparisons import ComparisonLimits
from penstock.engine.expiry import deadline_error
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, DeviceFailed, EngineError, ModelAsleep, PenstockError, QueueFull
from penstock.runner.base import SLEEP_LEVELS, MakeRoom, Sleeper
from penstock.types import Comparison, EngineSleep, Failure, Outcome, Request

log = logging.getLogger("penstock.engine")

Done = Callable[[str | None], None]  # called with None on success, or with the reason of the failure


@dataclass(frozen=True, slots=True, eq=False)
class SleepCommand:
    level: int | None  # None: the default of the device
    done: Done


@dataclass(frozen=True, slots=True, eq=False)
class WakeCommand:
    done: Done


Command = SleepCommand | WakeCommand


@dataclass(frozen=True, slots=True, eq=False)
class SleepReport:
    """A sleep or a wake that has succeeded."""

    state: EngineSleep  # ASLEEP or AWAKE
    seconds: float
    num_bytes: int  # freed by a sleep, or taken by a wake


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    work: Request | Comparison
    since_s: float
    number: int  # in order of arrival


@dataclass(slots=True, eq=False)
class _Move:
    """A sleep or a wake that runs on the separate thread."""

    thread: Thread
    began_s: float
    is_done: bool = False
    num_bytes: int = 0
    error: BaseException | None = None


class SleepController:
    """awake → falling asleep → asleep → waking → awake.

    Commands run one after another. All methods are called on the core's thread. Other threads may only append
    to `commands`.
    """

    def __init__(
        self,
        core: EngineCore,
        sleeper: Sleeper | None,
        *,
        wake_timeout_s: float = 30.0,
        make_room: MakeRoom = lambda num_bytes: None,
        observe: Callable[[SleepReport], None] = lambda report: None,
        commands: deque[Command] | None = None,
    ) -> None:
        """`wake_timeout_s`: how long work is held before it fails. 0: work fails at once, but wakes the
        engine. Other threads that append to `commands` have to wake the loop afterwards."""
        self.state = EngineSleep.AWAKE
        self.level = 0  # the level at which the engine sleeps; 0: it is awake
        self.commands: deque[Command] = deque() if commands is None else commands
        self._core = core
        self._sleeper = sleeper
        self._wake_timeout_s = wake_timeout_s
        self._make_room = make_room
        self._observe = observe
        self._command: Command | None = None  # the command that is being carried out
        self._move: _Move | None = None
        self._is_wanted = False  # work has arrived while the engine was not awake
        self._wake_failure = ""  # why the last wake failed; empty if it did not
        self._held: dict[str, _Held] = {}  # in order of arrival
        self._held_bytes = 0  # of comparisons
        # Heap of (time, number, id). It may contain work that has left.
        self._expiries: list[tuple[float, int, str]] = []
        self._count = itertools.count()

    @property
    def is_awake(self) -> bool:
        """Whether work goes straight to the core."""
        return self.state is EngineSleep.AWAKE

    @property
    def needs_turn(self) -> bool:
        return self.state is not EngineSleep.AWAKE or bool(self.commands)

    @property
    def busy(self) -> bool:
        """Whether work is held or weights are being moved."""
        return bool(self._held) or self._move is not None

    @property
    def device_bytes(self) -> int:
        return 0 if self._sleeper is None else self._sleeper.num_bytes

    def next_deadline_s(self) -> float | None:
        """When held work expires next; None: no work is held."""
        self._drop_stale_expiries()
        return self._expiries[0][0] if self._expiries else None

    # Held work.

    def hold(self, work: Request | Comparison) -> list[Outcome]:
        """Hold work until the engine is awake. Returns its failure if it is refused."""
        self._is_wanted = True
        if self._wake_timeout_s <= 0:
            reason = self._wake_failure or "the model sleeps and is being woken"
            return [Failure(work.id, ModelAsleep(f"{reason}; try again shortly"))]
        try:
            self._check_room(work)
        except PenstockError as error:
            return [Failure(work.id, error)]
        now_s = self._core.clock()
        held = self._held[work.id] = _Held(work, now_s, next(self._count))
        self._count_held(work, 1)
        expires_s = min(
            now_s + self._wake_timeout_s, math.inf if work.deadline_s is None else work.deadline_s
        )
        heapq.heappush(self._expiries, (expires_s, held.number, work.id))
        return []

    def cancel(self, request_id: str) -> bool:
        """Drop held work; False if the id is unknown."""
        return self._release(request_id) is not None

    def _check_room(self, work: Request | Comparison) -> None:
        if work.id in self._held:
            raise BadValue(f"request_id {work.id!r} is already in use", param="request_id")
        if isinstance(work, Comparison):
            limit = ComparisonLimits().max_waiting_bytes
            if self._held_bytes and self._held_bytes + work.num_bytes > limit:
                raise QueueFull("too many vectors wait for the model to wake; try again shortly")
            return
        held, limit = self._core.held, self._core.scheduler.budget.max_queued_tokens
        waiting = held.num_tokens if work.sampling is None else held.num_prompt_tokens
        if waiting and waiting + work.num_tokens > limit:
            raise QueueFull(
                f"{waiting} tokens wait for the model to wake and at most {limit} may; try again shortly"
            )

    def _count_held(self, work: Request | Comparison, sign: int) -> None:
        held = self._core.held
        if isinstance(work, Comparison):
            self._held_bytes += sign * work.num_bytes
        elif work.sampling is None:
            held.num_tokens += sign * work.num_tokens
            held.num_rows += sign * work.num_rows
        else:
            held.num_prompt_tokens += sign * work.num_tokens
            held.num_rows += sign * work.num_rows

    def _release(self, request_id: str) -> Request | Comparison | None:
        if (held := self._held.pop(request_id, None)) is None:
            return None
        self._count_held(held.work, -1)
        return held.work

    def _submit_held(self) -> list[Outcome]:
        """Submit held work to the core, in order of arrival."""
        outcomes: list[Outcome] = []
        for request_id in list(self._held):
            if (work := self._release(request_id)) is not None:
                outcomes += self._core.submit(work)
        return outcomes

    def _fail_held(self, error: PenstockError) -> list[Outcome]:
        failed = list(self._held)
        for request_id in failed:
            self._release(request_id)
        return [Failure(request_id, error) for request_id in failed]

    def _drop_stale_expiries(self) -> None:
        while self._expiries and not self._is_held(*self._expiries[0][1:]):
            heapq.heappop(self._expiries)

    def _is_held(self, number: int, request_id: str) -> bool:
        held = self._held.get(request_id)
        return held is not None and held.number == number

    def _expire(self) -> list[Outcome]:
        """Fail held work whose deadline or maximum wait has passed."""
        outcomes: list[Outcome] = []
        now_s = self._core.clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, number, request_id = heapq.heappop(self._expiries)
            if self._is_held(number, request_id):
                outcomes.append(Failure(request_id, _expiry_error(self._held[request_id], now_s)))
                self._release(request_id)
        return outcomes

    # Turns of the loop.

    def turn(self) -> list[Outcome]:
        """Make every transition that is possible without waiting. Returns failures of held work."""
        outcomes = self._expire()
        if self._move is not None and self._move.is_done:
            outcomes += self._end_move(self._move)
        while self._move is None and self._core.device_failure is None and self._go_on():
            pass
        return outcomes

    def _go_on(self) -> bool:
        """Make one transition; False if none is possible now."""
        if self._command is None and self.commands:
            self._command = self.commands.popleft()
            if (refusal := self._refusal(self._command)) is not None:
                self._complete(refusal)
                return True
        if self.state is EngineSleep.AWAKE:
            if isinstance(self._command, WakeCommand):
                self._complete(None)
                return True
            if self._command is not None:
                self.state, self._is_wanted = EngineSleep.FALLING_ASLEEP, False
                return True
            return False
        if self.state is EngineSleep.FALLING_ASLEEP:
            if self._core.busy:
                return False
            self._begin_sleep()
            return True
        return self._go_on_asleep()

    def _go_on_asleep(self) -> bool:
        if isinstance(self._command, SleepCommand):
            if self._wanted_level(self._command) <= self.level:
                self._complete(None)
            else:
                self.state = EngineSleep.FALLING_ASLEEP
            return True
        if self._command is not None or self._is_wanted or self._held:
            self.state = EngineSleep.WAKING
            self._begin(self._wake)
            return True
        return False

    def _refusal(self, command: Command) -> str | None:
        if isinstance(command, WakeCommand):
            return None
        if self._sleeper is None:
            return self._core.why_not_sleep
        if command.level is not None and command.level not in SLEEP_LEVELS:
            return f"level {command.level} is unknown; use {' or '.join(map(str, SLEEP_LEVELS))}"
        return None

    def _wanted_level(self, command: SleepCommand) -> int:
        if command.level is not None:
            return command.level
        return 0 if self._sleeper is None else self.level or self._sleeper.default_level

    def _complete(self, reason: str | None) -> None:
        command, self._command = self._command, None
        if command is None:
            return
        try:
            command.done(reason)
        except Exception:  # an error in the caller's function must not stop the engine
            log.exception("the end of a sleep or a wake could not be reported")

    # Moves, on a separate thread.

    def _begin_sleep(self) -> None:
        assert isinstance(self._command, SleepCommand)
        level = self._wanted_level(self._command)
        self._core.forget_cached()
        self._begin(lambda sleeper: sleeper.sleep(level))

    def _wake(self, sleeper: Sleeper) -> int:
        sleeper.wake(self._make_room)
        return sleeper.num_bytes

    def _begin(self, work: Callable[[Sleeper], int]) -> None:
        sleeper = self._sleeper
        assert sleeper is not None

        def run() -> None:
            try:
                move.num_bytes = work(sleeper)
            except BaseException as error:
                move.error = error
            move.is_done = True
            self._core.wake()

        thread = Thread(target=run, name="penstock-sleep", daemon=True)
        move = self._move = _Move(thread, time.perf_counter())
        thread.start()

    def _end_move(self, move: _Move) -> list[Outcome]:
        self._move = None
        move.thread.join()
        was, seconds = self.state, time.perf_counter() - move.began_s
        if isinstance(move.error, DeviceFailed):
            self._core.fail_device(move.error)
            self._complete(move.error.message)
            return self._fail_held(move.error)
        if was is EngineSleep.FALLING_ASLEEP:
            return self._end_sleep(move, seconds)
        return self._end_wake(move, seconds)

    def _end_sleep(self, move: _Move, seconds: float) -> list[Outcome]:
        if move.error is not None:
            self.state = EngineSleep.ASLEEP if self.level else EngineSleep.AWAKE
            reason = _words(move.error)
            log.error("the model cannot sleep: %s", reason, exc_info=_unexpected(move.error))
            self._complete(f"the model cannot sleep: {reason}")
            return [] if self.level else self._submit_held()
        assert isinstance(self._command, SleepCommand)
        self.state, self.level = EngineSleep.ASLEEP, self._wanted_level(self._command)
        freed = f"{move.num_bytes / 2**20:,.0f} MiB freed"
        log.info("the model sleeps at level %d after %.2f s: %s", self.level, seconds, freed)
        self._observe(SleepReport(self.state, seconds, move.num_bytes))
        self._complete(None)
        return []

    def _end_wake(self, move: _Move, seconds: float) -> list[Outcome]:
        self._is_wanted = False
        if move.error is not None:
            self.state = EngineSleep.ASLEEP
            reason = f"the model cannot be woken: {_words(move.error)}"
            self._wake_failure = reason
            log.error("%s", reason, exc_info=_unexpected(move.error))
            self._complete_wake(reason)
            return self._fail_held(ModelAsleep(reason))
        self.state, self.level, self._wake_failure = EngineSleep.AWAKE, 0, ""
        log.info("the model woke in %.2f s", seconds)
        self._observe(SleepReport(self.state, seconds, move.num_bytes))
        self._complete_wake(None)
        return self._submit_held()

    def _complete_wake(self, reason: str | None) -> None:
        if isinstance(self._command, WakeCommand):
            self._complete(reason)


def _expiry_error(held: _Held, now_s: float) -> PenstockError:
    deadline_s = held.work.deadline_s
    if deadline_s is not None and deadline_s <= now_s:
        return deadline_error(held.work, now_s)
    waited_s = now_s - held.since_s
    return ModelAsleep(f"the model sleeps and was not awake after {waited_s:.1f} s; try again shortly")


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _unexpected(error: BaseException) -> BaseException | None:
    """The error, if its traceback should be logged."""
    is_expected = isinstance(error, PenstockError) and type(error) is not EngineError
    return None if is_expected else error
