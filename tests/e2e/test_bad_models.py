"""Model folders that cannot be served: one line with the reason, exit code 2, and no restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import Engine
from penstock.errors import ModelLoadError
from tests.checkpoints import BERT_CONFIG, wordpiece_tokenizer, wordpiece_vocabulary, write_bert, write_json
from tests.e2e.server import serving_here
from tests.thinning import thorough
from tests.waiting import PATIENCE_S

WORDS = len(wordpiece_vocabulary())


def without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 7}')


def with_more_ids_than_rows(folder: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    tokenizer.add_tokens(["penstock", "turbine", "sluice"])
    tokenizer.save(str(folder / "tokenizer.json"))


def with_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def with_a_cut_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def with_noise_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)


def with_empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_safetensors_named_as_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_a_wrong_table_size(folder: Path) -> None:
    write_json(folder / "config.json", BERT_CONFIG | {"vocab_size": WORDS + 50})


def with_half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(BERT_CONFIG)[:60])


def with_seven_heads(folder: Path) -> None:
    write_json(folder / "config.json", BERT_CONFIG | {"num_attention_heads": 7})


def with_a_billion_positions(folder: Path) -> None:
    write_json(folder / "config.json", BERT_CONFIG | {"max_position_embeddings": 10**9})


def with_a_huge_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes((2**62).to_bytes(8, "little") + weights.read_bytes()[8:])


BROKEN: dict[Callable[[Path], None], tuple[str, ...]] = {
    without_a_tokenizer: ("no tokenizer.json", "no vocabulary"),
    with_a_broken_tokenizer: ("tokenizer.json is not a tokenizer",),
    with_more_ids_than_rows: (f"ids up to {WORDS + 2}", f"{WORDS} rows"),
    with_truncated_weights: ("not a readable safetensors file",),
    with_a_cut_header: ("not a readable safetensors file",),
    with_noise_for_weights: ("not a readable safetensors file",),
    with_empty_weights: ("not a readable safetensors file",),
    without_weights: ("safetensors",),
    with_safetensors_named_as_a_pickle: ("pytorch_model.bin", "not a readable PyTorch file"),
    with_a_wrong_table_size: ("word_embeddings.weight", f"[{WORDS + 50}, 32]"),
    with_half_a_config: ("config.json",),
    with_seven_heads: ("config.json", "num_attention_heads = 7"),
    with_a_billion_positions: ("config.json", "max_position_embeddings = 1000000000"),
    with_a_huge_header: ("not a readable safetensors file",),
}

# One for each stage of start-up: tokenizer, configuration, weight files, tensors (both in one process).
SERVED = [
    without_a_tokenizer,
    with_half_a_config,
    pytest.param(with_truncated_weights, marks=thorough),
    with_a_wrong_table_size,
    with_seven_heads,
]


@pytest.mark.parametrize("damage", SERVED, ids=lambda damage: damage.__name__)
def test_a_server_of_a_broken_folder_says_what_is_wrong_and_exits_2(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    damage(write_bert(tmp_path / "model"))
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path / "model"), "--port", "0"]
    ran = subprocess.run(
        [*command, "--device", "cpu", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 2, ran.stderr
    for words in BROKEN[damage]:
        assert words in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("damage", BROKEN, ids=lambda damage: damage.__name__)
def test_an_engine_of_a_broken_folder_raises_the_same_error(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    damage(write_bert(tmp_path / "model"))
    with pytest.raises(ModelLoadError) as raised:
        Engine(str(tmp_path / "model"), device="cpu", threads=1)
    assert all(words in raised.value.message for words in BROKEN[damage])


def test_a_padded_embedding_table_is_served(tmp_path: Path) -> None:
    """Many checkpoints pad their table to a round number of rows."""
    folder = write_bert(tmp_path / "model", config={"vocab_size": WORDS + 7})
    with serving_here(folder) as http:
        assert http.post("/v1/embeddings", json={"input": "the water"}).status_code == 200
        spare = http.post("/v1/embeddings", json={"input": [WORDS + 7]})
        assert spare.status_code == 400 and str(WORDS + 6) in spare.json()["error"]["message"]
        assert http.post("/v1/embeddings", json={"input": [WORDS + 6]}).status_code == 200
