"""How a model that reads a query and a document together scores them.

This comes from its files, and from the prompts that decoder rerankers were trained with. Models that nothing
identifies as scoring models do not score pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from tokenizers import Tokenizer

from penstock.checkpoint.convert import tokenizer_file
from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import CheckpointFiles, Module, optional_json, read_json, shown
from penstock.checkpoint.identity import Identity
from penstock.checkpoint.labels import label_count
from penstock.checkpoint.rerankers import PROMPTS, Activation, Prompt
from penstock.checkpoint.tokenizer_settings import named_templates
from penstock.errors import ConfigError, ModelLoadError


class ScoreSpec(msgspec.Struct, frozen=True):
    """A score is activation(first output − second output); the second output is optional.

    `template` is the row as parts that are tokenised separately; a single part is tokenised like any text.
    Without a template, the tokenizer joins query and document as a pair. `tokens` are rows of the
    language-model head, which replace a classifier's labels.
    """

    outputs: tuple[int, ...] = (0,)
    activation: Activation = "sigmoid"
    scale: float = 1.0  # divisor of a score before the sigmoid
    template: tuple[str, ...] = ()  # with {query}, {document} and optionally {instruction}
    instruction: str = ""  # default instruction
    wording: str = "{instruction}"  # format of an instruction in the row
    tokens: tuple[int, ...] = ()
    strips: bool = False  # remove white space around query and document
    opened: bool = True  # add the tokenizer's special tokens at the beginning
    closed: bool = True  # add the tokenizer's special tokens at the end
    marks: tuple[int, ...] = ()  # listwise models: the tokens that mark a document and the query


DOCUMENT_MARK, QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"
MARK_DIM = 512  # width of the vectors of marked tokens


PLAIN_PAIR = "none"  # as score_template: the tokenizer joins the pair


def read_score(
    files: CheckpointFiles,
    architecture: Architecture,
    identity: Identity,
    *,
    template: str | None = None,
    score_labels: Sequence[int] | None = None,
) -> ScoreSpec | None:
    """Read how pairs are scored; None for a model that does not read query and document together."""
    classifies, labels = architecture.classifies_sequences, label_count(files.config)
    vocabulary = _Vocabulary(files.folder)
    if architecture.family.is_listwise:
        marks = (vocabulary.number(DOCUMENT_MARK), vocabulary.number(QUERY_MARK))
        return ScoreSpec((), "identity", marks=marks)
    tokens = _tokens(files, vocabulary)
    if template is None:
        prompt, is_pair = _own_prompt(files, architecture, identity, vocabulary, tokens)
    else:
        prompt, is_pair = _given_prompt(template), template == PLAIN_PAIR
    if not classifies and not tokens and prompt is not None and architecture.has_language_head:
        tokens = tuple(vocabulary.number(token) for token in prompt.tokens)
    outputs = _outputs(labels if classifies else 0, len(tokens), score_labels)
    if not outputs:
        if template is not None:
            raise ConfigError(
                f"score_template needs a model that reads query and document together; {architecture.name} "
                f"with {labels} labels does not, unless score_labels in the pooler config says which to take",
                param="score_template",
            )
        return None
    if prompt is None:
        if tokens and not is_pair:
            raise ModelLoadError(
                f"{architecture.name} answers with the tokens {', '.join(vocabulary.texts(tokens))}, but no "
                "file says what it is asked; give score_template",
                param="score_template",
            )
        return ScoreSpec(outputs, _activation(files) or "sigmoid", tokens=tokens)
    activation = _activation(files)
    return ScoreSpec(
        outputs,
        activation or prompt.activation,
        scale=prompt.scale if activation is None else 1.0,
        template=prompt.template,
        instruction=prompt.instruction,
        wording=prompt.wording,
        tokens=tokens,
        strips=prompt.strips,
        opened=prompt.opened,
        closed=prompt.closed,
    )


def why_not_score(files: CheckpointFiles, architecture: Architecture, identity: Identity) -> str | None:
    """Why the vectors of a decoder must not be compared to score a pair; None if they may.

    The last token's state of a language model ranks badly, and a reranker's states are not embeddings.
    """
    family = architecture.family
    if not family.is_decoder or files.modules or family.embed_mark is not None:
        return None
    if identity.is_reranker:
        return (
            f"its name or model card says that it reranks, but how this {architecture.name} is asked is not "
            "known; " + _HOW_TO_SCORE
        )
    if identity.is_embedder or not architecture.has_language_head or not family.is_causal(files.config):
        return None
    return (
        f"nothing marks {architecture.name} as an embedder or a reranker: not modules.json, not its name and "
        "not its model card. If it reranks, "
        + _HOW_TO_SCORE
        + """; if it embeds, name its pooling: --pooler-config '{"pooling_type": "last"}'"""
    )


_HOW_TO_SCORE = (
    "say how it answers and what it is asked: "
    """--hf-overrides '{"classifier_from_token": ["no", "yes"]}' --score-template """
    "'Query: {query} Document: {document} Relevant:'"
)


class _Vocabulary:
    """The tokenizer, loaded when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rust: Tokenizer | None = None

    @property
    def rust(self) -> Tokenizer:
        if self._rust is None:
            file = tokenizer_file(self.folder)
            try:
                self._rust = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises plain Exception
                raise ModelLoadError(f"{file} is not a tokenizer: {error}") from None
        return self._rust

    def number(self, text: str | int) -> int:
        if isinstance(text, int):
            return text
        if (number := self.rust.token_to_id(text)) is not None:
            return int(number)
        ids = self.rust.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ModelLoadError(
                f"{text!r} is not one token of this model: the tokenizer splits it into {len(ids)}"
            )
        return int(ids[0])

    def numbers(self, tokens: Sequence[str | int]) -> list[int | None]:
        """The ids of tokens; None for tokens that this vocabulary lacks."""
        return [token if isinstance(token, int) else self.rust.token_to_id(token) for token in tokens]

    def texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(self.rust.id_to_token(number)) for number in tokens)


