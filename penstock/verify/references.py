"""Runs a model in its reference library, each text alone, in fp32. Libraries are imported on first use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from penstock.checkpoint.spec import ModelSpec
from penstock.errors import ConfigError, shown
from penstock.types import Task
from penstock.verify.choose import Library
from penstock.verify.samples import Answers, Check, Sample, array

MAX_PROMPTS = 4  # named prompts to compare besides the default
MAX_GENERATED_TOKENS = 16
MAX_GENERATED_TEXTS = 4
_HEADS = {
    Task.CLASSIFY: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFY: "AutoModelForTokenClassification",
    Task.GENERATE: "AutoModelForCausalLM",
}
_PACKAGES = {
    "transformers": "transformers",
    "model2vec": "model2vec",
}  # the others are part of sentence-transformers


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    device: str = "cpu"
    runs_model_code: bool = False  # Python files in the model's folder


class Reference(ABC):
    """A model in a reference library."""

    def __init__(self, spec: ModelSpec, options: ReferenceOptions) -> None:
        self.spec = spec
        self.options = options
        self._seen: list[list[int]] = []

    @abstractmethod
    def checks(self) -> list[Check]: ...

    @abstractmethod
    def answer(self, check: Check, sample: Sample) -> Answers: ...

    def one_by_one(self, run: Callable[[Any], Any], inputs: Sequence[Any]) -> Answers:
        """Run each input alone, so that the model gets no padding and recorded tokens stay in order."""
        values, tokens = [], []
        for each in inputs:
            self._seen = []
            values.append(array(run(each)))
            tokens.append(self._seen[0] if len(self._seen) == 1 else None)
        complete = [row for row in tokens if row is not None]
        return Answers(values, complete if len(complete) == len(tokens) else None)

    def watch(self, model: Any) -> None:
        """Record the token ids of every lookup in the model's token table."""

        def note(_module: Any, args: Any) -> None:
            self._seen.append([int(number) for number in args[0].flatten().tolist()])

        for table in _token_tables(model):
            table.register_forward_pre_hook(note)


def _token_tables(model: Any) -> list[Any]:
    """Find the token tables: one for each transformers model or static module."""
    from torch import nn
    from transformers import PreTrainedModel

    outer: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(name.startswith(other) for other, _ in outer):
            outer.append((name, module))
    tables = [module.get_input_embeddings() for _, module in outer]
    return tables + [module for module in model.modules() if isinstance(module, nn.EmbeddingBag)]


class _SentenceTransformersReference(Reference):
    """A model of sentence-transformers. Subclasses choose the class."""

    kind = "SentenceTransformer"

    def __init__(self, spec: ModelSpec, options: ReferenceOptions) -> None:
        super().__init__(spec, options)
        import sentence_transformers

        self.model = getattr(sentence_transformers, self.kind)(
            str(spec.root_path),
            device=options.device,
            local_files_only=True,
            trust_remote_code=options.runs_model_code,
            model_kwargs={"dtype": "float32"},
        )
        self.model.eval()
        self.watch(self.model)

    def encode(self, method: str, text: str, **options: Any) -> Any:
        found = getattr(self.model, method)([text], show_progress_bar=False, **options)[0]
        return found.to_dense().cpu().numpy() if hasattr(found, "cpu") else found


class DenseReference(_SentenceTransformersReference):
    def checks(self) -> list[Check]:
        if self._has_routes:
            return [
                Check(f"embed, {side}", Task.EMBED, {"input_type": side}) for side in ("query", "document")
            ]
        names = list(self.spec.prompts)[:MAX_PROMPTS]
        named = [Check(f"embed, prompt {shown(name)}", Task.EMBED, {"prompt_name": name}) for name in names]
        return [Check("embed", Task.EMBED), *named]

    @property
    def _has_routes(self) -> bool:
        return any(type(module).__name__ == "Router" for module in self.model)

    def answer(self, check: Check, sample: Sample) -> Answers:
        if "input_type" in check.options:
            method = f"encode_{check.options['input_type']}"
            return self.one_by_one(lambda text: self.encode(method, text), sample.texts)
        prompt = check.options.get("prompt_name")
        return self.one_by_one(lambda text: self.encode("encode", text, prompt_name=prompt), sample.texts)


class SparseReference(_SentenceTransformersReference):
    kind = "SparseEncoder"

    def checks(self) -> list[Check]:
        return [Check(f"sparse, {side}", Task.SPARSE, {"input_type": side}) for side in ("query", "document")]

    def answer(self, check: Check, sample: Sample) -> Answers:
        method = f"encode_{check.options['input_type']}"
        return self.one_by_one(
            lambda text: self.encode(method, text, convert_to_sparse_tensor=False), sample.texts
        )


