"""Decoder rerankers against transformers: their prompts, and the few logits that matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file

from penstock import Engine
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig
from penstock.errors import BadValue, ConfigError, ModelLoadError
from penstock.inputs.pairs import prepare_pairs
from penstock.types import PoolingParams, Task
from tests.parity.decoders import change_config
from tests.parity.reference import make_texts
from tests.parity.rerankers import LIMIT, LONG, QWEN3, write, write_listwise

QUERY = "how long is the water?"
DOCUMENTS = [text for text in make_texts(14) if text] + ["{query} looks like a field", ""]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Reference:
    """Computes the next-token logits of a model for joined pieces of text."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0, -1]
        return found


def qwen3_rows(
    reference: Reference, query: str, documents: Sequence[str], instruction: str
) -> list[list[int]]:
    """Rows in the format of the model card."""
    prefix = reference.ids(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = reference.ids("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    texts = [f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}" for document in documents]
    return [prefix + reference.ids(text)[: LIMIT - len(prefix) - len(suffix)] + suffix for text in texts]


def qwen3_scores(folder: Path, instruction: str = INSTRUCTION) -> Any:
    reference = Reference(folder)
    yes, no = (reference.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    found = []
    for row in qwen3_rows(reference, QUERY, DOCUMENTS, instruction):
        logits = reference.logits(row)
        found.append(torch.softmax(logits[[no, yes]], dim=0)[1].item())
    return np.array(found)


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_rerankers_answer_with_the_probability_of_yes(tmp_path: Path, tied: bool) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    expected = qwen3_scores(folder)
    assert expected.std() > 1e-3
    with open_engine(folder, hf_overrides=QWEN3 | {"is_original_qwen3_reranker": True}) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=1e-5)
        raw = engine.score(QUERY, DOCUMENTS, use_activation=False)
        np.testing.assert_allclose(raw, np.log(expected / (1 - expected)), atol=1e-3)
        told = engine.score(QUERY, DOCUMENTS, instruction="find words")
        np.testing.assert_allclose(told, qwen3_scores(folder, "find words"), atol=1e-5)
        assert engine.spec.tasks[0] is Task.SCORE and engine.settings.prefix_caching


def test_only_the_scored_rows_of_the_head_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    with open_engine(folder, hf_overrides=QWEN3) as engine:
        head = engine.local.engine.core.runner.model.heads[Task.SCORE]
        assert head.outputs == 2 and head.method == "last"


def test_sentence_transformers_layout_names_the_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
    expected = qwen3_scores(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = (tokens.convert_tokens_to_ids(word) for word in ("yes", "no"))
    kinds = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    rows = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, ["", "1_LogitScore"], strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=1e-5)


def test_the_chat_template_of_a_reranker_is_recognised(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM")
    assert describe(EngineConfig(model=str(folder))).score is None
    (folder / "chat_template.jinja").write_text(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        "Instruct provided. Note that …{{ messages }}"
    )
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), qwen3_scores(folder), atol=1e-5)


def test_converted_checkpoints_score_with_their_one_label(tmp_path: Path) -> None:
    """A common conversion of the head to one row: yes minus no."""
    folder = write(tmp_path / "lm", "Qwen3ForCausalLM", tie_word_embeddings=True)
    expected = qwen3_scores(folder)
    reference = Reference(folder)
    yes, no = (reference.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.model.load_state_dict(reference.model.model.state_dict())
    rows = reference.model.lm_head.weight.data
    model.score.weight.data = (rows[yes] - rows[no])[None]
    model.save_pretrained(tmp_path / "seq")
    reference.tokenizer.save_pretrained(tmp_path / "seq")
    with open_engine(tmp_path / "seq", score_template="qwen3-reranker") as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS), expected, atol=1e-5)


@pytest.mark.parametrize("instruction", [None, "be strict"])
def test_mxbai_rerankers_score_the_logit_of_1_minus_that_of_0(
    tmp_path: Path, instruction: str | None
) -> None:
    folder = write(tmp_path, "Qwen2ForCausalLM")
    reference = Reference(folder)
    prefix = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n"
    )
    task = (
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your "
        "binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
    )
    told = "" if instruction is None else f"instruction: {instruction}\n"
    one, nought = reference.ids("1")[0], reference.ids("0")[0]
    expected = []
    for document in DOCUMENTS:
        parts = (prefix, f"{told}query: {QUERY}", "\n", f"document: {document}", "\n", task)
        ids = [token for part in parts for token in reference.ids(part)]
        logits = reference.logits(ids + reference.ids("<|im_end|>\n<|im_start|>assistant\n"))
        expected.append((logits[one] - logits[nought]).item())
    overrides = {
        "architectures": ["Qwen2ForSequenceClassification"],
        "classifier_from_token": ["0", "1"],
        "method": "from_2_way_softmax",
    }
    with open_engine(folder, hf_overrides=overrides) as engine:
        raw = engine.score(QUERY, DOCUMENTS, use_activation=False, instruction=instruction)
    np.testing.assert_allclose(raw, expected, atol=1e-4)