def _tokens(files: CheckpointFiles, vocabulary: _Vocabulary) -> tuple[int, ...]:
    """The answer tokens that the files or the caller name, relevant first."""
    for module in files.modules_of("LogitScore"):
        return _module_tokens(files, module)
    config = files.config
    named = config.get("classifier_from_token")
    if named is None and config.get("is_original_qwen3_reranker"):
        named = list(reversed(PROMPTS["qwen3-reranker"].tokens))
    if named is None:
        return ()
    if not isinstance(named, list) or not 1 <= len(named) <= 2 or not all(isinstance(n, str) for n in named):
        raise ConfigError(
            f'classifier_from_token is {named!r}; give one token, or two such as ["no", "yes"]',
            param="hf_overrides",
        )
    return tuple(vocabulary.number(text) for text in reversed(named))


def _module_tokens(files: CheckpointFiles, module: Module) -> tuple[int, ...]:
    file = _module_file(files, module)
    values = read_json(file)
    if (name := values.get("module_input_name", "causal_logits")) != "causal_logits":
        raise ModelLoadError(f"{file} has module_input_name = {shown(name)}; only causal_logits is supported")
    size, tokens = files.integer("vocab_size"), []
    for key in ("true_token_id", "false_token_id"):
        number = values.get(key)
        if number is None and key == "false_token_id":
            continue
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < size:
            raise ModelLoadError(f"{file} has {key} = {shown(number)}; it has to be a token id below {size}")
        tokens.append(number)
    return tuple(tokens)


def _module_file(files: CheckpointFiles, module: Module) -> Path:
    """The module's config.json. modules.json of Qwen3-VL-Reranker-8B names a folder that is not there."""
    file = files.root / module.path / "config.json"
    others = list(files.root.glob("*_LogitScore/config.json"))
    return others[0] if not file.is_file() and len(others) == 1 else file


class _OwnPrompt(NamedTuple):
    prompt: Prompt | None
    is_pair: bool = False  # according to the files, the tokenizer joins the texts


