"""Plans of generation steps: the fast path for decode steps gives the same plan as the general path."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.steps import (
    PromptRequest,
    SamplerChanges,
    SequenceMemory,
    StepRows,
    generation_plan,
)
from penstock.types import Join, SamplerParams


def assert_same(got: Any, wanted: Any, where: str = "plan") -> None:
    assert type(got) is type(wanted), where
    if is_dataclass(wanted):
        for field in fields(wanted):
            name = field.name
            assert_same(getattr(got, name), getattr(wanted, name), f"{where}.{name}")
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype, where
        np.testing.assert_array_equal(got, wanted, err_msg=where)
    else:
        assert got == wanted, where


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_decode_step_has_the_plan_of_the_general_path(data: st.DataObject) -> None:
    choose = data.draw
    size, slots, length = choose(st.sampled_from([1, 4, 16])), 12, 40
    rows = choose(st.permutations(range(slots)))[: choose(st.integers(1, slots))]
    some = st.lists(st.integers(0, length - 1), min_size=len(rows), max_size=len(rows))
    begins = np.array(choose(some), dtype=np.int32)
    generator = np.random.default_rng(choose(st.integers(0, 9)))
    chosen = StepRows(
        slots=np.array(rows, dtype=np.int32),
        begins=begins,
        counts=np.ones(len(rows), dtype=np.int32),
        samples=generator.random(len(rows)) < choose(st.sampled_from([0.5, 1.1])),
        num_known=begins + generator.integers(0, 2, len(rows), dtype=np.int32),
        num_logprobs=generator.integers(-1, 3, len(rows), dtype=np.int32),
        epochs=generator.integers(0, 5, len(rows), dtype=np.int32),
        visits=generator.integers(0, 5, len(rows), dtype=np.int32),
    )
    memory = SequenceMemory(
        token_ids=generator.integers(0, 97, (slots, length), dtype=np.int32),
        block_tables=generator.integers(0, 50, (slots, -(-length // size)), dtype=np.int32),
        block_size=size,
    )
    join = Join(rows[0], SamplerParams(), np.array([1], dtype=np.int32))
    changes = SamplerChanges((3,), (join,), ((rows[-1], np.array([5], dtype=np.int32)),))
    no_prompts = PromptRequest(np.zeros(len(rows), dtype=np.int32), 0)  # forces the general path
    general = generation_plan(chosen, memory, changes, no_prompts)
    assert_same(generation_plan(chosen, memory, changes), general)