def test_bge_gemma_answers_with_the_logit_of_yes(tmp_path: Path) -> None:
    folder = write(tmp_path, "GemmaForCausalLM", bos=True)
    reference = Reference(folder)
    task = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
        "providing a prediction of either 'Yes' or 'No'."
    )
    yes, line = reference.tokenizer.convert_tokens_to_ids("Yes"), reference.ids("\n")
    expected = []
    for document in DOCUMENTS:
        ids = [0, *reference.ids(f"A: {QUERY}"), *line, *reference.ids(f"B: {document}"), *line]
        expected.append(reference.logits(ids + reference.ids(task))[yes].item())
    overrides = {
        "architectures": ["GemmaForSequenceClassification"],
        "classifier_from_token": ["Yes"],
        "method": "no_post_processing",
    }
    with open_engine(folder, hf_overrides=overrides) as engine:
        raw = engine.score(QUERY, DOCUMENTS, use_activation=False)
    assert np.std(expected) > 0.01
    np.testing.assert_allclose(raw, expected, atol=5e-4)


def test_nemotron_reads_one_text_with_bidirectional_attention(tmp_path: Path) -> None:
    folder = write(tmp_path, "LlamaForSequenceClassification", bos=True, num_labels=1)
    change_config(
        folder,
        lambda config: (
            config
            | {
                "architectures": ["LlamaBidirectionalForSequenceClassification"],
                "model_type": "llama_bidirec",
                "pooling": "avg",
                "temperature": 0.5,
            }
        ),
    )
    with open_engine(folder) as engine:
        texts = [f"question:{QUERY} \n \n passage:{document}" for document in DOCUMENTS]
        expected = engine.classify(texts, use_activation=False)[:, 0]
        raw = engine.score(QUERY, DOCUMENTS, use_activation=False)
        np.testing.assert_allclose(raw, expected, atol=1e-5)
        assert not engine.settings.prefix_caching  # attention is bidirectional


