"""Every decoder family against transformers, on the same files: hidden states, vectors, heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import processors
from torch import nn

from penstock import Engine
from penstock.errors import ModelLoadError
from tests.parity.reference import Vectors, byte_level_bpe, cosines, make_texts

VOCABULARY = 400
LIMIT = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 6}


@dataclass(frozen=True)
class Family:
    """A transformers class, what its configuration has of its own, and what config.json says besides."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    says: dict[str, Any] = field(default_factory=dict)
    full: bool = False  # the reference runs with every token in sight of every other
    old: bool = False  # config.json in the form that files on the hub have

    def write(self, folder: Path, seed: int = 0, **settings: Any) -> Path:
        kind = getattr(transformers, self.model)
        model = kind(kind.config_class(**SIZES | self.settings | settings)).eval()
        randomise(model, seed)
        model.save_pretrained(folder)
        change_config(folder, lambda config: (old_form(config) if self.old else config) | self.says)
        write_tokenizer(folder)
        return folder


FAMILIES: dict[str, Family] = {
    "qwen3": Family("Qwen3Model", {"head_dim": 16}),
    "qwen3-causal-lm": Family("Qwen3ForCausalLM", {"head_dim": 12, "tie_word_embeddings": True}, old=True),
    "qwen3-bias-yarn": Family(
        "Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN}, old=True
    ),
    "qwen3-windows": Family(
        "Qwen3Model",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        old=True,
    ),
    "qwen2": Family("Qwen2Model", old=True),
    "qwen2-causal-lm": Family("Qwen2ForCausalLM", {"num_key_value_heads": 3}),
    "qwen2-windows": Family(
        "Qwen2Model", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    ),
    "llama": Family("LlamaModel", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}, old=True),
    "llama3": Family("LlamaForCausalLM", {"head_dim": 16, "rope_parameters": LLAMA3}, old=True),
    "llama-biases": Family(
        "LlamaModel", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 10}
    ),
    "llama-linear-rope": Family(
        "LlamaModel", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, old=True
    ),
    "mistral": Family("MistralModel", {"sliding_window": 16, "rms_norm_eps": 1e-5}, old=True),
    "mistral-no-window": Family("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "ministral": Family(
        "MinistralModel",
        {
            "head_dim": 16,
            "sliding_window": 10,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma": Family("GemmaModel", {"head_dim": 16}, old=True),
    "gemma3": Family("Gemma3TextModel", GEMMA),
    "gemma3-causal-lm": Family("Gemma3ForCausalLM", GEMMA | {"attention_bias": True}, old=True),
    "embeddinggemma": Family("Gemma3TextModel", GEMMA | {"use_bidirectional_attention": True}, old=True),
    "embeddinggemma-new": Family(
        "Gemma3TextModel", GEMMA | {"use_bidirectional_attention": True, "sliding_window": 31}
    ),
    "nemotron": Family(
        "LlamaModel",
        {"rope_parameters": LLAMA3},
        {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "pooling": "avg"},
        full=True,
        old=True,
    ),
    "gritlm": Family(
        "MistralForCausalLM", {"sliding_window": 16}, {"architectures": ["GritLM"]}, full=True, old=True
    ),
    "qwen2-looking-ahead": Family("Qwen2ForCausalLM", {"is_causal": False}, old=True),
    "mistral-looking-ahead": Family("MistralModel", {"is_causal": False, "sliding_window": 8}, old=True),
}
LOOK_AHEAD = ("embeddinggemma", "nemotron", "gritlm", "qwen2-looking-ahead", "mistral-looking-ahead")


def randomise(model: nn.Module, seed: int) -> None:
    """Every parameter far from its usual start, at a size that keeps the signal as strong as it was."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            plain = "norm" in name and type(model).__name__[:5] != "Gemma"  # Gemma's start from nought
            parameter.data = 0.3 * noise + (1 if plain else 0)
        else:
            parameter.data = noise * (1 if "embed" in name else 0.8 * parameter.shape[1] ** -0.5)


def change_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def old_form(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as it was written before `rope_parameters`."""
    rope, old = config.pop("rope_parameters"), dict(config)
    old["torch_dtype"] = old.pop("dtype", "float32")
    old.pop("layer_types", None)
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    return old


def write_tokenizer(folder: Path) -> None:
    """Qwen's way: nothing before a text, the end of text after it."""
    tokenizer = byte_level_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=LIMIT, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)


def make_rows() -> list[list[int]]:
    draw = np.random.default_rng(7)
    lengths = [1, 2, 3, 9, 16, 17, 33, 33, 64, 120, 200]
    return [draw.integers(5, VOCABULARY, length).tolist() for length in lengths]


ROWS = make_rows()
TEXTS = [text for text in make_texts(30) if text]


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **{"max_num_batched_tokens": 1024} | options)


def token_states(engine: Engine, rows: list[list[int]] = ROWS) -> Vectors:
    return np.concatenate(engine.token_embed(rows, normalize=False))


