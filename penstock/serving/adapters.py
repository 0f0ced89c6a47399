"""LoRA adapters of a model: which names they may have, and where their files are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from penstock.checkpoint.adapter_files import adapter_digest, find_adapter
from penstock.checkpoint.adapter_folder import check_folder
from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, LoraModule, ModelConfig
from penstock.errors import BadValue, ConfigError, NotPossible, shown
from penstock.serving.launch import AdapterLaunch

MAX_NAME_CHARS = 256
RESERVED = ("query", "document", "latest")  # have another meaning in MODEL:SUFFIX
ENABLE = "start the server with --enable-lora"


def check_enabled(config: EngineConfig, model: str) -> None:
    if not config.enable_lora:
        raise NotPossible(f"model {model} takes no LoRA adapters; {ENABLE}", param="model")


def check_name(name: str, spec: ModelSpec, model_names: Collection[str]) -> None:
    """Refuse an ambiguous name for an adapter. `model_names` are the names of all models."""
    why = None
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        why = f"use 1 to {MAX_NAME_CHARS} printable characters"
    elif ":" in name:
        why = "a colon stands between the name of a model and that of an adapter or a prompt"
    elif name in model_names:
        why = "a model has this name"
    elif name in spec.adapters:
        why = f"model {spec.name} has an adapter of its own with this name"
    elif name in spec.prompts or name in RESERVED:
        why = f"{spec.name}:{name} names a prompt or a version of the model"
    if why is not None:
        raise BadValue(
            f"an adapter cannot be called {shown(name)}: {why}; use another name", param="lora_name"
        )


def read_adapter(
    adapter_id: int,
    name: str,
    path: str,
    spec: ModelSpec,
    root: str | None = None,
    download_dir: str | None = None,
) -> AdapterLaunch:
    """Find, check and hash the files of an adapter. Blocks; may download the files."""
    folder = find_adapter(path, root, download_dir)
    check_folder(folder, spec)
    return AdapterLaunch(adapter_id, name, str(folder), adapter_digest(folder), path)


def own_modules(config: EngineConfig, spec: ModelSpec) -> tuple[LoraModule, ...]:
    """The entries of `lora_modules` for this model: they name it as their base model, or name none."""
    names = (spec.name, *config.model_names, *([config.model] if config.model else ()))
    return tuple(each for each in config.lora_modules if each.base_model_name in (None, *names))


def initial_adapters(
    config: EngineConfig, spec: ModelSpec, next_id: Callable[[], int]
) -> tuple[AdapterLaunch, ...]:
    """The adapters that a model is loaded with."""
    return tuple(
        read_adapter(next_id(), each.name, each.path, spec, download_dir=config.download_dir)
        for each in own_modules(config, spec)
    )


def check_lora_modules(config: EngineConfig, spec: ModelSpec, model_names: Collection[str] = ()) -> None:
    """Refuse `lora_modules` that cannot be served, before the model is loaded."""
    modules = own_modules(config, spec)
    if modules:
        check_enabled(config, spec.name)
    seen: set[str] = set()
    for each in modules:
        try:
            check_name(each.name, spec, {spec.name, *config.model_names[1:], *model_names})
            if each.name in seen:
                raise BadValue(f"two adapters are called {each.name!r}; give one another name")
            read_adapter(0, each.name, each.path, spec, download_dir=config.download_dir)
        except (BadValue, NotPossible) as error:
            raise ConfigError(f"--lora-modules: {error.message}", param="lora_modules") from None
        seen.add(each.name)


def check_base_names(modules: Sequence[LoraModule], models: Sequence[tuple[ModelConfig, ModelSpec]]) -> None:
    """Refuse modules with an unknown base model, or with none if the server has several models."""
    names = {
        name
        for config, spec in models
        for name in (spec.name, *config.engine.model_names, config.engine.model)
        if name is not None
    }
    for each in modules:
        if each.base_model_name is None and len(models) > 1:
            raise ConfigError(
                f"--lora-modules: this server has several models; say which adapter {each.name!r} is for, "
                'with JSON such as {"name": …, "path": …, "base_model_name": …}, or in `models:` of --config',
                param="lora_modules",
            )
        if each.base_model_name is not None and each.base_model_name not in names:
            raise ConfigError(
                f"--lora-modules: adapter {each.name!r} is for {each.base_model_name!r}, which this server "
                f"does not have; its models are: {', '.join(sorted(names))}",
                param="lora_modules",
            )
