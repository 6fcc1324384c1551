"""The model of a checkpoint: `load_checkpoint`, for programs and for the commands that use one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from atoll.coordinator import checkpoint_sets
from atoll.coordinator.checkpoint_sets import CheckpointSet
from atoll.coordinator.checkpoints import Checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import ModelError
from atoll.peer.training.data.tokens import Tokenizer
from atoll.peer.training.opening import (
    build_model,
    expect_params,
    open_tokenizer,
    separate_documents,
    slices_by_stage,
    slices_of,
)
from atoll.peer.training.permission import Allowed, with_own_files
from atoll.peer.training.stages import Slices, StageModel


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model as a run has trained it, with what it needs to be used."""

    model: nn.Module
    """On the CPU; with its adapters, if the run trained some; of a pipeline in one piece."""
    spec: RunSpec
    """Of the run, with this machine's files."""
    tokenizer: Tokenizer
    positions: tuple[int, ...]
    """Rounds committed by each module; a dense run has one, a pipeline one for each stage."""

    @property
    def position(self) -> int:
        """Return the rounds committed; of a pipeline, by its last stage."""
        return self.positions[-1]


def load_checkpoint(
    checkpoint: str | Path | Checkpoint,
    *,
    allow_model: str | Collection[str] = (),
    any_source: bool = False,
    tokenizer: str | None = None,
    init: str | None = None,
) -> Trained:
    """Load the model of a checkpoint. Its author is anybody, so it names no code and no file.

    Args:
        checkpoint: a checkpoint, its file, or a folder (the newest file in it is used). Of a
            pipeline the file of any stage, or the folder that holds those of the stages: the files
            of the others are found beside it.
        allow_model: custom model, or models, that the checkpoint may name, as `module:function`.
        any_source: accept a custom model of another source than the one that was trained.
        tokenizer: the tokenizer's file on this machine; one that the checkpoint names is not read.
        init: folder of the weights with which the run began, needed beneath adapters and for
            frozen parameters; one that the checkpoint names is not read.

    Raises:
        CheckpointError: the checkpoint, or that of a stage, is missing or damaged.
        LayoutError: its parameters do not fit its model.
        SetupError: its model, tokenizer or weights are not allowed, or not usable here, or of
            another size.
    """
    found = checkpoint if isinstance(checkpoint, Checkpoint) else checkpoint_sets.find(checkpoint)
    spec = with_own_files(found.spec, data=None, tokenizer=tokenizer, init=init)
    allowed = Allowed(
        models=frozenset({allow_model} if isinstance(allow_model, str) else allow_model),
        files=frozenset(name for name in (tokenizer, init) if name is not None),
        any_source=any_source,
    )
    opened = open_tokenizer(spec, allowed)
    model: nn.Module
    if isinstance(found, CheckpointSet) and found.is_pipeline:
        known = slices_of(spec, opened.vocab_size, allowed)
        model = _pipeline(spec, found, known)
    else:
        whole = found if isinstance(found, Checkpoint) else found.read(found.headers[0])
        model = _dense(spec, whole, opened, allowed)
    positions = (found.position,) if isinstance(found, Checkpoint) else found.positions
    return Trained(model=model, spec=spec, tokenizer=opened, positions=positions)


def expect_stages(spec: RunSpec, found: CheckpointSet, known: Slices) -> None:
    """Check that the checkpoints of a pipeline hold the parameters of its stages; build none.

    Args:
        spec: of the run, with this machine's files.
        found: its checkpoints.
        known: the slices of its model.

    Raises:
        ModelError: one has others, or the model cannot be cut.
    """
    runs = slices_by_stage(spec, known)
    for (module, run), header in zip(runs.items(), found.headers, strict=True):
        expected = known.layout(run)
        if header.layout != expected:
            raise ModelError(
                f"{header.path}: expected the {expected.numel:,} parameters of {module}, got "
                f"{header.layout.numel:,} that are not those; check that the model and "
                "--tokenizer are the run's"
            )


def _dense(
    spec: RunSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, allowed: Allowed
) -> nn.Module:
    if spec.topology.num_stages > 1:
        raise ModelError(
            "a checkpoint of one stage is not a model; give the path of its file, beside which "
            "those of the other stages are found"
        )
    expect_params(spec, tokenizer.vocab_size, checkpoint.layout.numel)
    model = build_model(spec, tokenizer.vocab_size, allowed)
    separate_documents(spec, model, tokenizer)
    checkpoint.layout.load_(model, checkpoint.params_N)
    return model


def _pipeline(spec: RunSpec, found: CheckpointSet, known: Slices) -> StageModel:
    """Return all slices as one model; of the stages, one checkpoint is in memory at a time."""
    expect_stages(spec, found, known)
    slices: dict[int, nn.Module] = {}
    runs = slices_by_stage(spec, known).values()
    for run, header in zip(runs, found.headers, strict=True):
        stage = known.build(run, seed=spec.run.seed)
        header.layout.load_(stage, found.read(header).params_N)
        slices |= zip(stage.indices, stage.slices.values(), strict=True)
    return StageModel(slices, known.shape, num_slices=len(known))
