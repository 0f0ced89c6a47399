"""Small seeded checkpoints of encoder families in their real layouts, with the reference that wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig
from penstock.offline.local import LocalEngine
from penstock.runner.load import settle
from penstock.types import PoolingParams, Request, Task
from tests.helpers import ints
from tests.parity import jina_bert
from tests.parity.reference import Vectors, randomise

VOCABULARY = 120
LABELS = 5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "num_labels": LABELS,
}
LENGTHS = (1, 2, 3, 5, 5, 16, 17, 33, 64, 65, 100, 100, 129, 200)
ADAPTERS = ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"]

Settings = dict[str, Any]
Tensors = dict[str, Tensor]


def make_rows(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(1, VOCABULARY, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Case:
    """A layout of a family: what transformers saves, and later changes to the files."""

    name: str
    options: Settings = field(default_factory=dict)
    rewrite: Callable[[Settings], Settings] = dict  # changes config.json
    rename: Callable[[Tensors], Tensors] = dict  # changes model.safetensors
    extend: Callable[[nn.Module], None] = lambda model: None  # changes the reference before it is saved
    adjust: Callable[[nn.Module], None] = lambda model: None  # adds an option that the reference lacks
    overrides: Settings = field(default_factory=dict)
    config_name: str = ""  # set if the config class has another prefix than the model class

    @property
    def config_class(self) -> str:
        return f"{self.config_name or self.name}Config"

    def write(self, folder: Path, kind: str = "Model", scale: float = 0.2) -> nn.Module:
        """Write the checkpoint, with weights of about `scale`; returns the reference to compare with."""
        config = getattr(transformers, self.config_class)(**(SIZES | self.options))
        model: Any = getattr(transformers, f"{self.name}{kind}")(config).eval()
        self.extend(model)
        randomise(model, seed=1)
        for parameter in model.parameters():
            parameter.data *= scale / 0.2 if parameter.dim() > 1 else 1
        model.save_pretrained(folder)
        files = self.rewrite(json.loads((folder / "config.json").read_text()))
        (folder / "config.json").write_text(json.dumps(files))
        tensors = self.rename(load_file(folder / "model.safetensors"))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
        self.adjust(model)
        written: nn.Module = model
        return written


def _old_modernbert(config: Settings) -> Settings:
    """The configuration of the first checkpoints: two bases and a stride instead of parameters per layer."""
    new = ("rope_parameters", "layer_types")
    old = {"global_rope_theta": 90_000.0, "local_rope_theta": 7_000.0, "global_attn_every_n_layers": 2}
    return {name: value for name, value in config.items() if name not in new} | old


def _original_nomic(config: Settings) -> Settings:
    return {
        "architectures": config["architectures"],
        "model_type": "nomic_bert",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 4,
        "n_inner": 96,
        "n_positions": 256,
        "max_trained_positions": 128,
        "vocab_size": VOCABULARY,
        "pad_vocab_size_multiple": 8,
        "type_vocab_size": 2,
        "activation_function": "swiglu",
        "prenorm": False,
        "causal": False,
        "parallel_block": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "use_rms_norm": False,
        "id2label": config.get("id2label"),
    }


def _original_gte(config: Settings) -> Settings:
    config.pop("rope_parameters")
    name = config["architectures"][0].replace("Gte", "New")
    return config | {
        "architectures": [name],
        "model_type": "new",
        "position_embedding_type": "rope",
        "rope_theta": 20_000,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "pack_qkv": True,
        "unpad_inputs": False,
    }


def _stretch(model: nn.Module) -> None:
    """Apply Alibaba's fixed NTK scaling: a base eight times as large, all frequencies divided by
    8^(2/dim)."""
    dim = 16
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            wide = 1.0 / ((8 * 20_000.0) ** (torch.arange(0, dim, 2).float() / dim))
            module.inv_freq = wide / 8 ** (2 / dim)


def _under_new(tensors: Tensors) -> Tensors:
    """Move the tensors below "new.", and add an unused classifier for sparse weights."""
    own = {name.replace("gte.", "new."): tensor for name, tensor in tensors.items()}
    own = {
        name if name.startswith(("new.", "classifier.", "lm_head.")) else f"new.{name}": own[name]
        for name in own
    }
    spare = {"classifier.weight": torch.zeros(1, 64), "classifier.bias": torch.zeros(1)}
    return spare | own


def _flash(config: Settings) -> Settings:
    name = config["architectures"][0].replace("JinaEmbeddingsV3", "XLMRoberta")
    config.pop("rope_parameters")
    return config | {
        "architectures": [name],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20_000.0,
        "use_flash_attn": True,
        "use_reg_tokens": False,
        "lora_adaptations": ADAPTERS,
        "lora_rank": 4,
        "lora_alpha": 2,
    }


def _is_adapted(name: str) -> bool:
    norm = "norm" in name or "emb_ln" in name
    return name.endswith(".weight") and not norm and not name.startswith(("classifier", "lm_head"))


def _parametrised(tensors: Tensors) -> Tensors:
    """Five adapters for every linear layer and table, in the format of torch's parametrisation."""
    out = {}
    for name, tensor in tensors.items():
        if not _is_adapted(name):
            out[name] = tensor
            continue
        place = name.removesuffix("weight") + "parametrizations.weight."
        out[place + "original"] = tensor
        out[place + "0.lora_A"], out[place + "0.lora_B"] = _adapter(name, tensor)
    return out