def _own_prompt(
    files: CheckpointFiles,
    architecture: Architecture,
    identity: Identity,
    vocabulary: _Vocabulary,
    tokens: tuple[int, ...],
) -> _OwnPrompt:
    """The prompt that the checkpoint was trained with.

    It comes from the sentence-transformers layout. Otherwise it is a prompt of the family that matches the
    checkpoint's answer tokens, chat template or name.
    """
    scores_logits = files.has_module("LogitScore")
    modalities = files.transformer.get("modality_config")
    if scores_logits or (architecture.classifies_sequences and files.modules and modalities is not None):
        from penstock.checkpoint.pair_template import read_pair_prompt  # imports Jinja only if needed

        prompt = read_pair_prompt(files, lambda: vocabulary.rust)
        if prompt is not None or modalities is not None:
            return _OwnPrompt(prompt, prompt is None)
    prompts = [PROMPTS[name] for name in architecture.family.score_prompts]
    if files.modules and not architecture.classifies_sequences and not tokens:
        prompts = []  # an embedder, whatever its name
    chat = _chat_template(files.folder) if prompts and not tokens else ""
    for prompt in prompts:
        with_origin = not architecture.classifies_sequences
        # An adapter was trained with its base model's prompt. A classifier was perhaps trained from such a
        # model with another prompt, so its origin is ignored.
        is_named = prompt.names != "" and (
            identity.is_named(prompt.names, with_origin=with_origin) or identity.has_base_named(prompt.names)
        )
        if tokens:
            has_tokens = vocabulary.numbers(prompt.tokens) == list(tokens)
            found = has_tokens and (is_named or prompt.answers_identify)
        elif prompt.mark or prompt.names:
            found = is_named or (prompt.mark != "" and prompt.mark in chat)
        else:
            found = architecture.classifies_sequences
        if found:
            return _OwnPrompt(prompt)
    return _OwnPrompt(None, scores_logits)


def _given_prompt(template: str) -> Prompt | None:
    if template == PLAIN_PAIR:
        return None
    return PROMPTS.get(template) or _custom_prompt(template)


def _custom_prompt(template: str) -> Prompt:
    """A template from the caller. The text after the document is kept when the document is truncated."""
    if "{document}" not in template or "{query}" not in template:
        raise ConfigError(
            f"score_template is {template!r}; it needs {{query}} and {{document}}, or has to be one of "
            + ", ".join((*PROMPTS, PLAIN_PAIR)),
            param="score_template",
        )
    before, _, after = template.rpartition("{document}")
    parts = (before + "{document}", after) if after.strip() else (template,)
    return Prompt(parts, closed=True)


def _chat_template(folder: Path) -> str:
    return named_templates(folder, optional_json(folder / "tokenizer_config.json")).get("default", "")


def _outputs(labels: int, tokens: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    count = tokens or labels
    if wanted is None:
        return tuple(range(tokens)) or ((0,) if labels == 1 else ())
    if not count:
        raise ConfigError("score_labels needs a model with a classifier, which this one lacks", param=_LABELS)
    if not 1 <= len(wanted) <= 2 or not all(0 <= label < count for label in wanted):
        raise ConfigError(
            f"score_labels is {list(wanted)}; give one or two labels from 0 to {count - 1}", param=_LABELS
        )
    return tuple(wanted)


_LABELS = "pooler_config.score_labels"


def _activation(files: CheckpointFiles) -> Activation | None:
    """The activation, looked up as in sentence-transformers; None if no file names one."""
    options = files.config.get("sentence_transformers")
    named = options.get("activation_fn") if isinstance(options, Mapping) else None
    named = named or files.config.get("sbert_ce_default_activation_function")
    named = named or files.sentence_transformers.get("activation_fn")
    if named is None:
        return None
    name = str(named).rsplit(".", 1)[-1].lower()
    if name == "sigmoid":
        return "sigmoid"
    if name == "identity":
        return "identity"
    raise ModelLoadError(
        f"{files.folder} scores through the activation {named}, which is not supported; "
        "supported: Sigmoid, Identity"
    )
