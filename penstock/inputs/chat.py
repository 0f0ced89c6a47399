"""Chat templates: a model's own Jinja text, run in a sandbox, turns messages into one prompt.

The environment is the one that transformers gives to templates, so a template means the same here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.checkpoint.files import optional_json
from penstock.errors import BadValue, ConfigError

Message = Mapping[str, Any]
_OURS = ("messages", "add_generation_prompt")  # names that the caller's own must not replace


class _Refused(TemplateError):
    """What `raise_exception` of a template says."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only what stands inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One template with the special tokens that it may name."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special = dict(special or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._takes_parts = _reads_parts(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                param="chat_template",
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """`more` are names of the template's own, such as `enable_thinking`."""
        if not messages:
            raise BadValue("messages is empty; give at least one message", param="messages")
        if add_generation_prompt and continue_final_message:
            raise BadValue(
                "add_generation_prompt and continue_final_message contradict each other",
                param="continue_final_message",
            )
        more = more or {}
        for name in _OURS:
            if name in more:
                raise BadValue(f"chat_template_kwargs must not hold {name!r}", param="chat_template_kwargs")
        settled = [self._settled(message, index) for index, message in enumerate(messages)]
        values = {"tools": None, "documents": None, **self.special, **more}
        try:
            text = self._template.render(
                messages=settled, add_generation_prompt=add_generation_prompt, **values
            )
        except _Refused as error:
            raise BadValue(f"the chat template refuses these messages: {error}", param="messages") from None
        except Exception as error:  # a template computes: anything that it stumbles over comes out here
            raise BadValue(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from None
        return _up_to_last(text, messages[-1]) if continue_final_message else text

    def _settled(self, message: Message, index: int) -> dict[str, Any]:
        """The message as the template wants it: content as a text, or as a list of parts."""
        content = message.get("content")
        if content is None:
            return dict(message)
        texts = part_texts(content, index)
        if self._takes_parts:
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(texts)}


def part_texts(content: Any, index: int) -> list[str]:
    """The texts of a message, which has one or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadValue(f"content of message {index} must be a text or a list of parts", param="messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal"):
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise BadValue(f"a part of message {index} has no text", param="messages")
            texts.append(text)
        else:
            raise BadValue(
                f"message {index} has a part of type {kind!r}; only text is taken", param="messages"
            )
    return texts


def _up_to_last(text: str, message: Message) -> str:
    """The prompt cut right behind the last message's words, so that the model goes on with them."""
    content = message.get("content")
    last = "" if content is None else part_texts(content, -1)[-1]
    words = last.strip()
    if not words:
        raise BadValue(
            "continue_final_message needs words in the last message", param="continue_final_message"
        )
    at = text.rfind(words)
    if at < 0:
        raise BadValue(
            "continue_final_message: the chat template changes the last message's words",
            param="continue_final_message",
        )
    whole = last.lstrip()  # with the spaces behind the words, where the template keeps them
    return text[: at + (len(whole) if text.startswith(whole, at) else len(words))]


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template goes through the parts of a content; else it wants one text."""
    named = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in named)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


class ModelTemplate:
    """The template that a model comes with, or the one that the operator gave. Read when first needed."""

    def __init__(self, folder: Path, given: str | None = None) -> None:
        self._folder = folder
        self._given = given

    @cached_property
    def template(self) -> ChatTemplate:
        settings = optional_json(self._folder / "tokenizer_config.json")
        source = self._source(settings)
        if source is None:
            raise BadValue(
                "the model has no chat template; give one with --chat-template, or use completions",
                param="messages",
            )
        return ChatTemplate(source, special_tokens(settings))

    def _source(self, settings: Mapping[str, Any]) -> str | None:
        known = self._known(settings)
        if self._given is None:
            return known.get("default")
        if self._given in known:
            return known[self._given]
        if "{{" in self._given or "{%" in self._given:
            return self._given
        file = Path(self._given)
        if not file.is_file():
            names = f"; it has templates named {', '.join(known)}" if known else ""
            raise ConfigError(
                f"--chat-template {self._given!r} is neither a file nor a template{names}",
                param="chat_template",
            )
        return file.read_text(encoding="utf-8")

    def _known(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """The templates of the model by name; the plain one is `default`."""
        known: dict[str, str] = {}
        listed = settings.get("chat_template")
        if isinstance(listed, str):
            known["default"] = listed
        elif isinstance(listed, list):
            known |= {str(entry["name"]): str(entry["template"]) for entry in listed}
        for file in sorted((self._folder / "additional_chat_templates").glob("*.jinja")):
            known[file.stem] = file.read_text(encoding="utf-8")
        alone = self._folder / "chat_template.jinja"
        if alone.is_file():
            known["default"] = alone.read_text(encoding="utf-8")
        return known


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like, as `tokenizer_config.json` spells them."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if name.endswith("_token") and not name.startswith("add_"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found
