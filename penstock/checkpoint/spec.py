"""`ModelSpec`: everything that a model's files say about it, as `describe.py` reads it.

Free of torch, so that an API process learns what it needs about a model without loading it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.checkpoint.dual import DualSpec
from penstock.checkpoint.families import find_architecture
from penstock.checkpoint.frames import TextFrame
from penstock.checkpoint.gliclass import ZeroShotSpec
from penstock.checkpoint.gliner import EntitySpec
from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.checkpoint.image_prompts import ImagePromptSpec
from penstock.checkpoint.late import LateSpec
from penstock.checkpoint.layout import QueryRoute
from penstock.checkpoint.pooling import PoolingSpec
from penstock.checkpoint.reward import RewardSpec
from penstock.checkpoint.score import MARK_DIM, ScoreSpec
from penstock.checkpoint.sizes import ModelSizes, read_sizes, table_sizes
from penstock.checkpoint.sparse import SparseSpec
from penstock.checkpoint.static import StaticSpec
from penstock.config import ModelFacts
from penstock.errors import ModelLoadError
from penstock.types import LABELLED_TASKS, Task


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # holds the config.json, tokenizer and weights of the model itself
    root: str = ""  # holds modules.json; the folders of modules are below it. "": the same as `folder`
    name: str
    architecture: str
    config: dict[str, Any]
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)  # the part of `config` from the caller
    max_model_len: int  # tokens of one row, special tokens included
    max_positions: int  # what the weights allow; `--max-model-len` may raise `max_model_len` to it
    hidden_size: int | None = None
    num_layers: int | None = None
    embed_dim: int
    token_dim: int
    vocab_size: int
    num_segments: int = 0  # number of token types
    pooling: PoolingSpec
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    lower_case: bool
    tasks: tuple[Task, ...]
    default_task: Task | None = None  # task of requests that name none; None: the first
    labels: tuple[str, ...] = ()
    is_causal: bool = False  # causal attention
    instruction_template: str | None = None  # with {instruction}; precedes a text
    frame: TextFrame = TextFrame()  # text around the inputs of a chat model that embeds
    text_end: str = ""  # appended to every text before it is tokenised
    query_end: str = ""  # appended to queries instead; late interaction uses `late.query_end`
    begin_token: str | None = None  # only special token added to a text; None: the tokenizer's are added
    sparse: SparseSpec | None = None
    reward: RewardSpec | None = None
    adapters: tuple[str, ...] = ()  # task adapters, of which a request may choose one
    requires_adapter: bool = False  # a request has to choose an adapter
    query_adapters: tuple[str, ...] = ()  # adapters with which every text gets the query prompt
    multi_vector: str | None = None  # BGE-M3's file with the projection of its token vectors
    static: StaticSpec | None = None  # static embeddings: a table of token vectors
    query_route: QueryRoute | None = None  # route of queries, if a Router separates them from documents
    late: LateSpec | None = None  # one vector per token, compared token by token
    images: ImageProcessorSpec | None = None  # None: the model reads no images
    image_prompt: ImagePromptSpec | None = None  # for images in the row of a text; None: images are separate
    dual: DualSpec | None = None  # for models with towers of their own for texts and images
    score: ScoreSpec | None = None  # for models that read a query and a document together
    entities: EntitySpec | None = None  # for models that find entities of labels in the request
    zero_shot: ZeroShotSpec | None = None  # for models that classify by labels in the request
    why_not_score: str | None = None  # reason not to score by comparing vectors, if any
    why_not_sliced: str | None = None  # why `dimensions` cannot truncate a vector; None: it can
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a generated text
    why_not_generate: str | None = "no checkpoint was read"  # None: it can generate
    generates_by_default: bool = False
    merges_adapter: bool = False  # merge the adapter in the model's root folder as weights are read
    draft: ModelSpec | None = None  # the draft model for speculative decoding

    @property
    def generates(self) -> bool:
        return Task.GENERATE in self.tasks

    @property
    def classifies_each_token(self) -> bool:
        """Whether a sequence classifier can also classify every token.

        A causal one can: its head reads one token, and each token represents the text up to it.
        """
        return self.is_causal and Task.CLASSIFY in self.tasks and Task.TOKEN_CLASSIFY not in self.tasks

    @property
    def reads_labels(self) -> bool:
        """Whether labels are part of the request."""
        return not LABELLED_TASKS.isdisjoint(self.tasks)

    @property
    def labels_images(self) -> bool:
        """Whether it classifies images by labels in the request."""
        return self.dual is not None and self.dual.logit_scale is not None

    @property
    def is_unmarked(self) -> bool:
        """Whether nothing indicates that the model was trained to embed."""
        return self.why_not_score is not None and Task.EMBED in self.tasks

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows are expected to share prefixes. Rows of a causal reranker do: they begin with the
        instruction and the query."""
        return self.is_causal and self.score is not None and not self.score.marks

    @property
    def why_not_chunked(self) -> str | None:
        """Why a row cannot be split over several steps; None if it can."""
        if not self.is_causal:
            return f"{self.architecture} is not causal: a token's state depends on later tokens"
        if Task.SPARSE in self.tasks:
            return "sparse weights need the whole row in one step"
        if (why := find_architecture(self.architecture, self.config).family.why_whole_rows) is not None:
            return f"{self.architecture} runs a row in one step: {why}"
        if self.late is not None:
            return "late interaction needs the whole row in one step"
        if self.pooling.methods in (("last",), ("mean",), ("mean_sqrt_len",)):
            return None
        return f"{' + '.join(self.pooling.methods)} pooling needs the whole row in one step"

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            max_model_len=self.max_model_len,
            max_positions=self.max_positions,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            why_not_chunked=self.why_not_chunked,
            shares_prefixes=self.shares_prefixes,
            generates=self.generates,
            is_static=self.static is not None,
            draft=None if self.draft is None else self.draft.facts,
        )

    @property
    def sizes(self) -> ModelSizes:
        """The sizes of a native model's parts."""
        if self.static is not None:
            return table_sizes(self.static.vocab_size, self.static.dim)
        family = find_architecture(self.architecture, self.config).family
        return read_sizes(self.path / "config.json", family, self.config)

    @property
    def score_kind(self) -> Literal["cross", "list", "bi", "late"] | None:
        """How queries and documents are scored: read together in pairs or as a list, by one vector each, or
        token by token."""
        if Task.SCORE not in self.tasks:
            return None
        if self.late is not None:
            return "late"
        if self.score is None:
            return "bi"
        return "list" if self.score.marks else "cross"

    @property
    def step_tag(self) -> int:
        """The token that ends a step, for models that score steps."""
        if self.reward is None or self.reward.tag is None:
            raise ValueError(f"{self.architecture} judges no steps")
        return self.reward.tag

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def root_path(self) -> Path:
        return Path(self.root or self.folder)

    def width(self, task: Task) -> int:
        """Number of values in an output row of this task."""
        if task is Task.EMBED:
            return self.embed_dim
        if task is Task.SPARSE:
            return 1 if self.sparse is not None and self.sparse.kind == "lexical" else self.vocab_size
        if task is Task.SCORE:
            return MARK_DIM if self.score is not None and self.score.marks else 1
        if task is Task.ENTITIES and self.entities is not None:
            return self.entities.outputs_per_label  # for each label
        if task is Task.ZERO_SHOT:
            return 1  # for each label
        return self.token_dim if task is Task.TOKEN_EMBED else len(self.labels)


