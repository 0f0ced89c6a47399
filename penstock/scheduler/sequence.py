"""A sequence: one prompt of a generation request and the tokens that follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from penstock.content import PrefixKeys
from penstock.scheduler.fair_queue import ClientQueue
from penstock.types import Ints, Request, SamplerParams, TokenLogprobs

SequenceRank = tuple[float, int, int]  # arrival plus head start, order of arrival, row


class Constraint(Protocol):
    """Limits which tokens a sequence may sample next, for example to those that a grammar allows."""

    @property
    def done(self) -> bool:
        """Whether the text is complete."""

    def mask(self) -> NDArray[Any]:
        """A bit mask of the allowed next tokens, 32 per word. The next call may overwrite the array."""

    def accept(self, token: int) -> None: ...


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence. Numbers that change every step are in the `SlotTable`."""

    request: Request
    sampling: SamplerParams
    row: int
    rank: SequenceRank
    prefix_keys: PrefixKeys
    constraint: Constraint | None = None
    client: ClientQueue[SequenceState] | None = None  # set when it is queued
    slot: int = -1  # -1: the sequence waits for its first slot
    blocks: list[int] = field(default_factory=list)
    queued_s: float = 0.0
    prompt_logprobs: TokenLogprobs | None = None  # filled chunk by chunk, if requested
    prompt_logprobs_sent: bool = False

    @property
    def prompt(self) -> Ints:
        start = int(self.request.starts[self.row])
        return self.request.token_ids[start : start + int(self.request.lengths[self.row])]

    @property
    def rope_positions(self) -> Ints | None:
        """[prompt tokens, 3], positions in time, down and across; None: all are the token's index."""
        if (positions := self.request.rope_positions) is None:
            return None
        start = int(self.request.starts[self.row])
        return positions.reshape(-1, 3)[start : start + int(self.request.lengths[self.row])]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed and sent."""
        return self.sampling.prompt_logprobs is not None and not self.prompt_logprobs_sent
