"""The prompts that published decoder rerankers were trained with, and how each is recognised.

A record is written from the model's card or its own scoring code. It applies where the checkpoint itself says
nothing; a sentence-transformers layout says everything (`pair_template`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Activation = Literal["sigmoid", "identity"]


class Prompt(NamedTuple):
    """What a reranker is asked, and how its answer becomes a score."""

    template: tuple[str, ...]  # parts that are tokenised separately
    tokens: tuple[str | int, ...] = ()  # it answers with these, relevant first; texts or ids
    names: str = ""  # a pattern that its published names match, lower case
    mark: str = ""  # a phrase that identifies its chat template
    answers_identify: bool = True  # within its family, whoever names these tokens means this prompt
    instruction: str = ""  # in the place of an instruction where the caller gives none
    wording: str = "{instruction}"  # how an instruction is written in the row
    activation: Activation = "sigmoid"
    scale: float = 1.0  # a logit is divided by it before the sigmoid
    strips: bool = False  # white space around query and document is removed
    opened: bool = True  # the tokenizer's special tokens are added at the beginning
    closed: bool = False  # and at the end


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
_CTXL_TASK = "Check whether a given document contains information helpful to answer the query."
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
        names=r"qwen3-reranker",
        mark=_QWEN3_MARK,
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
    # One text up to the answer: images and texts of query and document follow their marks without a space.
    "qwen3-vl-reranker": Prompt(
        (
            f'<|im_start|>system\n{_QWEN3_MARK} Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}",
            _ANSWER,
        ),
        ("yes", "no"),
        names=r"qwen3-vl-reranker",
        instruction="Given a search query, retrieve relevant candidates that answer the query.",
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
        names=r"mxbai-rerank-\w+-v2",
        mark="You are a search relevance expert who evaluates how well documents match search queries.",
        wording="instruction: {instruction}\n",
    ),
    "bge-reranker-v2-gemma": Prompt(
        ("A: {query}", "\n", "B: {document}", "\n", _GEMMA_TASK),
        ("Yes",),
        names=r"bge-reranker-v2-gemma",
        mark=_GEMMA_TASK,
    ),
    # The query is the system's message, the document the user's. Until May 2026 the repositories scored with
    # code of their own, through a sigmoid of a fifth of the logit; since then a LogitScore module does.
    "zerank": Prompt(
        ("<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n", "{document}", _ANSWER),
        ("Yes",),
        names=r"zerank-\d",
        answers_identify=False,
        scale=5.0,
        strips=True,
    ),
    # The logit of vocabulary row 0, as it is. The tokens of the whole text are those of one part.
    "ctxl-rerank-v2": Prompt(
        (_CTXL_TASK + "\n<Document> {document}\n<Query> {query}{instruction} ??",),
        (0,),
        names=r"ctxl-rerank(?:er)?-v2",
        answers_identify=False,
        wording=" {instruction}",
        activation="identity",
        closed=True,
    ),
    "nemotron-rerank": Prompt(("question:{query} \n \n passage:{document}",), closed=True),
}
