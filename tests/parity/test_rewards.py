"""Reward models, for whole texts and for steps, against transformers' hidden states and the head by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from penstock import Engine
from penstock.config import PoolerConfig
from penstock.errors import BadValue, ModelLoadError, NotPossible
from tests.parity.decoders import FAMILIES
from tests.parity.rewards import write_reward_model

TEXTS = ["a short text", "one step and then another, which is longer", "the end"]


def head_values(folder: Path, head: dict[str, Tensor], rows: list[list[int]]) -> list[Tensor]:
    """The head's values of each row, [tokens, labels]."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModel.from_config(config).eval()
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("model.")
    }
    model.load_state_dict(tensors)
    out = []
    with torch.inference_mode():
        for row in rows:
            hidden = model(torch.tensor([row])).last_hidden_state[0]
            inner = torch.relu(hidden @ head["score.0.weight"].T + head["score.0.bias"])
            out.append(inner @ head["score.2.weight"].T + head["score.2.bias"])
    return out


def test_the_reward_of_a_text_is_that_of_its_last_token(tmp_path: Path) -> None:
    head = write_reward_model(tmp_path, "Qwen2ForRewardModel", 1)
    with Engine(str(tmp_path), device="cpu") as engine:
        expected = [float(v[-1, 0]) for v in head_values(tmp_path, head, engine.tokenize(TEXTS))]
        got = engine.reward(TEXTS)
        np.testing.assert_allclose(np.asarray(got)[:, 0], expected, rtol=1e-4, atol=1e-4)
        assert engine.spec.tasks[0] == "reward"
        with pytest.raises(NotPossible, match="has no task 'classify'"):
            engine.classify(TEXTS)


def test_steps_are_judged_at_their_tags_with_and_without_chunked_prefill(tmp_path: Path) -> None:
    head = write_reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    tag = 7
    for extra in ({}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 5}):
        pooler = PoolerConfig(pooling_type="STEP", step_tag_id=tag)
        with Engine(str(tmp_path), device="cpu", pooler_config=pooler, **extra) as engine:
            rows = [[9, 9, tag, 11, tag], [tag], [5, 6, 7, 8, 9, 10, 11, 12, tag, 3]]
            expected = head_values(tmp_path, head, rows)
            got = engine.reward(rows)
            for row, values, steps in zip(rows, expected, got, strict=True):
                at = [i for i, token in enumerate(row) if token == tag]
                np.testing.assert_allclose(steps, values[at].softmax(-1), rtol=1e-4, atol=1e-5)
            raw = engine.reward(rows, use_activation=False)
            np.testing.assert_allclose(raw[1], expected[1], rtol=1e-4, atol=1e-4)
            with pytest.raises(BadValue, match="input 1 has no step tag"):
                engine.reward([[5, tag], [5, 6]])


def test_the_step_tag_is_found_in_the_tokenizer(tmp_path: Path) -> None:
    write_reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    entry = {"id": 400, "content": "<extra_0>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append(entry | flags)
    file.write_text(json.dumps(tokenizer))
    with Engine(str(tmp_path), device="cpu") as engine:
        got = engine.reward(["one<extra_0>two<extra_0>"])
        assert got[0].shape == (2, 2)


def test_steps_without_a_tag_are_refused_at_load(tmp_path: Path) -> None:
    write_reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    with pytest.raises(ModelLoadError, match="STEP pooling needs step_tag_id"):
        Engine(str(tmp_path), device="cpu")


def test_a_model_without_a_judging_head_refuses_steps(tmp_path: Path) -> None:
    FAMILIES["qwen2"].write(tmp_path)
    with pytest.raises(ModelLoadError, match="needs a reward model or a sequence classifier"):
        Engine(str(tmp_path), device="cpu", pooler_config=PoolerConfig(pooling_type="STEP", step_tag_id=3))


def test_a_one_label_classifier_rewards_with_its_raw_score(tmp_path: Path) -> None:
    model = transformers.LlamaForSequenceClassification
    sizes = {"vocab_size": 400, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = model.config_class(**sizes, intermediate_size=80, num_labels=1, pad_token_id=1)
    FAMILIES["llama"].write(tmp_path)  # only its tokenizer is used
    torch.manual_seed(5)
    reference = model(config).eval()
    reference.save_pretrained(tmp_path)
    with Engine(str(tmp_path), device="cpu") as engine:
        rows = engine.tokenize(TEXTS)
        with torch.inference_mode():
            expected = [float(reference(torch.tensor([row])).logits[0, 0]) for row in rows]
        np.testing.assert_allclose(np.asarray(engine.reward(TEXTS))[:, 0], expected, rtol=1e-4, atol=1e-5)
