"""Keys of config.json that change a model's results: each has the same effect as in transformers, or is
refused by name. None is silently ignored."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from penstock.checkpoint.describe import read_spec
from penstock.errors import ModelLoadError
from penstock.layers.build import LayerBuilder
from penstock.models.registry import build_model
from penstock.types import Task
from penstock.weights.stream import DummySource, SafetensorsSource
from tests.layers.inputs import ordered_batch
from tests.parity.reference import randomise

Json = dict[str, Any]
VOCABULARY, LENGTH = 96, 40
REMOVED = "(removed)"
SIZES: Json = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PAD_1 = SIZES | {"pad_token_id": 1, "type_vocab_size": 1}
DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DEBERTA = SIZES | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
    "position_biased_input": False,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BASES: dict[str, tuple[str, Json]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", PAD_1),
    "xlm-roberta": ("XLMRoberta", PAD_1),
    "distilbert": ("DistilBert", DISTILBERT),
    "mpnet": ("MPNet", PAD_1),
    "deberta-v2": ("DebertaV2", DEBERTA),
    "modernbert": ("ModernBert", SIZES | {"local_attention": 8}),
    "nomic_bert": ("NomicBert", SIZES),
    "gte": ("Gte", SIZES),
    "llama": ("Llama", DECODER),
    "mistral": ("Mistral", DECODER),
    "qwen2": ("Qwen2", DECODER),
    "qwen3": ("Qwen3", DECODER),
    "gemma": ("Gemma", DECODER),
    "gemma2": ("Gemma2", DECODER),
    "gemma3_text": ("Gemma3Text", DECODER),
    "granite": ("Granite", DECODER),
    "smollm3": ("SmolLM3", DECODER),
    "olmo3": ("Olmo3", {key: value for key, value in DECODER.items() if key != "head_dim"}),
    "electra": ("Electra", SIZES | {"embedding_size": 16}),
    "albert": ("Albert", SIZES | {"embedding_size": 16}),
    "t5": ("T5Encoder", T5),
    "phi3": ("Phi3", {key: value for key, value in DECODER.items() if key != "head_dim"}),
}
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"
MASKED, CAUSAL = "ForMaskedLM", "ForCausalLM"
HEADS = {SEQUENCE: Task.CLASSIFY, TOKENS: Task.TOKEN_CLASSIFY, MASKED: Task.SPARSE, CAUSAL: Task.GENERATE}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
BY_LAYER = {"full_attention": LINEAR | {"rope_theta": 50.0}, "sliding_attention": {"rope_theta": 20.0}}


class Flip(NamedTuple):
    family: str
    settings: Json
    kind: str = "Model"

    def __str__(self) -> str:
        named = ",".join(f"{key}={value}" for key, value in self.settings.items() if key not in LABELS)
        return f"{self.family}-{self.kind}-{named}"[:90]


def flips(family: str, *settings: Json, kind: str = "Model") -> list[Flip]:
    return [Flip(family, each, kind) for each in settings]


COMPUTED = [
    *flips("bert", {"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"layer_norm_eps": 0.1}),
    *flips("bert", {"hidden_act": "quick_gelu"}),
    *flips("roberta", {"hidden_act": "silu"}, {"layer_norm_eps": 0.1}, {"pad_token_id": 3}),
    *flips("xlm-roberta", {"pad_token_id": 3}, {"type_vocab_size": REMOVED}),
    *flips("distilbert", {"activation": "relu"}),
    *flips("mpnet", {"hidden_act": "relu"}, {"layer_norm_eps": 0.1}),
    *flips(
        "deberta-v2",
        {"pos_att_type": ["c2p"]},
        {"pos_att_type": "p2c"},
        {"position_buckets": 8},
        {"position_buckets": -1},
        {"max_relative_positions": 20},
        {"share_att_key": False},
        {"norm_rel_ebd": "none"},
        {"position_biased_input": True},
        {"type_vocab_size": 2},
        {"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2},
        {"embedding_size": 16},
        {"layer_norm_eps": 0.1},
        {"hidden_act": "relu"},
    ),
    *flips(
        "modernbert",
        {"hidden_activation": "relu"},
        {"norm_eps": 0.1},
        {"norm_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"local_attention": 4},
        {"global_attn_every_n_layers": 1},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"global_rope_theta": 100.0},
        {"local_rope_theta": 100.0},
        {"rope_parameters": BY_LAYER},
    ),
    *flips("nomic_bert", {"hidden_act": "relu"}, {"rope_theta": 77.0}, {"rope_scaling": LINEAR}),
    *flips("gte", {"hidden_act": "relu"}, {"rope_theta": 77.0}, {"rope_scaling": YARN}),
    *flips(
        "llama",
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.1},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_theta": 77.0},
        {"rope_scaling": LINEAR},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}},
        {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 0.8}},
        {"rope_parameters": LINEAR | {"rope_theta": 500.0}, "rope_theta": 9.0},
        {"rope_parameters": LINEAR, "rope_scaling": YARN},
        {"rope_scaling": LINEAR | {"rope_theta": 500.0}, "rope_theta": 9.0},
        {"is_causal": False},
        {"head_dim": 4},
    ),
    *flips("mistral", {"sliding_window": 8}, {"rms_norm_eps": 0.1}),
    *flips("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    *flips("qwen2", MIXED | {"use_sliding_window": True}, {"is_causal": False}),
    *flips("qwen3", {"attention_bias": True}, {"rope_scaling": YARN}, {"is_causal": False}),
    *flips("gemma", {"use_bidirectional_attention": True}, {"rms_norm_eps": 0.1}, {"attention_bias": True}),
    *flips("gemma2", {"attn_logit_softcapping": 2.0}, {"query_pre_attn_scalar": 3}, {"sliding_window": 8}),
    *flips("gemma2", {"hidden_activation": "relu"}),
    *flips("gemma3_text", {"use_bidirectional_attention": True}, {"query_pre_attn_scalar": 3}),
    *flips("gemma3_text", MIXED | {"rope_parameters": BY_LAYER, "rope_scaling": YARN}),
    *flips("modernbert", {"rope_parameters": BY_LAYER, "rope_scaling": YARN}),
    *flips("gemma3_text", MIXED, MIXED | {"rope_theta": 77.0}, {"rope_local_base_freq": 50.0}),
    *flips("granite", {"residual_multiplier": 0.5}, {"attention_multiplier": 0.3}),
    *flips("smollm3", {"no_rope_layers": [0, 1]}),
    *flips("electra", {"hidden_act": "relu"}),
    *flips("albert", {"hidden_act": "relu"}, {"num_hidden_groups": 2}, {"inner_group_num": 2}),
    *flips("t5", {"feed_forward_proj": "gated-gelu"}, {"relative_attention_num_buckets": 8}),
    *flips("phi3", {"sliding_window": 8}, {"hidden_act": "gelu"}),
    *flips("deberta-v2", LABELS | {"pooler_hidden_act": "relu"}, kind=SEQUENCE),
    *flips("modernbert", LABELS | {"classifier_pooling": "mean"}, kind=SEQUENCE),
    *flips("modernbert", LABELS | {"classifier_activation": "relu", "classifier_bias": True}, kind=SEQUENCE),
    *flips("bert", {"num_labels": 4}, LABELS | {"num_labels": 5}, kind=TOKENS),
    *flips("bert", {"hidden_act": "relu"}, {"tie_word_embeddings": False}, kind=MASKED),
    *flips("gte", {"hidden_act": "relu"}, kind=MASKED),
    *flips("modernbert", {"classifier_activation": "relu"}, {"decoder_bias": False}, kind=MASKED),
    *flips("llama", {"tie_word_embeddings": True}, kind=CAUSAL),
    *flips("gemma2", {"final_logit_softcapping": 2.0}, kind=CAUSAL),
]
# Keys without effect, in transformers and in Penstock.
WITHOUT_EFFECT = [
    *(Flip(family, {}) for family in BASES),  # a missing key has the family's default
    *flips("bert", {"chunk_size_feed_forward": 4}, {"torchscript": True}),
    *flips("distilbert", {"sinusoidal_pos_embds": True}, {"hidden_act": "relu"}),
    *flips("distilbert", {"layer_norm_eps": 0.1}, kind=MASKED),
    *flips("gemma2", {}, kind=CAUSAL),
    *flips("gemma", {"hidden_act": "gelu"}),
    *flips("llama", {"rope_interleaved": True}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    *flips("qwen2", {"sliding_window": 8}),
]
REFUSED = {
    "is_decoder": flips("bert", {"is_decoder": True}) + flips("xlm-roberta", {"is_decoder": True}),
    "is_causal": flips("modernbert", {"is_causal": True}) + flips("gte", {"is_causal": True}),
    "pruned_heads": flips("bert", {"pruned_heads": {"0": [1]}}),
    "position_embedding_type": flips("bert", {"position_embedding_type": "relative_key"}),
    "mish": flips("bert", {"hidden_act": "mish"}) + flips("qwen3", {"hidden_act": "mish"}),
    "pad_token_id": flips("mpnet", {"pad_token_id": 3}),
    "relative_attention_num_buckets": flips("mpnet", {"relative_attention_num_buckets": 64}),
    "p2p": flips("deberta-v2", {"pos_att_type": ["c2p", "p2p"]}),
    "attention_head_size": flips("deberta-v2", {"attention_head_size": 4}),
    "sliding_window": flips("modernbert", {"sliding_window": 6}),
    "partial_rotary_factor": flips("llama", {"partial_rotary_factor": 0.5})
    + flips("qwen3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "longrope": flips("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    "rope_theta": flips("olmo3", {"rope_theta": 77.0}),
    "dense_act_fn": flips("t5", {"feed_forward_proj": "relu", "dense_act_fn": "gelu_new"}),
    "layer_types": flips("granite", MIXED)
    + flips("llama", MIXED)
    + flips("gemma", MIXED)
    + flips("phi3", MIXED),
    "use_bidirectional_attention": flips("qwen3", {"use_bidirectional_attention": True})
    + flips("gemma2", {"use_bidirectional_attention": True})
    + flips("smollm3", {"use_bidirectional_attention": True}),
    "attn_logit_softcapping": flips("llama", {"attn_logit_softcapping": 2.0}),
    "final_logit_softcapping": flips("qwen2", {"final_logit_softcapping": 2.0}),
    "hidden_act": flips("gemma", {"hidden_act": "relu"}),
    "head_dim": flips("nomic_bert", {"head_dim": 4}),
    "classifier_pooling": flips("modernbert", {"classifier_pooling": "max"}, kind=SEQUENCE),
    "quantization_config": flips("bert", {"quantization_config": {"quant_method": "unheard-of"}}),
}
IDS = torch.tensor([[(7 * at * at + 3 * at) % (VOCABULARY - 5) + 5 for at in range(LENGTH)]])


def write_config(folder: Path, flip: Flip) -> type[Any]:
    prefix, base = BASES[flip.family]
    name = prefix + flip.kind
    config = base | {"model_type": flip.family, "architectures": [name]} | flip.settings
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value != REMOVED}
    (folder / "config.json").write_text(json.dumps(kept))
    found: type[Any] = getattr(transformers, name)
    return found


@torch.inference_mode()
def reference(folder: Path, flip: Flip) -> Tensor:
    """transformers' result with the same config.json. Also saves the weights in the folder."""
    model = write_config(folder, flip)(transformers.AutoConfig.from_pretrained(folder)).eval()
    randomise(model, seed=1)
    model.save_pretrained(folder / "saved")
    (folder / "saved/model.safetensors").rename(folder / "model.safetensors")
    answer = model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    found: Tensor = answer.last_hidden_state if flip.kind == "Model" else answer.logits
    return found.reshape(-1, found.shape[-1])