def _adapter(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = tensor.shape
    generator = torch.Generator().manual_seed(len(name) + rows)
    table = "embeddings" in name
    shape_a, shape_b = ((5, rows, 4), (5, 4, columns)) if table else ((5, 4, columns), (5, rows, 4))
    return torch.randn(shape_a, generator=generator) * 0.2, torch.randn(shape_b, generator=generator) * 0.2


def _merge_separation(model: nn.Module) -> None:
    """Merge the third adapter into the reference's tensors."""
    state = model.state_dict()
    for i in range(4):  # one fused tensor in the checkpoint, three in the reference
        layer = f"layers.{i}."
        parts = [f"{layer}self_attn.{part}_proj.weight" for part in "qkv"]
        fused = torch.cat([state[part] for part in parts])
        change = _change(f"encoder.{layer}mixer.Wqkv.weight", fused)
        for part, rows in zip(parts, change.chunk(3), strict=True):
            state[part] += rows
        out = f"encoder.{layer}mixer.out_proj.weight"
        state[f"{layer}self_attn.o_proj.weight"] += _change(out, state[f"{layer}self_attn.o_proj.weight"])
        for name in ("fc1", "fc2"):
            own = f"{layer}mlp.{name}.weight"
            state[own] += _change(f"encoder.{own}", state[own])
    for name in ("word_embeddings", "token_type_embeddings"):
        own = f"embeddings.{name}.weight"
        state[own] += _change(own, state[own])
    model.load_state_dict(state)


def _change(name: str, tensor: Tensor) -> Tensor:
    a, b = _adapter(name, tensor)
    return (a[2] @ b[2] if "embeddings" in name else b[2] @ a[2]) * (2 / 4)


def _unpacked(config: Settings) -> Settings:
    return _original_gte(config) | {"pack_qkv": False, "rope_scaling": None, "rope_theta": 160_000}


def _split_qkv(tensors: Tensors) -> Tensors:
    out = {}
    for name, tensor in tensors.items():
        parts = [name.replace("qkv_proj", f"{letter}_proj") for letter in ("qkv" if "qkv" in name else "q")]
        out.update(zip(parts, tensor.chunk(len(parts)), strict=True))
    return out


def _plain_nomic(config: Settings) -> Settings:
    """Biases and an ungated feed-forward block. The reference is another family with the same wiring."""
    biases = {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    own = {"architectures": ["NomicBertModel"], "activation_function": "gelu", "type_vocab_size": 1}
    return _original_nomic(config) | own | biases | {"layer_norm_epsilon": 1e-5, "rotary_emb_base": 20_000}


class NomicExperts(nn.Module):
    """The feed-forward block of nomic-embed-text-v2-moe: softmax over all experts, the best two without
    renormalisation, one bias after the sum."""

    def __init__(self, hidden: int = 64, inner: int = 96, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Module()
        self.router.layer = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.Module()
        self.experts.mlp = nn.Module()
        self.experts.mlp.w1 = nn.Parameter(torch.empty(experts * inner, hidden))
        self.experts.mlp.w2 = nn.Parameter(torch.empty(experts * inner, hidden))
        self.experts.bias = nn.Parameter(torch.empty(hidden))
        self.shape = (experts, inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        odds = self.router.layer(x).softmax(dim=-1, dtype=torch.float32)
        best, chosen = odds.topk(2, dim=-1)
        shares = torch.zeros_like(odds).scatter(-1, chosen, best).to(x.dtype)  # [..., experts]
        up, down = (getattr(self.experts.mlp, name).view(self.shape) for name in ("w1", "w2"))
        inner = torch.nn.functional.gelu(torch.einsum("...h,eih->...ei", x, up))
        return torch.einsum("...ei,eih,...e->...h", inner, down, shares) + self.experts.bias


def _add_experts(model: nn.Module) -> None:
    """Put the experts into every second layer, starting with the second."""
    for layer in list(model.layers)[1::2]:  # type: ignore[arg-type]
        layer.mlp = NomicExperts()


def _moe_nomic(config: Settings) -> Settings:
    experts = {"num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2, "moe_impl": "megablocks"}
    off = {"num_shared_experts": 0, "expert_choice_router": False, "moe_normalize_expert_weights": False}
    return _plain_nomic(config) | experts | off | {"ffn_div": 1}


def _jina_bert(config: Settings, kind: str = "geglu") -> Settings:
    """The configuration of JinaBERT. model_type stays "bert"."""
    name = "Jina" + config["architectures"][0]
    alibi = {"position_embedding_type": "alibi", "feed_forward_type": kind, "emb_pooler": "mean"}
    return config | alibi | {"architectures": [name], "attn_implementation": "torch"}


def _jina_case(heads: int, kind: str = "geglu", **options: bool) -> Case:
    return Case(
        "Bert",
        {"num_attention_heads": heads, "hidden_size": 8 * heads},
        rewrite=partial(_jina_bert, kind=kind),
        extend=partial(jina_bert.install, **options),
        rename=jina_bert.drop_positions,
        adjust=jina_bert.zero_positions,
    )


def _t5(config: Settings) -> Settings:
    """Remove the sizes of other families, which T5's configuration would keep."""
    others = ("intermediate_size", "max_position_embeddings", "hidden_size", "num_hidden_layers")
    kept = {name: value for name, value in config.items() if name not in (*others, "num_attention_heads")}
    return kept | {"n_positions": 512}  # older files have this key; nothing reads it


def _t5_case(name: str, **options: Any) -> Case:
    sizes = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 3, "num_heads": 4}
    return Case(f"{name}Encoder", sizes | options, rewrite=_t5, config_name=name)


def _absolute(config: Settings) -> Settings:
    return config | {"use_flash_attn": True, "position_embedding_type": "absolute"}


def _flash_names(tensors: Tensors) -> Tensors:
    """XLM-R in the layout of the flash implementation: one tensor for query, key and value."""
    renames = {
        "embeddings.LayerNorm": "emb_ln",
        "encoder.layer.": "encoder.layers.",
        "attention.output.dense": "mixer.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
    }
    out = {}
    for name, tensor in tensors.items():
        if "attention.self.query" in name:
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            name, tensor = name.replace("attention.self.query", "mixer.Wqkv"), torch.cat(parts)
        elif "attention.self" in name:
            continue
        for old, new in renames.items():
            name = name.replace(old, new)
        out[name] = tensor
    return out


def _port_names(**renames: str) -> Callable[[Tensors], Tensors]:
    """Rename tensors to a port's internal names, which checkpoints may have too."""

    def rename(tensors: Tensors) -> Tensors:
        out = {}
        for name, tensor in tensors.items():
            for old, new in renames.items():
                name = name.replace(old.replace("_DOT_", "."), new)
            parts = [name]
            if "QKV" in name:
                parts = [name.replace("QKV", f"{letter}_proj") for letter in "qkv"]
            elif "UPGATE" in name:
                parts = [name.replace("UPGATE", "up_proj"), name.replace("UPGATE", "gate_proj")]
            out.update(zip(parts, tensor.chunk(len(parts)), strict=True))
        return out

    return rename


_NOMIC_PORT = {
    "encoder_DOT_layers": "layers",
    "emb_ln": "embeddings.LayerNorm",
    "attn_DOT_out_proj": "self_attn.o_proj",
    "attn_DOT_Wqkv": "self_attn.QKV",
    "fc11": "up_proj",
    "fc12": "gate_proj",
    "fc2": "down_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}
_GTE_PORT = {
    "encoder_DOT_layer": "layers",
    "attention_DOT_o_proj": "self_attn.o_proj",
    "attention_DOT_qkv_proj": "self_attn.QKV",
    "up_gate_proj": "UPGATE",
    "attn_ln": "post_attention_layernorm",
    "mlp_ln": "post_mlp_layernorm",
}
_MODERNBERT = {
    "local_attention": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
_DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 32,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
CASES: dict[str, Case] = {
    "modernbert": Case("ModernBert", _MODERNBERT),
    "modernbert-first-checkpoints": Case(
        "ModernBert",
        _MODERNBERT
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "classifier_activation": "silu",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 90_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 7_000.0},
            },
        },
        rewrite=_old_modernbert,
    ),
    "nomic": Case("NomicBert"),
    "nomic-original": Case("NomicBert", rewrite=_original_nomic),
    "nomic-port-names": Case("NomicBert", rename=_port_names(**_NOMIC_PORT)),
    "gte": Case("Gte", {"type_vocab_size": 1}),
    "gte-original": Case(
        "Gte", {"type_vocab_size": 1}, rewrite=_original_gte, rename=_under_new, adjust=_stretch
    ),
    "gte-port-names": Case("Gte", {"type_vocab_size": 0}, rename=_port_names(**_GTE_PORT)),
    "jina": Case("JinaEmbeddingsV3"),
    "jina-flash": Case("JinaEmbeddingsV3", rewrite=_flash, rename=_parametrised),
    "jina-bert": _jina_case(6),
    "jina-bert-code": _jina_case(8, code=True),
    "electra": Case("Electra", {"embedding_size": 48}),
    "albert": Case("Albert", {"embedding_size": 48, "num_hidden_groups": 2, "inner_group_num": 2}),
    "ernie": Case("Ernie", {"use_task_id": True, "task_type_vocab_size": 3}),
    "deberta-v3": Case("DebertaV2", _DEBERTA_V3),
    "deberta-v2": Case(
        "DebertaV2",
        {
            "relative_attention": True,
            "pos_att_type": "c2p|p2c",
            "type_vocab_size": 2,
            "embedding_size": 48,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
            "max_relative_positions": 64,
        },
    ),
    "deberta-one-term": Case(
        "DebertaV2", _DEBERTA_V3 | {"pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none"}
    ),
}
# Heads of masked-language models in layouts that the cases above do not have.
MASKED_LM: dict[str, Case] = {
    "deberta-lm-predictions": Case("DebertaV2", _DEBERTA_V3 | {"legacy": False}),
    "modernbert-no-decoder-bias": Case("ModernBert", _MODERNBERT | {"decoder_bias": False}),
    "gte-untied": Case("Gte", {"tie_word_embeddings": False}),
}
# Layouts with the same heads as a case above, or with other heads in the reference.
BACKBONES: dict[str, Case] = {
    "gte-unpacked": Case("Gte", rewrite=_unpacked, rename=lambda tensors: _split_qkv(_under_new(tensors))),
    "nomic-plain": Case(
        "JinaEmbeddingsV3",
        rewrite=_plain_nomic,
        rename=lambda tensors: {name.replace("mixer", "attn"): tensors[name] for name in tensors},
    ),
    "nomic-moe": Case(
        "JinaEmbeddingsV3",
        rewrite=_moe_nomic,
        rename=lambda tensors: {name.replace("mixer", "attn"): tensors[name] for name in tensors},
        extend=_add_experts,
    ),
    "t5": _t5_case("T5", relative_attention_num_buckets=16, relative_attention_max_distance=64),
    "t5-gated": _t5_case("T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _t5_case("MT5"),
    "flash-absolute": Case("XLMRoberta", {"type_vocab_size": 1}, rewrite=_absolute, rename=_flash_names),
    "jina-bert-plain": _jina_case(6, "original", gated=False),
    "electra-wide": Case("Electra", {"embedding_size": 64}),
    "deberta-no-distances": Case("DebertaV2", {"type_vocab_size": 2, "pos_att_type": ["c2p"]}),
}
ADAPTED = Case(
    "JinaEmbeddingsV3",
    rewrite=_flash,
    rename=_parametrised,
    adjust=_merge_separation,
    overrides={"lora_task": "separation"},
)


class Opened:
    """A checkpoint in an engine that gets token ids."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    def ask(
        self, rows: Sequence[Sequence[int]], task: Task, segments: Sequence[int] | None = None
    ) -> Vectors:
        return self.engine.submit(self.request(rows, task, segments)).result(60).values  # type: ignore[return-value]

    @staticmethod
    def request(
        rows: Sequence[Sequence[int]], task: Task, segments: Sequence[int] | None = None, adapter: int = -1
    ) -> Request:
        return Request(
            f"{task}-{id(rows)}-{adapter}",
            ints([token for row in rows for token in row]),
            ints([len(row) for row in rows]),
            PoolingParams(task, normalize=False),
            type_ids=None if segments is None else ints(segments),
            adapters=None if adapter < 0 else ints([adapter] * len(rows)),
        )


@contextmanager
def opened(folder: Path, overrides: Settings | None = None, **options: Any) -> Iterator[Opened]:
    where = {"device": "cpu", "threads": 1} | options
    config = EngineConfig(model=str(folder), hf_overrides=overrides or {}, **where)
    spec = describe(config)
    engine = LocalEngine(spec, settle(config, spec))
    try:
        yield Opened(engine)
    finally:
        engine.close()


@torch.inference_mode()
def reference_hidden(model: nn.Module, rows: Sequence[Sequence[int]]) -> list[Vectors]:
    """The hidden states of each row alone, so that the reference pads nothing."""
    return [model(input_ids=torch.tensor([row])).last_hidden_state[0].numpy() for row in rows]


@torch.inference_mode()
def reference_terms(model: nn.Module, rows: Sequence[Sequence[int]]) -> Vectors:
    """SPLADE's term weights by its formula, [rows, vocabulary]."""
    logits = [model(input_ids=torch.tensor([row])).logits[0].float() for row in rows]
    return np.stack([torch.log1p(torch.relu(row)).amax(dim=0).numpy() for row in logits])


def dense_terms(terms: Vectors, vocabulary: int) -> Vectors:
    """[rows, terms, 2] of ids and weights → [rows, vocabulary]."""
    out = np.zeros((len(terms), vocabulary + 1), dtype=np.float32)  # absent terms are -1: the last column
    np.put_along_axis(out, terms[..., 0].astype(np.int64), terms[..., 1], axis=1)
    return out[:, :vocabulary]


@torch.inference_mode()
def reference_logits(model: nn.Module, rows: Sequence[Sequence[int]]) -> Vectors:
    answers = [model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row))) for row in rows]
    return np.concatenate([answer.logits.reshape(-1, LABELS).numpy() for answer in answers])
