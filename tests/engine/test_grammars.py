"""Requests with a grammar wait until it is compiled, and no other request waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.engine import grammars
from penstock.engine.grammars import ConstraintFactory, Grammars
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, DeadlineExceeded, QueueFull
from penstock.types import Grammar, Request
from tests.generation.fakes import VOCABULARY, Answers, continued, generation_request, make_core, run

ROW = [3, 1, 4]


class Anything:
    """A constraint that allows every token and ends after three."""

    def __init__(self) -> None:
        self.taken = 0

    @property
    def done(self) -> bool:
        return self.taken == 3

    def mask(self) -> Any:
        return np.full(-(-VOCABULARY // 32), 0xFFFFFFFF, dtype=np.uint32)

    def accept(self, token: int) -> None:
        self.taken += 1


class Slow:
    """A compiler that waits for the test to release it, and counts."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.compiled: list[str] = []

    def hold(self, text: str) -> threading.Event:
        return self.gates.setdefault(text, threading.Event())

    def __call__(self, grammar: Grammar) -> ConstraintFactory:
        self.compiled.append(grammar.text)
        if grammar.text in self.gates:
            assert self.gates[grammar.text].wait(20)
        if grammar.text == "bad":
            raise BadValue("the regular expression cannot be used: said the library")
        if grammar.text == "broken":
            raise RuntimeError("out of its depth")
        return Anything


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    for gate in made.gates.values():
        gate.set()


def core_with(slow: Slow, **options: Any) -> EngineCore:
    core = make_core(blocks=60)
    core.clock = time.monotonic
    core.grammars = Grammars(slow, **options)
    return core


def following(name: str, text: str, rows: int = 1, **fields: Any) -> Request:
    request = generation_request(name, [ROW] * rows, 10, grammar=Grammar("regex", text))
    for field, value in fields.items():
        object.__setattr__(request, field, value)
    return request


def until(core: EngineCore, answers: Answers, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        answers.take(list(core.step()))
        time.sleep(0.001)


def check_nothing_is_left(core: EngineCore) -> None:
    assert not core.busy and core.generation is not None and core.grammars is not None
    core.generation.check_integrity()
    core.generation.pool.check_integrity()
    assert core.next_deadline_s() is None


def test_other_requests_generate_while_a_grammar_compiles(slow: Slow) -> None:
    core, answers, gate, woken = core_with(slow), Answers(), slow.hold("slow"), threading.Event()
    core.wake = woken.set
    core.add(following("bound", "slow", rows=2))
    core.add(generation_request("free", [[1, 2], [5]], 20))
    until(core, answers, lambda: len(answers.finished) == 2)
    assert answers.tokens == {("free", 0): continued([1, 2], 20), ("free", 1): continued([5], 20)}
    assert core.busy and core.generates("bound") and core.generation is not None and not core.generation.busy
    with pytest.raises(BadValue, match="already in use"):
        core.add(following("bound", "slow"))
    woken.clear()
    gate.set()
    assert woken.wait(10), "the engine was not woken when the grammar was ready"
    run(core, answers)
    for row in (0, 1):
        assert answers.tokens["bound", row] == continued(ROW, 3) and answers.finished["bound", row] == "stop"
    check_nothing_is_left(core)


def test_a_second_grammar_compiles_beside_the_first(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    slow.hold("slow")
    core.add(following("a", "slow"))
    core.add(following("b", "quick"))
    until(core, answers, lambda: ("b", 0) in answers.finished)
    assert ("a", 0) not in answers.tokens and core.generates("a")
    core.cancel("a")
    check_nothing_is_left(core)


def test_equal_grammars_compile_once_and_the_oldest_is_evicted(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    core, answers, gate = core_with(slow), Answers(), slow.hold("one")
    for name in "abc":
        core.add(following(name, "one"))
    gate.set()
    run(core, answers)
    for name, text in (("d", "one"), ("e", "two"), ("f", "one"), ("g", "three"), ("h", "one"), ("i", "two")):
        core.add(following(name, text))
        run(core, answers)
    assert slow.compiled == ["one", "two", "three", "two"]
    assert not answers.failed and len(answers.finished) == 9
    check_nothing_is_left(core)


@pytest.mark.parametrize(("text", "said"), [("bad", "said the library"), ("broken", "out of its depth")])
def test_a_grammar_that_does_not_compile_is_refused_every_time(slow: Slow, text: str, said: str) -> None:
    core, answers = core_with(slow), Answers()
    for name in ("a", "b"):
        core.add(following(name, text))
        core.add(generation_request(f"{name}-free", [[7]], 5))
        run(core, answers)
        error = answers.failed[name].error
        assert isinstance(error, BadValue) and said in error.message
        assert answers.tokens[f"{name}-free", 0] == continued([7], 5)
    assert slow.compiled == [text, text]
    check_nothing_is_left(core)


def test_a_request_cancelled_while_its_grammar_compiles_leaves_nothing(slow: Slow) -> None:
    core, answers, gate = core_with(slow), Answers(), slow.hold("slow")
    core.add(following("a", "slow"))
    core.step()
    core.cancel("a")
    check_nothing_is_left(core)
    gate.set()
    for _ in range(20):
        assert core.step() == []
        time.sleep(0.001)
    core.add(following("a", "slow"))  # its id is free again, and the compiled grammar is cached
    run(core, answers)
    assert slow.compiled == ["slow"] and answers.tokens["a", 0] == continued(ROW, 3)
    check_nothing_is_left(core)


def test_a_deadline_passes_while_a_grammar_compiles(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    slow.hold("slow")
    now = time.monotonic()
    core.add(following("a", "slow", arrival_s=now, deadline_s=now + 0.05))
    core.add(following("b", "slow"))
    assert core.next_deadline_s() == now + 0.05
    until(core, answers, lambda: "a" in answers.failed)
    assert isinstance(answers.failed["a"].error, DeadlineExceeded)
    assert core.generates("b") and not core.generates("a")
    core.cancel("b")
    check_nothing_is_left(core)


def test_a_grammar_that_takes_too_long_to_compile_is_refused(slow: Slow) -> None:
    core, answers = core_with(slow, max_compile_s=0.05), Answers()
    slow.hold("slow")
    core.add(following("a", "slow"))
    until(core, answers, lambda: "a" in answers.failed)
    error = answers.failed["a"].error
    assert isinstance(error, BadValue) and "more than 0.05 s" in error.message
    check_nothing_is_left(core)


def test_a_request_is_refused_when_too_many_wait_for_grammars(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 2)
    core = core_with(slow)
    slow.hold("slow")
    core.add(following("a", "slow"))
    core.add(following("b", "slow"))
    with pytest.raises(QueueFull, match="2 requests wait"):
        core.add(following("c", "slow"))
    core.cancel("a")
    core.cancel("b")
    check_nothing_is_left(core)


def test_an_invalid_request_is_refused_before_its_grammar_compiles(slow: Slow) -> None:
    core = core_with(slow)
    request = generation_request("a", [ROW], 1000, grammar=Grammar("regex", "x"))
    with pytest.raises(BadValue, match="max_tokens"):
        core.add(request)
    assert slow.compiled == []
    check_nothing_is_left(core)


def test_closing_the_engine_ends_the_compiler_threads(slow: Slow) -> None:
    core, answers = core_with(slow), Answers()
    core.add(following("a", "x"))
    run(core, answers)
    assert core.grammars is not None
    threads = core.grammars._threads
    assert threads and all(thread.is_alive() and thread.daemon for thread in threads)
    core.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
