"""How a model that reads a query and a document together scores them: from its files, and from the prompts
that decoder rerankers were trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from tokenizers import Tokenizer

from penstock.checkpoint.convert import tokenizer_file
from penstock.checkpoint.families import Architecture
from penstock.checkpoint.files import CheckpointFiles, optional_json
from penstock.checkpoint.labels import label_count
from penstock.errors import ConfigError, ModelLoadError

Activation = Literal["sigmoid", "identity"]


class ScoreSpec(msgspec.Struct, frozen=True):
    """A score is the first of the outputs, minus the second if there is one, through the activation.

    `template` is the row as parts that are tokenised separately; a single part is tokenised as any text.
    Without a template the tokenizer joins query and document to a pair. `tokens` are rows of the
    language-model head that replace a classifier's labels.
    """

    outputs: tuple[int, ...] = (0,)
    activation: Activation = "sigmoid"
    template: tuple[str, ...] = ()  # with {query}, {document} and optionally {instruction}
    instruction: str = ""  # where the caller gives none
    wording: str = "{instruction}"  # how an instruction is written in the row
    tokens: tuple[int, ...] = ()
    closed: bool = True  # special tokens are added at the end too, not only at the beginning
    marks: tuple[int, ...] = ()  # of listwise models: the tokens that mark a document and the query


DOCUMENT_MARK, QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"
MARK_DIM = 512  # of the vectors of marked tokens


class Prompt(NamedTuple):
    """The prompt of a family of rerankers, and the tokens it answers with: relevant first."""

    template: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    mark: str = ""  # a phrase that identifies its chat template
    instruction: str = ""
    wording: str = "{instruction}"
    closed: bool = False


_QWEN3_MARK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
)
_MXBAI_TASK = (
    "You are a search relevance expert who evaluates how well documents match search queries. For each "
    "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
    "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
)
_GEMMA_TASK = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'."
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
PROMPTS: dict[str, Prompt] = {
    "qwen3-reranker": Prompt(
        (
            f'<|im_start|>system\n{_QWEN3_MARK} Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n",
            "<Instruct>: {instruction}\n<Query>: {query}\n",
            "<Document>: {document}",
            f"{_ANSWER}<think>\n\n</think>\n\n",
        ),
        ("yes", "no"),
        _QWEN3_MARK,
        "Given a web search query, retrieve relevant passages that answer the query",
    ),
    "mxbai-rerank-v2": Prompt(
        (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
            "<|im_end|>\n<|im_start|>user\n",
            "{instruction}query: {query}",
            "\n",
            "document: {document}",
            "\n",
            _MXBAI_TASK,
            _ANSWER,
        ),
        ("1", "0"),
        "You are a search relevance expert who evaluates how well documents match search queries.",
        wording="instruction: {instruction}\n",
    ),
    "bge-reranker-v2-gemma": Prompt(
        ("A: {query}", "\n", "B: {document}", "\n", _GEMMA_TASK), ("Yes",), _GEMMA_TASK
    ),
    "nemotron-rerank": Prompt(("question:{query} \n \n passage:{document}",), closed=True),
}


def read_score(
    files: CheckpointFiles,
    architecture: Architecture,
    *,
    template: str | None = None,
    score_labels: Sequence[int] | None = None,
) -> ScoreSpec | None:
    """None for a model that does not read query and document together."""
    classifies, labels = architecture.classifies_sequences, label_count(files.config)
    vocabulary = _Vocabulary(files.folder)
    if architecture.family.is_listwise:
        marks = (vocabulary.number(DOCUMENT_MARK), vocabulary.number(QUERY_MARK))
        return ScoreSpec((), "identity", marks=marks)
    tokens = _tokens(files, vocabulary)
    texts = vocabulary.texts(tokens) if tokens else ()
    prompt = _prompt(files.folder, architecture, texts) if template is None else _given_prompt(template)
    if not classifies and not tokens and prompt is not None and prompt.tokens:
        tokens = tuple(vocabulary.number(text) for text in prompt.tokens)
    outputs = _outputs(labels if classifies else 0, len(tokens), score_labels)
    if not outputs:
        if template is not None:
            raise ConfigError(
                f"score_template needs a model that reads query and document together; {architecture.name} "
                f"with {labels} labels does not, unless score_labels in the pooler config says which to take",
                param="score_template",
            )
        return None
    score = ScoreSpec(outputs, _activation(files), tokens=tokens)
    if prompt is not None:
        return msgspec.structs.replace(
            score,
            template=prompt.template,
            instruction=prompt.instruction,
            wording=prompt.wording,
            closed=prompt.closed,
        )
    if tokens:
        raise ModelLoadError(
            f"{architecture.name} answers with the tokens {', '.join(vocabulary.texts(tokens))}, but no file "
            "says what it is asked; give score_template",
            param="score_template",
        )
    return score


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

    def number(self, text: str) -> int:
        if (number := self.rust.token_to_id(text)) is not None:
            return int(number)
        ids = self.rust.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ModelLoadError(
                f"{text!r} is not one token of this model: the tokenizer splits it into {len(ids)}"
            )
        return int(ids[0])

    def texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(self.rust.id_to_token(number)) for number in tokens)


def _tokens(files: CheckpointFiles, vocabulary: _Vocabulary) -> tuple[int, ...]:
    """The answer tokens that the files or the caller name, relevant first."""
    for module in files.modules_of("LogitScore"):
        values = optional_json(files.root / module.path / "config.json")
        pair = (values.get("true_token_id"), values.get("false_token_id"))
        return tuple(int(number) for number in pair if number is not None)
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


def _prompt(folder: Path, architecture: Architecture, texts: tuple[str, ...]) -> Prompt | None:
    """The one of the family's prompts whose tokens are `texts`, or whose mark the chat template has."""
    prompts = [PROMPTS[name] for name in architecture.family.score_prompts]
    chat = _chat_template(folder) if prompts and not texts else ""
    for prompt in prompts:
        if texts:
            found = texts == prompt.tokens
        else:
            found = prompt.mark in chat if prompt.mark else architecture.classifies_sequences
        if found:
            return prompt
    return None


def _given_prompt(template: str) -> Prompt:
    return PROMPTS.get(template) or _custom_prompt(template)


def _custom_prompt(template: str) -> Prompt:
    """A template from the caller. The text after the document is kept when the document is truncated."""
    if "{document}" not in template or "{query}" not in template:
        raise ConfigError(
            f"score_template is {template!r}; it needs {{query}} and {{document}}, or has to be one of "
            + ", ".join(PROMPTS),
            param="score_template",
        )
    before, _, after = template.rpartition("{document}")
    parts = (before + "{document}", after) if after.strip() else (template,)
    return Prompt(parts, closed=True)


def _chat_template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(errors="replace")
    template = optional_json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else ""


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


def _activation(files: CheckpointFiles) -> Activation:
    """As sentence-transformers finds it; a sigmoid where no file names one."""
    options = files.config.get("sentence_transformers")
    named = options.get("activation_fn") if isinstance(options, Mapping) else None
    named = named or files.config.get("sbert_ce_default_activation_function")
    named = named or files.sentence_transformers.get("activation_fn")
    if named is None:
        return "sigmoid"
    name = str(named).rsplit(".", 1)[-1].lower()
    if name == "sigmoid":
        return "sigmoid"
    if name == "identity":
        return "identity"
    raise ModelLoadError(
        f"{files.folder} scores through the activation {named}, which is not supported; "
        "supported: Sigmoid, Identity"
    )
