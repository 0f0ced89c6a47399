"""Conversations for every route that takes `messages`: checked, and rendered by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import msgspec
import orjson

from penstock.api.call import Call
from penstock.api.images import RawContent, content_part, message_images, prepared_images, with_images
from penstock.api.state import ServedModel
from penstock.errors import BadValue, shown
from penstock.inputs.chat import ChatTemplate, has_image_parts, is_image_part, part_texts
from penstock.inputs.images.content import Rendered
from penstock.inputs.long_texts import RowLimit
from penstock.types import PreparedImage

Message = dict[str, Any]
Conversations = list[Message | list[Message]]  # one conversation, or a list of them
MAX_MESSAGES = 4096  # in one conversation
_NULL = msgspec.Raw(b"null")
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ConversationBody(Protocol):
    """The fields that say how a conversation is rendered."""

    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


def are_conversations(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether a body has messages, under `messages` or `input`."""
    if fields.get("messages", _NULL) != _NULL:
        return True
    return "input" in fields and _has_role(fields["input"])


def _has_role(raw: msgspec.Raw) -> bool:
    """Whether a value is a list of messages, or a list of conversations. Only the first item is checked."""
    try:
        for _ in range(2):
            items = _ITEMS.decode(raw)
            if not items:
                return False
            raw = items[0]
            if bytes(memoryview(raw)[:1]) == b"{":
                return "role" in _FIELDS.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return False


def listed_conversations(messages: Conversations | None, given: Any) -> list[list[Message]]:
    """The conversations of a body, which has them under `messages` or `input`."""
    if messages is not None and given is not None:
        raise BadValue("give either messages or input", param="messages")
    found: Any = messages if messages is not None else given
    name = "messages" if messages is not None else "input"
    if not found:
        raise BadValue(f"{name} is empty; give at least one message", param=name)
    if all(isinstance(each, dict) for each in found):
        return [found]
    if all(isinstance(each, list) for each in found):
        return list(found)
    raise BadValue(
        f"{name} mixes messages and lists of messages; give one conversation, or a list of conversations",
        param=name,
    )


def check_messages(messages: list[Message]) -> list[Message]:
    """Check messages, and normalise them for a chat template."""
    if len(messages) > MAX_MESSAGES:
        raise BadValue(f"messages has {len(messages)} entries; give at most {MAX_MESSAGES}", param="messages")
    return [_checked(message, index) for index, message in enumerate(messages)]


def check_template(call: Call, template: str | None) -> None:
    """Refuse a chat template in a request, unless the operator trusts clients to send them."""
    if template is not None and not call.state.config.trust_request_chat_template:
        raise BadValue(
            "chat_template is accepted only by a server that runs with --trust-request-chat-template; "
            "the operator sets the template with --chat-template",
            param="chat_template",
        )


