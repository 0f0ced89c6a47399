"""GLiNER and GLiClass by their published descriptions, built on modules of torch and transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.types import LABEL_MARK, TEXT_MARK
from tests.parity.reference import unigram

GLINER_TOKENS = ("[FLERT]", "<<ENT>>", "<<SEP>>")
GLICLASS_TOKENS = ("<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>")
WIDTH, MAX_WIDTH, MAX_WORDS = 48, 5, 40


def projection(inputs: int, outputs: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, inner), nn.ReLU(), nn.Dropout(0.0), nn.Linear(inner, outputs))


class Holder(nn.Module):
    """Gives modules the names of published checkpoints."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class Gliner(nn.Module):
    def __init__(self, encoder: nn.Module, encoder_width: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        layer = Holder(bert_layer=Holder(model=encoder), projection=nn.Linear(encoder_width, WIDTH))
        self.token_rep_layer: Any = layer
        self.rnn: Any = Holder(lstm=nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True))
        if mode == "token_level":
            mlp = nn.Sequential(
                nn.Linear(3 * WIDTH, 4 * WIDTH), nn.Dropout(0.0), nn.ReLU(), nn.Linear(4 * WIDTH, 3)
            )
            linear = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.scorer: Any = Holder(proj_token=linear[0], proj_label=linear[1], out_mlp=mlp)
            return
        inner = (2 if mode == "marker" else 4) * WIDTH
        last = nn.Linear(2 * WIDTH, WIDTH) if mode == "marker" else projection(2 * WIDTH, WIDTH, 4 * WIDTH)
        spans = Holder(
            project_start=projection(WIDTH, WIDTH, inner),
            project_end=projection(WIDTH, WIDTH, inner),
            out_project=last,
        )
        self.span_rep_layer: Any = Holder(span_rep_layer=spans)
        self.prompt_rep_layer = projection(WIDTH, WIDTH, 4 * WIDTH)

    @torch.inference_mode()
    def forward(self, ids: Tensor, labels_at: list[int], words_at: list[int]) -> Tensor:
        """The probabilities for one text: [words, width, labels] or [words, labels, 3]."""
        layer = self.token_rep_layer
        states = layer.projection(layer.bert_layer.model(ids[None]).last_hidden_state)[0]
        words, labels = self.rnn.lstm(states[words_at][None])[0][0], states[labels_at]
        if self.mode == "token_level":
            first, second = self.scorer.proj_token(words)[:, None].chunk(2, dim=-1)
            label_first, label_second = self.scorer.proj_label(labels)[None].chunk(2, dim=-1)
            shape = (len(words), len(labels), WIDTH)
            joined = [first.expand(shape), label_first.expand(shape), second * label_second]
            return self.scorer.out_mlp(torch.cat(joined, dim=-1)).sigmoid()
        spans = self.span_rep_layer.span_rep_layer
        starts, ends = spans.project_start(words), spans.project_end(words)
        out = torch.zeros(len(words), MAX_WIDTH, len(labels))
        queries = self.prompt_rep_layer(labels)
        for start in range(len(words)):
            for width in range(min(MAX_WIDTH, len(words) - start)):
                both = torch.cat([starts[start], ends[start + width]]).relu()
                out[start, width] = (queries @ spans.out_project(both)).sigmoid()
        return out


class Gliclass(nn.Module):
    def __init__(self, encoder: nn.Module, width: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

        def projector() -> nn.Module:
            return Holder(linear_1=nn.Linear(width, width), linear_2=nn.Linear(width, width))

        parts: dict[str, nn.Module] = {"encoder_model": encoder}
        parts |= {"text_projector": projector(), "classes_projector": projector()}
        kind = options.get("scorer_type", "simple")
        if kind == "weighted-dot":
            mlp = nn.Sequential(
                nn.Linear(3 * width, 4 * width), nn.Dropout(0.0), nn.ReLU(), nn.Linear(4 * width, 1)
            )
            parts["scorer"] = Holder(
                proj_text=nn.Linear(width, 2 * width), proj_label=nn.Linear(width, 2 * width), out_mlp=mlp
            )
        elif kind == "mlp":
            layers = (nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))
            parts["scorer"] = Holder(mlp=nn.Sequential(*layers))
        self.model: Any = Holder(**parts)
        self.model.logit_scale = nn.Parameter(torch.tensor(2.6592))

    @torch.inference_mode()
    def forward(self, ids: Tensor, label_id: int, separator_id: int) -> Tensor:
        """The logits of one row's labels."""
        options, model = self.options, self.model
        states = model.encoder_model(ids[None]).last_hidden_state[0]
        at = torch.nonzero(ids == label_id)[:, 0]
        labels = states[at if options.get("embed_class_token", True) else at + 1]
        if options.get("extract_text_features"):
            states = states[int(torch.nonzero(ids == separator_id)[0, 0]) :]
        kind = options.get("pooling_strategy", "first")
        text = {"first": states[0], "last": states[-1], "avg": states.mean(0), "max": states.amax(0)}[kind]

        def project(part: Any, x: Tensor) -> Tensor:
            return part.linear_2(nn.functional.gelu(part.linear_1(x)))

        text, labels = project(model.text_projector, text), project(model.classes_projector, labels)
        if options.get("normalize_features"):
            text, labels = (x / (x.norm(dim=-1, keepdim=True) + 1e-8) for x in (text, labels))
        logits = self._scores(text, labels)
        return logits * model.logit_scale if options.get("normalize_features") else logits

    def _scores(self, text: Tensor, labels: Tensor) -> Tensor:
        kind = self.options.get("scorer_type", "simple")
        if kind == "simple":
            return labels @ text
        if kind == "mlp":
            return self.model.scorer.mlp(torch.cat([text.expand_as(labels), labels], dim=-1))[:, 0]
        scorer = self.model.scorer
        first, second = scorer.proj_text(text).chunk(2)
        label_first, label_second = scorer.proj_label(labels).chunk(2, dim=-1)
        joined = torch.cat([first.expand_as(label_first), label_first, second * label_second], dim=-1)
        return scorer.out_mlp(joined)[:, 0]