def backbone(family: Family) -> Any:
    name = family.model.replace("ForCausalLM", "Model").replace("Gemma3Model", "Gemma3TextModel")
    return getattr(transformers, name)


@torch.inference_mode()
def reference_states(family: Family, folder: Path) -> list[Vectors]:
    """Each row alone, so that no padding takes part."""
    model = backbone(family).from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row in ROWS:
        mask = torch.zeros(1, 1, len(row), len(row)) if family.full else None
        states = model(input_ids=torch.tensor([row]), attention_mask=mask).last_hidden_state
        found.append(states[0].numpy())
    return found


def unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Pair(NamedTuple):
    name: str
    folder: Path
    engine: Engine
    theirs: list[Vectors]  # of each row [tokens, hidden]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    family = FAMILIES[request.param]
    folder = family.write(tmp_path_factory.mktemp(request.param))
    with open_engine(folder) as engine:
        yield Pair(request.param, folder, engine, reference_states(family, folder))


def test_hidden_states_equal_the_references(pair: Pair) -> None:
    ours, theirs = token_states(pair.engine), np.concatenate(pair.theirs)
    assert ours.shape == theirs.shape
    assert cosines(ours, theirs).min() >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_bf16_stays_near_the_reference(pair: Pair) -> None:
    with open_engine(pair.folder, dtype="bfloat16") as engine:
        assert cosines(token_states(engine), np.concatenate(pair.theirs)).min() >= 0.999


def test_vectors_are_pooled_as_such_models_are_trained(pair: Pair) -> None:
    """Without modules: the last token of those that see only backwards, else the mean; unit length."""
    ahead = pair.name.startswith(LOOK_AHEAD)
    theirs = unit(np.stack([states.mean(0) if ahead else states[-1] for states in pair.theirs]))
    ours = pair.engine.embed(ROWS)
    assert cosines(ours, theirs).min() >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_row_has_the_same_states_alone_in_a_batch_and_in_any_order(pair: Pair) -> None:
    batch = token_states(pair.engine)
    alone = np.concatenate([token_states(pair.engine, [row]) for row in ROWS])
    np.testing.assert_allclose(batch, alone, atol=1e-5)
    vectors, order = pair.engine.embed(ROWS), np.random.default_rng(3).permutation(len(ROWS))
    np.testing.assert_allclose(pair.engine.embed([ROWS[i] for i in order]), vectors[order], atol=1e-5)


