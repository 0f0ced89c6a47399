"""`--adapter`: the LoRA adapter that a command uses."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from penstock.cli.flags import ADAPTERS, EngineFields
from penstock.config import LoraModule
from penstock.errors import BadValue


class AdapterFlag(msgspec.Struct, frozen=True, kw_only=True):
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|NAME=FOLDER",
            help="Adapter to use: NAME=FOLDER loads a LoRA adapter; NAME is one of --lora-modules, or a task "
            "adapter of the model's own.",
            show_default="none",
            rich_help_panel=ADAPTERS,
        ),
    ] = None

    def chosen(self, engine: EngineFields) -> str | None:
        """The adapter's name. An adapter with a folder is added to those that the engine loads."""
        name, equals, folder = (self.adapter or "").partition("=")
        if not equals:
            return self.adapter
        if not name or not folder:
            raise BadValue(f"--adapter is {self.adapter!r}; use NAME=FOLDER, or NAME", param="--adapter")
        module = LoraModule(name, folder)
        modules = tuple(engine.get("lora_modules", ()))
        engine["enable_lora"] = True
        engine["lora_modules"] = modules if module in modules else (*modules, module)
        return name