@torch.inference_mode()
def penstock(folder: Path, flip: Flip) -> Tensor:
    spec = read_spec(folder, "model")
    weights = SafetensorsSource(folder, torch.float32, torch.device("cpu"))
    splade, generates = flip.kind == MASKED, flip.kind == CAUSAL
    model = build_model(
        spec.architecture, spec.config, LayerBuilder(weights), splade=splade, generates=generates
    )
    batch = ordered_batch([LENGTH])
    batch.token_ids.copy_(IDS[0])
    states = model(batch)
    if flip.kind == "Model":
        return states
    head = model.heads[HEADS[flip.kind]]
    method = "all" if generates else head.method
    pooled = {"all": states, "cls": states[:1], "mean": states.mean(0, keepdim=True), "last": states[-1:]}
    return head.project(pooled[method])


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns transformers' result for a family without the changed key."""

    @cache
    def find(family: str, kind: str) -> Tensor:
        return reference(tmp_path_factory.mktemp("unchanged"), Flip(family, {}, kind))

    return find


@pytest.mark.parametrize("flip", COMPUTED, ids=str)
def test_a_key_changes_the_answer_as_it_does_in_transformers(
    flip: Flip, tmp_path: Path, unchanged: Any
) -> None:
    wanted = reference(tmp_path, flip)
    before = unchanged(flip.family, flip.kind)
    assert before.shape != wanted.shape or (before - wanted).abs().max() > 3e-4
    torch.testing.assert_close(penstock(tmp_path, flip), wanted, rtol=0, atol=3e-5)


