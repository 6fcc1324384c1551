"""The things that a run's spec names, opened on this machine: text, tokenizer, model, first state.

Nothing beyond the built-in parts is read or run unless its owner has allowed it (`Allowed`).
"""

from dataclasses import dataclass

from torch import Tensor, nn

from atoll.compression.activations import parse_activations
from atoll.compression.base import CodecError
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.module import WHOLE
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.pieces import FragmentError
from atoll.peer.errors import ModelError
from atoll.peer.pipeline.placement import StageNeeds
from atoll.peer.training import models, stages
from atoll.peer.training.data import load as data
from atoll.peer.training.data.remarks import expect_text
from atoll.peer.training.devices import Device
from atoll.peer.training.hf import lora
from atoll.peer.training.hf.beginning import begin_, expect_init, with_shape
from atoll.peer.training.permission import Allowed

STATE_BYTES = 8  # a parameter: its value and the outer step's memory, as a snapshot holds them
DEVICE_BYTES = 16  # a parameter: its value, its gradient, and two moments of AdamW
VALID_BATCHES = 16  # 16k tokens of nano: half a second on one core


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The text and the whole model of a run, ready to train in one process."""

    corpus: data.Corpus
    model: nn.Module
    """on its device; a custom one has computed a gradient there"""


def open_whole(spec: RunSpec, device: Device, allowed: Allowed | None = None) -> Opened:
    """Open the text of a run, build its model on a device, and try a custom one there.

    Raises:
        SetupError: the data or the model is not usable.
    """
    corpus = open_corpus(spec, allowed)
    device.activate()
    model = build_model(spec, corpus.tokenizer.vocab_size, allowed).to(device.device)
    try_model(spec, model, device, vocab_size=corpus.tokenizer.vocab_size)
    return Opened(corpus=corpus, model=model)


def try_model(spec: RunSpec, model: nn.Module, device: Device, *, vocab_size: int) -> None:
    """Compute a tiny gradient with a custom model; raise ModelError if it breaks the contract."""
    if spec.model.custom is None:
        return
    with device.autocast():
        models.expect_runs(
            spec.model.custom,
            model,
            device.device,
            vocab_size=vocab_size,
            seq_len=spec.data.seq_len,
        )


def open_corpus(spec: RunSpec, allowed: Allowed | None = None) -> data.Corpus:
    """Open the data of a run.

    Args:
        spec: the spec of the run.
        allowed: files that this machine's owner lets the spec name; none by default.

    Raises:
        DataError: the text is not allowed, missing, empty, too short or needs an extra.
    """
    section, allowed = spec.data, allowed or Allowed()
    allowed.expect_data(spec)
    allowed.expect_tokenizer(spec)
    corpus = data.open_corpus(
        section.source,
        format=section.format,
        tokenizer=section.tokenizer,
        tokenizer_sha256=section.tokenizer_sha256,
        text_field=section.text_field,
        valid_fraction=section.valid_fraction,
        split=section.split,
        revision=section.revision,
        seq_len=section.seq_len,
        public=section.source not in allowed.files,
    )
    expect_text(spec, corpus)
    return corpus


def open_tokenizer(spec: RunSpec, allowed: Allowed | None = None) -> data.Tokenizer:
    """Open the tokenizer of a run; raise DataError if it is not allowed or not usable."""
    (allowed or Allowed()).expect_tokenizer(spec)
    return data.open_tokenizer(spec.data.tokenizer, sha256=spec.data.tokenizer_sha256)


def build_model(
    spec: RunSpec,
    vocab_size: int,
    allowed: Allowed | None = None,
    *,
    own_loop: bool = False,
    is_first: bool = False,
) -> nn.Module:
    """Build the model of a run on the CPU, with weights drawn from the run's seed.

    If the spec names weights, frozen parameters are theirs.

    Args:
        spec: the spec of the run.
        vocab_size: number of tokens of the run's tokenizer.
        allowed: custom models that this machine's owner lets the spec name; none by default.
        own_loop: accept a model that takes no tokens, which only a loop of its own can train.
        is_first: take the trained parameters from those weights too, as for the first state.

    Raises:
        ModelError: the preset, the overrides, the custom model or the weights are not usable.
        ExtraMissing: the spec names adapters, and `peft` is not installed.
    """
    allowed = allowed or Allowed()
    if spec.model.lora is not None:  # adapters alone say nothing of the size beneath them
        expect_init(spec, allowed.files)
    if spec.model.init in allowed.files:
        spec = with_shape(spec)
    model = models.build(
        spec.model.preset,
        custom=spec.model.custom,
        overrides=spec.model.overrides,
        vocab_size=vocab_size,
        seq_len=spec.data.seq_len,
        seed=spec.run.seed,
        allowed=allowed.models,
        source_sha256=None if allowed.any_source else spec.model.source_sha256,
        own_loop=own_loop,
    )
    begin_(model, spec, files=allowed.files, is_first=is_first)
    return model


def separate_documents(spec: RunSpec, model: nn.Module, tokenizer: data.Tokenizer) -> None:
    """Let a model tell documents apart if the run packs them so; raise ModelError if it cannot."""
    if spec.data.packing == "documents":
        models.separate_documents(model, tokenizer.end_token)


def slices_of(spec: RunSpec, vocab_size: int, allowed: Allowed) -> stages.Slices:
    """Return the slices of a pipeline's model; build none.

    Args: as `build_model`.

    Raises:
        ModelError: the model is not usable, or cannot be cut into stages, or a stage into the
            fragments of the run's method.
    """
    known = stages.slices(
        spec.model.preset,
        custom=spec.model.custom,
        overrides=spec.model.overrides,
        vocab_size=vocab_size,
        seq_len=spec.data.seq_len,
        allowed=allowed.models,
        source_sha256=None if allowed.any_source else spec.model.source_sha256,
    )
    if spec.topology.num_stages > 1:
        for module, slices in slices_by_stage(spec, known).items():
            _expect_fragments(spec, known, module, slices)
    return known


def _expect_fragments(spec: RunSpec, known: stages.Slices, module: str, slices: range) -> None:
    """Check that the run's method can divide a stage as it divides a model."""
    try:
        spec.method().fragments(known.layout(slices))
    except FragmentError as error:
        raise ModelError(
            f"outer.method: {spec.outer.method} divides each stage into fragments of whole slices, "
            f"and {module} of {spec.topology.num_stages} has {len(slices)}; set count to at most "
            "the slices of the smallest stage, fewer stages, or a method of one fragment"
        ) from error


