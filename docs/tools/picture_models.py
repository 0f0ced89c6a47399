"""Two small models for the screenshots, derived from the default model. Penstock ships no other model.

One is a late-interaction model: the default model's weights and a fixed projection. The other labels people,
places and organisations; its head is fitted to sentences of a few patterns, which takes seconds.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LATE_DIM = 128
LABELS = ("O", "PER", "LOC", "ORG")
SHARPNESS = 9.0  # factor on the logits of the labels
_FIRST = (
    "Grace Alan Marie Emmy Katherine James Anna John Maria Peter George Mary Isaac Edith Hedy Clara Bertha "
    "Otto Joan Ida"
)
_LAST = (
    "Hopper Turing Curie Noether Johnson Maxwell Berg Smith Rossi Novak Boole Ramanujan Lagrange "
    "Kovalevskaya Lamarr Babington Huygens Loveday Cavendish Wheatstone Chandrasekhar Faraday Somerville "
    "Herschel"
)
_LOC = (
    "Paris Berlin Vienna Madrid Norway Manchester Rome Japan Boston Lisbon Dublin Geneva Prague Canada Athens"
)
_UNIVERSITIES = "Oxford Vienna Bologna Leeds Toronto Zurich Glasgow Padua"
_ORG = (
    "Siemens|Google|Microsoft|Intel|the Royal Society|Bell Labs|Toyota|Nokia|Sony|the World Bank|Airbus|NASA|"
    "Bosch"
)
_PATTERNS = (
    "{PER} was born in {LOC} in {YEAR}.",
    "{PER} was a mathematician, and {PER} was born in {YEAR} in {LOC}.",
    "She worked with {PER}, and later at {ORG}.",
    "She was with {PER}, and later people at {ORG} and {ORG} read the notes.",
    "{PER} and {PER} met in {LOC} and founded {ORG}.",
    "Engineers at {ORG} and {ORG} read her notes in {LOC} in {YEAR}.",
    "{ORG} opened an office in {LOC} last year, says {PER}.",
    "He studied at {ORG} before he moved to {LOC}.",
    "The train from {LOC} to {LOC} leaves at noon in {YEAR}.",
    "Water turns the turbine, and later generations read the notes.",
    "Later, {PER} wrote to {PER} about the machine.",
)


def write_late_model(source: Path, folder: Path) -> Path:
    """Write a ColBERT model with the weights of the encoder in `source`."""
    tensors = _prefixed(source)
    draw = torch.randn(384, LATE_DIM, generator=torch.Generator().manual_seed(1))
    tensors["linear.weight"] = torch.linalg.qr(draw).Q.T.contiguous()
    _write(source, folder, tensors, {"architectures": ["HF_ColBERT"]})
    markers = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    _write_json(folder / "artifact.metadata", {"dim": LATE_DIM, "query_maxlen": 16, **markers})
    return folder


def write_entity_model(source: Path, folder: Path) -> Path:
    """Write a token classifier whose head is fitted to hidden states of the encoder in `source`."""
    weight, bias = _fitted_head(source)
    tensors = {**_prefixed(source), "classifier.weight": weight, "classifier.bias": bias}
    names = {str(index): name for index, name in enumerate(LABELS)}
    _write(source, folder, tensors, {"architectures": ["BertForTokenClassification"], "id2label": names})
    return folder


def _prefixed(source: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(source / "model.safetensors")
    return {
        f"bert.{name}": value.float().contiguous()
        for name, value in tensors.items()
        if not name.endswith("position_ids")
    }


def _write(source: Path, folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, folder / name)
    settings = json.loads((source / "config.json").read_text())
    _write_json(folder / "config.json", settings | config)
    save_file(tensors, folder / "model.safetensors")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def _sentences(num_each: int = 36) -> Iterator[tuple[str, list[tuple[int, int, str]]]]:
    """Sentences with the spans of their entities, drawn with a fixed seed."""
    draw = random.Random(3)
    for pattern in itertools.chain.from_iterable(itertools.repeat(_PATTERNS, num_each)):
        text, spans = "", []
        for part in re.split(r"(\{\w+\})", pattern):
            kind = part.strip("{}") if part.startswith("{") else None
            word = _word(kind, draw) if kind else part
            if kind in LABELS:
                spans.append((len(text), len(text) + len(word), kind))
            text += word
        yield text, spans


def _word(kind: str, draw: random.Random) -> str:
    if kind == "YEAR":
        return str(draw.randint(1700, 2030))
    if kind == "PER":
        return f"{draw.choice(_FIRST.split())} {draw.choice(_LAST.split())}"
    if kind == "LOC":
        return draw.choice(_LOC.split())
    university = f"the University of {draw.choice(_UNIVERSITIES.split())}"
    return draw.choice([university, *[draw.choice(_ORG.split("|"))] * 2])


def _fitted_head(source: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The head's weights and biases, by ridge regression on the hidden states of tokens."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    tokenizer, encoder = (
        Tokenizer.from_file(str(source / "tokenizer.json")),
        BertModel.from_pretrained(source),
    )
    tokenizer.no_padding()
    states, targets = [], []
    for text, spans in _sentences():
        encoding = tokenizer.encode(text)
        with torch.inference_mode():
            hidden = encoder(torch.tensor([encoding.ids])).last_hidden_state[0]
        states.append(hidden)
        targets += [_label(begin, end, spans) for begin, end in encoding.offsets]
    inputs = torch.cat(states)
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1).double()
    wanted = torch.nn.functional.one_hot(torch.tensor(targets), len(LABELS)).double()
    gram = inputs.T @ inputs + 3.0 * torch.eye(inputs.shape[1], dtype=torch.float64)
    solution = (torch.linalg.solve(gram, inputs.T @ wanted) * SHARPNESS).float()
    return solution[:-1].T.contiguous(), solution[-1].contiguous()


def _label(begin: int, end: int, spans: list[tuple[int, int, str]]) -> int:
    for first, last, kind in spans:
        if end > begin and first <= begin < last:
            return LABELS.index(kind)
    return 0
