"""The prompts that published decoder rerankers were trained with, and how each is recognised.

Each record comes from the model's card or its own scoring code. It is used only if the checkpoint does not
contain the prompt; a sentence-transformers layout does (`pair_template`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Activation = Literal["sigmoid", "identity"]


class Prompt(NamedTuple):
    """The prompt of a reranker, and how its answer becomes a score."""

    template: tuple[str, ...]  # parts that are tokenised separately
    tokens: tuple[str | int, ...] = ()  # answer tokens, the relevant one first; texts or ids
    names: str = ""  # pattern of the published names, in lower case
    mark: str = ""  # a phrase that identifies its chat template
    answers_identify: bool = True  # within the family, these tokens imply this prompt
    instruction: str = ""  # default instruction
    wording: str = "{instruction}"  # format of an instruction in the row
    activation: Activation = "sigmoid"
    scale: float = 1.0  # divisor of a logit before the sigmoid
    strips: bool = False  # remove white space around query and document
    opened: bool = True  # add the tokenizer's special tokens at the beginning
    closed: bool = False  # add the tokenizer's special tokens at the end


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
    # The query is the system message, the document the user message. Until May 2026 the repositories had
    # their own scoring code, sigmoid(logit / 5); since then they have a LogitScore module.
    "zerank": Prompt(
        ("<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n", "{document}", _ANSWER),
        ("Yes",),
        names=r"zerank-\d",
        answers_identify=False,
        scale=5.0,
        strips=True,
    ),
    # The score is the plain logit of vocabulary row 0. The whole text is tokenised as one part.
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