class MultiVectorReference(_SentenceTransformersReference):
    kind = "MultiVectorEncoder"

    def checks(self) -> list[Check]:
        sides = [
            Check(f"token_embed, {side}", Task.TOKEN_EMBED, {"input_type": side})
            for side in ("query", "document")
        ]
        return [*sides, Check("score", Task.SCORE)]

    def answer(self, check: Check, sample: Sample) -> Answers:
        if check.task is Task.SCORE:
            vectors = {
                (method, text): self.encode(method, text)
                for pair in sample.pairs
                for method, text in zip(("encode_query", "encode_document"), pair, strict=True)
            }
            found = [
                array(_maxsim(vectors["encode_query", query], vectors["encode_document", document]))
                for query, document in sample.pairs
            ]
            return Answers(found, None)
        method = f"encode_{check.options['input_type']}"
        return self.one_by_one(lambda text: self.encode(method, text), sample.texts)


def _maxsim(query: Any, document: Any) -> float:
    """Sum the best match of each query token."""
    return float((array(query) @ array(document).T).max(axis=1).sum())


class PairReference(_SentenceTransformersReference):
    kind = "CrossEncoder"

    def checks(self) -> list[Check]:
        return [Check("score", Task.SCORE)]

    def answer(self, check: Check, sample: Sample) -> Answers:
        return self.one_by_one(
            lambda pair: self.model.predict([pair], show_progress_bar=False)[0], sample.pairs
        )


class StaticReference(Reference):
    """Static embeddings in model2vec's own layout."""

    def __init__(self, spec: ModelSpec, options: ReferenceOptions) -> None:
        super().__init__(spec, options)
        self.model = import_module("model2vec").StaticModel.from_pretrained(spec.folder)

    def checks(self) -> list[Check]:
        return [Check("embed", Task.EMBED)]

    def answer(self, check: Check, sample: Sample) -> Answers:
        return self.one_by_one(self._vector, sample.texts)

    def _vector(self, text: str) -> Any:
        self._seen = [[int(number) for number in self.model.tokenize([text])[0]]]
        return self.model.encode([text])[0]


class TransformersReference(Reference):
    """A class of transformers, by the model's task: compares hidden states, logits or greedy texts."""

    def __init__(self, spec: ModelSpec, options: ReferenceOptions) -> None:
        super().__init__(spec, options)
        import transformers

        self.task = next((task for task in _HEADS if task in spec.tasks), Task.TOKEN_EMBED)
        keywords = {"local_files_only": True, "trust_remote_code": options.runs_model_code}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(spec.folder, **keywords)
        kind = getattr(transformers, _HEADS.get(self.task, "AutoModel"))
        model, report = kind.from_pretrained(
            spec.folder, dtype="float32", output_loading_info=True, **keywords
        )
        if self.task is not Task.TOKEN_EMBED and report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:4])
            raise ConfigError(
                f"transformers finds no weights for {missing} in {spec.name}, and would run with random ones",
                param="model",
            )
        self.model = model.to(options.device).eval()
        self.watch(self.model)

    def checks(self) -> list[Check]:
        return [Check(self.task.value, self.task)]

    def answer(self, check: Check, sample: Sample) -> Answers:
        run = self._generated if check.task is Task.GENERATE else self._outputs
        texts = sample.texts[:MAX_GENERATED_TEXTS] if check.task is Task.GENERATE else sample.texts
        return self.one_by_one(run, texts)

    def _inputs(self, text: str) -> Any:
        found = self.tokenizer(text, truncation=True, max_length=self.spec.max_model_len, return_tensors="pt")
        return found.to(self.options.device)

    def _outputs(self, text: str) -> Any:
        with _without_gradients():
            found = self.model(**self._inputs(text))
        values = found.last_hidden_state if self.task is Task.TOKEN_EMBED else found.logits
        return values[0].float().cpu().numpy()

    def _generated(self, text: str) -> Any:
        inputs = self._inputs(text)
        with _without_gradients():
            found = self.model.generate(**inputs, do_sample=False, max_new_tokens=MAX_GENERATED_TOKENS)
        self._seen = [inputs["input_ids"][0].tolist()]
        return found[0, inputs["input_ids"].shape[1] :].cpu().numpy()


@contextmanager
def _without_gradients() -> Iterator[None]:
    import torch

    with torch.inference_mode():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the libraries' progress bars and warnings about unused heads."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


_KINDS: dict[Library, type[Reference]] = {
    "sentence-transformers": DenseReference,
    "sparse-encoder": SparseReference,
    "multi-vector-encoder": MultiVectorReference,
    "cross-encoder": PairReference,
    "transformers": TransformersReference,
    "model2vec": StaticReference,
}


def package_of(library: Library) -> str:
    return _PACKAGES.get(library, "sentence-transformers")


def open_reference(library: Library, spec: ModelSpec, options: ReferenceOptions) -> Reference:
    """Load the model in its library. If that fails, raises `ConfigError` with the library's reason."""
    package = package_of(library)
    try:
        version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f"{spec.name} has to be compared with {package}, which is not installed; "
            f"run `pip install {package}`",
            param="reference",
        ) from None
    try:
        with _quiet():
            return _KINDS[library](spec, options)
    except ConfigError:
        raise
    except Exception as error:  # libraries raise errors of any type
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{package} cannot load {spec.name}: {type(error).__name__}: {reason[:300]}; a model with Python "
            "code of its own needs --trust-remote-code",
            param="reference",
        ) from error
