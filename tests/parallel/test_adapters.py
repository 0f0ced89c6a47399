"""Adapters of an engine with two ranks give PEFT's results; both ranks load and drop them together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import Engine, SamplingParams
from penstock.errors import EngineUnavailable, ModelLoadError
from penstock.runner.parallel.runner import ParallelRunner
from penstock.types import Task
from tests.generation.adapters import CHOSEN, PROMPTS, TARGETS, generate, greedy, write_base
from tests.parallel.adapter_folders import sites_of
from tests.parallel.adapter_folders import write_adapter as write_adapter_for
from tests.parallel.answers import TEXTS
from tests.parallel.checkpoints import LLAMA, write_checkpoint
from tests.parity import decoders
from tests.parity.encoders import CASES, Case, Opened, make_rows, reference_hidden, reference_logits
from tests.parity.lora import FIRST_ID, ask, opened_with, reference, write_adapter

pytestmark = pytest.mark.parallel
ROWS = [[max(token, 3) for token in row] for row in make_rows((5, 1, 17, 33, 5, 64, 9))]
MIXED = (0, -1, 1, 0, 2, -1, 1)
TOLERANCE = 1e-4
CHUNKED: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
ENCODERS: dict[str, Case] = {
    "bert": Case("Bert"),
    "xlm-roberta": Case("XLMRoberta"),
    "modernbert": CASES["modernbert"],
    "nomic": CASES["nomic-port-names"],  # its adapters name parts of a fused layer
    "gte": CASES["gte"],
}
OPTIONS: tuple[dict[str, Any], ...] = ({"r": 4}, {"r": 9, "use_rslora": True}, {"r": 2, "use_dora": True})


def write_adapters(base: Any, folder: Path, options: tuple[dict[str, Any], ...] = OPTIONS) -> Any:
    """Write adapters into folders `0`, `1`, …; return the folders and PEFT's models."""
    folders = [folder / str(number) for number in range(len(options))]
    return folders, [
        write_adapter(base, each, number, **more)
        for number, (each, more) in enumerate(zip(folders, options, strict=True))
    ]


def runner_of(engine: Opened) -> ParallelRunner:
    runner = engine.engine.core.runner
    assert isinstance(runner, ParallelRunner)
    return runner


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_with_different_adapters_give_what_peft_gives(name: str, tmp_path: Path) -> None:
    base = ENCODERS[name].write(tmp_path / "base")
    folders, adapted = write_adapters(base, tmp_path)
    expected = reference(base, adapted, ROWS, MIXED, reference_hidden)
    with opened_with(tmp_path / "base", folders, **TWO) as engine:
        found = ask(engine, ROWS, MIXED, Task.TOKEN_EMBED)
        plain = ask(engine, ROWS, [-1] * len(ROWS), Task.TOKEN_EMBED)
    with opened_with(tmp_path / "base", folders) as engine:
        alone = ask(engine, ROWS, MIXED, Task.TOKEN_EMBED)
    assert np.abs(found - expected).max() <= TOLERANCE
    assert np.abs(found - alone).max() <= TOLERANCE
    without = reference(base, adapted, ROWS, [-1] * len(ROWS), reference_hidden)
    assert np.abs(plain - without).max() <= TOLERANCE
    assert np.abs(without - expected).max() > 0.01  # the adapters have an effect


