"""A model's chat template, applied to plain prompts before they are sent."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from penstock.errors import BadValue


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json` of a folder, with the chat template if that is in a separate file."""
    try:
        value = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        value = {}
    config = value if isinstance(value, dict) else {}
    if (file := folder / "chat_template.jinja").is_file():
        config["chat_template"] = file.read_text()
    return config


def chat_template(config: dict[str, Any]) -> str | None:
    """The template of a tokenizer's configuration, if it has one."""
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def apply(template: str, config: dict[str, Any], prompts: list[str]) -> list[str]:
    """Render each prompt as one user message, followed by the generation prompt."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    names = {name: _token(value) for name, value in config.items() if name.endswith("_token") and value}
    try:
        compiled = environment.from_string(template)
        return [
            compiled.render(
                messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, **names
            )
            for prompt in prompts
        ]
    except TemplateError as error:
        raise BadValue(
            f"the model's chat template cannot be applied: {error}; use --skip-chat-template",
            param="skip_chat_template",
        ) from None


def _token(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
