"""Background sequences pause while others generate, and give their blocks and slots to them."""

from __future__ import annotations

import pytest

from penstock.errors import QueueFull
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.types import GeneratePlan, Request
from tests.generation.fakes import generation_request


def make(slots: int = 4, blocks: int = 64, max_queued_tokens: int = 10**6) -> GenerationScheduler:
    limits = GenerationLimits(slots, 64, 64, 64, max_queued_tokens, prefix_caching=False)
    return GenerationScheduler(BlockPool(blocks, 4), limits)


def request(name: str, length: int = 3, *, background: bool = False) -> Request:
    made = generation_request(name, [list(range(1, length + 1))], 8)
    made.is_background, made.client = background, name
    return made


def names(scheduler: GenerationScheduler, plan: GeneratePlan | None) -> set[str]:
    slots = [] if plan is None else plan.sample.slots.tolist()
    return {scheduler._slots[slot].request.id for slot in slots}


def test_steps_have_either_background_sequences_or_others() -> None:
    scheduler = make()
    scheduler.add(request("batch", background=True))
    scheduler.add(request("user"))
    assert names(scheduler, scheduler.schedule(0.0)) == {"user"}
    assert names(scheduler, scheduler.schedule_background(0.0, 64)) == {"batch"}
    assert scheduler.has_background and scheduler.has_interactive
    scheduler.check_integrity()


def test_nothing_interactive_is_planned_where_only_background_sequences_wait() -> None:
    scheduler = make()
    scheduler.add(request("batch", background=True))
    scheduler.schedule_background(0.0, 64)
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_interactive


def test_a_background_sequence_gives_its_blocks_to_another() -> None:
    scheduler = make(blocks=6)
    scheduler.add(request("batch", 16, background=True))
    assert names(scheduler, scheduler.schedule_background(0.0, 64)) == {"batch"}
    scheduler.add(request("user", 16))
    assert names(scheduler, scheduler.schedule(0.0)) == {"user"}
    assert scheduler.num_preemptions == 1
    scheduler.check_integrity()
    scheduler.cancel("user")
    assert names(scheduler, scheduler.schedule_background(0.0, 64)) <= {"batch"}
    scheduler.clear()
    scheduler.check_integrity()


def test_background_sequences_leave_half_of_the_slots() -> None:
    scheduler = make(slots=4)
    for number in range(4):
        scheduler.add(request(f"batch-{number}", background=True))
    assert len(names(scheduler, scheduler.schedule_background(0.0, 64))) == 2
    scheduler.add(request("user"))
    assert names(scheduler, scheduler.schedule(0.0)) == {"user"}
    scheduler.clear()
    scheduler.check_integrity()


def test_background_prompts_count_for_no_limit_of_others() -> None:
    scheduler = make()
    scheduler.add(request("batch", 10, background=True))
    assert scheduler.queued_tokens == 0
    assert scheduler.queued_background_tokens == 10
    scheduler.cancel("batch")
    assert scheduler.queued_background_tokens == 0
    scheduler.check_integrity()


def test_background_prompts_never_exceed_the_limit_of_the_queue() -> None:
    scheduler = make(max_queued_tokens=16)
    scheduler.add(request("batch", 16, background=True))
    with pytest.raises(QueueFull, match="16 tokens of prompts are waiting"):
        scheduler.add(request("other-batch", 2, background=True))
    scheduler.add(request("user", 16))
    scheduler.add(request("other-user", 2))  # below its share: an eighth more fits