@pytest.mark.parametrize(
    "more", [{}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}], ids=str
)
@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_a_decoder_that_embeds_gives_what_peft_gives(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    family = (decoders.FAMILIES | decoders.MORE_FAMILIES)[name]
    base = decoders.open_backbone(family, family.write(tmp_path / "base"))
    folders, adapted = write_adapters(base, tmp_path, ({"r": 4}, {"r": 9, "use_dora": True}))
    chosen = (0, -1, 1, 0, 1, -1, 1)
    expected = reference(base, adapted, ROWS, chosen, reference_hidden)
    options = {"enable_generation": False, "kv_cache_gb": 0.01} | more
    with opened_with(tmp_path / "base", folders, **options, **TWO) as engine:
        found = ask(engine, ROWS, chosen, Task.TOKEN_EMBED)
    assert np.abs(found - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.parametrize(("max_loras", "step_tokens"), [(1, 256), (4, 16)])
def test_greedy_tokens_are_those_of_peft(max_loras: int, step_tokens: int, tmp_path: Path) -> None:
    """Includes adapters of the language-model head, whose vocabulary is divided among ranks."""
    base = write_base(tmp_path / "base", "qwen3")
    more = {"target_modules": TARGETS["qwen3"]}
    folders, adapted = write_adapters(base, tmp_path, ({"r": 3, **more}, {"r": 4, "use_dora": True, **more}))
    count = 6
    expected = [
        greedy(base if each < 0 else adapted[each], prompt, count)
        for prompt, each in zip(PROMPTS, CHOSEN, strict=True)
    ]
    options = {"enable_generation": True, "max_loras": max_loras, "max_num_seqs": 8, "kv_cache_gb": 0.001}
    options["max_num_batched_tokens"] = step_tokens
    with opened_with(tmp_path / "base", folders, **options, **TWO) as engine:
        assert generate(engine, count) == expected
        assert generate(engine, count) == expected  # with cached prefixes
    assert expected[0] != expected[3] != expected[5]


def test_probabilities_of_tokens_and_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    """Every rank computes its part of the logits with each row's adapter, for prompt tokens too."""
    folder = write_checkpoint(tmp_path / "model", LLAMA)
    adapters: dict[str, str] = {}
    for number, name in enumerate(("a", "b")):
        write_adapter_for(
            tmp_path / name, sites_of(LLAMA), rank=3 + number, use_dora=number == 1, seed=number
        )
        adapters[name] = str(tmp_path / name)
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)

    def found(**more: Any) -> list[list[Any]]:
        options = {"enable_lora": True, "lora_modules": adapters, "device": "cpu", "kv_cache_gb": 0.01}
        with Engine(str(folder), **options, **more) as engine:
            return [engine.generate(TEXTS, sampling, adapter=name) for name in ("a", None, "b")]

    for ones, twos in zip(found(), found(**TWO), strict=True):
        assert [each.token_ids for each in twos] == [each.token_ids for each in ones]
        for one, two in zip(ones, twos, strict=True):
            for kind in ("logprobs", "prompt_logprobs"):
                expected, given = getattr(one, kind), getattr(two, kind)
                np.testing.assert_allclose(given.values, expected.values, atol=1e-4)


def test_heads_of_adapters_are_used_on_rank_0(tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base", "ForSequenceClassification")
    targets = {"target_modules": ["query", "value", "pooler.dense"]}
    whole = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    folders, adapted = write_adapters(base, tmp_path, (targets | whole, targets))
    chosen = (0, -1, 1, 0, 1, -1, 0)
    expected = reference(base, adapted, ROWS, chosen, reference_logits)
    with opened_with(tmp_path / "base", folders, **TWO) as engine:
        assert np.abs(ask(engine, ROWS, chosen, Task.CLASSIFY) - expected).max() <= TOLERANCE


WORDS: dict[str, dict[str, Any]] = {
    "low rank": {"target_modules": ["word_embeddings", "query"], "exclude_modules": ["pooler.dense"]},
    "trained": {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]},
    "some": {"target_modules": ["query"], "trainable_token_indices": {"word_embeddings": [3, 7, 20, 64]}},
    "whole layers": {"target_modules": ["query"], "modules_to_save": ["intermediate.dense", "output.dense"]},
}


@pytest.mark.parametrize("name", WORDS)
def test_tables_and_whole_weights_of_adapters(name: str, tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base")
    folders, adapted = write_adapters(base, tmp_path, (WORDS[name], {"target_modules": ["key"]}))
    chosen = (0, -1, 1, 0, 1, -1, 0)
    expected = reference(base, adapted, ROWS, chosen, reference_hidden)
    with opened_with(tmp_path / "base", folders, **TWO) as engine:
        found = ask(engine, ROWS, chosen, Task.TOKEN_EMBED)
    assert np.abs(found - expected).max() <= TOLERANCE


def test_more_adapters_than_slots_and_host_memory_are_read_again_on_every_rank(tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base")
    targets = {"target_modules": ["query", "output.dense"]}
    folders, adapted = write_adapters(
        base, tmp_path, tuple({"r": 2 + number, **targets} for number in range(5))
    )
    rows = ROWS[:3]
    with opened_with(tmp_path / "base", folders, **TWO, max_loras=2, max_cpu_loras=2) as engine:
        for chosen in ((0, 1, -1), (2, 3, 2), (4, 0, -1), (1, 1, 1), (3, 4, 3), (-1, 2, 0)):
            expected = reference(base, adapted, rows, chosen, reference_hidden)
            assert np.abs(ask(engine, rows, chosen, Task.TOKEN_EMBED) - expected).max() <= TOLERANCE
        adapters = runner_of(engine).adapters
        assert adapters is not None
        stats = adapters.stats()
        assert (stats.num_loaded, stats.num_on_host, stats.num_on_device) == (5, 2, 2)
        assert stats.num_host_loads > 5 and stats.num_device_loads > 5
        core = engine.engine.core
        core.load_adapter(50, str(folders[0]), "again").result(60)
        core.unload_adapter(FIRST_ID)
        expected = reference(base, adapted, rows, (1, -1, 4), reference_hidden)
        assert np.abs(ask(engine, rows, (1, -1, 4), Task.TOKEN_EMBED) - expected).max() <= TOLERANCE


def change_weight(folder: Path, place: int) -> None:
    """Add a changed copy of a base weight to the adapter. The change is in row `place`."""
    module = "base_model.model.encoder.layer.1.attention.self.query"
    tensors = load_file(folder / "adapter_model.safetensors")
    base = load_file(folder.parent / "base" / "model.safetensors")
    weight = base["encoder.layer.1.attention.self.query.weight"].clone()
    weight[place, 0] += 1
    tensors[f"{module}.base_layer.weight"] = weight
    save_file(tensors, folder / "adapter_model.safetensors")


def raise_rank(folder: Path, place: int) -> None:
    """Give the adapter a rank above the engine's limit."""
    config = json.loads((folder / "adapter_config.json").read_text()) | {"r": 32}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_A" in name:
            tensors[name] = torch.zeros(32, tensor.shape[1])
        elif "lora_B" in name:
            tensors[name] = torch.zeros(tensor.shape[0], 32)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "place", "words"),
    [
        (change_weight, 0, r"^the adapter 'spoilt' brings another weight"),  # a row of rank 0
        (change_weight, -1, r"^rank 1: the adapter 'spoilt' brings another weight"),  # a row of rank 1
        (raise_rank, 0, "rank 32; at most 16"),
    ],
    ids=["only rank 0 refuses", "only rank 1 refuses", "all refuse"],
)
def test_an_adapter_that_a_rank_refuses_is_on_none(
    spoil: Callable[[Path, int], None], place: int, words: str, tmp_path: Path
) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base")
    targets = {"target_modules": ["query", "output.dense"], "use_dora": True}  # DoRA needs all ranks
    folders, adapted = write_adapters(base, tmp_path, (targets,))
    write_adapter(base, spoilt := tmp_path / "spoilt", 1, **targets)
    spoil(spoilt, place)
    with opened_with(tmp_path / "base", folders, **TWO) as engine:
        core, adapters = engine.engine.core, runner_of(engine).adapters
        assert adapters is not None
        before = adapters.stats()
        with pytest.raises(ModelLoadError, match=words):
            core.load_adapter(30, str(spoilt), "spoilt").result(60)
        assert adapters.stats()[:3] == before[:3]
        expected = reference(base, adapted, ROWS, (0, -1) * 3 + (0,), reference_hidden)
        found = ask(engine, ROWS, (0, -1) * 3 + (0,), Task.TOKEN_EMBED)
        assert np.abs(found - expected).max() <= TOLERANCE
        core.load_adapter(31, str(folders[0]), "after").result(60)


def test_a_load_fails_when_a_rank_is_gone(tmp_path: Path) -> None:
    base = ENCODERS["bert"].write(tmp_path / "base")
    folders, _ = write_adapters(base, tmp_path, ({"target_modules": ["query"]},))
    with opened_with(tmp_path / "base", folders, **TWO) as engine:
        process = runner_of(engine)._ranks._processes[0]
        process.kill()
        process.wait()
        with pytest.raises(EngineUnavailable):
            engine.engine.core.load_adapter(30, str(folders[0]), "late").result(60)
