"""Quantised checkpoints: what `quantization_config` says about how each module's weight is stored.

Every writer has its own keys and its own way to name modules. `stored_format` turns them into one
description, and refuses formats that `weights/quantized.py` cannot read. Free of torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from penstock.checkpoint.files import read_json, shown
from penstock.errors import ModelLoadError

BLOCK = 128
_CONFIG_KEYS = ("quantization_config", "compression_config")  # the second: old compressed-tensors files
_MODELOPT_FILE = "hf_quant_config.json"
_MAX_PATTERN_LENGTH = 300
_MAX_PATTERN_REPEATS = 4  # in a regular expression; more could take minutes to match
Scope = Literal["tensor", "channel", "group", "block"]


class Layout(Enum):
    """The format in which a module's weight is stored."""

    FP8_BLOCKS = "fp8 blocks"
    FP8 = "fp8"  # with a scale for the tensor or for each output
    INT8 = "int8"  # one value per byte
    PACKED = "packed"  # compressed-tensors: integers packed along the inputs
    GPTQ = "gptq"  # integers packed along the inputs, zero points along the outputs
    AWQ = "awq"  # integers and zero points packed along the outputs, interleaved
    BNB_4BIT = "bitsandbytes 4-bit"  # entries of a table of 16 values
    BNB_INT8 = "bitsandbytes int8"  # one scale per row


# Tensors that identify the layout of a module, which has one of them. Some fp8 writers name the scale
# weight_scale_inv.
_FP8_SCALES = ("weight_scale", "weight_scale_inv")
MARKS: dict[Layout, tuple[str, ...]] = {
    Layout.FP8_BLOCKS: _FP8_SCALES,
    Layout.FP8: _FP8_SCALES,
    Layout.INT8: ("weight_scale",),
    Layout.PACKED: ("weight_packed",),
    Layout.GPTQ: ("qweight",),
    Layout.AWQ: ("qweight",),
    Layout.BNB_4BIT: ("weight.absmax",),
    Layout.BNB_INT8: ("SCB",),
}
_MXFP4_FAMILIES = ("gpt_oss", "openai_privacy_filter")
ALL_MARKS = tuple(sorted({mark for marks in MARKS.values() for mark in marks}))


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How one module's weight is stored."""

    layout: Layout
    bits: int = 8
    scope: Scope = "channel"  # the values that share a scale
    group_size: int | None = None  # inputs that share a scale, for the scope "group"
    is_symmetric: bool = True  # no zero points are stored
    has_quantized_inputs: bool = False  # the checkpoint was made to run with 8-bit activations
    has_lowered_zeros: bool = False  # GPTQ's first format stores zero points minus one


