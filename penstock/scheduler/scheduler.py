"""Who runs next, within a budget of tokens and rows. Pure Python and NumPy; time is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core import Ints, Request
from penstock.errors import QueueFull
from penstock.scheduler.queue import WaitingLine


@dataclass(frozen=True, slots=True)
class Budget:
    tokens: int  # of one step
    rows: int  # of one step
    queued_tokens: int  # of the waiting line; beyond it requests are refused


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The rows that one request runs in the coming step."""

    request: Request
    rows: Ints


class Scheduler:
    """Continuous batching: whatever waits and fits shares the next step, the first in line first."""

    LOOK_AHEAD = 64  # requests behind one that does not fit which may still fill the step

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.line = WaitingLine()

    def add(self, request: Request) -> None:
        """Join the waiting line; `QueueFull` if it is too long. An empty line takes any request."""
        if self.line.tokens and self.line.tokens + request.num_tokens > self.budget.queued_tokens:
            raise QueueFull(
                f"{self.line.tokens} tokens are waiting and at most {self.budget.queued_tokens} may; "
                "try again shortly"
            )
        self.line.join(request)

    def cancel(self, request_id: str) -> bool:
        return self.line.remove(request_id) is not None

    def expire(self, now_s: float) -> list[Request]:
        return self.line.expired(now_s)

    def schedule(self) -> list[Share]:
        """Fill one step. A row larger than the whole budget runs alone."""
        tokens, rows, passed_over = self.budget.tokens, self.budget.rows, 0
        shares: list[Share] = []
        for waiting in self.line:
            before = waiting.tokens_taken
            taken = waiting.take(tokens, rows)
            if not len(taken) and not shares:
                taken = waiting.take(waiting.tokens_left, 1)
            if len(taken):
                used = waiting.tokens_taken - before
                shares.append(Share(waiting.request, taken))
                self.line.took(used, len(taken))
                tokens, rows = tokens - used, rows - len(taken)
            if waiting.rows_left:
                passed_over += 1
            if tokens <= 0 or rows <= 0 or passed_over > self.LOOK_AHEAD:
                break
        if shares:
            self.line.sweep()
        return shares
