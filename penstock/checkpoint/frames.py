"""What stands around the texts and images of published embedders that are chat models.

Where a checkpoint has modules, these say everything, and nothing here applies. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.checkpoint.identity import Identity

DEFAULT = "default"  # the name of the prompt of texts whose request names none
_TURN = "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n"
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class TextFrame:
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    instruction_template: str | None = None  # with {instruction}
    text_end: str = ""


class _Embedder(NamedTuple):
    names: str  # a pattern that its published names match, lower case
    instruction: str  # where the caller gives none
    end: str


_EMBEDDERS = (
    _Embedder(r"gme-?qwen2-?vl", "You are a helpful assistant.", _ANSWER + "<|endoftext|>"),
    _Embedder(r"qwen3-vl-embedding", "Represent the user's input.", _ANSWER),
)


def image_embedder_frame(identity: Identity, architecture: str) -> TextFrame:
    """The frame of a checkpoint that goes by a published name; an empty one for any other."""
    for embedder in _EMBEDDERS:
        named = Identity((*identity.names, architecture.lower()), identity.origin)
        if named.is_named(embedder.names, with_origin=True):
            prompt = _TURN.replace("{instruction}", embedder.instruction)
            return TextFrame({DEFAULT: prompt}, DEFAULT, _TURN, embedder.end)
    return TextFrame()
