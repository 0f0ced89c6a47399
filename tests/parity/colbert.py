"""Seeded late-interaction checkpoints in their real layouts. Each has a reference that follows the steps of
PyLate's `ColBERT.encode` with transformers' modules: pad, insert the marker, mask, project, drop tokens."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.checkpoints import wordpiece_tokenizer, write_json
from tests.parity.encoders import CASES, Case
from tests.parity.lfm2 import look_both_ways
from tests.parity.reference import Vectors, byte_level_bpe, unigram

Settings = dict[str, Any]
Layer = TypeVar("Layer", bound=nn.Module)
DIM = 24


@dataclass(frozen=True)
class Reading:
    """How the reference reads texts."""

    query_marker: str
    document_marker: str
    query_length: int = 32
    document_length: int = 180
    expand: bool = True
    attend: bool = False
    skip: tuple[str, ...] = tuple(string.punctuation)


class Reference:
    def __init__(self, model: nn.Module, tokenizer: Any, dense: Sequence[nn.Module], how: Reading) -> None:
        self.model, self.tokenizer, self.dense, self.how = model, tokenizer, dense, how
        tokenizer.pad_token = tokenizer.mask_token or tokenizer.eos_token
        self.skip = [tokenizer.convert_tokens_to_ids(word) for word in how.skip]

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], *, query: bool) -> list[Vectors]:
        """Queries run as one batch, because all are expanded to one length. Documents run one by one, so that
        none is padded."""
        parts = [texts] if query and self.how.expand else [[text] for text in texts]
        return [vectors for part in parts for vectors in self._encode(part, query=query)]

    def _encode(self, texts: Sequence[str], *, query: bool) -> list[Vectors]:
        how = self.how
        marker = how.query_marker if query else how.document_marker
        fill = query and how.expand
        inputs = self.tokenizer(
            [text.strip() for text in texts],
            padding="max_length" if fill else True,
            truncation=True,
            max_length=(how.query_length if query else how.document_length) - 1,
            return_tensors="pt",
        )
        ids = self._insert(inputs["input_ids"], self.tokenizer.convert_tokens_to_ids(marker))
        seen = self._insert(inputs["attention_mask"], 1)
        if fill and how.attend:
            seen = torch.ones_like(seen)
        vectors = self.model(input_ids=ids, attention_mask=seen).last_hidden_state
        for layer in self.dense:
            vectors = layer(vectors)
        keep = torch.ones_like(seen) if fill else seen
        if not query:
            keep = keep * ~torch.isin(ids, torch.tensor(self.skip))
        return [
            F.normalize(row[kept], dim=-1).numpy() for row, kept in zip(vectors, keep.bool(), strict=True)
        ]

    @staticmethod
    def _insert(ids: Tensor, value: int) -> Tensor:
        return torch.cat([ids[:, :1], torch.full_like(ids[:, :1], value), ids[:, 1:]], dim=1)


class Dense(nn.Module):
    """PyLate's Dense module. It may add its input to its output, through a layer if the widths differ."""

    def __init__(self, inputs: int, outputs: int, *, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.residual = nn.Linear(inputs, outputs, bias=False) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if self.residual is None else out + self.residual(x)


def _seeded(layer: Layer, seed: int) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return layer


def bert_tokenizer() -> Tokenizer:
    """A BERT tokenizer with `[unused…]` words in its base vocabulary."""
    values = json.loads(wordpiece_tokenizer().to_str())
    words = values["model"]["vocab"]
    words |= {name: len(words) + i for i, name in enumerate(("[unused0]", "[unused1]"))}
    return Tokenizer.from_str(json.dumps(values))


def with_markers(make: Callable[[], Tokenizer], *markers: str) -> Callable[[], Tokenizer]:
    """A tokenizer with added tokens, as PyLate adds its prefixes."""

    def made() -> Tokenizer:
        tokenizer = make()
        tokenizer.add_tokens(list(markers))
        return tokenizer

    return made


@dataclass(frozen=True)
class Late:
    """A checkpoint: backbone, tokenizer, layout, and settings in other files."""

    case: Case
    tokenizer: Callable[[], Tokenizer]
    markers: tuple[str, str]
    special: dict[str, str]
    stanford: bool
    prefix: str = ""  # name prefix of the backbone's tensors
    # Keys of artifact.metadata or config_sentence_transformers.json.
    words: Settings = field(default_factory=dict)

    def write(self, folder: Path, scale: float = 0.2, **words: Any) -> Reference:
        """Write the checkpoint, with weights of about `scale`; returns the reference to compare with."""
        tokenizer = self.tokenizer()
        size = tokenizer.get_vocab_size()
        case = replace(self.case, options=self.case.options | {"vocab_size": size})
        model = case.write(folder, scale=scale)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **self.special)
        fast.save_pretrained(folder)
        words = self.words | words
        dense = self._stanford(folder, words) if self.stanford else self._pylate(folder, words)
        return Reference(model, fast, dense, self._reading(words))

    def _reading(self, words: Settings) -> Reading:
        names = {
            "query_maxlen": "query_length",
            "doc_maxlen": "document_length",
            "do_query_expansion": "expand",
            "attend_to_mask_tokens": "attend",
            "attend_to_expansion_tokens": "attend",
            "skiplist_words": "skip",
        }
        found = {names.get(name, name): value for name, value in words.items()}
        if found.pop("mask_punctuation", True) is False:
            found["skip"] = ()
        return Reading(*self.markers, **found)

    def _stanford(self, folder: Path, words: Settings) -> list[nn.Module]:
        linear: nn.Linear = _seeded(nn.Linear(64, DIM, bias=False), 7)
        tensors = {
            self.prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors | {"linear.weight": linear.weight.data}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", config | {"architectures": ["HF_ColBERT"], "dim": DIM})
        markers = {"query_token_id": self.markers[0], "doc_token_id": self.markers[1]}
        write_json(folder / "artifact.metadata", {"similarity": "cosine", **markers, **words})
        return [linear]

    def _pylate(self, folder: Path, words: Settings) -> Sequence[nn.Module]:
        layers = [
            _seeded(Dense(64, 48, residual=True), 8),
            _seeded(Dense(48, DIM, residual=False), 9),
        ]
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        for number, layer in enumerate(layers, 1):
            path = f"{number}_Dense"
            values = {
                "in_features": layer.linear.in_features,
                "out_features": layer.linear.out_features,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
                "use_residual": layer.residual is not None,
            }
            write_json(folder / path / "config.json", values)
            save_file(layer.state_dict(), folder / path / "model.safetensors")
            kind = "pylate.models.Dense.Dense"
            modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        (folder / "modules.json").write_text(json.dumps(modules))
        markers = {"query_prefix": self.markers[0], "document_prefix": self.markers[1]}
        table = {"prompts": {}, "similarity_fn_name": "MaxSim", **markers, **words}
        write_json(folder / "config_sentence_transformers.json", table)
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": 255, "do_lower_case": False})
        return layers


_BERT = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
    "unk_token": "[UNK]",
}
_XLMR = {
    "cls_token": "<s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
    "unk_token": "<unk>",
}
_LFM2 = {
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "num_key_value_heads": 2,
    "block_multiple_of": 8,
}
_CHAT = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}  # no mask token
_NARROW = CASES["modernbert"].options | {"local_attention": 16}