def test_instruction_and_query_are_computed_once_for_all_documents(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
    documents = [f"{text} {number}" for number, text in enumerate(DOCUMENTS * 3)]
    with (
        open_engine(folder, hf_overrides=QWEN3) as warm,
        open_engine(folder, hf_overrides=QWEN3, enable_prefix_caching=False) as cold,
    ):
        expected = cold.score(QUERY, documents)
        np.testing.assert_allclose(warm.score(QUERY, documents), expected, atol=1e-5)
        rows = qwen3_rows(Reference(folder), QUERY, documents, INSTRUCTION)
        alike = next(i for i, tokens in enumerate(zip(*rows, strict=False)) if len(set(tokens)) > 1)
        pool = warm.local.engine.core.scheduler.chunking.pool
        shared = alike // pool.block_size * pool.block_size
        assert shared > 60
        assert pool.hit_tokens >= (len(documents) - 1) * shared
        before = pool.hit_tokens
        np.testing.assert_allclose(warm.score(QUERY, documents[:5]), expected[:5], atol=1e-5)
        assert pool.hit_tokens - before >= 5 * shared  # cached by an earlier request


def test_a_long_document_is_truncated_and_the_prompt_is_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=True)
    long = " ".join(["water and oil"] * 400)
    reference = Reference(folder)
    yes, no = (reference.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    (row,) = qwen3_rows(reference, QUERY, [long], INSTRUCTION)
    assert len(row) == LIMIT
    logits = reference.logits(row)
    with open_engine(folder, hf_overrides=QWEN3) as engine:
        raw = engine.score(QUERY, [long], use_activation=False, truncate_prompt_tokens=-1)
        np.testing.assert_allclose(raw, [(logits[yes] - logits[no]).item()], atol=1e-4)
        with pytest.raises(Exception, match="document 0 with its query"):
            engine.score(QUERY, [long])
        with pytest.raises(Exception, match="no room for a document"):
            engine.score(long, ["a"], truncate_prompt_tokens=-1)


def test_unusable_score_options_are_refused_when_the_model_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM")

    def read(**options: Any) -> Any:
        return describe(EngineConfig(model=str(folder), **options))

    with pytest.raises(ModelLoadError, match="give score_template"):
        read(hf_overrides={"classifier_from_token": ["Yes", "no"]})
    with pytest.raises(ModelLoadError, match="not one token"):
        read(hf_overrides={"classifier_from_token": ["yes and no"]})
    with pytest.raises(ConfigError, match="one token, or two"):
        read(hf_overrides={"classifier_from_token": "yes"})
    with pytest.raises(ConfigError, match=r"needs \{query\} and \{document\}"):
        read(score_template="{query}", hf_overrides=QWEN3)
    with pytest.raises(ConfigError, match="reads query and document together"):
        read(score_template="{query} {document}")
    own = read(score_template="Q {query} D {document} A", hf_overrides={"classifier_from_token": ["Yes"]})
    assert own.score.template == ("Q {query} D {document}", " A") and own.score.outputs == (0,)


class ListReference:
    """The steps of jina-reranker-v3's code: a prompt for each block, cosines, a mean query over blocks."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        self.projector = [tensors.pop(name) for name in ("projector.0.weight", "projector.2.weight")]
        config = transformers.AutoConfig.from_pretrained(folder)
        self.model = transformers.Qwen3Model(config).eval()
        self.model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})

    @torch.inference_mode()
    def block(self, query: str, documents: Sequence[str], instruction: str | None) -> tuple[Any, Any]:
        told = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
        passages = [f'<passage id="{i}">\n{d}<|embed_token|>\n</passage>' for i, d in enumerate(documents)]
        prompt = (
            "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the "
            "passages based on how relevant they are to the query. If the query is a question, how relevant "
            "a passage is depends on how well it answers the question. If not, try to analyze the intent of "
            "the query and assess how well each passage satisfies the intent. If an instruction is provided, "
            "you should follow the instruction when determining the ranking.<|im_end|>\n<|im_start|>user\n"
            f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
            f"Rank the passages based on their relevance to query: {query}\n{told}"
            + "\n".join(passages)
            + "\n"
            f"<query>\n{query}<|rerank_token|>\n</query>"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        states = self.model(ids).last_hidden_state[0]
        marks = [self.tokenizer.convert_tokens_to_ids(f"<|{name}_token|>") for name in ("embed", "rerank")]
        found = torch.relu(states @ self.projector[0].T) @ self.projector[1].T
        return found[ids[0] == marks[0]].numpy(), found[ids[0] == marks[1]].numpy()

    def scores(self, query: str, blocks: list[list[str]], instruction: str | None = None) -> Any:
        def cosines(one: Any, many: Any) -> Any:
            return (many @ one) / (np.linalg.norm(one) * np.linalg.norm(many, axis=1))

        done = [self.block(query, documents, instruction) for documents in blocks]
        weights = [((1 + cosines(q[0], d)) / 2).max() for d, q in done]
        mean = np.average([q[0] for _, q in done], axis=0, weights=weights)
        return cosines(mean, np.concatenate([d for d, _ in done]))


def test_jina_rerankers_read_the_whole_list(tmp_path: Path) -> None:
    folder = write_listwise(tmp_path)
    reference = ListReference(folder)
    documents = [*DOCUMENTS[:8], "a mark <|embed_token|> in the text"]
    clean = [*DOCUMENTS[:8], "a mark  in the text"]
    expected = reference.scores(QUERY, [clean])
    assert expected.std() > 1e-4
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.score(QUERY, documents), expected, atol=1e-5)
        told = engine.score(QUERY, documents, instruction="be strict")
        np.testing.assert_allclose(told, reference.scores(QUERY, [clean], "be strict"), atol=1e-5)
        order = [row.index for row in engine.rerank(QUERY, documents)]
        assert order == np.argsort(-expected, kind="stable").tolist()
        queries = ["oil", "oil", QUERY, "oil"]
        several = engine.score(queries, clean[:4])
        lists = [("oil", clean[:2]), (QUERY, clean[2:3]), ("oil", clean[3:4])]
        each = np.concatenate([reference.scores(query, [block]) for query, block in lists])
        np.testing.assert_allclose(several, each, atol=1e-5)


def test_a_list_that_does_not_fit_is_read_in_blocks(tmp_path: Path) -> None:
    folder = write_listwise(tmp_path)
    documents = [f"{DOCUMENTS[i % 12]} number {i}" for i in range(90)]
    with open_engine(folder) as engine:
        request = prepare_pairs(
            engine.local.text.processor,
            "r",
            [(QUERY, document) for document in documents],
            PoolingParams(Task.SCORE),
        )
        mark = engine.local.text.processor.tokenizer.encode(["<|embed_token|>"], add_special_tokens=False)[0][
            0
        ]
        rows = np.split(request.token_ids, request.starts[1:])
        counts = [int((row == mark).sum()) for row in rows]
        assert len(rows) > 1 and sum(counts) == 90 and request.lengths.max() <= LONG
        ours = engine.score(QUERY, documents)
        with pytest.raises(BadValue, match="a list of documents takes"):
            engine.score(QUERY, ["water " * 5000])
        assert engine.score(QUERY, ["water " * 5000], truncate_prompt_tokens=-1).shape == (1,)
    blocks = np.split(np.array(documents, dtype=object), np.cumsum(counts)[:-1])
    expected = ListReference(folder).scores(QUERY, [list(block) for block in blocks])
    np.testing.assert_allclose(ours, expected, atol=1e-5)
