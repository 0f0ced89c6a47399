from __future__ import annotations

import numpy as np

from penstock.bench.load.samples import GIVEN_UP, OK, Block, Recorder, join


def add(recorder: Recorder, start: float, error: int = OK, gaps: tuple[float, ...] = ()) -> None:
    recorder.add((0, start, start, start, start + 1, 0.0, 0.0, 200, error, 5, len(gaps), 9, len(gaps)), gaps)


def blocks() -> list[Block]:
    """Blocks of two processes that number the same messages differently."""
    one, two = Recorder(), Recorder()
    add(one, 3.0, gaps=(0.3,))
    add(one, 1.0, one.message("down"))
    two.message("other")
    add(two, 2.0, two.message("down"))
    add(two, 4.0, two.message("other"))
    add(two, 0.0, gaps=(0.1, 0.2))
    return [one.flush(), two.flush()]


def test_samples_of_all_processes_are_in_the_order_of_their_start() -> None:
    samples = join(blocks())
    assert samples["start"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert samples.ok.tolist() == [True, False, False, True, False]


def test_gaps_between_tokens_stay_with_their_request() -> None:
    samples = join(blocks())
    counts = samples.columns["gaps"]
    assert counts.tolist() == [2, 0, 0, 1, 0]
    assert np.allclose(samples.gaps, [0.1, 0.2, 0.3])


def test_equal_messages_of_all_processes_are_counted_together() -> None:
    assert join(blocks()).errors() == {"down": 2, "other": 1}


def test_abandoned_requests_are_neither_answered_nor_failed() -> None:
    recorder = Recorder()
    add(recorder, 1.0, GIVEN_UP)
    samples = join([recorder.flush()])
    assert not samples.ok.any()
    assert not samples.failed.any()


def test_a_flushed_recorder_is_empty() -> None:
    recorder = Recorder()
    add(recorder, 1.0, recorder.message("x"))
    recorder.flush()
    assert len(recorder) == 0
    assert recorder.flush().messages == []


def test_no_blocks_make_empty_samples() -> None:
    assert len(join([])) == 0
    assert join([]).errors() == {}