def _bidirectional(config: Settings) -> Settings:
    return config | {"architectures": ["Lfm2BidirectionalModel"]}


LATE: dict[str, Late] = {
    "stanford": Late(
        Case("Bert", {"type_vocab_size": 2}),
        bert_tokenizer,
        ("[unused0]", "[unused1]"),
        _BERT,
        stanford=True,
        prefix="bert.",
        words={"query_maxlen": 24, "doc_maxlen": 60},
    ),
    "jina": Late(
        replace(CASES["jina-flash"], rename=dict),
        with_markers(unigram, "[QueryMarker]", "[DocumentMarker]"),
        ("[QueryMarker]", "[DocumentMarker]"),
        _XLMR,
        stanford=True,
        prefix="roberta.",
        words={"query_maxlen": 20, "doc_maxlen": 60},
    ),
    "pylate-bert": Late(
        Case("Bert", {"type_vocab_size": 2}),
        with_markers(bert_tokenizer, "[Q] ", "[D] "),
        ("[Q] ", "[D] "),
        _BERT,
        stanford=False,
        words={"query_length": 24, "document_length": 60},
    ),
    "pylate-modernbert": Late(
        Case("ModernBert", _NARROW),
        with_markers(byte_level_bpe, "[Q] ", "[D] "),
        ("[Q] ", "[D] "),
        _XLMR,
        stanford=False,
        words={"query_length": 40, "document_length": 60},
    ),
    "pylate-mpnet-bias": Late(
        Case("MPNet", {"pad_token_id": 1}),
        with_markers(unigram, "[Q] ", "[D] "),
        ("[Q] ", "[D] "),
        _XLMR,
        stanford=False,
        words={"query_length": 24, "document_length": 60},
    ),
    "pylate-lfm2": Late(
        Case("Lfm2", _LFM2),
        with_markers(byte_level_bpe, "[Q] ", "[D] "),
        ("[Q] ", "[D] "),
        _CHAT,
        stanford=False,
        words={"query_length": 24, "document_length": 60},
    ),
    "pylate-lfm2-bidirectional": Late(
        Case("Lfm2", _LFM2, rewrite=_bidirectional, adjust=look_both_ways),
        with_markers(byte_level_bpe, "[Q] ", "[D] "),
        ("[Q] ", "[D] "),
        _CHAT,
        stanford=False,
        words={"query_length": 24, "document_length": 60},
    ),
}


def worst(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> float:
    """The largest difference. Fails if shapes differ."""
    assert [row.shape for row in ours] == [row.shape for row in theirs]
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