def with_generation(spec: ModelSpec, wanted: bool | None) -> ModelSpec:
    """Add generation if `wanted`. If that is None, add it to models that generate by default."""
    if wanted is None:
        wanted = spec.why_not_generate is None and spec.generates_by_default
    if not wanted:
        return spec
    if spec.why_not_generate is not None:
        raise ModelLoadError(
            f"enable_generation cannot be used: {spec.why_not_generate}", param="enable_generation"
        )
    return msgspec.structs.replace(spec, tasks=(*spec.tasks, Task.GENERATE))


GIVEN_PROMPT = "--default-prompt"  # name of the caller's prompt in `prompts`


def with_default_prompt(spec: ModelSpec, name: str | None, prompt: str | None) -> ModelSpec:
    """Set the prompt of requests that name none: one of the model's prompts, or the caller's text."""
    if name is None and prompt is None:
        return spec
    if name is not None and prompt is not None:
        raise ModelLoadError(
            "default_prompt_name and default_prompt exclude each other; give one", param="default_prompt"
        )
    if prompt is not None:
        prompts = {**spec.prompts, GIVEN_PROMPT: prompt}
        return msgspec.structs.replace(spec, prompts=prompts, default_prompt_name=GIVEN_PROMPT)
    if name not in spec.prompts:
        known = f"it has: {', '.join(sorted(spec.prompts))}" if spec.prompts else "it has none"
        raise ModelLoadError(
            f"model {spec.name} has no prompt named {name!r}; {known}", param="default_prompt_name"
        )
    return msgspec.structs.replace(spec, default_prompt_name=name)


def with_max_model_len(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """Set the row limit that `resolve` decided on."""
    return msgspec.structs.replace(spec, max_model_len=max_model_len)