@dataclass(frozen=True)
class Written:
    """A checkpoint and its reference."""

    folder: Path
    model: Any
    tokenizer: Any

    def token(self, text: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(text))


def _tokenizer(folder: Path, added: tuple[str, ...]) -> Any:
    names = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=unigram(), **names)
    tokenizer.add_tokens(list(added), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _encoder(vocab_size: int, kind: str) -> Any:
    """A ModernBERT or DeBERTa v3. DeBERTa has fewer positions than the test rows have tokens, because it uses
    only relative positions."""
    if kind == "modernbert":
        return transformers.ModernBertConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=256,
            local_attention=8,
            pad_token_id=1,
        )
    return transformers.DebertaV2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
        pad_token_id=1,
    )


def _write(folder: Path, model: nn.Module, width: float) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim():
                scale, mean = (width, 0.0) if values.dim() > 1 else (0.1, float("orm.weight" in name))
                values.copy_(torch.randn(values.shape, generator=generator) * scale + mean)
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )


def write_gliner(
    folder: Path, mode: str = "markerV0", kind: str = "deberta-v2", scale: float = 0.13
) -> Written:
    tokenizer = _tokenizer(folder, GLINER_TOKENS)
    encoder = _encoder(len(tokenizer), kind)
    model = Gliner(transformers.AutoModel.from_config(encoder), encoder.hidden_size, mode).eval()
    _write(folder, model, scale)
    if mode == "token_level":  # so that some words start and end entities
        model.scorer.out_mlp[3].bias.data += 1.5
        save_file({k: v.clone() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    config = {
        "model_name": "microsoft/deberta-v3-small",
        "hidden_size": WIDTH,
        "max_width": MAX_WIDTH,
        "max_len": MAX_WORDS,
        "span_mode": mode,
        "class_token_index": tokenizer.convert_tokens_to_ids("<<ENT>>"),
        "vocab_size": len(tokenizer),
        "encoder_config": encoder.to_dict(),
    }
    (folder / "gliner_config.json").write_text(json.dumps(config))
    return Written(folder, model, tokenizer)


def write_gliclass(folder: Path, kind: str = "deberta-v2", scale: float = 0.13, **options: Any) -> Written:
    tokenizer = _tokenizer(folder, GLICLASS_TOKENS)
    encoder = _encoder(len(tokenizer), kind)
    model = Gliclass(transformers.AutoModel.from_config(encoder), encoder.hidden_size, options).eval()
    _write(folder, model, scale)
    config = {
        "architectures": ["GLiClassModel"],
        "model_type": "GLiClass",
        "architecture_type": "uni-encoder",
        "encoder_config": encoder.to_dict(),
        "hidden_size": encoder.hidden_size,
        "vocab_size": len(tokenizer),
        "class_token_index": tokenizer.convert_tokens_to_ids("<<LABEL>>"),
        "text_token_index": tokenizer.convert_tokens_to_ids("<<SEP>>"),
        **options,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Written(folder, model, tokenizer)


def make_rows(
    written: Written, markers: tuple[str, str], num_labels: int, word_mark: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of random tokens in GLiNER's layout, and the positions of their labels and words."""
    random = np.random.default_rng(6)
    label, separator = (written.token(marker) for marker in markers)
    rows, marks = [], []
    for size in (1, 2, 7, 16, 33, 60):
        row, mark = [written.token("<s>")], [0]
        for tokens in random.integers(10, 150, size=(num_labels, 3)).tolist():
            row += [label, *tokens]
            mark += [LABEL_MARK, 0, 0, 0]
        rows.append([*row, separator, *random.integers(10, 150, size=size).tolist(), written.token("</s>")])
        marks.append([*mark, 0, *[word_mark] * size, 0])
    return rows, marks


@torch.inference_mode()
def entity_scores(model: Any, rows: list[list[int]], marks: list[list[int]]) -> Any:
    """The scores of all rows, [words, values]."""
    found = []
    for row, mark in zip(rows, marks, strict=True):
        at = [[index for index, each in enumerate(mark) if each == kind] for kind in (LABEL_MARK, TEXT_MARK)]
        found.append(model(torch.tensor(row), *at).float().flatten(1).numpy())
    return np.concatenate(found)


@torch.inference_mode()
def label_scores(model: Any, rows: list[list[int]], ids: tuple[int, int]) -> Any:
    """The logits of all rows, [rows, labels]."""
    return np.stack([model(torch.tensor(row), *ids).float().numpy() for row in rows])
