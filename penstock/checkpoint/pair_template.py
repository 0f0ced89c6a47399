"""How a sentence-transformers CrossEncoder writes a pair: as two messages, through the model's chat template.

The template is rendered once, with placeholders for the texts. The text around them is the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import Tokenizer

from penstock.checkpoint.files import CheckpointFiles, mapping, optional_json, shown
from penstock.checkpoint.rerankers import PROMPTS, Prompt
from penstock.checkpoint.template_limits import MAX_TEMPLATE_CHARS, limited
from penstock.checkpoint.templates import template_environment
from penstock.checkpoint.tokenizer_settings import named_templates, special_tokens
from penstock.errors import ModelLoadError

# Options that sentence-transformers passes to the tokenizer, not to the template.
_TOKENIZER_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "padding_side"}
_NEUTRAL_OPTIONS = _TOKENIZER_OPTIONS | {"pad_to_multiple_of", "logits_to_keep", "return_attention_mask"}
# Signs that a template loops over the parts of a message's content instead of writing it as a string.
_PART_MARKS = ("content[0]", ".type", "'type'", '"type"', "message.content[")
_ROLES = ("query", "document")
_QUERY, _DOCUMENT, _INSTRUCTION = "\ue000q\ue000", "\ue000d\ue000", "\ue000i\ue000"
_PLACEHOLDERS = {_QUERY: "{query}", _DOCUMENT: "{document}", _INSTRUCTION: "{instruction}"}


class MessageTemplate(NamedTuple):
    """A compiled chat template, and the variables that it is rendered with besides the messages."""

    file: str
    compiled: Any
    values: dict[str, Any]
    takes_parts: bool

    def render(self, query: str, document: str, system: str | None) -> str:
        return self.render_messages([("query", query), ("document", document)], system)

    def render_messages(self, texts: Sequence[tuple[str, str]], system: str | None = None) -> str:
        """Render messages, given as (role, text), after the system message if there is one."""
        if system is not None:
            texts = [("system", system), *texts]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.takes_parts else text}
            for role, text in texts
        ]
        try:
            with limited():
                return str(self.compiled.render(messages=messages, **self.values))
        except Exception as error:  # a template can raise any exception
            raise ModelLoadError(
                f"the chat template of {self.file} fails on messages of the roles "
                f"{', '.join(role for role, _ in texts)}: {type(error).__name__}: {error}",
                param="model",
            ) from None


def read_pair_prompt(files: CheckpointFiles, open_tokenizer: Callable[[], Tokenizer]) -> Prompt | None:
    """The prompt of a CrossEncoder; None if the tokenizer's pair template joins the texts."""
    template = find_template(files)
    if template is None:
        return None
    default = _default_prompt(files)
    plain = template.render(_QUERY, _DOCUMENT, default)
    instructed = template.render(_QUERY, _DOCUMENT, _INSTRUCTION)
    text, instruction, wording = _with_instruction(plain, instructed)
    if text.count(_DOCUMENT) != 1 or _QUERY not in text or any(name in text for name in _NAMES):
        raise ModelLoadError(
            f"the chat template of {template.file} does not write query and document as they are, once each; "
            "give score_template",
            param="score_template",
        )
    strips = _strips(template, text, instruction, default)
    text = _named(text)
    if (known := _known_prompt(text, instruction, wording)) is not None:
        return known._replace(strips=strips)
    parts = _split(text, open_tokenizer())
    return Prompt(parts, instruction=instruction, wording=wording, strips=strips, opened=False)


_NAMES = tuple(_PLACEHOLDERS.values())


def find_template(files: CheckpointFiles) -> MessageTemplate | None:
    """The chat template with which sentence-transformers writes texts; None if it uses none."""
    options, file = files.transformer, files.folder / "sentence_bert_config.json"
    modalities = options.get("modality_config")
    if modalities is not None and "message" not in modalities:
        return None
    settings = optional_json(files.folder / "tokenizer_config.json")
    templates = named_templates(files.folder, settings)
    processing = mapping(options, "processing_kwargs", file=file)
    values = dict(mapping(processing, "chat_template", file=file))
    _refuse_unknown({**processing.get("common", {}), **processing.get("text", {})}, str(file))
    name = str(values.pop("chat_template", "default"))
    source = templates.get(name, name if "{{" in name else None)
    if modalities is None and (source is None or not all(role in source for role in _ROLES)):
        return None  # not a layout of sentence-transformers, and the template is for chats
    if source is None:
        raise ModelLoadError(f"{files.folder} scores through the chat template {name!r}, which it lacks")
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelLoadError(f"the chat template of {files.folder} has {len(source)} characters")
    for option in (*_TOKENIZER_OPTIONS, "restore_suffix"):
        values.pop(option, None)
    values = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        **special_tokens(settings),
        **values,
    }
    form = (modalities or {}).get("message", {}).get("format", "auto")
    takes_parts = form == "structured" or (form == "auto" and any(mark in source for mark in _PART_MARKS))
    try:
        with limited():
            compiled = template_environment().limited_template(source)
    except (TemplateError, SyntaxError, RecursionError) as error:
        raise ModelLoadError(f"the chat template of {files.folder} cannot be compiled: {error}") from None
    return MessageTemplate(str(files.folder), compiled, values, takes_parts)


