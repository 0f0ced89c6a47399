from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.config import (
    EngineConfig,
    Machine,
    ModelFacts,
    PoolerConfig,
    Resolved,
    ServerConfig,
    available_cpus,
    check_settings,
    cuda_step_tokens,
    from_mapping,
    resolve,
    unused_settings,
)
from penstock.errors import ConfigError

CPU = Machine(cpus=4, cuda=False)
GPU = Machine(cpus=16, cuda=True, bf16=True, fp8=True)
OLD_GPU = Machine(cpus=16, cuda=True, bf16=False)
MODEL = ModelFacts(max_model_len=512)


def settle(machine: Machine = CPU, **values: Any) -> Resolved:
    return resolve(EngineConfig(**values), MODEL, machine)


def test_resolve_settles_every_auto() -> None:
    for machine in (CPU, GPU):
        resolved = settle(machine)
        values = {name: getattr(resolved, name) for name in resolved.__struct_fields__}
        undecided = {name for name, value in values.items() if value in ("auto", None)}
        assert undecided <= {"quantization", "speculation", "draft"}


@pytest.mark.parametrize(("machine", "device"), [(CPU, "cpu"), (GPU, "cuda")])
def test_auto_uses_the_gpu_if_there_is_one(machine: Machine, device: str) -> None:
    assert settle(machine).device == device


@pytest.mark.parametrize("device", ["cpu", "null"])
def test_a_given_device_is_used(device: str) -> None:
    assert settle(GPU, device=device).device == device
    assert settle(GPU, device="cuda:1").device == "cuda:1"


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_missing_gpu_is_an_error(device: str) -> None:
    with pytest.raises(ConfigError, match="has no CUDA device") as caught:
        settle(CPU, device=device)
    assert caught.value.param == "device"


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tpu' is unknown; use auto, cpu, cuda"):
        settle(device="tpu")


@pytest.mark.parametrize(
    ("machine", "asked", "dtype"),
    [
        (CPU, "auto", "float32"),
        (GPU, "auto", "bfloat16"),
        (OLD_GPU, "auto", "float16"),
        (CPU, "bfloat16", "bfloat16"),
        (CPU, "float", "float32"),
        (GPU, "half", "float16"),
    ],
)
def test_the_dtype_follows_the_machine_unless_it_is_given(machine: Machine, asked: str, dtype: str) -> None:
    assert settle(machine, dtype=asked).dtype == dtype


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "float8"}, "'float8' is unknown; use auto, float32"),
        ({"dtype": "float16"}, "float16 is slow and imprecise on a CPU"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "int8"),
    ],
)
def test_an_unusable_dtype_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settle(**values)
    assert caught.value.param == "dtype"


def test_each_quantization_has_its_device() -> None:
    assert settle(GPU, quantization="fp8", unquantized_layers=(0, 3)).unquantized_layers == (0, 3)
    assert settle(GPU, quantization="fp8").dtype == "bfloat16"
    assert settle(CPU, quantization="int8").dtype == "float32"


