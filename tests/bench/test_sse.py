from __future__ import annotations

import pytest

from penstock.bench.load.sse import TokenStream

TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":9}}\n\n'


def test_the_first_token_and_the_gaps_after_it_are_timed() -> None:
    stream = TokenStream()
    for now in (1.0, 1.5, 1.75):
        stream.feed(TOKEN, now)
    stream.feed(USAGE + b"data: [DONE]\n\n", 2.0)
    assert (stream.first_token, stream.last_token) == (1.0, 1.75)
    assert stream.gaps == pytest.approx([0.5, 0.25])
    assert (stream.input_tokens, stream.tokens) == (4, 9)
    assert stream.finished


def test_an_event_may_be_split_anywhere() -> None:
    stream = TokenStream()
    for now, byte in enumerate(TOKEN + USAGE):
        stream.feed(bytes([byte]), float(now + 1))
    assert stream.first_token > 0
    assert stream.tokens == 9


def test_without_usage_each_event_counts_as_a_token() -> None:
    stream = TokenStream()
    stream.feed(TOKEN * 3, 1.0)
    assert stream.tokens == 3
    assert stream.input_tokens == -1


def test_comments_are_not_tokens() -> None:
    stream = TokenStream()
    stream.feed(b": ping\n\n", 1.0)
    assert stream.tokens == 0


@pytest.mark.parametrize("event", [b'data: {"error":{"message":"out of memory"}}\n\n', b"data: {broken\n\n"])
def test_an_error_in_the_stream_is_reported(event: bytes) -> None:
    stream = TokenStream()
    stream.feed(event, 1.0)
    assert stream.error is not None