def test_later_tokens_change_earlier_states_only_where_the_model_looks_ahead(pair: Pair) -> None:
    row, tail = ROWS[-3], ROWS[-2]
    alone, followed = (token_states(pair.engine, [ids])[: len(row)] for ids in (row, row + tail))
    if pair.name.startswith(LOOK_AHEAD):
        assert cosines(alone, followed).min() < 0.999
    else:
        np.testing.assert_allclose(alone, followed, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3", {"is_causal": False}),
        ("qwen3", {"rope_parameters": {"rope_theta": 500.0}}),
        ("qwen3-bias-yarn", {"rope_scaling": None}),
        ("qwen3-windows", {"sliding_window": 21}),
        ("qwen3-windows", {"max_window_layers": 2}),
        ("llama3", {"rope_scaling": {"rope_type": "default"}}),
        ("mistral", {"sliding_window": 17}),
        ("mistral", {"sliding_window": None}),
        ("ministral", {"layer_types": ["full_attention"] * 3}),
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"sliding_window": 25}),
        ("gemma3-causal-lm", {"rope_local_base_freq": 1e6}),
        ("embeddinggemma", {"use_bidirectional_attention": False}),
        ("embeddinggemma", {"sliding_window": 26}),
        ("embeddinggemma", {"sliding_window_pattern": 3}),
        ("gritlm", {"is_causal": True}),
        ("nemotron", {"rms_norm_eps": 0.5}),
    ],
    ids=str,
)
def test_an_override_changes_the_states_so_the_option_is_read(
    name: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Which also shows that agreeing with the reference means something."""
    folder = FAMILIES[name].write(tmp_path)
    with open_engine(folder) as engine, open_engine(folder, hf_overrides=overrides) as other:
        assert np.abs(token_states(engine) - token_states(other)).max() > 0.01


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama3"])
def test_an_override_turns_a_causal_model_round_as_the_reference_does(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].write(tmp_path)
    with open_engine(folder, hf_overrides={"is_causal": False}) as engine:
        ours = token_states(engine)
        assert engine.spec.pooling.methods == ("mean",)
    change_config(folder, lambda config: config | {"is_causal": False})
    theirs = np.concatenate(reference_states(FAMILIES[name], folder))
    assert cosines(ours, theirs).min() >= 0.99999


def test_the_name_gritlm_is_enough_to_tell_it_from_mistral(tmp_path: Path) -> None:
    folder = FAMILIES["mistral"].write(tmp_path)
    with open_engine(folder, hf_overrides={"architectures": ["GritLM"]}) as engine:
        ours = token_states(engine)
    grit = Family("MistralModel", full=True)
    assert cosines(ours, np.concatenate(reference_states(grit, folder))).min() >= 0.99999


class Layout(NamedTuple):
    """A sentence-transformers folder: how such models are published."""

    family: str
    pooling: str
    dense: tuple[int, ...] = ()


LAYOUTS = {
    "qwen3-embedding": Layout("qwen3-causal-lm", "lasttoken"),
    "e5-mistral": Layout("mistral", "lasttoken"),
    "embeddinggemma": Layout("embeddinggemma", "mean", (96, 48)),
    "llama-weighted": Layout("llama3", "weightedmean"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sentence_transformers_folder_gives_the_references_vectors(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    plain = FAMILIES[layout.family].write(tmp_path / "plain")
    parts: list[Any] = [modules.Transformer(str(plain)), modules.Pooling(48, layout.pooling)]
    width = 48
    for out in layout.dense:
        dense = modules.Dense(width, out, bias=False, activation_function=nn.Identity())
        randomise(dense, seed=out)
        parts.append(dense)
        width = out
    reference = SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    reference.save(str(tmp_path / "model"), create_model_card=False)
    with open_engine(tmp_path / "model") as engine:
        assert engine.tokenize(TEXTS) == [reference.tokenizer(text)["input_ids"] for text in TEXTS]
        ours, theirs = engine.embed(TEXTS), reference.encode(TEXTS, batch_size=1)
    assert cosines(ours, theirs).min() >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


HEADS = {
    "qwen3": Family("Qwen3ForSequenceClassification", {"head_dim": 16}),
    "qwen2": Family("Qwen2ForSequenceClassification", old=True),
    "llama": Family("LlamaForSequenceClassification", {"rope_parameters": LLAMA3}, old=True),
    "mistral": Family("MistralForSequenceClassification", {"sliding_window": 16}),
    "gemma3": Family("Gemma3TextForSequenceClassification", GEMMA),
    "reward": Family("Qwen2ForSequenceClassification", {"num_labels": 1}),
    "qwen3-tokens": Family("Qwen3ForTokenClassification", {"head_dim": 16}, old=True),
    "qwen2-tokens": Family("Qwen2ForTokenClassification"),
    "llama-tokens": Family("LlamaForTokenClassification", {"num_labels": 9}),
    "mistral-tokens": Family("MistralForTokenClassification", {"sliding_window": 16}),
}


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_classification_heads_give_the_references_scores(name: str, tmp_path: Path) -> None:
    family = HEADS[name]
    folder = family.write(tmp_path, **{"num_labels": 4} | family.settings)
    model = getattr(transformers, family.model).from_pretrained(folder, dtype=torch.float32).eval()
    theirs = [model(input_ids=torch.tensor([row])).logits[0].numpy() for row in ROWS]
    with open_engine(folder) as engine:
        ours: Any
        if name.endswith("-tokens"):
            ours = np.concatenate(engine.token_classify(ROWS, use_activation=False))
            np.testing.assert_allclose(ours, np.concatenate(theirs), atol=2e-5)
        else:
            ours = engine.classify(ROWS, use_activation=False)
            np.testing.assert_allclose(ours, np.stack(theirs), atol=2e-5)
        assert len(engine.labels) == family.settings.get("num_labels", 4)


def test_the_reranker_of_nemotron_pools_before_it_projects(tmp_path: Path) -> None:
    says = {
        "architectures": ["LlamaBidirectionalForSequenceClassification"],
        "model_type": "llama_bidirec",
        "pooling": "avg",
        "temperature": 0.2,
    }
    family = Family("LlamaForSequenceClassification", {"num_labels": 1}, says, full=True)
    folder = family.write(tmp_path)
    score = transformers.LlamaForSequenceClassification.from_pretrained(folder).score.weight.detach().numpy()
    states = reference_states(Family("LlamaModel", full=True), folder)
    theirs = np.stack([row.mean(0) for row in states]) @ score.T / 0.2
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.classify(ROWS, use_activation=False), theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ("llama", {"hidden_act": "xielu"}, "activation 'xielu'"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ("llama", {"attention_bias": True}, "q_proj.bias"),
        ("llama", {"intermediate_size": None}, "intermediate_size"),
        ("llama", {"head_dim": 16}, "has shape"),
        ("qwen2-windows", {"use_sliding_window": False}, "no sliding window"),
        ("ministral", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
        ("qwen3", {"num_hidden_layers": 2}, "does not use"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_rightly_is_refused_by_name(
    name: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = FAMILIES[name].write(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        open_engine(folder, hf_overrides=overrides)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama3", "mistral", "embeddinggemma", "gritlm"])
def test_a_shape_runs_without_weights(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].write(tmp_path)
    (folder / "model.safetensors").unlink()
    with open_engine(folder, load_format="dummy") as engine:
        vectors = engine.embed(ROWS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_int8_keeps_the_direction(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].write(tmp_path)
    with open_engine(folder) as engine, open_engine(folder, quantization="int8") as small:
        assert np.median(cosines(small.embed(ROWS), engine.embed(ROWS))) >= 0.99
