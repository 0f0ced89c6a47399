"""LoRA adapters that PEFT has saved, and task adapters that are part of a checkpoint.

`read_lora` reads a folder with adapter_config.json and adapter_model.safetensors, without torch. It refuses
unknown options and tensors by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.checkpoint.expressions import first_endless
from penstock.checkpoint.files import positive_integer, read_json, shown
from penstock.checkpoint.tensors import StoredTensor, stored_tensors
from penstock.errors import ModelLoadError

T = TypeVar("T")
MAX_RANK = 1 << 14
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_ALL_LINEAR = "all-linear"
_INPUT_TABLE = ""  # key of the input embedding table, if a file does not name it
_TASK_TENSOR = re.compile(r"(?P<matrix>.+\.lora_[AB])\.(?P<task>[^.]+)\.weight")
_TOWER = re.compile("vision|visual|image|audio")  # other towers, whose layers may have the same names
_WRAPPERS = frozenset({"model", "language_model", "vlm"})
# Options that change the computation, and the values with which they do not; (): any empty value.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "layer_replication": (),
    "target_parameters": (),
    "arrow_config": (),
    "alora_invocation_tokens": (),
    "use_bdlora": (False,),
    "kasa_config": (),
    "velora_config": (),
    "monteclora_config": (),
    "megatron_config": (),
    "corda_config": (),
    "lora_ga_config": (),
    "loftq_config": (),
    # Other values, such as pissa, olora and loftq, change the base model's weights before training.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_READ: set[str] = {"r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "exclude_modules"}
_READ |= {
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
}
_HARMLESS: set[str] = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
}
_HARMLESS |= {
    "fan_in_fan_out",
    "megatron_core",
    "eva_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
}
LACKING = "adapter %r has no tensors for modules that target_modules names, which stay as they are: %s"
_NUMBER = re.compile(r"\d+")
_FLOATS = ("F", "BF")  # prefixes of float dtypes: F64, F32, F16, BF16, F8_E4M3 …
_PARTS = (  # suffixes of tensor names, after the name of the module
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_embedding_A",
    ".lora_embedding_B",
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
    ".token_adapter.trainable_tokens_delta",
    ".base_layer.weight",
)


class LoraTarget(msgspec.Struct, frozen=True):
    """A module that an adapter changes by a low-rank product: W + scale · B A."""

    rank: int
    scale: float
    inputs: int  # for a table, its rows
    outputs: int
    is_table: bool = False  # an embedding
    is_dora: bool = False  # DoRA: each row of W + BA is scaled to a stored length
    has_base: bool = False  # the file also has the base model's weight


class LoraSpec(msgspec.Struct, frozen=True):
    """An adapter in a folder, checked except for whether it fits the model."""

    name: str
    folder: str
    rank: int  # largest rank of its targets
    base_model: str  # as the adapter names it; empty if it does not
    targets: dict[str, LoraTarget]  # by module name
    saved: dict[str, tuple[int, ...]]  # shapes of tensors that replace the model's, by name
    tokens: dict[str, tuple[int, ...]]  # replaced rows, by name of the table
    modules_to_save: tuple[str, ...] = ()  # suffixes of names of modules in `saved`
    task: str = ""  # the task, if the file has several adapters; otherwise empty

    @property
    def file(self) -> Path:
        return Path(self.folder) / WEIGHTS

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that it changes."""
        saved = (name.rpartition(".")[0] for name in self.saved)
        return tuple(dict.fromkeys((*self.targets, *saved, *self.tokens)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The last parts of its modules' names."""
        return tuple(sorted({module.rpartition(".")[2] for module in self.modules}))


def adapter_names(config: Mapping[str, Any], key: str = "lora_adaptations") -> tuple[str, ...]:
    """The task adapters that a request may choose; none if `lora_task` merges one."""
    if config.get("lora_task") is not None:
        return ()
    return tuple(map(str, config.get(key) or ()))


def read_lora(folder: Path, name: str, tasks: Sequence[str] = ()) -> LoraSpec:
    """Read the adapter in a folder, and refuse unknown options and tensors.

    If the file has adapters for several `tasks`, read the one for the task `name`.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise _refused(f"{folder} has no {CONFIG}, so it is no adapter that PEFT has saved")
    values = read_json(file)
    _check_options(values, file)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise _refused(f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True")
    stored = stored_tensors(weights)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    if len(tensors) < len(stored):
        twice = next(name for name in tensors if name in stored and PREFIX + name in stored)
        raise _refused(f"{weights} has a tensor {twice!r} twice, with and without the prefix {PREFIX!r}")
    if tasks:
        _check_tasks(tensors, tasks, weights)
        tensors = of_task(tensors, name)
    for tensor, each in tensors.items():
        if not each.dtype.startswith(_FLOATS):
            raise _refused(f"{weights} has a tensor {tensor!r} of type {each.dtype}; it has to be of floats")
    config = _Config.read(values, file)
    found = _by_module(tensors, weights)
    config.check_expressions((*found.targets, *found.tokens))
    targets = {module: _target(module, parts, config, weights) for module, parts in found.targets.items()}
    for module in (*targets, *found.tokens):
        if module in targets and not config.names(module):
            raise _refused(f"{weights} has tensors for {module}, which target_modules does not name")
    saved = {name: tensors[name].shape for name in found.saved}
    for tensor in saved:
        if not is_saved(tensor, config.modules_to_save):
            raise _refused(f"{weights} has a tensor {tensor!r}, which modules_to_save does not name")
    if config.modules_to_save and not saved:
        names = ", ".join(config.modules_to_save)
        raise _refused(f"{weights} has no tensors of the modules that modules_to_save names: {names}")
    tokens = {module: config.token_indices(module, shape, weights) for module, shape in found.tokens.items()}
    if not targets and not saved and not tokens:
        raise _refused(f"{weights} has no tensors")
    rank = max((target.rank for target in targets.values()), default=0)
    base = str(values.get("base_model_name_or_path") or "")
    task = name if tasks else ""
    return LoraSpec(name, str(folder), rank, base, targets, saved, tokens, config.modules_to_save, task=task)


def of_task(tensors: Mapping[str, T], task: str) -> dict[str, T]:
    """The tensors of one task, without the task in their names: `….lora_A.task.weight` becomes
    `….lora_A.weight`."""
    found = {}
    for name, tensor in tensors.items():
        named = _TASK_TENSOR.fullmatch(name)
        if named is None:
            found[name] = tensor
        elif named["task"] == task:
            found[f"{named['matrix']}.weight"] = tensor
    return found


def _check_tasks(tensors: Iterable[str], tasks: Sequence[str], file: Path) -> None:
    found = {name: _TASK_TENSOR.fullmatch(name) for name in tensors}
    for name, named in found.items():
        if named is None or named["task"] not in tasks:
            raise _refused(
                f"{file} has a tensor {name!r}, which belongs to none of the tasks: {', '.join(tasks)}"
            )


def read_lora_options(folder: Path) -> tuple[int, tuple[str, ...]]:
    """Read the rank of an adapter and the last parts of its modules' names, without its weights."""
    values = read_json(file := folder / CONFIG)
    _check_options(values, file)
    config = _Config.read(values, file)
    if isinstance(config.target_modules, str):
        raise _refused(f"{file} has target_modules = {config.target_modules!r}; it has to be a list of names")
    return config.rank, tuple(name.rpartition(".")[2] for name in config.target_modules)


class TargetRule(NamedTuple):
    """Which modules an adapter's options select."""

    names: Callable[[str], bool]  # takes a module's name in the adapter's file
    is_list: bool  # by suffixes of names, not by an expression for whole names


def named_modules(spec: LoraSpec, changed: Mapping[str, str], others: Iterable[str]) -> list[str]:
    """Find modules that the adapter's options select although its file has no tensors for them.

    `changed` maps the model's name of each changed module to the name in the file. `others` are the names of
    the model's other modules.
    """
    rule = _target_rule(Path(spec.folder))
    alike = {_NUMBER.sub("#", place): (place, module) for place, module in changed.items()}
    found = []
    for name in others:
        place, module = alike.get(_NUMBER.sub("#", name), ("", ""))
        in_file = module.replace(place, name) if place and place in module else name
        if (place or rule.is_list) and rule.names(in_file):
            found.append(name)
    return found


def _target_rule(folder: Path) -> TargetRule:
    config = _Config.read(read_json(file := folder / CONFIG), file)
    return TargetRule(config.names, not isinstance(config.target_modules, str))


def match_modules(names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Map each name to the name in `known` of the same module; leave out names without a clear match.

    The names of a module may differ in their first parts: `bert.encoder.layer.0…` and `encoder.layer.0…`, or,
    between versions of transformers, `model.language_model.layers.0…` and `model.layers.0…`.
    """
    exact = dict.fromkeys(known)
    by_core: dict[str, list[str]] = {}
    for name in exact:
        by_core.setdefault(without_wrappers(name), []).append(name)
    by_end: dict[str, list[str]] = {}
    for name in exact:
        by_end.setdefault(name.rpartition(".")[2], []).append(name)
    found = {}
    for name in names:
        if name in exact:
            found[name] = name
            continue
        alike = [
            other
            for other in by_end.get(name.rpartition(".")[2], ())
            if other.endswith(f".{name}")
            or (name.endswith(f".{other}") and not _TOWER.search(name.removesuffix(other)))
        ]
        alike = alike or by_core.get(without_wrappers(name), [])
        if len(alike) == 1:
            found[name] = alike[0]
    return found


def is_saved(tensor: str, modules_to_save: Iterable[str]) -> bool:
    """Whether `modules_to_save` names the module of a tensor, or a module that contains it.

    As in PEFT, a name means every module whose name ends with it.
    """
    parts = tensor.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts))]
    return any(module.endswith(name) for module in around for name in modules_to_save)


def without_wrappers(name: str) -> str:
    """The name of a module without leading wrappers, such as `model` or `language_model`."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def _check_options(values: Mapping[str, Any], file: Path) -> None:
    if values.get("peft_type") is None:  # PEFT does not load it either
        raise _refused(f"{file} has no peft_type; supported: LORA")
    for key, accepted in _REFUSED.items():
        value = values.get(key)
        if value is None or value in accepted or (not accepted and not value):
            continue
        hint = f"; supported: {', '.join(map(str, accepted))}" if accepted else ""
        raise _refused(f"{file} has {key} = {shown(value)}, which is not supported{hint}")
    known = {*_REFUSED, *_READ, *_HARMLESS}
    for key, value in values.items():
        if key not in known and value not in (None, False, {}, []):
            raise _refused(f"{file} has {key} = {shown(value)}, which is not known")


class _Found(NamedTuple):
    """The tensors of a file by kind."""

    targets: dict[str, dict[str, StoredTensor]]  # by module, then by suffix
    tokens: dict[str, tuple[int, ...]]  # shapes of replaced rows, by table
    saved: list[str]  # names of all other tensors


def _by_module(tensors: Mapping[str, StoredTensor], file: Path) -> _Found:
    found = _Found({}, {}, [])
    for name, tensor in tensors.items():
        part = next((part for part in _PARTS if name.endswith(part)), None)
        module = name if part is None else name.removesuffix(part)
        if part == ".token_adapter.trainable_tokens_delta":
            found.tokens[module] = tensor.shape
        elif part is not None:
            found.targets.setdefault(module, {})[part.removesuffix(".weight").lstrip(".")] = tensor
        elif "lora_" in name:
            raise _refused(f"{file} has a tensor {name!r}, which is not known")
        else:
            found.saved.append(name)
    return found


class _Config(NamedTuple):
    """adapter_config.json: which modules it names, with which rank and scale."""

    rank: int
    alpha: float
    is_rs: bool
    is_dora: bool
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    modules_to_save: tuple[str, ...]
    layers: tuple[int, ...] | None  # None: all
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    token_tables: Mapping[str, tuple[int, ...]]
    file: Path

    @classmethod
    def read(cls, values: Mapping[str, Any], file: Path) -> _Config:
        layers = values.get("layers_to_transform")
        indices = values.get("trainable_token_indices") or {}
        tables = indices if isinstance(indices, Mapping) else {_INPUT_TABLE: indices}
        return cls(
            rank=positive_integer(values, "r", file=file, high=MAX_RANK),
            alpha=_number(values.get("lora_alpha", 8), "lora_alpha", file),
            is_rs=_flag(values, "use_rslora", file),
            is_dora=_flag(values, "use_dora", file),
            target_modules=_names(values, "target_modules", file),
            exclude_modules=_names(values, "exclude_modules", file),
            modules_to_save=tuple(_list(values.get("modules_to_save"), "modules_to_save", file)),
            layers=None if layers in (None, []) else tuple(_integers(layers, "layers_to_transform", file)),
            layers_pattern=tuple(_list(values.get("layers_pattern") or [], "layers_pattern", file)),
            rank_pattern=_pattern(values, "rank_pattern", file),
            alpha_pattern=_pattern(values, "alpha_pattern", file),
            token_tables={
                str(name): tuple(_integers(each, "trainable_token_indices", file))
                for name, each in tables.items()
            },
            file=file,
        )

    def check_expressions(self, modules: Sequence[str]) -> None:
        """Refuse expressions that take too long to match the names of these modules."""
        whole = [each for each in (self.target_modules, self.exclude_modules) if isinstance(each, str)]
        keys = [_key_expression(key) for key in (*self.rank_pattern, *self.alpha_pattern)]
        layers = [_layer_expression(each) for each in self.layers_pattern]
        if (endless := first_endless([*whole, *keys, *layers], modules)) is not None:
            raise _refused(f"{self.file} has the expression {shown(endless)}, which takes too long to match")

    def rank_of(self, module: str) -> int:
        for pattern, rank in self.rank_pattern.items():
            if _fits(pattern, module, self.file):
                values = {"rank_pattern": rank}
                return positive_integer(values, "rank_pattern", file=self.file, high=MAX_RANK)
        return self.rank

    def scale_of(self, module: str, rank: int) -> float:
        alphas = (value for key, value in self.alpha_pattern.items() if _fits(key, module, self.file))
        alpha = _number(next(alphas, self.alpha), "alpha_pattern", self.file)
        return alpha / math.sqrt(rank) if self.is_rs else alpha / rank

    def names(self, module: str) -> bool:
        """Whether PEFT would change this module."""
        excluded, wanted = self.exclude_modules, self.target_modules
        if isinstance(excluded, str):
            if excluded and _matches(excluded, module, self.file):
                return False
        elif _ends_with_any(module, excluded):
            return False
        if isinstance(wanted, str):
            return wanted == _ALL_LINEAR or _matches(wanted, module, self.file)
        if module in wanted:
            return True
        return _ends_with_any(module, wanted) and self._transforms_layer(module)

    def _transforms_layer(self, module: str) -> bool:
        if self.layers is None:
            return True
        patterns = [_layer_expression(each) for each in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(?P<number>\d+)\."]:
            if (found := _compiled(pattern, self.file).match(module)) is not None:
                return int(found["number"]) in self.layers
        return False

    def token_indices(self, module: str, shape: Sequence[int], file: Path) -> tuple[int, ...]:
        """The indices of a table's replaced rows."""
        for name, indices in self.token_tables.items():
            if name == _INPUT_TABLE or module == name or module.endswith(f".{name}"):
                if len(shape) != 2 or len(indices) != shape[0] or len(set(indices)) != len(indices):
                    raise _refused(
                        f"{file} replaces rows of {module} by a tensor of shape {list(shape)}; "
                        f"trainable_token_indices names {len(set(indices))} rows"
                    )
                return indices
        raise _refused(f"{file} replaces rows of {module}, which trainable_token_indices does not name")


def _target(module: str, parts: Mapping[str, StoredTensor], config: _Config, file: Path) -> LoraTarget:
    is_table = "lora_embedding_A" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A", "lora_B")
    down, up = (parts.get(name) for name in names)
    if down is None or up is None or len(down.shape) != 2 or len(up.shape) != 2:
        raise _refused(f"{file} has no matrices {names[0]} and {names[1]} for {module}")
    rank = config.rank_of(module)
    if down.shape[0] != rank or up.shape[1] != rank:
        raise _refused(
            f"{file} has {names[0]} of shape {list(down.shape)} and {names[1]} of shape {list(up.shape)} for "
            f"{module}; its rank is {rank}"
        )
    magnitude = parts.get("lora_magnitude_vector")
    if config.is_dora != (magnitude is not None):
        state = "no lora_magnitude_vector" if magnitude is None else "a lora_magnitude_vector"
        raise _refused(f"{file} has {state} for {module}, but use_dora is {str(config.is_dora).lower()}")
    if is_table and magnitude is not None:
        raise _refused(f"{file} has DoRA on {module}, an embedding, which is not supported")
    if magnitude is not None and magnitude.shape != (up.shape[0],):
        raise _refused(f"{file} has a lora_magnitude_vector of shape {list(magnitude.shape)} for {module}")
    return LoraTarget(
        rank,
        config.scale_of(module, rank),
        down.shape[1],
        up.shape[0],
        is_table,
        magnitude is not None,
        "base_layer" in parts,
    )


def _fits(pattern: str, module: str, file: Path) -> bool:
    """Whether a key of rank_pattern or alpha_pattern matches a module."""
    return _compiled(_key_expression(pattern), file).match(module) is not None


def _key_expression(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _layer_expression(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\."


def _matches(pattern: str, module: str, file: Path) -> bool:
    return _compiled(pattern, file).fullmatch(module) is not None


def _compiled(pattern: str, file: Path) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise _refused(f"{file} has {pattern!r}, which is no regular expression: {error}") from None


def _ends_with_any(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _names(values: Mapping[str, Any], key: str, file: Path) -> str | tuple[str, ...]:
    value = values.get(key)
    return value if isinstance(value, str) else tuple(_list(value, key, file))


def _list(value: Any, key: str, file: Path) -> list[str]:
    value = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _refused(f"{file} has {key} = {shown(value)}; it has to be a list of names")
    return value


def _integers(value: Any, key: str, file: Path) -> list[int]:
    value = [value] if isinstance(value, int) else value
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise _refused(f"{file} has {key} = {shown(value)}; it has to be a list of numbers")
    return value


def _pattern(values: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise _refused(f"{file} has {key} = {shown(value)}; it has to be an object of names and numbers")
    return value


def _flag(values: Mapping[str, Any], key: str, file: Path) -> bool:
    value = values.get(key)
    if value not in (None, True, False):
        raise _refused(f"{file} has {key} = {shown(value)}; it has to be true or false")
    return bool(value)


def _number(value: Any, key: str, file: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _refused(f"{file} has {key} = {shown(value)}; it has to be a number")
    return float(value)


def _refused(message: str) -> ModelLoadError:
    return ModelLoadError(message, param="lora_path")
