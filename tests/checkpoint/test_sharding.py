"""Which models can be sharded over how many devices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.checkpoint.sharding import check_shards
from penstock.checkpoint.sizes import check_memory
from penstock.checkpoint.static import StaticSpec
from penstock.config import EngineConfig, Machine, ModelFacts, resolve
from penstock.errors import ConfigError, ModelLoadError
from tests.checkpoints import FP8_BLOCKS
from tests.helpers import make_spec

CPU, GPUS = Machine(cpus=4, cuda=False), Machine(cpus=16, cuda=True, bf16=True, num_gpus=4)
FACTS = ModelFacts(max_model_len=16)
SIZES = {
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
BERT = SIZES | {"num_attention_heads": 12}
MOE = SIZES | {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 64,
}


def check(architecture: str, size: int, config: dict[str, Any], **changes: Any) -> None:
    spec = make_spec(architecture=architecture, config=config, **changes)
    check_shards(spec, resolve(EngineConfig(tensor_parallel_size=size), FACTS, CPU))


@pytest.mark.parametrize(
    ("architecture", "config", "sizes"),
    [
        ("LlamaForCausalLM", SIZES, (1, 3)),
        ("BertModel", BERT, (1, 2, 3, 4, 6, 12)),
        ("Qwen3MoeForCausalLM", MOE, (1, 2)),  # six experts, and two key heads
        ("Qwen3MoeForCausalLM", MOE | {"num_experts": 8}, (1, 2, 4, 8)),  # ranks share key heads
        ("Qwen3MoeForCausalLM", MOE | {"num_experts": 8, "mlp_only_layers": [0]}, (1, 2, 4, 8)),
        (
            "Qwen3MoeForCausalLM",
            MOE | {"num_experts": 8, "mlp_only_layers": [0], "intermediate_size": 6},
            (1, 2),
        ),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused_with_those_that_do(
    architecture: str, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    words = f"use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    for size in range(1, 13):
        if size in sizes:
            check(architecture, size, config)
            continue
        with pytest.raises(ConfigError, match="attention heads") as raised:
            check(architecture, size, config)
        assert raised.value.message.endswith(words) and raised.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("DebertaV2Model", {}, "DebertaV2Model is not divided; tensor parallel works with Albert, Bert"),
        ("GptOssForCausalLM", {}, "GptOssForCausalLM is not divided"),
        ("BertModel", {"adapters": ("retrieval",)}, "task adapters"),
        ("BertModel", {"static": StaticSpec("table", rows=10, dim=4, vocab_size=10)}, "static embeddings"),
    ],
)
def test_models_that_are_not_divided_are_refused_by_name(
    architecture: str, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        check(architecture, 2, BERT, **changes)
    check(architecture, 1, BERT, **changes)


def test_quantised_checkpoints_are_refused_by_their_method() -> None:
    with pytest.raises(ConfigError, match=r"stored quantised \(fp8\)"):
        check("Qwen3Model", 3, SIZES | {"quantization_config": FP8_BLOCKS})


def test_models_that_transformers_runs_are_refused() -> None:
    settings = resolve(EngineConfig(tensor_parallel_size=2, model_impl="transformers"), FACTS, CPU)
    with pytest.raises(ConfigError, match="transformers"):
        check_shards(make_spec(config=BERT), settings)


def test_more_ranks_than_gpus_are_refused() -> None:
    for device, size in (("cuda", 5), ("cuda:2", 3)):
        with pytest.raises(ConfigError, match="this machine has 4") as raised:
            resolve(EngineConfig(device=device, tensor_parallel_size=size), FACTS, GPUS)
        assert raised.value.param == "tensor_parallel_size"
    settings = resolve(EngineConfig(device="cuda:2", tensor_parallel_size=2), FACTS, GPUS)
    assert settings.tensor_parallel_size == 2
    assert not settings.graphs


@pytest.mark.parametrize("size", [0, -1, 65])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 64"):
        resolve(EngineConfig(tensor_parallel_size=size), FACTS, CPU)


def test_ranks_on_a_cpu_share_its_threads() -> None:
    settings = resolve(EngineConfig(tensor_parallel_size=2), FACTS, CPU)
    assert settings.threads == 2
    assert resolve(EngineConfig(tensor_parallel_size=2, threads=3), FACTS, CPU).threads == 3


def test_a_rank_needs_memory_for_its_share() -> None:
    sizes = make_spec(architecture="LlamaForCausalLM", config=SIZES | {"num_hidden_layers": 100}).sizes
    need = sizes.min_parameters * 4
    with pytest.raises(ModelLoadError, match="the weights need at least"):
        check_memory(sizes, 4, need - 1)
    check_memory(sizes, 4, need // 2, ranks=3)
    with pytest.raises(ModelLoadError, match="the weights of each of 3 ranks need"):
        check_memory(sizes, 4, need // 4, ranks=3)


def test_settings_with_one_rank_are_as_they_were() -> None:
    settings = resolve(EngineConfig(), FACTS, CPU)
    assert msgspec.structs.asdict(settings)["tensor_parallel_size"] == 1
    assert settings.threads == 4
