"""Plans as other ranks receive them, and the ring that carries them."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from penstock.errors import DeviceFailed
from penstock.kvcache.blocks import BlockPool
from penstock.runner.inputs import OutputPlan, generation_arrays, pool_arrays
from penstock.runner.parallel.plans import Message, decode_step, encode_step
from penstock.runner.parallel.ring import PlanReader, PlanWriter, create_memory
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import (
    GeneratePlan,
    Ints,
    PoolingParams,
    PoolPlan,
    Request,
    SampledResult,
    SamplerParams,
    Task,
)
from tests.helpers import ints, make_request
from tests.runner.small_models import plan_of


def carried(plan: PoolPlan | GeneratePlan, outputs: OutputPlan | None = None) -> Any:
    message = encode_step(plan, outputs)
    numbers = np.empty(message.size, dtype=np.int32)
    message.write(numbers)
    return decode_step(numbers)


def assert_equal_arrays(found: list[Ints], expected: list[Ints]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b)


def test_a_pooling_plan_arrives_with_all_that_the_model_reads() -> None:
    plan = dataclasses.replace(plan_of(skip=False), type_ids=ints(range(164)))
    outputs = OutputPlan(ints([1, 2]), ints([0, 1, 2]), ints([1, 1]))
    step = carried(plan, outputs)
    assert_equal_arrays(pool_arrays(step.plan, step.outputs), pool_arrays(plan, outputs))
    assert list(step.plan.groups) == list(plan.groups)
    assert (step.plan.max_length, step.plan.num_rows) == (plan.max_length, plan.num_rows)


def test_a_chunk_arrives_with_its_blocks_but_without_running_sums() -> None:
    request = make_request("chunk", (48,), params=PoolingParams())
    share = ScheduledRows(request, ints([0]), ints([16]), ints([32]), ([0, 1, 2],))
    plan = build_plan([share], 16)
    assert plan.kv is not None
    found = carried(plan).plan
    assert found.kv.carry is None and found.kv.max_keys == plan.kv.max_keys
    plain = dataclasses.replace(plan, skip=None, kv=dataclasses.replace(plan.kv, carry=None))
    assert_equal_arrays(pool_arrays(found, None), pool_arrays(plain, None))


def test_generation_plans_arrive_with_the_tokens_that_are_fed() -> None:
    generation = GenerationScheduler(
        BlockPool(8, 16), GenerationLimits(2, 64, 64, 40, 40, prefix_caching=False)
    )
    sampling = SamplerParams(max_tokens=3, temperature=0, prompt_logprobs=2)
    generation.add(Request("g", ints(range(20)), ints([20]), PoolingParams(Task.GENERATE), sampling=sampling))
    kinds = set()
    while (plan := generation.schedule(0.0)) is not None:
        found = carried(plan).plan
        assert_equal_arrays(generation_arrays(found), generation_arrays(plan))
        for name in ("sampled_tokens", "sampled_slots", "fed_tokens", "fed_slots"):
            np.testing.assert_array_equal(getattr(found.sample, name), getattr(plan.sample, name))
        assert (found.sample.prompts is None) is (plan.sample.prompts is None)
        kinds.add((plan.paged.num_rows > 0, plan.sample.prompts is not None))
        count = len(plan.sample.sampled_rows)
        generation.collect(plan, SampledResult(np.ones(count, dtype=np.int32)))
    assert len(kinds) == 2  # prompts and decode steps


@contextmanager
def ring(size: int) -> Iterator[tuple[PlanWriter, list[PlanReader], list[socket.socket]]]:
    file = create_memory(4 * size)
    pairs = [socket.socketpair() for _ in range(2)]
    readers = [PlanReader(file, rank, theirs) for rank, (_, theirs) in enumerate(pairs, start=1)]

    def check() -> None:
        raise DeviceFailed("the ring is full")  # these tests read only after writing

    try:
        yield PlanWriter(file, [ours for ours, _ in pairs], check), readers, [ours for ours, _ in pairs]
    finally:
        os.close(file)
        for pair in pairs:
            for each in pair:
                each.close()


def message_of(numbers: list[int]) -> Message:
    message = Message()
    message.array(ints(numbers))
    return message


def test_every_rank_reads_every_plan_in_order_however_often_the_ring_wraps() -> None:
    with ring(64) as (writer, readers, _):
        for number in range(40):
            expected = list(range(number, number + 5 + number % 11))
            writer.send(message_of(expected))
            for reader in readers:
                plan = reader.next()
                assert plan is not None and plan[2:].tolist() == expected


def test_a_plan_that_no_rank_has_read_is_not_overwritten() -> None:
    with ring(64) as (writer, readers, _):
        for _ in range(4):
            writer.send(message_of([7] * 14))
        readers[0].next()
        with pytest.raises(DeviceFailed):
            writer.send(message_of([8] * 14))


def test_a_plan_larger_than_the_ring_is_sent_beside_it() -> None:
    with ring(64) as (writer, readers, _):
        numbers = list(range(1000))
        writer.send(message_of(numbers))
        writer.send(message_of([1]))
        for reader in readers:
            first, second = reader.next(), reader.next()
            assert first is not None and first[2:].tolist() == numbers
            assert second is not None and second[2:].tolist() == [1]


def test_a_rank_learns_that_rank_0_is_done_or_gone() -> None:
    with ring(64) as (writer, readers, ours):
        writer.stop()
        assert readers[0].next() is None
        ours[1].close()
        assert readers[1].next() is None
        assert readers[1].next() is None