def _checked(message: Message, index: int) -> Message:
    """Check a message. Drops null fields that clients send, and parses the arguments of tool calls."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise BadValue(f"message {index} has no role", param="messages")
    given = {name: value for name, value in message.items() if value is not None}
    if role == "function":
        raise BadValue(f"message {index} has the role 'function'; use 'tool'", param="messages")
    for name, instead in _UNSUPPORTED.items():
        if name in given:
            raise BadValue(f"message {index} has {name!r}, which is refused; {instead}", param="messages")
    content = given.pop("content", None)
    if content is None:
        content = given.get("refusal") if role == "assistant" else None
    if content is None and role != "assistant":
        raise BadValue(f"message {index} has no content", param="messages")
    if content is not None and not has_image_parts(content):
        part_texts(content, index)
    if not given.get("tool_calls"):
        given.pop("tool_calls", None)
    else:
        given["tool_calls"] = _tool_calls(given["tool_calls"], index)
    return {**given, "content": content}


_UNSUPPORTED = {"function_call": "send it under `tool_calls`", "audio": "send its text"}


def _tool_calls(calls: Any, index: int) -> list[Any]:
    """Check earlier tool calls. Parses their arguments, because templates write them as JSON."""
    if not isinstance(calls, list):
        raise BadValue(f"message {index} has tool_calls that are not a list", param="messages")
    return [_tool_call(call, index) for call in calls]


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise BadValue(
            f"message {index} has a tool call that is not of type 'function'; only these are supported",
            param="messages",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments) if arguments.strip() else {}
        except ValueError:
            raise BadValue(
                f"message {index} has a tool call whose arguments are not valid JSON", param="messages"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


async def conversation_rows(
    call: Call,
    model: ServedModel,
    body: ConversationBody,
    conversations: list[list[Message]],
    limit: RowLimit | None = None,
) -> list[Any]:
    """The token ids of each conversation, so that no prompt of the model is added. If a conversation has
    images, returns rendered texts with their images instead. For a model with separate text and image towers,
    each conversation becomes token ids or one image."""
    check_template(call, body.chat_template)
    checked = [check_messages(each) for each in conversations]
    images = [message_images(each) for each in conversations]
    if model.spec.dual is not None and any(images):
        checked = [[_without_images(message) for message in each] for each in checked]
    size = sum(_size(message["content"]) for each in checked for message in each)
    texts = await model.text.batcher.call(partial(_render, model, body, checked), size)
    if not any(images):
        return await model.text.batcher.encode(texts, body.add_special_tokens, limit)
    prepared = await prepared_images(call, model, images, "messages")
    if model.spec.dual is not None:
        rows = await model.text.batcher.encode(texts, body.add_special_tokens, limit)
        parts = zip(prepared, texts, rows, strict=True)
        return [_text_or_image(own, text, row) for own, text, row in parts]
    return [Rendered(own, text) for own, text in zip(prepared, texts, strict=True)]


def is_plain(model: ServedModel, body: ConversationBody) -> bool:
    """Whether messages are used without a template: the model reads images and has no chat template."""
    return model.spec.images is not None and body.chat_template is None and not model.text.chat.exists


async def plain_inputs(call: Call, model: ServedModel, conversations: list[list[Message]]) -> list[Any]:
    """The texts and images of each conversation as one input."""
    items = [_plain_content(each) for each in conversations]
    return await with_images(call, model, items, "messages")


def _plain_content(messages: list[Message]) -> RawContent:
    checked = check_messages(messages)
    if [message["role"] for message in checked] != ["user"]:
        raise BadValue(
            "the model has no chat template, so a conversation is one message of the role 'user'; set "
            "--chat-template for others",
            param="messages",
        )
    content = checked[0]["content"]
    parts = content if has_image_parts(content) else part_texts(content, 0)
    if not parts:
        raise BadValue("message 0 has no content", param="messages")
    return tuple(content_part(part, "messages") for part in parts)


def _without_images(message: Message) -> Message:
    content: Any = message.get("content")
    if not has_image_parts(content):
        return message
    return {**message, "content": [part for part in content if not is_image_part(part)]}


def _text_or_image(images: tuple[PreparedImage, ...], text: str, token_ids: Any) -> Any:
    """A conversation as input of a model that reads a text or an image. `text` was rendered without the
    images."""
    if not images:
        return token_ids
    if len(images) > 1 or text.strip():
        beside = (
            f"{len(images)} images" if len(images) > 1 else f"the text {shown(text.strip())} with an image"
        )
        raise BadValue(
            f"a conversation has {beside} once the chat template has rendered it; this model embeds a text "
            "or one image. Send separate conversations, with a chat template that writes contents only",
            param="messages",
        )
    return images[0]


def _size(content: Any) -> int:
    """The number of characters to render. Bytes of images do not count."""
    if has_image_parts(content):
        return sum(
            len(str(part.get("text", ""))) if isinstance(part, dict) else len(part) for part in content
        )
    return len(str(content))


def _render(model: ServedModel, body: ConversationBody, conversations: list[list[Message]]) -> list[str]:
    chat = model.text.chat
    template: ChatTemplate = chat.template if body.chat_template is None else chat.given(body.chat_template)
    return [
        template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
        for messages in conversations
    ]
