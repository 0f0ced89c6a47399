"""Every decoder family against transformers, on the same files: hidden states, vectors, heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from penstock import Engine
from penstock.errors import ConfigError, ModelLoadError
from tests.parity.decoders import (
    FAMILIES,
    GPT_OSS,
    HEADS,
    LOOK_AHEAD,
    MINISTRAL3,
    NEMOTRON_RERANKER,
    ROWS,
    YARN,
    Family,
    change_config,
    randomise,
    reference_states,
    unit,
)
from tests.parity.reference import Vectors, cosines, make_texts

TEXTS = [text for text in make_texts(30) if text]


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **{"max_num_batched_tokens": 1024} | options)


def token_states(engine: Engine, rows: list[list[int]] = ROWS) -> Vectors:
    return np.concatenate(engine.token_embed(rows, normalize=False))


class Pair(NamedTuple):
    name: str
    folder: Path
    engine: Engine
    theirs: list[Vectors]  # one [tokens, hidden] per row


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
        near = np.sort(cosines(token_states(engine), np.concatenate(pair.theirs)))
        has_experts = pair.name.startswith(("qwen3-moe", "gpt-oss", "privacy-filter"))
        few = len(near) // 50 if has_experts else 0  # rounding may route a token to another expert
        assert near[few] >= 0.999 and near[0] > 0.98


def test_vectors_are_pooled_as_such_models_are_trained(pair: Pair) -> None:
    """Without modules.json, causal models pool the last token and bidirectional ones the mean. Vectors have
    unit length."""
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


def test_later_tokens_change_earlier_states_only_without_causal_attention(pair: Pair) -> None:
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
        ("ministral3", {"rope_parameters": MINISTRAL3["rope_parameters"] | {"llama_4_scaling_beta": 0.1}}),
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
    """This also shows that agreement with the reference is meaningful."""
    folder = FAMILIES[name].write(tmp_path)
    with open_engine(folder) as engine, open_engine(folder, hf_overrides=overrides) as other:
        assert np.abs(token_states(engine) - token_states(other)).max() > 0.01


@pytest.mark.parametrize("name", ["qwen3", "mistral", "llama3"])
def test_an_override_makes_a_causal_model_bidirectional_like_the_reference(name: str, tmp_path: Path) -> None:
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
    """A sentence-transformers folder, the layout in which such models are published."""

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
    folder = NEMOTRON_RERANKER.write(tmp_path)
    score = transformers.LlamaForSequenceClassification.from_pretrained(folder).score.weight.detach().numpy()
    states = reference_states(Family("LlamaModel", full=True), folder)
    theirs = np.stack([row.mean(0) for row in states]) @ score.T / 0.2
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.classify(ROWS, use_activation=False), theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"quantization_config": {"quant_method": "gguf"}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ("llama", {"hidden_act": "xielu"}, "activation 'xielu'"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        ("llama", {"attention_bias": True}, "q_proj.bias"),
        ("llama", {"intermediate_size": None}, "intermediate_size"),
        ("llama", {"head_dim": 16}, "has shape"),
        ("qwen2-windows", {"use_sliding_window": False}, "no sliding_window"),
        ("ministral", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("ministral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta"),
        ("eurobert-masked-lm", {"architectures": ["EuroBertForSequenceClassification"]}, "dense"),
        ("gemma3", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
        ("qwen3", {"num_hidden_layers": 2}, "does not use"),
    ],
    ids=str,
)
def test_unsupported_options_are_refused_by_name(
    name: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = FAMILIES[name].write(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        open_engine(folder, hf_overrides=overrides)


def test_experts_in_mxfp4_are_the_weights_that_transformers_reads(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    family = Family("GptOssModel", GPT_OSS | sizes)
    stored, plain = (family.write(tmp_path / name) for name in ("stored", "plain"))
    packed, said = (load_file(folder / "model.safetensors") for folder in (stored, plain))
    draw = torch.Generator().manual_seed(3)
    for name in [name for name in said if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        packed[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        packed[name + "_scales"] = torch.randint(119, 125, shape, generator=draw, dtype=torch.uint8)
        said[name] = mxfp4.convert_moe_packed_tensors(
            packed[name + "_blocks"].clone(), packed[name + "_scales"].clone(), dtype=torch.float32
        ).contiguous()
    for folder, tensors in ((stored, packed), (plain, said)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(stored, lambda config: config | {"quantization_config": {"quant_method": "mxfp4"}})
    with open_engine(stored, dtype="float32") as engine:
        ours = token_states(engine)
    np.testing.assert_allclose(ours, np.concatenate(reference_states(family, plain)), atol=2e-5)


def test_lfm2_is_not_chunked_and_does_not_generate(tmp_path: Path) -> None:
    folder = FAMILIES["lfm2-causal-lm"].write(tmp_path)
    with open_engine(folder) as engine:
        assert not engine.spec.generates and not engine.settings.chunked
    with pytest.raises(ModelLoadError, match="state of its convolutions"):
        open_engine(folder, enable_generation=True)
    with pytest.raises(ConfigError, match="state of its convolutions"):
        open_engine(folder, enable_chunked_prefill=True)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama3", "mistral", "embeddinggemma", "gritlm"])
def test_a_configuration_runs_with_dummy_weights(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].write(tmp_path)
    (folder / "model.safetensors").unlink()
    with open_engine(folder, load_format="dummy") as engine:
        vectors = engine.embed(ROWS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_int8_keeps_the_direction(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].write(tmp_path)
    with open_engine(folder) as engine, open_engine(folder, quantization="int8") as small:
        assert np.median(cosines(small.embed(ROWS), engine.embed(ROWS))) >= 0.99
