"""Chat templates render in a sandbox with the same result as in transformers, and fail with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadValue, ConfigError
from penstock.inputs.chat import ChatTemplate, ModelTemplate
from tests.text_models import TEMPLATE

LLAMA = """{{- bos_token }}
{%- set date_string = strftime_now("%Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\\n" + date_string + "\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'ignored' %}{% continue %}{% endif %}
    {%- if not (message.role in ['user', 'assistant']) %}
    {{- raise_exception('no role ' + message.role) }}{% endif %}
    {{- '<|start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}
    {%- else %}{{ message['content'] | trim }}{% endif %}{{ '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}
"""
JSON = "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{% if documents %}x{% endif %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:"
    "{% for part in m['content'] %}[{{ part.text }}]{% endfor %};{% endfor %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": '<b>Où ?</b> "ja"'},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": " Warum?\n"},
]


@pytest.mark.parametrize("source", [TEMPLATE, LLAMA, JSON], ids=["chatml", "llama", "json"])
@pytest.mark.parametrize("generation", [True, False])
def test_templates_render_as_in_transformers(source: str, generation: bool) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    more = {"enable_thinking": False}
    expected, _ = reference.render_jinja_template(
        conversations=[TALK], chat_template=source, add_generation_prompt=generation, bos_token="<s>", **more
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(TALK, add_generation_prompt=generation, template_kwargs=more) == expected[0]


@pytest.mark.parametrize("last", ["The answer", "The answer is ", "Warum?", "", "  "])
@pytest.mark.parametrize("source", [TEMPLATE, LLAMA], ids=["chatml", "llama"])
def test_a_last_message_is_continued_as_in_transformers(source: str, last: str) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    talk = [*TALK, {"role": "assistant", "content": last}]
    expected, _ = reference.render_jinja_template(
        conversations=[talk], chat_template=source, continue_final_message=True, bos_token="<s>"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    text = template.render(talk, add_generation_prompt=False, continue_final_message=True)
    assert text == expected[0] and text.rstrip().endswith(last.strip())


def test_content_parts_are_joined_unless_the_template_loops_over_them() -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
    ]
    assert ChatTemplate(PARTS).render(talk) == "user:[one][two];assistant:[three];"
    assert "user\none\ntwo<|im_end|>" in ChatTemplate(TEMPLATE).render(talk)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(BadValue, match="the chat template has no place for images"):
        ChatTemplate(TEMPLATE).render(image)
    video = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]
    with pytest.raises(BadValue, match="'video_url'; no model here reads videos"):
        ChatTemplate(TEMPLATE).render(video)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LLAMA, "rejects these messages: no role tool"),
        ("{{ messages[9].content.x }}", "UndefinedError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for i in range(999999999) %}x{% endfor %}", "OverflowError"),
    ],
)
def test_errors_of_a_template_are_reported(source: str, words: str) -> None:
    with pytest.raises(BadValue, match=words) as caught:
        ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "tool", "content": "x"}])
    assert caught.value.status == 400 and caught.value.param == "messages"


def test_contradicting_options_are_rejected() -> None:
    template = ChatTemplate(TEMPLATE)
    with pytest.raises(BadValue, match="contradict"):
        template.render(TALK, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(BadValue, match="must not contain 'messages'"):
        template.render(TALK, template_kwargs={"messages": []})
    with pytest.raises(BadValue, match="messages is empty"):
        template.render([])
    with pytest.raises(ConfigError, match="line 1"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize("content", [None, [], [{"type": "image_url", "image_url": {"url": "x"}}]])
def test_a_message_without_text_is_not_continued(content: Any) -> None:
    with pytest.raises(BadValue, match="needs text"):
        ChatTemplate(TEMPLATE, {}).render(
            [{"role": "assistant", "content": content}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_a_template_is_found_in_every_file_that_may_hold_it(tmp_path: Path) -> None:
    settings = tmp_path / "tokenizer_config.json"
    with pytest.raises(BadValue, match="no chat template"):
        _ = ModelTemplate(tmp_path).template
    named = [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "rag", "template": "R"}]
    settings.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}))
    hello = [{"role": "user", "content": "x"}]
    assert ModelTemplate(tmp_path).template.render(hello) == "D</s>"
    assert ModelTemplate(tmp_path, "rag").template.render(hello) == "R"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert ModelTemplate(tmp_path).template.render(hello) == "F"
    given = tmp_path / "mine.jinja"
    given.write_text("G{{ messages[0].content }}")
    assert ModelTemplate(tmp_path, str(given)).template.render(hello) == "Gx"
    assert ModelTemplate(tmp_path, "I{{ messages[0].content }}").template.render(hello) == "Ix"
    with pytest.raises(
        ConfigError, match="neither a file nor a Jinja template; the model's templates are: default, rag"
    ):
        _ = ModelTemplate(tmp_path, "nothing").template
