"""The parts of a checkpoint other than static embeddings: pooling, scores, sparse weights, late interaction.

Each part is read by its own module. This one reads them in order and checks whether they fit together.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.families import Architecture, Family
from penstock.checkpoint.files import CheckpointFiles
from penstock.checkpoint.identity import read_identity
from penstock.checkpoint.late import LateSpec, read_late
from penstock.checkpoint.layout import QueryRoute
from penstock.checkpoint.pooling import PoolingSpec, read_pooling
from penstock.checkpoint.score import ScoreSpec, read_score, why_not_score
from penstock.checkpoint.sparse import SparseSpec, read_sparse
from penstock.checkpoint.tasks import late_tasks, pooling_tasks, without_score
from penstock.config import PoolerConfig
from penstock.errors import ModelLoadError
from penstock.types import Task


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a config.json, and the architecture that it names."""

    files: CheckpointFiles
    architecture: Architecture
    query_route: QueryRoute | None

    @property
    def family(self) -> Family:
        return self.architecture.family

    @property
    def is_causal(self) -> bool:
        return self.family.is_causal(self.files.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    hidden_size: int
    width: int  # width of the last hidden states
    late: LateSpec | None
    pooling: PoolingSpec
    sparse: SparseSpec | None
    score: ScoreSpec | None
    why_not_score: str | None  # reason not to score by comparing vectors, if any


def read_parts(checkpoint: Checkpoint, name: str, pooler: PoolerConfig, score_template: str | None) -> Parts:
    """Read all parts. `name` is the served name, by which alone some rerankers are recognised."""
    files, architecture = checkpoint.files, checkpoint.architecture
    keys = checkpoint.family.keys
    hidden_size = files.integer(*keys.hidden_size)
    width = files.integer(*keys.output_size, *keys.hidden_size)
    identity = read_identity(checkpoint.files.root, name, files.config)
    late = read_late(files, architecture, identity, width)
    pooling = read_pooling(files, architecture, pooler, is_late=late is not None)
    sparse = read_sparse(files, architecture, pooler)
    score = read_score(
        files, architecture, identity, template=score_template, score_labels=pooler.score_labels
    )
    unmarked = why_not_score(files, architecture, identity)
    is_marked = score is not None or pooler.pooling_type is not None
    return Parts(
        hidden_size=hidden_size,
        width=width,
        late=late,
        pooling=pooling,
        sparse=sparse,
        score=score,
        why_not_score=None if is_marked else unmarked,
    )


def check_combinations(checkpoint: Checkpoint, parts: Parts) -> None:
    """Refuse combinations of parts that are supported only separately."""
    architecture, config = checkpoint.architecture, checkpoint.files.config
    is_masked = architecture.is_masked_language_model
    if checkpoint.is_causal and is_masked and config.get("is_causal") is None:
        raise ModelLoadError(
            f"{architecture.name} predicts masked tokens, but {checkpoint.files.config_file} does not say "
            "whether tokens see later ones; set is_causal to true or false with --hf-overrides",
            param="model",
        )
    own = _own_code(checkpoint)
    if own is not None and _leaves_causality_open(checkpoint) and Task.EMBED in read_tasks(checkpoint, parts):
        raise ModelLoadError(
            f"{checkpoint.files.config_file} names code of its own, {own}, which may use bidirectional "
            "attention, and does not have is_causal; Penstock runs no code from a checkpoint; set is_causal "
            "to true or false with --hf-overrides",
            param="model",
        )
    if checkpoint.query_route is not None and (parts.sparse is None or parts.sparse.kind != "splade"):
        raise ModelLoadError(
            f"{checkpoint.files.root} sends queries through SparseStaticEmbedding, but documents through no "
            "SpladePooling, which is not supported",
            param="model",
        )


def _own_code(checkpoint: Checkpoint) -> str | None:
    """The repository's own model class, which AutoModel would load; None if the files name no such class.

    Also None for Jina's embedders and models that read images, whose published classes Penstock implements.
    """
    family, code = checkpoint.family, checkpoint.files.config.get("auto_map")
    if family.both_ways_key is not None or family.reads_images:
        return None
    named = code.get("AutoModel") if isinstance(code, dict) else None
    is_model = isinstance(named, str) and named.endswith("Model") and "For" not in named.rpartition(".")[2]
    return named if is_model else None


def _leaves_causality_open(checkpoint: Checkpoint) -> bool:
    keys = ("is_causal", "use_bidirectional_attention")
    return checkpoint.is_causal and all(checkpoint.files.config.get(key) is None for key in keys)


def read_tasks(checkpoint: Checkpoint, parts: Parts) -> tuple[Task, ...]:
    if checkpoint.query_route is not None:
        return (Task.SPARSE,)
    if parts.late is not None:
        return late_tasks(checkpoint.files)
    tasks = pooling_tasks(checkpoint.files, checkpoint.architecture, parts.sparse, parts.score)
    return tasks if parts.why_not_score is None else without_score(tasks)
