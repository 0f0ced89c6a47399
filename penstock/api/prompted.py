"""Common fields for dialects with their own names of inputs and outputs: model, prompt and scheduling."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from penstock.api.fields import CacheSalt, User
from penstock.inputs.processor import InputOptions


class PromptedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The model, the prompt before the texts, and the scheduling."""

    takes_own_adapter: ClassVar[bool] = True  # `adapter` may name one of the checkpoint's own adapters
    model: str | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    input_type: str | None = None
    adapter: str | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None
    cache_salt: CacheSalt = ""

    def input_options(
        self, truncate_prompt_tokens: int | None = None, prompt: str | None = None
    ) -> InputOptions:
        return InputOptions(
            truncate_prompt_tokens=truncate_prompt_tokens,
            prompt_name=self.prompt_name,
            prompt=prompt,
            instruction=self.instruction,
            input_type=self.input_type,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )
