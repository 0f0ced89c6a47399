"""The prompt template around the texts and images of chat models that embed.

Published models are recognised by name. A sentence-transformers layout has the template as a chat template,
which is rendered once with placeholders for prompt and text. Free of torch.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.checkpoint.files import CheckpointFiles
from penstock.checkpoint.identity import Identity
from penstock.errors import ModelLoadError

_TURN = "<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n"
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
_TEXT, _PROMPT = "\ue000t\ue000", "\ue000p\ue000"
_PROBE = "  Ab{c}\u0301 <D> \n"  # a template that changes this text changes others too


class TextFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A text is written between `begin` and `end`, or with a prompt between `prompted` and `end`."""

    begin: str = ""
    prompted: str | None = None  # with {prompt}; None: the prompt is put directly before the text
    end: str = ""
    ends_sentences: bool = False  # add a full stop to a prompt that does not end with punctuation


class _Embedder(NamedTuple):
    names: str  # pattern of the published names, in lower case
    prompt: str  # default prompt
    end: str
    ends_sentences: bool = False


# From the code that is published with the models: gme_inference.py in GME's repositories, and
# src/models/qwen3_vl_embedding.py in QwenLM/Qwen3-VL-Embedding. Their configuration files do not have it.
_EMBEDDERS = (
    _Embedder(r"gme-?qwen2-?vl", "You are a helpful assistant.", _ANSWER + "<|endoftext|>"),
    _Embedder(r"qwen3-vl-embedding", "Represent the user's input.", _ANSWER, ends_sentences=True),
)


def published_frame(identity: Identity) -> TextFrame:
    """The frame of a checkpoint with a published name; an empty one for any other."""
    for embedder in _EMBEDDERS:
        if identity.is_named(embedder.names, with_origin=True):
            return TextFrame(
                begin=_TURN.replace("{prompt}", embedder.prompt),
                prompted=_TURN,
                end=embedder.end,
                ends_sentences=embedder.ends_sentences,
            )
    return TextFrame()


def message_frame(files: CheckpointFiles) -> TextFrame:
    """The frame of a sentence-transformers layout that writes texts as messages; an empty one for others.
    The prompt is the system message."""
    if "message" not in (files.transformer.get("modality_config") or {}):
        return TextFrame()
    from penstock.checkpoint.pair_template import find_template  # Jinja is not needed otherwise

    template = find_template(files)
    assert template is not None  # the layout has messages
    texts = [template.render_messages([("user", text)]) for text in (_TEXT, _PROBE)]
    prompted = template.render_messages([("user", _TEXT)], _PROMPT)
    begin, text, end = texts[0].partition(_TEXT)
    before, _, after = prompted.partition(_TEXT)
    if not text or texts[1] != begin + _PROBE + end or after != end or before.count(_PROMPT) > 1:
        raise ModelLoadError(
            f"the chat template of {template.file} changes the texts that it is given; that is not supported",
            param="model",
        )
    return TextFrame(begin=begin, prompted=before.replace(_PROMPT, "{prompt}"), end=end)