@pytest.mark.parametrize(
    ("machine", "values", "param", "message"),
    [
        (GPU, {"quantization": "int8"}, "quantization", "on CUDA use fp8"),
        (CPU, {"quantization": "fp8"}, "quantization", "on a CPU use int8"),
        (GPU, {"quantization": "fp8", "device": "cpu"}, "quantization", "on a CPU use int8"),
        (OLD_GPU, {"quantization": "fp8"}, "quantization", "compute capability 8.9"),
        (GPU, {"quantization": "fp8", "dtype": "float16"}, "dtype", "computes in bfloat16"),
        (GPU, {"unquantized_layers": (1,)}, "unquantized_layers", "needs a quantization"),
        (GPU, {"quantization": "fp8", "unquantized_layers": (-1,)}, "unquantized_layers", "from 0"),
    ],
)
def test_an_unusable_quantization_is_refused(
    machine: Machine, values: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settle(machine, **values)
    assert caught.value.param == param


def test_the_models_limit_applies_unless_a_shorter_one_is_given() -> None:
    assert settle().max_model_len == 512
    assert settle(max_model_len=100).max_model_len == 100


def test_max_model_len_may_rise_to_the_models_positions() -> None:
    config = EngineConfig(max_model_len=400)
    model = ModelFacts(max_model_len=256, max_positions=512)
    assert resolve(config, model, CPU).max_model_len == 400
    assert resolve(EngineConfig(), model, CPU).max_model_len == 256
    for positions in (399, None):
        with pytest.raises(ConfigError, match="positions for") as caught:
            resolve(config, ModelFacts(max_model_len=256, max_positions=positions), CPU)
        assert caught.value.param == "max_model_len"


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_queued_tokens",
        "pipeline_depth",
        "threads",
    ],
)
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is -1; it must be at least 1") as caught:
        settle(**{name: -1})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "name",
    ["max_num_seqs", "max_queued_tokens", "long_prefill_token_threshold", "max_num_partial_prefills"],
)
def test_numbers_that_no_message_can_hold_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {10**20}; use at most") as caught:
        settle(**{name: 10**20})
    assert caught.value.param == name


@pytest.mark.parametrize("size", [-1.0, 0.0, float("nan"), float("inf"), 1e12])
def test_a_kv_cache_has_a_size_that_memory_can_have(size: float) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gb is .*; use a size above 0, up to") as caught:
        settle(kv_cache_gb=size)
    assert caught.value.param == "kv_cache_gb"
    for name in ("document_cache_gb", "step_output_mb"):
        if size:
            with pytest.raises(ConfigError, match=f"{name} is .*; use up to"):
                settle(**{name: 2048 * size})


def test_prompts_run_beside_decodes_by_default_where_steps_have_graphs() -> None:
    assert settle(GPU).graphs and settle(GPU).target_itl_s == pytest.approx(0.014)
    assert settle(GPU, target_itl_ms=0.0).target_itl_s == 0
    assert settle(GPU, target_itl_ms=5.0).target_itl_s == pytest.approx(0.005)
    for resolved in (settle(CPU), settle(GPU, enforce_eager=True)):
        assert not resolved.graphs and resolved.target_itl_s == 0
    assert settle(CPU, target_itl_ms=5.0).target_itl_s == pytest.approx(0.005)


def test_an_engine_does_not_take_all_threads_of_the_machine() -> None:
    with pytest.raises(ConfigError, match="threads is 100000; use at most 1024"):
        settle(threads=100_000)
    assert settle(Machine(cpus=2048, cuda=False), threads=2048).threads == 2048


@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens", "max_num_seqs", "threads"])
def test_zero_is_refused_and_does_not_mean_the_default(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        settle(**{name: 0})


def test_given_values_are_kept() -> None:
    values = {
        "max_num_batched_tokens": 77,
        "max_num_seqs": 5,
        "max_queued_tokens": 1234,
        "pipeline_depth": 3,
        "threads": 2,
        "seed": 9,
        "load_format": "dummy",
    }
    resolved = settle(**values)
    assert {name: getattr(resolved, name) for name in values} == values


@pytest.mark.parametrize(
    ("hidden", "layers", "quantization", "tokens"),
    [
        (384, 6, None, 32_768),  # MiniLM
        (768, 12, None, 16_384),  # BERT-base
        (1024, 24, None, 16_384),  # XLM-R-large
        (1024, 28, None, 16_384),  # Qwen3-0.6B
        (2560, 36, None, 4096),  # Qwen3-4B
        (4096, 32, None, 4096),  # 7B
        (4096, 32, "fp8", 8192),
        (5120, 64, None, 1024),  # 32B
        (None, 12, None, 16_384),
        (768, None, None, 16_384),
    ],
)
def test_narrow_models_get_larger_steps_on_cuda(
    hidden: int | None, layers: int | None, quantization: str | None, tokens: int
) -> None:
    assert cuda_step_tokens(hidden, layers, quantization) == tokens
    model = ModelFacts(max_model_len=512, hidden_size=hidden, num_layers=layers)
    assert quantization or resolve(EngineConfig(), model, GPU).max_num_batched_tokens == tokens
    given = EngineConfig(max_num_batched_tokens=99)
    assert resolve(given, model, GPU).max_num_batched_tokens == 99
    on_cpu = resolve(EngineConfig(), model, CPU)
    assert on_cpu.max_num_batched_tokens == settle().max_num_batched_tokens


def test_threads_default_to_the_available_cores() -> None:
    assert settle().threads == 4
    assert available_cpus() >= 1


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="max_modle_len"):
        from_mapping(EngineConfig, {"max_modle_len": 3})
    with pytest.raises(ConfigError, match="prot"):
        from_mapping(ServerConfig, {"prot": 80})


