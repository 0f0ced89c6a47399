"""Admission: refuse a request that does not fit into the queue, before any work on it.

The engine publishes its backlog and its speed. An API process adds the requests that it is tokenising. It
estimates the tokens of a new request from the size of its body, and answers 429 if they would exceed a limit.
Estimates may be wrong, so the engine checks again with the actual number.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.backlog import ADMITTED_SHARE, check_wait, max_queued_of, retry_after_s
from penstock.errors import QueueFull
from penstock.wire.status import StatusPage

_FIRST_RATIO = 0.25  # tokens per byte of body, as in English; rather low, because the engine checks again
_FIRST_BYTES = 4096  # weight of the first ratio, as bytes of bodies already seen
_SMALL_BYTES = 1024  # bodies up to this size may be admitted without an estimate
_SMALL_ROWS = 8
_TRUST_S = 0.005  # how long small requests are not checked after one was admitted
_FADE = 0.95  # decay of earlier observations at each request


class TokenRatio:
    """Tokens per byte of body: a moving average over requests, weighted by size."""

    def __init__(self) -> None:
        self._bytes = float(_FIRST_BYTES)
        self._tokens = _FIRST_RATIO * _FIRST_BYTES

    def estimate(self, num_bytes: int) -> int:
        return int(num_bytes * self._tokens / self._bytes)

    def learn(self, num_bytes: int, num_tokens: int) -> None:
        self._bytes = self._bytes * _FADE + num_bytes
        self._tokens = self._tokens * _FADE + num_tokens


@dataclass(slots=True, eq=False)
class Admitted:
    """A request that may be tokenised."""

    num_bytes: int
    estimated_tokens: int
    is_large: bool


class Admission:
    """Admission control of one model. Without a status page, as with a local engine, it admits everything."""

    def __init__(
        self,
        status: StatusPage | None = None,
        settings: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
        num_engines: Callable[[], int] = lambda: 1,
    ) -> None:
        """`settings` returns the resolved settings of an engine; empty while no engine is ready.
        `num_engines` returns how many engines serve. The limit of queued tokens applies to each of them."""
        self._num_engines = num_engines
        self._status = status
        self._settings = settings
        self._ratios: defaultdict[str, TokenRatio] = defaultdict(TokenRatio)
        self._tokenising = [0, 0]  # estimated tokens of requests being tokenised: small, large
        self._clock = clock
        self._trusted_until_s = [0.0, 0.0]  # pooling, generation

    def takes(self, num_bytes: int, num_rows: int) -> bool:
        """Whether to admit a pooling request without an estimate: it is small, and either there is no backlog
        or another small request was just admitted."""
        if num_bytes > _SMALL_BYTES or num_rows > _SMALL_ROWS:
            return False
        if self._status is None or not self._status.has_backlog:
            return True
        return self._clock() < self._trusted_until_s[0]

    def admit(
        self,
        kind: str,
        num_bytes: int,
        num_rows: int = 1,
        *,
        generates: bool = False,
        light_weight: float = 0.0,
    ) -> Admitted:
        """Admit a request, or raise `QueueFull`. Call `tokenised` when it is ready to be submitted.

        `kind` groups requests with similar bodies, which have about the same number of tokens per byte.
        `light_weight` is the weight of a client without another request in flight, which does not wait for
        the whole backlog of other clients; 0 for any other client.
        """
        admitted = Admitted(num_bytes, self._ratios[kind].estimate(num_bytes), False)
        if self._status is not None:
            settings = self._settings()
            if settings:
                admitted.is_large = (
                    admitted.estimated_tokens > settings["max_num_batched_tokens"]
                    or num_rows > settings["max_num_seqs"]
                )
                if admitted.is_large or self._clock() >= self._trusted_until_s[generates]:
                    self._check(admitted, settings, generates, light_weight)
        self._tokenising[admitted.is_large] += admitted.estimated_tokens
        return admitted

    def tokenised(self, kind: str, admitted: Admitted, num_tokens: int | None) -> None:
        """Stop counting a request that is being submitted or, if `num_tokens` is None, has failed."""
        self._tokenising[admitted.is_large] -= admitted.estimated_tokens
        if num_tokens is not None:
            self._ratios[kind].learn(admitted.num_bytes, num_tokens)

    def with_retry_after(self, error: QueueFull) -> QueueFull:
        """Add to an error of the engine when to try again, estimated from the current backlog."""
        settings = self._settings()
        if self._status is not None and settings and (limit_s := settings["max_queue_seconds"]):
            wait_s = self._status.read().backlog.wait_s(is_large=True)
            error.retry_after_s = retry_after_s(wait_s, limit_s)
        return error

    def _check(
        self, admitted: Admitted, settings: Mapping[str, Any], generates: bool, light_weight: float
    ) -> None:
        if self._status is None or not (any(self._tokenising) or self._status.has_backlog):
            return
        status, (small, large) = self._status.read(), self._tokenising
        published = status.prompt_backlog if generates else status.backlog
        backlog = published._replace(
            small_tokens=published.small_tokens + small, large_tokens=published.large_tokens + large
        )
        waiting, max_tokens = backlog.num_tokens, settings["max_queued_tokens"] * self._num_engines()
        limit = max_tokens
        if light_weight and (backlog.small_weight or backlog.large_weight):
            limit = max_queued_of(limit, waiting, held=0, num_clients=1)
        if waiting and waiting + admitted.estimated_tokens > limit:
            error = QueueFull(
                f"about {waiting} tokens are waiting and at most {limit} may; this request has about "
                f"{admitted.estimated_tokens}; try again shortly"
            )
            error.retry_after_s = retry_after_s(backlog.wait_s(is_large=True), 0)
            raise error
        is_large = admitted.is_large or generates
        wait_s = any_wait_s = backlog.wait_s(is_large=is_large)
        if light_weight:
            own_tokens = min(admitted.estimated_tokens, settings["max_num_batched_tokens"])
            wait_s = backlog.client_wait_s(own_tokens, light_weight, is_large=is_large and not generates)
        check_wait(wait_s, max_wait_s := settings["max_queue_seconds"])
        is_admitted_for_any = any_wait_s <= ADMITTED_SHARE * max_wait_s or not max_wait_s
        is_admitted_for_any &= waiting + admitted.estimated_tokens <= max_tokens
        if not admitted.is_large and is_admitted_for_any:  # true for small requests of any client
            self._trusted_until_s[generates] = self._clock() + _TRUST_S
