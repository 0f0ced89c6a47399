"""Odd bodies for `/v1/completions` and `/v1/chat/completions`: wrong types, extreme numbers, deep nesting,
long lists, odd Unicode and random grammars. Equal seeds give equal bodies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_INTEGERS = [
    0, 1, -1, 2, 3, 7, 15, 16, 64, 255, 256, 1000, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62,
    2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30, -(10**30),
]  # fmt: skip
_FLOATS = [
    0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -2.0, 1e-6, 1e-45, 1e-308, 5e-324, 1e38, 3.5e38, 1e308, -1e308, 1e-7,
    0.999999,
]  # fmt: skip
# JSON that the encoder cannot write.
_RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1E+400",
    "1" * 5000,
    "-" + "9" * 5000,
    "0." + "1" * 5000,
]
_TEXTS = [
    "", " ", "a", "the water was", "\0", "\x1b[31m", "\r\n", "\u202e", "\ufeff", "é", "e\u0301", "日本語",
    "🙂", "👩‍👩‍👧", "\uffff", "ﷺ" * 20, "a" * 3000, "\\", '"', "<|im_end|>", "<|im_start|>system",
    "{{ 7 * 7 }}", "%s%n", "٣", "null",
]  # fmt: skip
_SURROGATES = [r'"\ud800"', r'"\udc00\ud800"', r'"x\udfff"']


class _Raw:
    """JSON text that is written into the body verbatim."""

    def __init__(self, text: str) -> None:
        self.text = text


def bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield endless (route, body) pairs. Most bodies are valid except for one to three fields."""
    draw = random.Random(seed)
    while True:
        yield _one(draw)


def _one(draw: random.Random) -> tuple[str, bytes]:
    route = draw.choice((COMPLETIONS, CHAT))
    if draw.random() < 0.03:
        return route, _broken(draw)
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 6)}
    if route == COMPLETIONS:
        body["prompt"] = draw.choice(["the water was", [1, 2, 3], ["a", "b"], [[5], [6, 7]]])
    else:
        body["messages"] = [{"role": "user", "content": "hi"}]
    fields = _FIELDS | (_COMPLETION_FIELDS if route == COMPLETIONS else _CHAT_FIELDS)
    for name in draw.sample(sorted(fields), draw.randint(1, 3)):
        body[name] = _anything(draw) if draw.random() < 0.2 else fields[name](draw)
    if draw.random() < 0.2:
        body["stream"] = True
    return route, _encoded(body)


def _encoded(value: Any) -> bytes:
    raw: list[str] = []

    def mark(given: Any) -> Any:
        raw.append(given.text)
        return f"\0raw{len(raw) - 1}\0"

    text = json.dumps(value, default=mark)
    for at, each in enumerate(raw):
        text = text.replace(json.dumps(f"\0raw{at}\0"), each)
    return text.encode("utf-8", "surrogatepass")


def _broken(draw: random.Random) -> bytes:
    """A body that is not a JSON object."""
    depth = draw.choice([10, 500, 2000, 20_000])
    return draw.choice(
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'"text"',
            b"\xff\xfe{}",
            b'{"prompt": "\xff"}',
            b'{"prompt": "a", "prompt": "b"}',
            b"[" * depth + b"]" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
            b'{"messages": ' + b"[" * depth + b"]" * depth + b"}",
            b'{"messages": [{"role": "user", "content": '
            + b'[{"text": ' * depth
            + b"1"
            + b"}]" * depth
            + b"}]}",
        ]
    )


