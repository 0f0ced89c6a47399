"""Limits of generation, and the check of requests against them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BadValue
from penstock.types import Request, SamplerParams, check_sampling, shown


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    max_rows: int  # sequences per step, and the number of slots
    max_tokens: int  # per step
    max_chunk_tokens: int  # per sequence and step
    max_length: int  # tokens of a sequence, prompt and output
    max_queued_tokens: int  # tokens of waiting prompts
    prefix_caching: bool = True  # keep full blocks for sequences with the same prefix
    vocab_size: int = 1 << 31
    separate_prefill: bool = False  # prefill and decode steps alternate
    mixed_needs_graph: bool = False  # prompts run beside decodes only in steps that a graph can replay
    target_itl_s: float = 0.0  # inter-token latency that steps with prompts should keep; 0: no target
    max_partial_prefills: int = 0  # prompts that a step may run in part only; 0: any number

    def check(self, request: Request, params: SamplerParams) -> None:
        """Raise `BadValue` for a request that can never run."""
        if request.num_rows == 0 or int(request.lengths.min()) == 0:
            raise BadValue("a prompt has no tokens; it needs at least one", param="prompt")
        for name, top in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if top is not None and not 0 <= top <= self.vocab_size:
                raise BadValue(f"{name} is {shown(top)}; use 0 to {self.vocab_size}", param=name)
        check_sampling(params, self.vocab_size)
        if params.min_tokens > params.max_tokens:
            raise BadValue(
                f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}", param="min_tokens"
            )
        longest = int(request.lengths.max())
        if longest + params.max_tokens > self.max_length:
            raise BadValue(
                f"a prompt of {longest} tokens and max_tokens {params.max_tokens} exceed the limit of "
                f"{self.max_length}; at most {max(0, self.max_length - longest)} may follow it",
                param="max_tokens",
            )
