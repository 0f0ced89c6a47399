"""Quantised checkpoints in published layouts, compared with transformers on the dequantised weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock import Engine, SamplingParams
from penstock.checkpoint.describe import describe
from penstock.checkpoint.quantization import stored_format, with_quantization
from penstock.checkpoint.sizes import check_weight_files
from penstock.config import EngineConfig
from penstock.errors import ModelLoadError
from penstock.weights.quantized import QuantizedReader
from penstock.weights.stream import SafetensorsSource
from tests.parity.decoders import ROWS
from tests.parity.quantized import FORMATS, write_quantized
from tests.parity.reference import cosines

SHORT = [ROWS[3], ROWS[5]]
CPU = torch.device("cpu")


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_read_as_what_it_stands_for(name: str, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    stored, stands = FORMATS[name].store(torch.randn(64, 96, generator=torch.Generator().manual_seed(1)))
    save_file({f"{module}.{end}": value for end, value in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / FORMATS[name].file).write_text(json.dumps(FORMATS[name].config))
    config = with_quantization(
        tmp_path, {FORMATS[name].key: FORMATS[name].config} if FORMATS[name].key else {}
    )
    found = stored_format(config)
    assert found is not None
    reader = QuantizedReader(SafetensorsSource(tmp_path, torch.float32, CPU), found)
    assert reader.find(module) is not None
    torch.testing.assert_close(reader.read_plain(module, 64, 96), stands, atol=1e-6, rtol=1e-5)
    reader.weights.check_all_read(found.unread_tensors)


# benchmarks/parity_table.py compares models in every format.
@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["fp8-channel", "modelopt", "int8", "packed-experts", "gptq-order", "awq", "nf4"]
)
def test_states_equal_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    stored, plain = write_quantized(name, tmp_path)
    kind = getattr(transformers, FORMATS[name].family.model)
    reference = kind.from_pretrained(plain, dtype=torch.float32).eval()
    theirs = [reference.model(torch.tensor([row])).last_hidden_state[0].numpy() for row in SHORT]
    with open_engine(stored) as engine:
        ours = np.concatenate(engine.token_embed(SHORT, normalize=False))
    assert cosines(ours, np.concatenate(theirs)).min() >= 0.99999
    assert np.abs(ours - np.concatenate(theirs)).max() < 1e-3


@torch.inference_mode()
def test_a_quantised_head_generates_the_likeliest_tokens(tmp_path: Path) -> None:
    stored, plain = write_quantized("packed-int4", tmp_path)
    tensors, wanted = load_file(stored / "model.safetensors"), load_file(plain / "model.safetensors")
    parts, wanted["lm_head.weight"] = FORMATS["packed-int4"].store(tensors.pop("lm_head.weight"))
    save_file(
        tensors | {f"lm_head.{end}": value for end, value in parts.items()}, stored / "model.safetensors"
    )
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("lm_head")
    (stored / "config.json").write_text(json.dumps(config))
    save_file(wanted, plain / "model.safetensors", metadata={"format": "pt"})
    reference = transformers.Qwen3ForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with open_engine(stored) as engine:
        made = engine.generate([ROWS[3]], params)[0].token_ids
    logits = reference(torch.tensor([ROWS[3] + made])).logits[0, len(ROWS[3]) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen).max() < 1e-4


def test_tensors_that_do_not_fit_the_configuration_are_refused_by_name(tmp_path: Path) -> None:
    stored, _ = write_quantized("gptq", tmp_path)
    file, module = stored / "model.safetensors", "model.layers.0.mlp.down_proj"
    tensors, config = load_file(file), json.loads((stored / "config.json").read_text())

    def opened(change: dict[str, torch.Tensor], without: str = "", **options: Any) -> None:
        held = {key: value for key, value in (tensors | change).items() if key != without}
        save_file(held, file, metadata={"format": "pt"})
        changed = config | {"quantization_config": config["quantization_config"] | options}
        (stored / "config.json").write_text(json.dumps(changed))
        with open_engine(stored):
            pass

    with pytest.raises(ModelLoadError, match=r"no tensor 'model.layers.0.mlp.down_proj.qzeros'"):
        opened({}, without=f"{module}.qzeros")
    with pytest.raises(ModelLoadError, match=r"down_proj.scales' has shape \[6, 64\]"):
        opened({f"{module}.scales": tensors[f"{module}.scales"].repeat(2, 1)})
    with pytest.raises(ModelLoadError, match=r"no multiple of group_size = 48"):
        opened({}, group_size=48)
    with pytest.raises(ModelLoadError, match=r"g_idx' names groups outside 0 to 2"):
        opened({f"{module}.g_idx": tensors[f"{module}.g_idx"] + 1})
    with pytest.raises(ModelLoadError, match=r"qweight' is stored as torch.int64"):
        opened({f"{module}.qweight": tensors[f"{module}.qweight"].long()})
    with pytest.raises(ModelLoadError, match=r"has the tensor 'qweight' .* says that it is not quantised"):
        opened({}, dynamic={"-:.*down_proj": {}})
    with pytest.raises(ModelLoadError, match=r"has the tensor 'qweight' .* is stored otherwise"):
        opened({}, quant_method="bitsandbytes", load_in_4bit=True)
    integers = {f"{module}.weight": torch.ones(64, 96, dtype=torch.int8)}
    with pytest.raises(ModelLoadError, match=r"down_proj.weight' is stored as torch.int8, but"):
        opened(integers, without=f"{module}.qweight")


def test_a_4_bit_checkpoint_is_not_too_small_for_its_parameters(tmp_path: Path) -> None:
    stored, _ = write_quantized("awq", tmp_path)
    sizes = describe(EngineConfig(model=str(stored))).sizes
    held = (stored / "model.safetensors").stat().st_size
    large = replace(sizes, layers=1, vocabulary=int(1.5 * held) // sizes.embedding)
    check_weight_files(stored, large, min_bits=4)
    with pytest.raises(ModelLoadError, match="the weight files hold only"):
        check_weight_files(stored, large, min_bits=8)