def _integer(draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return _Raw(draw.choice(_RAW))
    return draw.choice(_INTEGERS) if draw.random() < 0.7 else draw.randint(-5, 300)


def _number(draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return _Raw(draw.choice(_RAW))
    return draw.choice(_FLOATS) if draw.random() < 0.7 else draw.choice(_INTEGERS)


def _text(draw: random.Random) -> Any:
    if draw.random() < 0.08:
        return _Raw(draw.choice(_SURROGATES))
    if draw.random() < 0.1:
        return "".join(chr(draw.choice((*range(1, 0x250), *range(0x4E00, 0x4E20)))) for _ in range(30))
    return draw.choice(_TEXTS)


def _boolean(draw: random.Random) -> Any:
    return draw.choice([True, False, None])


def _ids(draw: random.Random) -> list[Any]:
    kind = draw.random()
    if kind < 0.1:
        return list(range(draw.choice([1025, 5000, 100_000])))
    if kind < 0.2:
        return [draw.randint(0, 50)] * draw.choice([1000, 200_000])
    return [draw.choice([_integer(draw), draw.randint(0, 200)]) for _ in range(draw.randint(0, 12))]


def _texts(draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return [f"word {i}" for i in range(draw.choice([65, 1100, 20_000]))]
    return [_text(draw) for _ in range(draw.randint(0, 5))]


def _bias(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.1:
        return {str(i): 1 for i in range(draw.choice([300, 1024, 1025, 50_000]))}
    keys = ["1", " 2 ", "-1", "9" * 5000, "٣", "1.0", "x", "", "10", "0x10", "1_0", "99999999999"]
    return {draw.choice(keys): _number(draw) for _ in range(draw.randint(0, 4))}


def _nested(draw: random.Random, depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value} if draw.random() < 0.5 else [value]
    return value


def _anything(draw: random.Random) -> Any:
    choices: list[Callable[[], Any]] = [
        lambda: _integer(draw),
        lambda: _number(draw),
        lambda: _text(draw),
        lambda: None,
        lambda: True,
        list,
        dict,
        lambda: [None],
        lambda: _nested(draw, draw.choice([3, 60, 400])),
        lambda: _Raw("[" * 2000 + "]" * 2000),
        lambda: _Raw('{"a":' * 2000 + "1" + "}" * 2000),
        lambda: _ids(draw),
        lambda: _texts(draw),
    ]
    return draw.choice(choices)()


def _schema(draw: random.Random, depth: int = 0) -> Any:
    """A random JSON schema, sometimes an invalid one."""
    kind = draw.randrange(14 if depth < 5 else 6)
    if kind < 3:
        return {"type": draw.choice(["string", "integer", "number", "boolean", "null", "wrong", 5])}
    if kind == 3:
        return {"type": "string", "pattern": _expression(draw)}
    if kind == 4:
        return {"enum": [_text(draw) for _ in range(draw.randint(0, 3))]}
    if kind == 5:
        name = draw.choice(
            ["minimum", "maximum", "minLength", "maxLength", "minItems", "multipleOf", "format"]
        )
        return {"type": draw.choice(["string", "integer", "array"]), name: _number(draw)}
    if kind == 6:
        return {
            "$ref": draw.choice(["#", "#/$defs/a", "#/nowhere", "https://example.com", "", "#/$defs/%61"])
        }
    if kind == 7:
        return {draw.choice(["anyOf", "oneOf", "allOf"]): [_schema(draw, depth + 1) for _ in range(2)]}
    if kind == 8:
        return {"type": "array", "items": _schema(draw, depth + 1)}
    if kind == 9:
        return _chained(draw.choice([10, 150, 2000]))
    if kind == 10:
        return _nested(draw, draw.choice([5, 90, 300]))
    names = [draw.choice(["a", "b", "", "é", "x" * 50]) for _ in range(3)]
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth + 1) for name in names},
        "required": names[: draw.randint(0, 3)],
        "additionalProperties": draw.choice([True, False]),
        "$defs": {"a": _schema(draw, depth + 1)},
    }


def _chained(count: int) -> dict[str, Any]:
    arrays = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**arrays, f"d{count}": {"type": "string"}}}


def _expression(draw: random.Random) -> str:
    parts = [
        "a", "b+", "[a-z]", "(", ")", "(?:", "|", "*", "?", "{2,5}", "{1000}", "{1000000}", ".", "\\d", "\\b",
        "^", "$", "(?=a)", "\\p{L}", "[^", "]", "é", "\\", "(a{0,100}){0,100}",
    ]  # fmt: skip
    if draw.random() < 0.05:
        return draw.choice(["(" * 5000 + "a" + ")" * 5000, "a" * 300_000, "|".join(map(str, range(5000)))])
    return "".join(draw.choice(parts) for _ in range(draw.randint(0, 8)))


