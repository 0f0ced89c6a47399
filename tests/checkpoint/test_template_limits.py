"""A chat template can neither run forever nor exhaust the memory, whoever wrote it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from penstock.checkpoint import template_limits
from penstock.errors import BadValue, ConfigError
from penstock.inputs.chat import ChatTemplate

TEXT = "x" * 100_000
TALK = [{"role": "user", "content": TEXT}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "loops without output": LOOPS,
    "loops with hidden names": "{% set turn = 1 %}{% set environment = 1 %}" + LOOPS,
    "calls that double": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "text times number": "{{ 'a' * 10000000000 }}",
    "constant condition": "{% if 'a' * 10000000000 %}{% endif %}",
    "list times number": "{{ [1] * 10000000000 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "sums": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "concatenation": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "percent format": "{{ '%1000000000d' % 1 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "width from argument": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "format that repeats": "{{ ('{0}' * 100000).format(messages[0].content) }}",
    "padding": "{{ 'a' | center(10000000000) }}",
    "padding method": "{{ 'a'.ljust(10000000000) }}",
    "replace": "{{ messages[0].content.replace('x', messages[0].content) }}",
    "replace filter": "{{ messages[0].content | replace('x', messages[0].content) }}",
    "join": "{{ ([messages[0].content] * 100000) | join }}",
    "join of a generator": "{{ range(90000) | map('string') | join(messages[0].content) }}",
    "join method": "{{ messages[0].content.join(messages[0].content) }}",
    "list as text": "{{ [messages[0].content] * 100000 }}",
    "json": "{{ ([messages[0].content] * 100000) | tojson }}",
    "json indent": "{{ messages | tojson(indent=1000000000) }}",
    "copies": "{{ ([range(90000) | list] * 10000) | map('list') | list | length }}",
    "slices": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set n.x = n.x + [messages[0].content[1:]] %}{% endfor %}",
    "captured output": "{% set y %}{% for i in range(99999) %}"
    "{{ messages[0].content }}{% endfor %}{% endset %}",
    "tabs": "{{ ('\\t' * 100000).expandtabs(1000000) }}",
    "indent": "{{ ('a\\n' * 100000) | indent(messages[0].content) }}",
    "wrap": "{{ messages[0].content | wordwrap(1, wrapstring=messages[0].content) }}",
    "bytes": "{{ (5).to_bytes(10000000000, 'big') }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
}


def rendering(bombs: dict[str, str]) -> str:
    """Code for a process with limited memory that renders each template."""
    return f"""
import json, resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from penstock.errors import BadValue
from penstock.checkpoint import template_limits
from penstock.inputs.chat import ChatTemplate
template_limits.MAX_RENDER_UNITS >>= 4  # a sixteenth of the time
talk = [{{"role": "user", "content": "x" * 100_000}}]
said = {{}}
for name, source in json.loads({json.dumps(json.dumps(bombs))}).items():
    try:
        said[name] = f"{{len(ChatTemplate(source).render(talk))}} characters"
    except BadValue as error:
        said[name] = error.message
status = open("/proc/self/status").read()  # the peak of getrusage begins with that of the parent
print(json.dumps([said, int(status.split("VmHWM:")[1].split()[0]) // 1024]))
"""


def test_templates_that_multiply_are_stopped_before_they_fill_the_memory() -> None:
    command = [sys.executable, "-c", rendering(BOMBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    said, peak_mb = json.loads(done.stdout)
    unstopped = {name: words for name, words in said.items() if "template was stopped" not in words}
    assert not unstopped
    assert peak_mb < 200


def test_a_template_that_takes_too_long_is_stopped() -> None:
    seconds = itertools.count()
    with template_limits.limited(lambda: float(next(seconds))):
        environment = template_limits.LimitedEnvironment()
        environment.guard_filters()
        template = environment.limited_template("{% for i in range(100) %}{% endfor %}")
        with pytest.raises(template_limits.TemplateLimitExceeded, match="takes longer than 5 s"):
            template.render()


def test_ordinary_templates_are_far_from_the_limits() -> None:
    source = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{{ m.content[:3] }}"
        "{{ '%s|%5d' % (m.role, 7) }}{{ ', '.join(['a', 'b']) }}{{ m | tojson }}{% endfor %}"
    )
    talk = [{"role": "user", "content": f" text {n} " * 20} for n in range(2000)]
    text = ChatTemplate(source).render(talk)
    assert text.startswith("<user>text 0  text 0") and "te" in text and "user|    7a, b{" in text


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{{ messages[0].content * 600 }}")
    assert [len(template.render(TALK)) for _ in range(3)] == [60_000_000] * 3


def test_deep_nesting_is_the_callers_error() -> None:
    deep: object = "x"
    for _ in range(5000):
        deep = [deep]
    for source in ("{{ deep }}", "{{ deep | tojson }}", "{{ deep | string }}"):
        with pytest.raises(BadValue) as caught:
            ChatTemplate(source).render(TALK, template_kwargs={"deep": deep})
        assert caught.value.status == 400


@pytest.mark.parametrize("source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "x" * (1 << 21)])
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(source)