def _refuse_unknown(options: Mapping[str, Any], file: str) -> None:
    for name in options:
        if name not in _NEUTRAL_OPTIONS:
            raise ModelLoadError(
                f"{file} has {name} = {shown(options[name])} in processing_kwargs, which is not supported"
            )


def _default_prompt(files: CheckpointFiles) -> str | None:
    """The default system message."""
    names = files.sentence_transformers.get("prompts")
    name = files.sentence_transformers.get("default_prompt_name")
    prompt = names.get(name) if isinstance(names, dict) and name is not None else None
    return prompt if isinstance(prompt, str) and prompt else None


def _with_instruction(plain: str, instructed: str) -> tuple[str, str, str]:
    """Return the text with a placeholder for the instruction, the default instruction, and its wording.

    If the template ignores the system message, the text has no placeholder.
    """
    if _INSTRUCTION not in instructed:
        return plain, "", "{instruction}"
    limit = min(len(plain), len(instructed))
    start = next((at for at in range(limit) if plain[at] != instructed[at]), limit)
    end = next((at for at in range(limit - start) if plain[-1 - at] != instructed[-1 - at]), limit - start)
    default, wording = plain[start : len(plain) - end], instructed[start : len(instructed) - end]
    if wording.count(_INSTRUCTION) != 1 or any(mark in default + wording for mark in (_QUERY, _DOCUMENT)):
        return plain, "", "{instruction}"
    before, after = wording.split(_INSTRUCTION)
    return (
        plain[:start] + _INSTRUCTION + plain[len(plain) - end :],
        default,
        _named(before) + "{instruction}" + _named(after),
    )


def _strips(template: MessageTemplate, text: str, instruction: str, default: str | None) -> bool:
    """Whether the template removes white space around the texts. Any other change is refused."""
    query, document = "  Ab{c}\u0301 <D> \n", "\n\tE  f\\g "
    rendered = template.render(query, document, default)
    for strips in (False, True):
        pair = (query.strip(), document.strip()) if strips else (query, document)
        if rendered == _filled(text, dict(zip(_PLACEHOLDERS, (*pair, instruction), strict=True))):
            return strips
    raise ModelLoadError(
        f"the chat template of {template.file} changes the texts that it is given; give score_template",
        param="score_template",
    )


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub("|".join(_PLACEHOLDERS), lambda found: values[found[0]], text)


def _named(text: str) -> str:
    return _filled(text, _PLACEHOLDERS)


def _known_prompt(text: str, instruction: str, wording: str) -> Prompt | None:
    """An equivalent prompt whose parts tokenise to the same tokens as the whole, and are cheaper to
    tokenise."""
    qwen3 = PROMPTS["qwen3-reranker"]
    same = ("".join(qwen3.template), qwen3.instruction, qwen3.wording) == (text, instruction, wording)
    return qwen3._replace(opened=False) if same else None


def _split(text: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Divide the text into parts that give the same tokens as the whole.

    It is divided only at added tokens, where the tokenizer splits too. The part with the document is as short
    as possible.
    """
    if "prepend_scheme=first" in str(tokenizer.pre_tokenizer):  # only the whole text begins with a space
        return (text,)
    added = tokenizer.get_added_tokens_decoder().values()
    plain: Sequence[str] = sorted(
        (token.content for token in added if not (token.lstrip or token.rstrip or token.single_word)),
        key=len,
        reverse=True,
    )
    start, end = 0, len(text)
    at = text.index("{document}")
    if plain:
        for found in re.finditer("|".join(re.escape(token) for token in plain), text):
            if found.end() <= at:
                start = found.end()
            elif found.start() >= at:
                end = min(end, found.start())
    return tuple(part for part in (text[:start], text[start:end], text[end:]) if part)
