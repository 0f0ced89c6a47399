"""Checkpoints in block-wise fp8 against transformers on the dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import Engine, SamplingParams
from penstock.errors import ModelLoadError
from tests.parity.blocks import MODELS, STORED, write_blocks
from tests.parity.decoders import ROWS
from tests.parity.reference import cosines


class Pair(NamedTuple):
    stored: Path
    reference: Any


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    stored, plain = write_blocks(request.param, tmp_path_factory.mktemp(request.param))
    kind = getattr(transformers, MODELS[request.param].model)
    return Pair(stored, kind.from_pretrained(plain, dtype=torch.float32).eval())


@torch.inference_mode()
def test_states_equal_those_of_the_dequantised_weights(pair: Pair) -> None:
    """On a CPU, weights are dequantised and activations are not quantised."""
    theirs = [pair.reference.model(torch.tensor([row])).last_hidden_state[0].numpy() for row in ROWS]
    with Engine(str(pair.stored), device="cpu", threads=1) as engine:
        ours = np.concatenate(engine.token_embed(ROWS, normalize=False))
    assert cosines(ours, np.concatenate(theirs)).min() >= 0.99999


@torch.inference_mode()
def test_greedy_tokens_are_the_likeliest(pair: Pair) -> None:
    row = ROWS[5]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with Engine(str(pair.stored), device="cpu", threads=1) as engine:
        made = engine.generate([row], params)[0].token_ids
    logits = pair.reference(torch.tensor([row + made])).logits[0, len(row) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen).max() < 1e-4


def test_dummy_weights_give_finite_numbers(pair: Pair) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)
    with Engine(str(pair.stored), device="cpu", threads=1, load_format="dummy") as engine:
        (got,) = engine.generate([ROWS[3]], params)
    assert got.logprobs is not None and np.isfinite(got.logprobs.values).all()


def test_mismatched_tensors_are_refused_by_name(tmp_path: Path) -> None:
    stored, _ = write_blocks("qwen3", tmp_path)
    file, name = stored / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(file)

    def opened(change: dict[str, torch.Tensor], without: str = "") -> None:
        held = {key: value for key, value in (tensors | change).items() if key != without}
        save_file(held, file, metadata={"format": "pt"})
        with Engine(str(stored), device="cpu"):
            pass

    with pytest.raises(ModelLoadError, match=r"o_proj.weight' is stored in fp8"):
        opened({}, without=f"{name}_scale_inv")
    with pytest.raises(ModelLoadError, match=r"o_proj.weight' has scales, but is stored as torch\.float32"):
        opened({name: tensors[name].float()})
    with pytest.raises(ModelLoadError, match=r"_scale_inv' has shape"):
        opened({f"{name}_scale_inv": torch.ones(1, 1)})
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(
        ModelLoadError, match=r"is stored in fp8, but quantization_config in config\.json does not cover it"
    ):
        opened({})
    config["quantization_config"] = STORED | {"quant_method": "gguf"}
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="quant_method = 'gguf'"):
        opened({})
