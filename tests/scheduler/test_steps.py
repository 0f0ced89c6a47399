"""Steps that generate: the short way of planning them gives what the long way gives."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.steps import StepRows, generation_plan
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
def test_the_decode_plan_equals_the_general_plan(data: st.DataObject) -> None:
    choose = data.draw
    size, slots, length = choose(st.sampled_from([1, 4, 16])), 12, 40
    rows = choose(st.permutations(range(slots)))[: choose(st.integers(1, slots))]
    some = st.lists(st.integers(0, length - 1), min_size=len(rows), max_size=len(rows))
    begins = np.array(choose(some), dtype=np.int32)
    generator = np.random.default_rng(choose(st.integers(0, 9)))
    chosen = StepRows(
        np.array(rows, dtype=np.int32),
        begins,
        np.ones(len(rows), dtype=np.int32),
        generator.integers(0, 5, len(rows), dtype=np.int32),
        generator.integers(0, 5, len(rows), dtype=np.int32),
    )
    join = Join(rows[0], SamplerParams(), np.array([1], dtype=np.int32))
    given: dict[str, Any] = {
        "known": begins + generator.integers(0, 2, len(rows), dtype=np.int32),
        "wants": generator.integers(-1, 3, len(rows), dtype=np.int32),
        "tokens": generator.integers(0, 97, (slots, length), dtype=np.int32),
        "tables": generator.integers(0, 50, (slots, -(-length // size)), dtype=np.int32),
        "block_size": size,
        "leaves": (3,),
        "joins": (join,),
        "masks": ((rows[-1], np.array([5], dtype=np.int32)),),
    }
    sampled = generator.random(len(rows)) < choose(st.sampled_from([0.5, 1.1]))
    nobody = np.zeros(len(rows), dtype=np.int32)  # asks about a prompt, which takes the long way
    long_way = generation_plan(chosen, sampled, **given, prompt_ends=nobody)
    assert_same(generation_plan(chosen, sampled, **given), long_way)