def slices_by_stage(spec: RunSpec, known: stages.Slices) -> dict[str, range]:
    """Return the slices of each module of a pipeline; raise ModelError if the cut does not fit."""
    return dict(zip(spec.modules, known.cut(spec.topology.stages), strict=True))


def stage_sizes(spec: RunSpec, known: stages.Slices) -> list[tuple[int, int]]:
    """Return, for each stage of a pipeline, its operations per token and its parameters.

    A stage of tables alone counts one operation, so that its speed is a number.
    """
    return [
        (max(1, sum(known.flops_per_token[run.start : run.stop])), known.layout(run).numel)
        for run in slices_by_stage(spec, known).values()
    ]


def stage_needs(spec: RunSpec, known: stages.Slices) -> tuple[StageNeeds, ...]:
    """Return what the stages of a run take of the peers that serve them."""
    return tuple(
        StageNeeds(
            cost=float(flops),
            state_bytes=STATE_BYTES * params,
            device_bytes=DEVICE_BYTES * params,
        )
        for flops, params in stage_sizes(spec, known)
    )


def build_stage(spec: RunSpec, module: str, vocab_size: int, allowed: Allowed) -> stages.StageModel:
    """Build one stage of a pipeline on the CPU, with weights drawn from the run's seed.

    Args: as `build_model`, and the name of the module.

    Raises:
        ModelError: the model is not usable, or cannot be cut into stages, or a stage into the
            fragments of the run's method.
    """
    known = slices_of(spec, vocab_size, allowed)
    _expect_codecs(spec, known.shape.width)
    return known.build(slices_by_stage(spec, known)[module], seed=spec.run.seed)


def _expect_codecs(spec: RunSpec, width: int) -> None:
    """Check that the run's codecs fit the width of what flows between stages."""
    for name in ("activations", "gradients"):
        try:
            parse_activations(getattr(spec.topology, name)).frame_bytes(1, width)
        except CodecError as error:
            raise ModelError(
                f"topology.{name}: does not fit a model of width {width}: {error}"
            ) from error


def first_state(
    spec: RunSpec, allowed: Allowed, *, module: str = WHOLE, own_loop: bool = False
) -> OuterState:
    """Build the state with which a module of a run begins; takes seconds for large models.

    Args: as `build_model`, and the name of the module.

    Raises:
        SetupError: the model or the tokenizer is not usable.
    """
    vocab_size = open_tokenizer(spec, allowed).vocab_size
    model: nn.Module
    if module == WHOLE:
        model = build_model(spec, vocab_size, allowed, own_loop=own_loop, is_first=True)
    else:
        model = build_stage(spec, module, vocab_size, allowed)
    layout = Layout.of(model)
    params_N = layout.flatten(model)
    del model  # of a large one, as much again as the vector
    return spec.method().genesis(layout, params_N)


def expect_params(spec: RunSpec, vocab_size: int, claimed: int, *, module: str = WHOLE) -> None:
    """Check the size of a run's built-in model before it takes any memory.

    A custom model is its owner's code; only running it would show its size.

    Args:
        spec: the spec of the run.
        vocab_size: number of tokens of the run's tokenizer.
        claimed: number of parameters by the word of a coordinator or a checkpoint.
        module: the part of the model that they are of.

    Raises:
        ModelError: the model has another size, or cannot be built.
    """
    if spec.model.custom is not None:
        return
    trained = _num_trained(spec, vocab_size, module)
    if trained != claimed:
        raise ModelError(
            f"expected a model of {claimed:,} parameters, as was claimed, got a spec of one with "
            f"{trained:,}; ask the organiser, and check --tokenizer"
        )


def _num_trained(spec: RunSpec, vocab_size: int, module: str) -> int:
    """Return the number of trained parameters of a built-in model, or of a stage of it."""
    if module != WHOLE:
        known = slices_of(spec, vocab_size, Allowed())
        return known.layout(slices_by_stage(spec, known)[module]).numel
    config = models.preset(
        spec.model.preset,
        spec.model.overrides,
        vocab_size=vocab_size,
        seq_len=spec.data.seq_len,
    )
    adapters = spec.model.lora
    return config.num_params if adapters is None else lora.num_params(config, adapters)


def validation(spec: RunSpec, corpus: data.Corpus, batches: int = VALID_BATCHES) -> list[Tensor]:
    """Return the fixed validation batches of a run, int64 `(B, T + 1)` each."""
    return corpus.validation(
        batches=batches, batch_size=spec.inner.batch_size, seq_len=spec.data.seq_len
    )
