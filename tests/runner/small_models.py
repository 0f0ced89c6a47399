"""Small models of many families with random weights, and step plans for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from penstock.checkpoint.pooling import PoolingSpec
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PoolPlan
from penstock.weights.stream import DummySource
from tests.helpers import ints, make_request

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 300,
    "vocab_size": 1000,
    "num_labels": 3,
    "rms_norm_eps": 1e-6,
}
NAMED = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}  # DistilBERT
NAMED |= {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 300, "layer_norm_epsilon": 1e-5}  # GPT-2
CONV = {"conv_kernel_size": 3, "relative_attention": True, "pos_att_type": "c2p|p2c", "position_buckets": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertForSequenceClassification": {},
    "RobertaModel": {"pad_token_id": 1},
    "DistilBertModel": {},
    "MPNetModel": {},
    "NomicBertModel": {"rope_theta": 1000.0},
    "GteModel": {"rope_theta": 1000.0},
    "ModernBertModel": {"global_rope_theta": 1e4, "local_rope_theta": 1e4, "local_attention": 16},
    "DebertaV2Model": {},
    "DebertaV2ForSequenceClassification": CONV,
    "GPT2Model": {},
    "GritLM": {"is_causal": False},
    "MistralModel": {"sliding_window": 20},
    "Qwen3Model": {},
    "Qwen3ForSequenceClassification": {},
    "Qwen3MoeModel": EXPERTS,
    "Gemma2Model": {"sliding_window": 20},
}
LENGTHS = (5, 9, 2, 30, 1, 17, 30, 70)
SKIP = (0, 3, 1, 29, 0, 0, 17, 40)


def plan_of(
    *params: PoolingParams,
    skip: bool = True,
    lengths: tuple[int, ...] = LENGTHS,
    left_out: tuple[int, ...] = SKIP,
) -> PoolPlan:
    shares = []
    for number, each in enumerate(params or (PoolingParams(),)):
        left = left_out[: len(lengths)] if skip else None
        request = make_request(f"r{number}", lengths, first_token=3 + number, params=each, skip=left)
        shares.append(ScheduledRows(request, ints(range(len(lengths)))))
    return build_plan(shares)


def make_runner(
    architecture: str,
    method: str,
    more: dict[str, Any],
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> ModelRunner:
    config = SIZES | NAMED | more
    with torch.inference_mode():
        source = DummySource(0, dtype, device)
        model = build_model(architecture, config, LayerBuilder(source, None))
    spec = SimpleNamespace(
        pooling=PoolingSpec((method,), normalize=True),
        config=config,
        sparse=None,
        late=None,
        multi_vector=None,
        score=None,
    )
    return ModelRunner(model, Pooler(spec, model.heads, []), device, 1)  # type: ignore[arg-type]


def seen(runner: ModelRunner, plan: PoolPlan) -> tuple[list[torch.Tensor], int]:
    """Run a plan. Returns the outputs, and the number of tokens that the last layer computed."""
    counts: list[int] = []
    model = runner.model

    def counted(batch: Batch) -> torch.Tensor:
        hidden = model(batch)
        counts.append(len(hidden))
        return hidden

    watched: Any = counted
    watched.prunes_last_layer, watched.hidden_size = model.prunes_last_layer, model.hidden_size
    runner.model = watched
    try:
        return runner.forward(plan), counts[0]
    finally:
        runner.model = model