@pytest.mark.parametrize(
    "values",
    [{"seed": "three"}, {"max_model_len": 1.5}, {"quantization": "int3"}, {"load_format": "pickle"}],
)
def test_a_value_of_the_wrong_type_is_refused_by_key(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        from_mapping(EngineConfig, values)


def test_nested_settings_are_read_and_checked() -> None:
    config = from_mapping(EngineConfig, {"pooler_config": {"pooling_type": "CLS"}})
    assert config.pooler_config == PoolerConfig(pooling_type="CLS")
    with pytest.raises(ConfigError, match="poolingtype"):
        from_mapping(EngineConfig, {"pooler_config": {"poolingtype": "CLS"}})


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().model = "other"  # type: ignore[misc]


def test_prefix_caching_defaults_to_models_that_share_prefixes() -> None:
    def caches(shares: bool, why_not_chunked: str | None = None, **values: Any) -> bool:
        model = ModelFacts(max_model_len=512, shares_prefixes=shares, why_not_chunked=why_not_chunked)
        settings = resolve(EngineConfig(**values), model, CPU)
        assert settings.chunked or not settings.prefix_caching
        return settings.prefix_caching

    assert caches(True) and not caches(False)
    assert not caches(True, enable_prefix_caching=False) and caches(False, enable_prefix_caching=True)
    assert not caches(True, enable_chunked_prefill=False)
    assert not caches(True, why_not_chunked="it looks ahead")


def test_step_output_is_given_in_megabytes() -> None:
    def bytes_of(**values: float) -> int:
        return settle(CPU, **values).step_output_bytes

    assert bytes_of() == 4096 * 1024 * 4, "4,096 tokens of 1,024 numbers"
    assert bytes_of(step_output_mb=0) == 0
    with pytest.raises(ConfigError, match="step_output_mb is -1"):
        bytes_of(step_output_mb=-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "auto", "target_itl_ms": 1e9}, "target_itl_ms is"),
        ({"device": "cpu", "quantization": "fp8"}, "fp8 is for CUDA"),
        ({"device": "cuda", "quantization": "int8"}, "int8 is for CPUs"),
        ({"device": "auto", "quantization": "int8"}, None),  # valid if the machine has no GPU
        ({"device": "auto", "quantization": "fp8"}, None),
        ({"device": "cuda:3", "tensor_parallel_size": 8}, None),
    ],
    ids=str,
)
def test_settings_that_no_machine_accepts_are_refused_before_it_is_known(
    settings: dict[str, Any], message: str | None
) -> None:
    config = EngineConfig(**settings)
    if message is None:
        check_settings(config, MODEL)
    else:
        with pytest.raises(ConfigError, match=message):
            check_settings(config, MODEL)


def test_settings_of_generation_are_unused_by_a_model_that_does_not_generate() -> None:
    config = EngineConfig(target_itl_ms=14.0, max_num_partial_prefills=1)
    assert unused_settings(config, MODEL) == ("target_itl_ms", "max_num_partial_prefills")
    assert unused_settings(EngineConfig(), MODEL) == ()
    assert unused_settings(config, msgspec.structs.replace(MODEL, generates=True)) == ()
