"""Decisions about which models sleep: on an operator's order, after idle time, or to free memory for another.

An engine wakes by itself when a request arrives. If its device has too little free memory, it asks the
supervisor, which puts the least recently used models to sleep.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.config import ServerConfig
from penstock.serving.control import EngineOrder, Link, OrderDone, RoomMade, RoomWanted
from penstock.serving.engines import ManagedEngine
from penstock.serving.models import ManagedModel, ModelSet
from penstock.wire.status import EngineSleep

log = logging.getLogger("penstock")
Done = Callable[[str | None], None]  # called with the reason for a failure, or None
ENGINE_GONE = "the engine process stopped meanwhile"


@dataclass(slots=True)
class _Sent:
    """An order that an engine is carrying out."""

    engine: ManagedEngine
    action: str
    done: Done


@dataclass(slots=True)
class _Room:
    """A request of an engine for memory."""

    model: ManagedModel
    engine: ManagedEngine
    link: Link
    id: int
    missing_bytes: int
    falling_asleep: list[ManagedEngine] = field(default_factory=list)
    asked: list[ManagedEngine] = field(default_factory=list)  # engines already ordered to sleep


class Sleepers:
    """Sends sleep and wake orders to engines, on request or as the server's settings require.

    A model sleeps when all of its engines sleep. To free memory, only engines on the device in need sleep.
    """

    def __init__(self, models: ModelSet, config: ServerConfig) -> None:
        self._models = models
        self._config = config
        self._ids = itertools.count()
        self._sent: dict[int, _Sent] = {}
        self._rooms: list[_Room] = []

    def order(self, model: ManagedModel, action: str, level: int | None, done: Done) -> None:
        """Have all engines of a model sleep or wake. `done` is called once, after the last engine has
        answered, with the reason if one of them failed."""
        waiting, errors = set(model.engines), list[str]()

        def engine_done(engine: ManagedEngine, error: str | None) -> None:
            waiting.discard(engine)
            if error is not None:
                errors.append(error)
            if not waiting:
                done(errors[0] if errors else None)

        for engine in model.engines:
            self._order_engine(model, engine, action, level, partial(engine_done, engine))

    def _order_engine(
        self, model: ManagedModel, engine: ManagedEngine, action: str, level: int | None, done: Done
    ) -> None:
        if engine.link is None or not engine.serves:
            which = "the engine" if len(model.engines) == 1 else f"engine {engine.index}"
            done(f"{which} of {model.name} does not run")
            return
        number = next(self._ids)
        self._sent[number] = _Sent(engine, action, done)
        engine.link.send(EngineOrder(number, "sleep" if action == "sleep" else "wake", level))

    def order_done(self, link: Link, message: OrderDone) -> None:
        sent = self._sent.get(message.id)
        if sent is not None and sent.engine.link is link:
            del self._sent[message.id]
            sent.done(message.error)

    def engine_exited(self, engine: ManagedEngine) -> None:
        """Fail the orders of an exited engine, drop its requests for memory and count its memory as free."""
        for number, sent in list(self._sent.items()):
            if sent.engine is engine:
                del self._sent[number]
                sent.done(ENGINE_GONE)
        self._rooms = [room for room in self._rooms if room.engine is not engine]
        for room in list(self._rooms):
            self._slept(room, engine)

    def closed(self, link: Link) -> None:
        self._rooms = [room for room in self._rooms if room.link is not link]

    def room_wanted(self, link: Link, message: RoomWanted) -> None:
        found = self._models.engine_of(link)
        if found is None:
            link.send(RoomMade(message.id))
            return
        room = _Room(*found, link, message.id, message.num_bytes)
        self._rooms.append(room)
        self._join(room)
        self._advance(room)

    def apply(self, now_s: float) -> None:
        """Put models to sleep that have been idle for long enough, or that exceed --max-awake-models."""
        for model in self._awake():
            limit_s = self._sleep_after_s(model)
            if limit_s and _is_idle(model) and now_s - model.last_used_s >= limit_s:
                self._send_to_sleep(model, f"it was idle for {limit_s:g} s")
        if limit := self._config.max_awake_models:
            awake = self._awake()
            for model in awake[: max(0, len(awake) - limit)]:
                self._send_to_sleep(model, f"--max-awake-models is {limit}")

    def _sleep_after_s(self, model: ManagedModel) -> float:
        own = model.config.sleep_after_s
        return self._config.sleep_after_s if own is None else own

    def _awake(self) -> list[ManagedModel]:
        """Models with an awake engine that has no pending order to sleep, least recently used first."""
        return list(dict.fromkeys(model for model, _ in self._awake_engines()))

    def _awake_engines(self) -> list[tuple[ManagedModel, ManagedEngine]]:
        """Engines that are awake, can sleep, and have no pending order to sleep; least recently used model
        first. Engines of several tensor-parallel ranks cannot sleep."""
        told = [sent.engine for sent in self._sent.values() if sent.action == "sleep"]
        awake = [
            (model, engine)
            for model, engine in self._models.engines()
            if model.config.engine.tensor_parallel_size == 1
            and engine.serves
            and engine.sleep_state is EngineSleep.AWAKE
            and engine not in told
        ]
        return sorted(awake, key=lambda each: each[0].last_used_s)

    def _send_to_sleep(self, model: ManagedModel, why: str) -> None:
        """Put the awake engines of a model to sleep."""
        for owner, engine in self._awake_engines():
            if owner is model:
                self._send_engine_to_sleep(model, engine, why)

    def _send_engine_to_sleep(
        self, model: ManagedModel, engine: ManagedEngine, why: str, done: Done | None = None
    ) -> None:
        began_s, name = time.monotonic(), model.describe_engine(engine)

        def slept(error: str | None) -> None:
            if error is None:
                log.info("%s sleeps after %.1f s: %s", name, time.monotonic() - began_s, why)
            else:
                log.warning("%s cannot sleep: %s", name, error)
            if done is not None:
                done(error)

        self._order_engine(model, engine, "sleep", None, slept)

    def _join(self, room: _Room) -> None:
        """Also wait for engines that were already ordered to sleep for another reason."""
        for sent in self._sent.values():
            victim, told = sent.engine, sent.done
            if sent.action != "sleep" or not _shares_memory(victim, room):
                continue
            room.asked.append(victim)
            room.falling_asleep.append(victim)

            def slept(error: str | None, victim: ManagedEngine = victim, told: Done = told) -> None:
                told(error)
                self._slept(room, victim, has_freed=error in (None, ENGINE_GONE))

            sent.done = slept

    def _advance(self, room: _Room) -> None:
        """Put further engines to sleep until enough memory will be free, or no candidate is left."""
        victims = (each for each in self._awake_engines() if _shares_memory(each[1], room))
        while self._expected_bytes(room) < room.missing_bytes and (found := next(victims, None)) is not None:
            model, victim = found
            room.asked.append(victim)
            room.falling_asleep.append(victim)

            def slept(error: str | None, victim: ManagedEngine = victim) -> None:
                self._slept(room, victim, has_freed=error in (None, ENGINE_GONE))

            self._send_engine_to_sleep(model, victim, f"{room.model.name} needs its memory", slept)
        if not room.falling_asleep and room in self._rooms:
            self._rooms.remove(room)
            room.link.send(RoomMade(room.id))

    @staticmethod
    def _expected_bytes(room: _Room) -> int:
        return sum(each.status.read().device_bytes for each in room.falling_asleep)

    def _slept(self, room: _Room, victim: ManagedEngine, *, has_freed: bool = True) -> None:
        """Handle that an engine ordered to sleep has fallen asleep, failed to, or exited."""
        if victim in room.falling_asleep:
            room.missing_bytes -= victim.status.read().device_bytes if has_freed else 0
            room.falling_asleep.remove(victim)
            self._advance(room)


def _is_idle(model: ManagedModel) -> bool:
    statuses = [each.status.read() for each in model.engines]
    return not any(
        status.queued_tokens or status.queued_prompt_tokens or status.step_began_s for status in statuses
    )


def _shares_memory(engine: ManagedEngine, room: _Room) -> bool:
    """Whether putting an engine to sleep can help: it shares a device with the engine that needs memory, and
    was not ordered to sleep yet. Engines of one model do not put each other to sleep."""
    is_other = engine not in room.model.engines
    return is_other and not engine.devices.isdisjoint(room.engine.devices) and engine not in room.asked