@pytest.mark.parametrize("flip", WITHOUT_EFFECT, ids=str)
def test_a_key_without_effect_in_transformers_has_none_here(flip: Flip, tmp_path: Path) -> None:
    torch.testing.assert_close(reference(tmp_path, flip), penstock(tmp_path, flip), rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("named", "flip"), [(named, flip) for named, cases in REFUSED.items() for flip in cases], ids=str
)
def test_a_key_that_would_be_computed_wrongly_is_refused_by_name(
    named: str, flip: Flip, tmp_path: Path
) -> None:
    write_config(tmp_path, flip)
    with pytest.raises(ModelLoadError, match=named):
        spec = read_spec(tmp_path, "model")
        build_model(spec.architecture, spec.config, LayerBuilder(_dummy()))


def test_a_key_that_nothing_reads_is_reported_once_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip = Flip("llama", {"residual_multiplier": 0.22, "no_rope_layers": [1], "new_and_off": False})
    write_config(tmp_path, flip)
    spec = read_spec(tmp_path, "model")
    with caplog.at_level(logging.WARNING, "penstock"):
        build_model(spec.architecture, spec.config, LayerBuilder(_dummy()))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "residual_multiplier = 0.22, no_rope_layers = [1]" in message and "new_and_off" not in message


def _dummy() -> DummySource:
    return DummySource(0, torch.float32, torch.device("cpu"))