@dataclass(frozen=True, slots=True)
class Rule:
    """The modules whose names `matches` accepts are stored as `weight`; None: not quantised."""

    matches: Callable[[str], bool]
    weight: StoredWeight | None


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How the modules of a checkpoint are stored. The first rule that matches a module's name applies."""

    method: str
    rules: tuple[Rule, ...]
    # Parts of names of tensors that are not needed: activations are scaled per token, and keys and values
    # are kept in the model's precision.
    unread_tensors: tuple[str, ...] = (
        ".input_scale",
        ".activation_scale",
        ".q_scale",
        ".k_scale",
        ".v_scale",
        ".kv_scale",
        ".weight_format",
    )

    notes: tuple[str, ...] = ()  # options of the checkpoint that are not used, for the log

    def weight_of(self, module: str) -> StoredWeight | None:
        return next((rule.weight for rule in self.rules if rule.matches(module)), None)

    @property
    def min_bits(self) -> int:
        """Minimum number of bits of a weight."""
        return min((rule.weight.bits for rule in self.rules if rule.weight is not None), default=16)


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with `quantization_config`, wherever the checkpoint keeps it."""
    for key in _CONFIG_KEYS:
        if config.get(key):
            return config | {"quantization_config": config[key]}
    file = folder / _MODELOPT_FILE
    if file.is_file():
        found = read_json(file)
        options = found.get("quantization")
        if not isinstance(options, dict):
            raise ModelLoadError(f"{file} has quantization = {shown(options)}; it has to be an object")
        if options.get("quant_algo"):
            return config | {"quantization_config": {"quant_method": "modelopt", **options}}
    return config


def stored_format(config: Mapping[str, Any]) -> StoredFormat | None:
    """Read the format of quantised weights, and refuse unsupported formats; None if not quantised."""
    options = config.get("quantization_config")
    if not options:
        return None
    method = options.get("quant_method")
    if method is None:  # old files leave the method out
        method = "compressed-tensors" if "config_groups" in options else None
    if method == "mxfp4":  # experts of gpt-oss, which its layer dequantises
        if config.get("model_type") not in _MXFP4_FAMILIES:
            raise _unsupported("quant_method", method, f"mxfp4 on {', '.join(_MXFP4_FAMILIES)} alone")
        return None
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise _unsupported("quant_method", method, ", ".join(sorted(_METHODS)))
    return replace(read(options), notes=tuple(_notes(options)))


def _notes(options: Mapping[str, Any]) -> Iterable[str]:
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if options.get(key):
            yield f"{key} in quantization_config is not used: keys and values stay in the model's precision"


def _fp8(options: Mapping[str, Any]) -> StoredFormat:
    """Read FP8: blocks of 128 × 128 with dynamic activations, or one scale per tensor."""
    if options.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported("fmt", options["fmt"], "e4m3")
    scheme, size = options.get("activation_scheme", "dynamic"), options.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise _unsupported("activation_scheme", scheme, "dynamic, static")
    if size is None:
        weight = StoredWeight(Layout.FP8, scope="tensor", has_quantized_inputs=True)
    else:
        if size != [BLOCK, BLOCK]:
            raise _unsupported("weight_block_size", size, f"[{BLOCK}, {BLOCK}], null")
        _require(options, "activation_scheme", "dynamic", default="dynamic")
        weight = StoredWeight(Layout.FP8_BLOCKS, scope="block", has_quantized_inputs=True)
    left = [*_names(options, "modules_to_not_convert"), *_names(options, "ignored_layers")]
    return StoredFormat("fp8", (Rule(_is_named(left), None), Rule(_any, weight)))


def _modelopt(options: Mapping[str, Any]) -> StoredFormat:
    """Read FP8 of NVIDIA's ModelOpt. Modules are excluded by names with wildcards."""
    scopes: dict[str, Scope] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
    algorithm = options.get("quant_algo")
    if algorithm not in scopes:
        raise _unsupported("quant_algo", algorithm, ", ".join(scopes))
    weight = StoredWeight(Layout.FP8, scope=scopes[algorithm], has_quantized_inputs=True)
    left = [*_names(options, "exclude_modules"), *_names(options, "ignore")]
    rules = (Rule(_is_named(left), None), Rule(_is_globbed(left), None), Rule(_any, weight))
    return StoredFormat("modelopt", rules)


def _gptq(options: Mapping[str, Any]) -> StoredFormat:
    """Read GPTQ. `dynamic` has patterns of modules: "-:" excludes them, "+:" or no prefix changes options."""
    stored_as = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
    if stored_as not in ("gptq", "gptq_v2") or options.get("is_marlin_format"):
        raise _unsupported("checkpoint_format", stored_as, "gptq, gptq_v2")
    _require(options, "pack_dtype", "int32", default="int32")
    rules = []
    dynamic = options.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise _unsupported("dynamic", dynamic, "an object of patterns")
    for pattern, changes in dynamic.items():
        matches = _is_matched([f"re:{pattern.removeprefix('-:').removeprefix('+:')}"])
        if pattern.startswith("-:"):
            rules.append(Rule(matches, None))
        else:
            rules.append(Rule(matches, _gptq_weight({**options, **(changes or {})}, stored_as)))
    return StoredFormat("gptq", (*rules, Rule(_any, _gptq_weight(options, stored_as))))


def _gptq_weight(options: Mapping[str, Any], stored_as: str) -> StoredWeight:
    weight = _integers(Layout.GPTQ, options, bits=(4, 8))
    return replace(weight, is_symmetric=False, has_lowered_zeros=stored_as == "gptq")


