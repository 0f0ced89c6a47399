"""Chat templates: a model's Jinja template, rendered in a sandbox, turns messages into one prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes

from penstock.checkpoint.files import optional_json
from penstock.checkpoint.template_limits import MAX_TEMPLATE_CHARS, TemplateLimitExceeded, limited
from penstock.checkpoint.templates import TemplateRefusal, template_environment
from penstock.checkpoint.tokenizer_settings import named_templates, special_tokens
from penstock.errors import BadValue, ConfigError, PenstockError

Message = Mapping[str, Any]
_RESERVED = ("messages", "add_generation_prompt")  # not allowed in chat_template_kwargs
_MARK = "\ue000end\ue000"  # marks where to cut a prompt
_TESTS_FOR_NONE = re.compile(r"\b(?:is|is not|==|!=)\s+none\b", re.IGNORECASE)


class ChatTemplate:
    """A chat template and the special tokens that it can refer to."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special = dict(special or {})
        self._tests_for_none = _TESTS_FOR_NONE.search(source) is not None
        self._knows_developers = "developer" in source
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(
                f"the chat template has {len(source)} characters; use one of at most {MAX_TEMPLATE_CHARS}",
                param="chat_template",
            )
        environment = template_environment()
        try:
            with limited():
                self._template = environment.limited_template(source)
            self._takes_parts = _reads_parts(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}",
                param="chat_template",
            ) from None
        except (SyntaxError, RecursionError, TemplateLimitExceeded) as error:
            raise ConfigError(
                f"the chat template cannot be compiled: {error}", param="chat_template"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt. `template_kwargs` are variables of the template, such as `enable_thinking`."""
        if not messages:
            raise BadValue("messages is empty; give at least one message", param="messages")
        if add_generation_prompt and continue_final_message:
            raise BadValue(
                "add_generation_prompt and continue_final_message contradict each other; set only one",
                param="continue_final_message",
            )
        template_kwargs = template_kwargs or {}
        for name in _RESERVED:
            if name in template_kwargs:
                raise BadValue(
                    f"chat_template_kwargs must not contain {name!r}", param="chat_template_kwargs"
                )
        is_blank = continue_final_message and not _last_text(messages[-1]).strip()
        if is_blank:
            messages = [*messages[:-1], _marked(messages[-1])]
        adapted = [self._adapt(message, index) for index, message in enumerate(messages)]
        values = {"tools": None, "documents": None, **self.special, **template_kwargs}
        try:
            with limited():
                text: str = self._template.render(
                    messages=adapted, add_generation_prompt=add_generation_prompt, **values
                )
        except TemplateLimitExceeded as error:
            raise BadValue(
                f"the chat template was stopped: {error}; send fewer or shorter messages", param="messages"
            ) from None
        except TemplateRefusal as error:
            raise BadValue(f"the chat template rejects these messages: {error}", param="messages") from None
        except Exception as error:  # a template can raise any exception
            raise BadValue(
                f"the chat template failed on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from None
        if is_blank:
            return _up_to_mark(text)
        return _up_to_last_message(text, messages[-1]) if continue_final_message else text

    def _adapt(self, message: Message, index: int) -> dict[str, Any]:
        """Convert a message's content to the form that the template expects: one text, or a list of parts.

        Missing content becomes an empty text, unless the template tests for none: most would write "None".
        The role `developer` becomes `system`, its older name, for templates that do not mention it.
        """
        if message.get("role") == "developer" and not self._knows_developers:
            message = {**message, "role": "system"}
        content = message.get("content")
        if content is None:
            return {**message, "content": None if self._tests_for_none else ""}
        if has_image_parts(content):
            return {**message, "content": self._parts(content, index)}
        texts = part_texts(content, index)
        if self._takes_parts:
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(texts)}

    def _parts(self, content: list[Any], index: int) -> list[dict[str, Any]]:
        """Texts and images in their order. The template writes the placeholders of images."""
        if not self._takes_parts:
            raise BadValue("the chat template has no place for images", param="messages")
        parts: list[dict[str, Any]] = []
        for part in content:
            if is_image_part(part):
                parts.append({"type": "image"})
            else:
                parts += [{"type": "text", "text": text} for text in part_texts([part], index)]
        return parts


IMAGE_PARTS = ("image_url", "image", "input_image", "image_base64")  # types of image parts


def is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def has_image_parts(content: Any) -> bool:
    return isinstance(content, list) and any(map(is_image_part, content))


def part_texts(content: Any, index: int) -> list[str]:
    """The texts of a message's content, which is one text or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadValue(f"messages[{index}].content must be a text or a list of text parts", param="messages")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal"):
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise BadValue(
                    f"messages[{index}].content has a part of type {kind!r} without text", param="messages"
                )
            texts.append(text)
        elif isinstance(kind, str) and "video" in kind:
            raise BadValue(
                f"messages[{index}].content has a part of type {kind!r}; no model here reads videos. Send "
                "frames of it as images",
                param="messages",
            )
        else:
            raise BadValue(
                f"messages[{index}].content has a part of type {kind!r}; use text, or image_url for a model "
                "that reads images",
                param="messages",
            )
    return texts


def _last_text(message: Message) -> str:
    content = message.get("content")
    return "" if not content or has_image_parts(content) else part_texts(content, -1)[-1]


def _marked(message: Message) -> Message:
    """Put a mark into a blank last message. The prompt is cut at the mark, where the text would begin."""
    if (not (content := message.get("content")) and content != "") or has_image_parts(content):
        raise BadValue(
            "continue_final_message needs text in the last message", param="continue_final_message"
        )
    return {**message, "content": _last_text(message) + _MARK}


def _up_to_mark(text: str) -> str:
    if text.count(_MARK) != 1:
        raise BadValue(
            "continue_final_message is not possible: the chat template writes the last message "
            f"{text.count(_MARK)} times",
            param="continue_final_message",
        )
    return text[: text.index(_MARK)]


def _up_to_last_message(text: str, message: Message) -> str:
    """The prompt up to the end of the last message's text, so that the model continues it."""
    last = _last_text(message)
    words = last.strip()
    at = text.rfind(words)
    if at < 0:
        raise BadValue(
            "continue_final_message is not possible: the chat template changes the last message's text",
            param="continue_final_message",
        )
    whole = last.lstrip()  # includes trailing spaces, if the template keeps them
    return text[: at + (len(whole) if text.startswith(whole, at) else len(words))]


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether the template loops over the parts of a message's content. Otherwise it expects one text."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False


class ModelTemplate:
    """The model's own chat template, or the one from `--chat-template`. Read on first use."""

    def __init__(self, folder: Path, given: str | None = None) -> None:
        self._folder = folder
        self._given = given

    @cached_property
    def exists(self) -> bool:
        """Whether messages can be sent."""
        try:
            _ = self.template
        except PenstockError:
            return False
        return True

    @cached_property
    def template(self) -> ChatTemplate:
        settings = optional_json(self._folder / "tokenizer_config.json")
        source = self._source(settings)
        if source is None:
            raise BadValue(
                "the model has no chat template; set --chat-template, or send text instead of messages",
                param="messages",
            )
        return ChatTemplate(source, special_tokens(settings))

    def given(self, source: str) -> ChatTemplate:
        """A template from a request, with the model's special tokens."""
        settings = optional_json(self._folder / "tokenizer_config.json")
        try:
            return ChatTemplate(source, special_tokens(settings))
        except ConfigError as error:
            raise BadValue(error.message, param="chat_template") from None

    def _source(self, settings: Mapping[str, Any]) -> str | None:
        known = named_templates(self._folder, settings)
        if self._given is None:
            return known.get("default")
        if self._given in known:
            return known[self._given]
        if "{{" in self._given or "{%" in self._given:
            return self._given
        file = Path(self._given)
        if not file.is_file():
            names = f"; the model's templates are: {', '.join(known)}" if known else ""
            raise ConfigError(
                f"--chat-template {self._given!r} is neither a file nor a Jinja template{names}",
                param="chat_template",
            )
        return file.read_text(encoding="utf-8")