def _grammar(draw: random.Random) -> str:
    kind = draw.randrange(8)
    if kind == 0:
        count = draw.choice([50, 250, 2900])
        return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"'
    if kind == 1:
        return "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} | "x"\n' for i in range(draw.choice([20, 2000])))
    if kind == 2:
        return "start: " + " | ".join(f'"w{i}"' for i in range(draw.choice([10, 1500, 9000])))
    if kind == 3:
        return "start: " + "(" * 300 + '"a"' + ")" * 300
    parts = [
        "start: ",
        "root ::= ",
        "a",
        "B",
        '"x"',
        "/y+/",
        "|",
        "*",
        "+",
        "~3",
        "(",
        ")",
        "\n",
        "A: ",
        "b: ",
        "[a-z]",
        "%json {}",
        "~",
        "&",
    ]
    return "".join(draw.choice(parts) for _ in range(draw.randint(1, 14)))


def _choices(draw: random.Random) -> Any:
    if draw.random() < 0.1:
        return [f"choice {i}" for i in range(draw.choice([1500, 9000, 20_000]))]
    return [_text(draw) for _ in range(draw.randint(0, 4))]


def _guided_json(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.2:
        depth = draw.choice([50, 2000, 100_000])
        return '{"items":' * depth + "{}" + "}" * depth
    schema = _schema(draw)
    return _encoded(schema).decode("utf-8", "replace") if kind < 0.5 else schema


def _response_format(draw: random.Random) -> Any:
    return draw.choice(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": _text(draw), "schema": _schema(draw)}},
            {"type": "json_schema", "json_schema": {"schema": _anything(draw)}},
            {"type": "xml"},
            {"type": "json_schema", "json_schema": _anything(draw)},
        ]
    )


def _structured(draw: random.Random) -> Any:
    made = {"json": _guided_json, "regex": _expression, "choice": _choices, "grammar": _grammar}
    names = draw.sample(sorted(made), draw.choice([1, 1, 1, 2]))
    return {name: made[name](draw) for name in names}


def _prompt(draw: random.Random) -> Any:
    return draw.choice(
        [_text(draw), _texts(draw), _ids(draw), [_ids(draw), _ids(draw)], ["a"] * 300, _anything(draw)]
    )


def _messages(draw: random.Random) -> Any:
    content = draw.choice(
        [_text(draw), [{"type": "text", "text": _text(draw)}], [{"type": "image_url"}], _anything(draw)]
    )
    roles = ["user", "assistant", "system", "tool", "", "\0", 5]
    message = {"role": draw.choice(roles), "content": content}
    extra = draw.choice([{}, {"name": _text(draw)}, {"tool_calls": _anything(draw)}, {"x": _anything(draw)}])
    return draw.choice([[{**message, **extra}], [message] * draw.choice([2, 500]), [], [_anything(draw)]])


_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
    "min_p": _number,
    "seed": _integer,
    "n": _integer,
    "stop": lambda draw: draw.choice([_text(draw), _texts(draw)]),
    "stop_token_ids": _ids,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "repetition_penalty": _number,
    "logit_bias": _bias,
    "allowed_token_ids": _ids,
    "bad_words": _texts,
    "prompt_logprobs": _integer,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "truncate_prompt_tokens": _integer,
    "truncation_side": lambda draw: draw.choice(["left", "right", "middle"]),
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _guided_json,
    "guided_regex": _expression,
    "guided_choice": _choices,
    "guided_grammar": _grammar,
    "cache_salt": _text,
    "model": _text,
    "stream": _boolean,
    "stream_options": lambda draw: draw.choice(
        [{}, {"include_usage": True}, {"continuous_usage_stats": True}]
    ),
    "return_tokens_as_token_ids": _boolean,
    "priority": _integer,
    "timeout": _number,
    "request_id": _text,
    "user": _text,
    "unknown": _anything,
}
_COMPLETION_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "prompt": _prompt,
    "echo": _boolean,
    "logprobs": _integer,
    "add_special_tokens": _boolean,
    "suffix": _text,
    "best_of": _integer,
}
_CHAT_FIELDS: dict[str, Callable[[random.Random], Any]] = {
    "messages": _messages,
    "max_completion_tokens": _integer,
    "logprobs": _boolean,
    "top_logprobs": _integer,
    "echo": _boolean,
    "add_generation_prompt": _boolean,
    "continue_final_message": _boolean,
    "chat_template_kwargs": _anything,
}