def _awq(options: Mapping[str, Any]) -> StoredFormat:
    stored_as = str(options.get("version") or options.get("format") or "gemm").lower()
    if stored_as != "gemm":
        raise _unsupported("version", stored_as, "gemm")
    given = {
        "bits": options.get("bits", options.get("w_bit")),
        "group_size": options.get("group_size", options.get("q_group_size")),
    }
    _require(options, "zero_point", True, default=True)
    weight = replace(_integers(Layout.AWQ, given, bits=(4,)), is_symmetric=False)
    left = _names(options, "modules_to_not_convert")

    def is_left(module: str) -> bool:
        return any(part in module for part in left)

    return StoredFormat("awq", (Rule(is_left, None), Rule(_any, weight)))


def _bitsandbytes(options: Mapping[str, Any]) -> StoredFormat:
    if options.get("load_in_4bit"):
        kind = options.get("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise _unsupported("bnb_4bit_quant_type", kind, "nf4, fp4")
        _require(options, "bnb_4bit_quant_storage", "uint8", default="uint8")
        weight = StoredWeight(Layout.BNB_4BIT, bits=4, scope="group")
    elif options.get("load_in_8bit"):
        weight = StoredWeight(Layout.BNB_INT8)
    else:
        raise _unsupported("load_in_4bit and load_in_8bit", None, "one of them true")
    left = _names(options, "llm_int8_skip_modules")
    return StoredFormat("bitsandbytes", (Rule(_is_named(left), None), Rule(_any, weight)))


def _compressed_tensors(options: Mapping[str, Any]) -> StoredFormat:
    """Read a scheme for each group of targets: module names, "re:" patterns, or the class Linear."""
    sparsity = options.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config.format", sparsity.get("format"), "dense")
    for key in ("transform_config", "moe_sparsity_config"):
        found = options.get(key) or {}
        if found.get("config_groups", found):
            raise _unsupported(key, found, "null")
    groups = options.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise _unsupported("config_groups", groups, "an object of schemes with weights and targets")
    by_name, by_pattern, by_class = [], [], []
    for group in groups.values():
        weight = _compressed_weight(group, str(group.get("format") or options.get("format")))
        for target in _names(group, "targets"):
            if target == "Linear":
                by_class.append(Rule(_any, weight))
            elif target.startswith("re:"):
                by_pattern.append(Rule(_is_matched([target]), weight))
            elif "." in target or target.islower():
                by_name.append(Rule(_is_matched([target]), weight))
            else:
                raise _unsupported("targets", target, 'Linear, names of modules, "re:" and a pattern')
    ignored = Rule(_is_matched(_names(options, "ignore")), None)
    return StoredFormat("compressed-tensors", (ignored, *by_name, *by_pattern, *by_class))


def _compressed_weight(group: Mapping[str, Any], stored_as: str) -> StoredWeight | None:
    if group.get("output_activations"):
        raise _unsupported("output_activations", group["output_activations"], "null")
    inputs = group.get("input_activations")
    if inputs and inputs.get("num_bits", 8) != 8:
        raise _unsupported("input_activations.num_bits", inputs.get("num_bits"), "8, or no input_activations")
    given = group.get("weights")
    if not given:
        return None
    kind, bits, scope = given.get("type", "int"), given.get("num_bits", 8), given.get("strategy")
    group_size = given.get("group_size")
    if scope is None:
        scope = "tensor" if group_size is None else "group" if group_size > 0 else "channel"
    what = f"{kind}{bits} weights in format {stored_as!r} with strategy {scope!r}"
    if (kind, stored_as) in (("float", "float-quantized"), ("float", "naive-quantized")) and bits == 8:
        if scope == "block" and given.get("block_structure") in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            return StoredWeight(Layout.FP8_BLOCKS, scope="block", has_quantized_inputs=bool(inputs))
        if scope in ("tensor", "channel"):
            return StoredWeight(Layout.FP8, scope=scope, has_quantized_inputs=bool(inputs))
    if kind == "int" and bits in (4, 8) and stored_as in _INTEGER_FORMATS:
        layout = Layout.PACKED if stored_as == "pack-quantized" else Layout.INT8
        if scope in ("channel", "group") or (scope == "tensor" and layout is Layout.INT8):
            weight = _integers(layout, {"bits": bits, "group_size": group_size if scope == "group" else -1})
            is_symmetric = bool(given.get("symmetric", True))
            found: Scope = "tensor" if scope == "tensor" else weight.scope
            return replace(weight, scope=found, is_symmetric=is_symmetric, has_quantized_inputs=bool(inputs))
    raise ModelLoadError(
        f"quantization_config has {what}, which is not supported; supported: fp8 weights (float-quantized or "
        f"naive-quantized) with strategy tensor, channel, or block of {BLOCK} × {BLOCK}; int4 and int8 "
        f"weights ({', '.join(_INTEGER_FORMATS)}) with strategy channel or group",
        param="model",
    )


_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_METHODS: dict[str, Callable[[Mapping[str, Any]], StoredFormat]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
}


def _integers(layout: Layout, options: Mapping[str, Any], bits: tuple[int, ...] = (4, 8)) -> StoredWeight:
    """Describe integers in groups. A group size of -1 means one scale for each output."""
    found, size = options.get("bits"), options.get("group_size", -1)
    if found not in bits:
        raise _unsupported("bits", found, ", ".join(map(str, bits)))
    if size == -1 or size is None:
        return StoredWeight(layout, bits=found)
    if not isinstance(size, int) or size <= 0:
        raise _unsupported("group_size", size, "a positive integer, or -1")
    return StoredWeight(layout, bits=found, scope="group", group_size=size)


def _any(module: str) -> bool:
    return True


def _is_named(names: Iterable[str]) -> Callable[[str], bool]:
    """Accept a module whose name is in `names`, ends in one of them, or has a parent among them."""
    left = frozenset(names)
    counts = sorted({name.count(".") + 1 for name in left})  # number of parts of the names

    def matches(module: str) -> bool:
        """Look up prefixes and suffixes of the name, because models have tens of thousands of modules."""
        for own in _spellings(module):
            parts = own.split(".")
            for count in counts:
                if ".".join(parts[:count]) in left or ".".join(parts[-count:]) in left:
                    return True
        return False

    return matches


def _is_globbed(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Accept a module that a pattern with wildcards names, or whose parent it names."""
    left = tuple(patterns)

    def matches(module: str) -> bool:
        return any(
            fnmatch.fnmatchcase(own, other) or fnmatch.fnmatchcase(own, other + ".*")
            for own in _spellings(module)
            for other in left
        )

    return matches


def _is_matched(targets: Iterable[str]) -> Callable[[str], bool]:
    """Accept a module by its whole name, or by its start if the target is "re:" and a pattern."""
    names, patterns = set(), []
    for target in targets:
        if target.startswith("re:"):
            patterns.append(_compiled(target.removeprefix("re:")))
        else:
            names.add(target)

    def matches(module: str) -> bool:
        return any(own in names or any(each.match(own) for each in patterns) for own in _spellings(module))

    return matches


def _spellings(module: str) -> tuple[str, ...]:
    """A module's name without and with the prefix `model.`: files and lists may differ in it."""
    bare = module.removeprefix("model.")
    return (bare, f"model.{bare}")


def _compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression from a checkpoint. One that could take very long to match is refused."""
    repeats = len(re.findall(r"(?<!\\)(?:\\\\)*[*+{]", pattern))
    if (
        len(pattern) > _MAX_PATTERN_LENGTH
        or repeats > _MAX_PATTERN_REPEATS
        or re.search(r"(?<!\\)\)[*+{]", pattern)
    ):
        raise _unsupported(
            "pattern",
            pattern,
            f"at most {_MAX_PATTERN_LENGTH} characters, {_MAX_PATTERN_REPEATS} repeats, no repeated group",
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelLoadError(
            f"quantization_config has the pattern {pattern!r}: {error}", param="model"
        ) from None


def _names(options: Mapping[str, Any], key: str) -> list[str]:
    found = options.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _unsupported(key, found, "a list of strings")
    return found


def _require(options: Mapping[str, Any], key: str, wanted: Any, default: Any = None) -> None:
    found = options.get(key)
    if (default if found is None else found) != wanted:
        raise _unsupported(key, found, repr(wanted))


def _unsupported(key: str, value: Any, accepted: str) -> ModelLoadError:
    return ModelLoadError(
        f"quantization_config has {key} = {shown(value)}, which is not supported; supported: {accepted}",
        param="model",
    )
