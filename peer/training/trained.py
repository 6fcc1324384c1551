"""The model of a checkpoint: `load_checkpoint`, for programs and for the commands that use one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from atoll.coordinator import checkpoints
from atoll.coordinator.checkpoints import Checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import SetupError
from atoll.peer.training.data.tokens import Tokenizer
from atoll.peer.training.opening import (
    build_model,
    expect_params,
    open_tokenizer,
    separate_documents,
)
from atoll.peer.training.permission import Allowed, with_own_files


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model as a run has trained it, with what it needs to be used."""

    model: nn.Module
    """On the CPU; with its adapters, if the run trained some."""
    spec: RunSpec
    """Of the run, with this machine's files."""
    tokenizer: Tokenizer
    position: int
    """Rounds committed."""


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
        checkpoint: a checkpoint, its file, or a folder (the newest file in it is used).
        allow_model: custom model, or models, that the checkpoint may name, as `module:function`.
        any_source: accept a custom model of another source than the one that was trained.
        tokenizer: the tokenizer's file on this machine; one that the checkpoint names is not read.
        init: folder of the weights with which the run began, needed beneath adapters and for
            frozen parameters; one that the checkpoint names is not read.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        LayoutError: its parameters do not fit its model.
        SetupError: its model, tokenizer or weights are not allowed, or not usable here, or of
            another size.
    """
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = checkpoints.load_checkpoint(newest(Path(checkpoint)))
    spec = with_own_files(checkpoint.spec, data=None, tokenizer=tokenizer, init=init)
    allowed = Allowed(
        models=frozenset({allow_model} if isinstance(allow_model, str) else allow_model),
        files=frozenset(name for name in (tokenizer, init) if name is not None),
        any_source=any_source,
    )
    opened = open_tokenizer(spec, allowed)
    expect_params(spec, opened.vocab_size, checkpoint.layout.numel)
    model = build_model(spec, opened.vocab_size, allowed)
    separate_documents(spec, model, opened)
    checkpoint.layout.load_(model, checkpoint.params_N)
    return Trained(model=model, spec=spec, tokenizer=opened, position=checkpoint.position)


def newest(path: Path) -> Path:
    """Return a checkpoint's file, or the newest one in a folder.

    Raises:
        SetupError: the folder holds none.
    """
    if not path.is_dir():
        return path
    files = list(path.glob("*.safetensors"))
    if not files:
        raise SetupError(f"expected a checkpoint (*.safetensors) in {path}, got none")
    return max(files, key=lambda file: file.stat().st_mtime_ns)
