"""Models in slices, and stages: the consecutive slices of a model that one peer holds.

A model that can be cut is a sequence of slices. The first one maps `tokens_BT -> x_BTD`, the inner
ones map `x_BTD -> x_BTD`, and the last one maps `x_BTD` to logits or, with targets, to the loss. Of
the built-in decoder these are the embedding, each block, and the last norm with the output matrix.
It is never tied here, whatever its preset says: the embedding is in the first stage and the output
matrix in the last, so that the model has `vocab_size * dim` parameters more than the tied one.

A model of your own gives its slices by a function with a mark. It returns functions, so that each
peer builds the slices of its own stage and no others::

    from functools import partial
    from atoll.peer.training.models import model

    @model(slices=True)
    def build(*, vocab_size: int, seq_len: int, width: int = 64, depth: int = 4):
        blocks = [partial(Block, width) for _ in range(depth)]
        return [partial(nn.Embedding, vocab_size, width), *blocks, partial(Head, width, vocab_size)]

- The first slice has `forward(tokens_BT) -> x_BTD`, the inner ones `forward(x_BTD) -> x_BTD`.
- The last one has either of the two signatures of a whole model: `forward(x_BTD) -> logits_BTV`,
  or `forward(x_BTD, targets_BT=None) -> loss`, the mean over all positions.
- Each slice has trainable parameters of its own, and shares none: what two slices share would have
  to be in two stages. A layer without parameters belongs to a slice beside it.
- Each call of a function builds a new module, and names no device: peers also build every slice
  without values (on torch's device `meta`), to learn its shapes.
- Like a whole model, it keeps nothing that it learns in a buffer.
- To generate text, a slice may have two more methods. Without them it computes a text's earlier
  positions again for each new one: the output at a position must follow from the inputs up to it,
  as in any causal model. The methods are `extend(x_BTD, cache)`, which returns what `forward` would
  for the positions after the first `cache.rows`, given theirs alone (`SliceCache`; the last slice
  may return the logits of the newest position alone), and `cache_bytes(rows)`, what the cache then
  holds.

Parameters have global names, such as `slices.3.attention.qkv.weight`, and the values with which a
slice begins follow from the run's seed and its own index. So neither depends on the cut, and what
all stages hold is one checkpoint.

# B sequences, T positions, V vocabulary, D width
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from atoll.coordinator.run.sections import Stages
from atoll.optim.state.layout import Layout
from atoll.peer.errors import ModelError
from atoll.peer.training.cutting import cut_by_patterns, cut_evenly
from atoll.peer.training.models import (
    Block,
    ModelConfig,
    Rope,
    SliceBuilder,
    SliceCache,
    cross_entropy,
    initialise_,
    loss_after,
    preset,
    slice_builders,
    takes_targets,
)

MAX_SLICES = 512  # the deepest decoders have 126 blocks; the work of a cut grows with the square
PROBE = 8  # positions of the shapes that slices are tried with
FLOAT_BYTES, TOKEN_BYTES = 4, 8  # of a number that flows, and of a token as a tensor


@runtime_checkable
class Extending(Protocol):
    """A slice that keeps what new positions of a text need of the earlier ones."""

    def extend(self, x_BTD: Tensor, cache: SliceCache) -> Tensor:
        """Return the outputs of new positions, and keep what later ones need."""
        ...

    def cache_bytes(self, rows: int) -> int:
        """Return the bytes that a cache of so many positions holds."""
        ...


class EmbeddingSlice(nn.Module):
    """The first slice of a decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        initialise_(self, config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the residual stream before the first block."""
        return cast(Tensor, self.embedding(tokens_BT))

    def extend(self, tokens_BT: Tensor, cache: SliceCache) -> Tensor:
        """Return the same, as each position stands by itself."""
        return self(tokens_BT)  # type: ignore[no-any-return]

    def cache_bytes(self, rows: int) -> int:
        """Return 0: nothing is kept."""
        return 0


class BlockSlice(Block):
    """A block of a decoder, with a table of positions of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.rope = Rope(config)
        initialise_(self, config)

    def forward(self, x_BTD: Tensor) -> Tensor:  # type: ignore[override]
        """Return the residual stream after the block."""
        return super().forward(x_BTD, self.rope)

    def extend(self, x_BTD: Tensor, cache: SliceCache) -> Tensor:
        """Return the residual stream of new positions, whose keys and values the cache takes."""
        return self.extend_by(x_BTD, self.rope, cache)

    def cache_bytes(self, rows: int) -> int:
        """Return the bytes of the keys and values of so many positions."""
        return 2 * FLOAT_BYTES * rows * self.attention.kv_heads * self.attention.head_dim


class HeadSlice(nn.Module):
    """The last slice of a decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, False)
        initialise_(self, config)

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits, or the mean cross-entropy in nats if targets are given."""
        x_BTD = self.norm(x_BTD)
        if targets_BT is None:
            return cast(Tensor, self.head(x_BTD))
        return loss_after(self.head, x_BTD, targets_BT, width=self.head.out_features)

    def extend(self, x_BTD: Tensor, cache: SliceCache) -> Tensor:
        """Return the logits of the newest position, `(B, 1, V)`."""
        return self(x_BTD[:, -1:])  # type: ignore[no-any-return]

    def cache_bytes(self, rows: int) -> int:
        """Return 0: nothing is kept."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The input of a model, and the values between its slices."""

    vocab_size: int
    """Tokens and targets are below it."""
    seq_len: int
    """Most positions of a sequence."""
    width: int
    """D, of every slice but the last."""


class StageModel(nn.Module):
    """Some consecutive slices of a model; with all of them it is a whole model.

    The names of its parameters are those in the whole model.
    """

    def __init__(self, slices: Mapping[int, nn.Module], shape: Shape, *, num_slices: int) -> None:
        """Take the slices of a stage.

        Args:
            slices: each by its index in the model, rising.
            shape: of the model.
            num_slices: of the model.
        """
        super().__init__()
        self.indices = range(min(slices), max(slices) + 1)
        self.shape = shape
        self.is_first = self.indices.start == 0
        self.is_last = self.indices.stop == num_slices
        self.slices = nn.ModuleDict({str(index): each for index, each in slices.items()})
        self._takes_targets = self.is_last and takes_targets(slices[self.indices[-1]])

    def forward(self, inputs: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Compute the stage's output.

        Args:
            inputs: `tokens_BT` of the first stage, `x_BTD` of the others.
            targets_BT: int64, the token after each position; for the last stage only.

        Returns:
            `x_BTD`; of the last stage the logits `(B, T, V)` or, with targets, the mean loss.
        """
        x_BTD = inputs
        *earlier, last = self.slices.values()
        for each in earlier:
            x_BTD = each(x_BTD)
        if targets_BT is None:
            return cast(Tensor, last(x_BTD))
        if self._takes_targets:
            return cast(Tensor, last(x_BTD, targets_BT))
        return cross_entropy(last(x_BTD), targets_BT)

    def caches(self, max_rows: int) -> list[SliceCache]:
        """Return empty caches of one text, one a slice."""
        return [SliceCache(max_rows) for _ in self.slices]

    def cache_bytes(self, rows: int) -> int:
        """Return the bytes that the caches of a text of so many positions hold."""
        return sum(
            each.cache_bytes(rows) if isinstance(each, Extending) else rows * self._row_bytes(index)
            for index, each in zip(self.indices, self.slices.values(), strict=True)
        )

    def extend(self, inputs: Tensor, caches: Sequence[SliceCache]) -> Tensor:
        """Compute the output of new positions of one text, and keep what later ones need.

        If it raises, the caches hold as many positions as before.

        Args:
            inputs: `tokens_BT` of the first stage, `x_BTD` of the others, of the new positions.
            caches: of the earlier ones, as `caches` made them.

        Returns:
            `x_BTD` of the new positions; of the last stage the logits `(B, T, V)`, of which those
            of the newest position alone need be there.
        """
        x_BTD = inputs
        for each, cache in zip(self.slices.values(), caches, strict=True):
            if isinstance(each, Extending):
                x_BTD = each.extend(x_BTD, cache)
            else:
                all_BTD = cache.appended("inputs", x_BTD, dim=1)
                x_BTD = each(all_BTD)[:, cache.rows :]
        for cache in caches:
            cache.rows += inputs.shape[1]
        return x_BTD

    def _row_bytes(self, index: int) -> int:
        """Return the bytes of one position's input of a slice."""
        return TOKEN_BYTES if index == 0 else FLOAT_BYTES * self.shape.width

    @property
    def title(self) -> str:
        """Name of the stage, for messages."""
        first, last = self.indices[0], self.indices[-1]
        return f"stage of slice {first}" if first == last else f"stage of slices {first} to {last}"


@dataclass(frozen=True, kw_only=True)
class Slices:
    """A model that can be cut: what its slices are, and how each is built.

    Nothing here holds parameters; sizes and shapes come from slices without values.
    """

    title: str
    """The model's name, for messages."""
    builders: Sequence[SliceBuilder]
    """One a slice."""
    vocab_size: int
    """Number of tokens of the run's tokenizer."""
    seq_len: int
    """Positions per sequence of the run."""

    def __post_init__(self) -> None:
        """Check the number of slices; raise ModelError if it is out of range."""
        _expect_count(self.title, len(self.builders))

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self.builders)

    def build(self, indices: range, *, seed: int) -> StageModel:
        """Build the slices of a stage on the CPU, and no others.

        The values of each depend on the run's seed and its index alone. The caller's random state
        remains unchanged.

        Args:
            indices: of the slices.
            seed: the run's.

        Raises:
            ModelError: a slice cannot be built, or breaks the contract.
        """
        shape, built = self.shape, {}
        for index in self._checked(indices):
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(slice_seed(seed, index))
                built[index] = self._built(index)
            if any(
                value.is_meta for value in (*built[index].parameters(), *built[index].buffers())
            ):
                raise ModelError(
                    f"slice {index} of {self.title} has parameters without values; its function "
                    "must build a new module at each call"
                )
        return StageModel(built, shape, num_slices=len(self))

    def layout(self, indices: range) -> Layout:
        """Return the layout of a stage's parameters.

        Raises:
            ModelError: a slice breaks the contract.
        """
        empty = {index: self._empty[index] for index in self._checked(indices)}
        return Layout.of(StageModel(empty, self.shape, num_slices=len(self)))

    @cached_property
    def num_params(self) -> tuple[int, ...]:
        """Number of parameters of each slice, frozen ones included."""
        return tuple(_numel(each.parameters()) for each in self._empty)

    @cached_property
    def flops_per_token(self) -> tuple[int, ...]:
        """Operations of each slice's forward pass for one token, in products with parameters.

        The rows of an embedding are looked up, so they cost nothing. Attention's scores are left
        out: a share of `T / 12 D` of a block, and of all blocks alike.
        """
        return tuple(
            2 * (_numel(each.parameters()) - _numel(_tables(each))) for each in self._empty
        )

    def cut(self, stages: Stages) -> tuple[range, ...]:
        """Cut the model into stages; return the slices of each.

        Args:
            stages: how many, of about equal work; or the patterns of each one's parameters.

        Raises:
            ModelError: the model has fewer slices, the patterns do not fit it, or a slice breaks
                the contract.
        """
        if isinstance(stages, int):
            return cut_evenly(self.flops_per_token, stages)
        names = [
            [f"slices.{index}.{name}" for name, _ in each.named_parameters()]
            for index, each in enumerate(self._empty)
        ]
        return cut_by_patterns(names, stages)

    @cached_property
    def shape(self) -> Shape:
        """The values between the slices, which are tried on shapes alone.

        Raises:
            ModelError: a slice gives another shape than the contract says.
        """
        tokens_BT = torch.zeros(2, min(self.seq_len, PROBE), dtype=torch.int64, device="meta")
        first, *inner = self._empty[:-1]
        try:
            x_BTD = _tried(first, tokens_BT)
        except Exception as error:
            raise ModelError(
                f"slice 0 of {self.title} failed on tokens of shape {tuple(tokens_BT.shape)} "
                f"without values, by which peers learn the model's width: "
                f"{type(error).__name__}: {error}; let the first slice be an embedding"
            ) from error
        if not (_is_floating(x_BTD) and x_BTD.dim() == 3 and x_BTD.shape[:2] == tokens_BT.shape):
            raise self._wrong_shape(0, f"floats of shape (2, {tokens_BT.shape[1]}, width)", x_BTD)
        for index, each in enumerate(inner, start=1):
            self._expect_same_shape(index, each, x_BTD)
        self._expect_result(x_BTD, tokens_BT)
        return Shape(vocab_size=self.vocab_size, seq_len=self.seq_len, width=x_BTD.shape[2])

    @cached_property
    def num_logits(self) -> int:
        """Return how many logits a position has: at least the tokens of the run's tokenizer."""
        empty_BTD = torch.zeros(1, 1, self.shape.width, device="meta")
        try:
            found = _tried(self._empty[-1], empty_BTD)
        except Exception:
            return self.vocab_size  # some kernels run on a GPU only
        is_fit = _is_floating(found) and found.dim() == 3
        return found.shape[2] if is_fit else self.vocab_size

    def _expect_same_shape(self, index: int, inner: nn.Module, x_BTD: Tensor) -> None:
        try:
            found = _tried(inner, x_BTD)
        except Exception:
            return  # some kernels run on a GPU only; `expect_runs` tries them on a peer's device
        if not (_is_floating(found) and found.shape == x_BTD.shape):
            raise self._wrong_shape(index, f"floats of shape {tuple(x_BTD.shape)}", found)

    def _expect_result(self, x_BTD: Tensor, targets_BT: Tensor) -> None:
        last = self._empty[-1]
        try:
            found = _tried(last, x_BTD, *((targets_BT,) if takes_targets(last) else ()))
        except Exception:
            return
        if takes_targets(last):
            expected, fits = "a scalar", isinstance(found, Tensor) and found.dim() == 0
        else:
            batch, length = targets_BT.shape
            expected = f"floats of shape ({batch}, {length}, vocabulary)"
            fits = _is_floating(found) and found.dim() == 3 and found.shape[:2] == targets_BT.shape
        if not fits:
            raise self._wrong_shape(len(self) - 1, expected, found)

    def _wrong_shape(self, index: int, expected: str, found: object) -> ModelError:
        got = type(found).__name__
        if isinstance(found, Tensor):
            got = f"shape {tuple(found.shape)} of {found.dtype}"
        return ModelError(
            f"slice {index} of {self.title} must return {expected}, got {got}; "
            "the first slice maps tokens_BT to x_BTD, the inner ones x_BTD to "
            "x_BTD, the last one x_BTD to logits_BTV or, with targets_BT, to a scalar"
        )

    @cached_property
    def _empty(self) -> tuple[nn.Module, ...]:
        """All slices without values."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            slices = tuple(self._built(index) for index in range(len(self)))
        for index, each in enumerate(slices):
            if not all(param.is_meta for param in each.parameters()):
                raise ModelError(
                    f"slice {index} of {self.title} has parameters before a peer needs it; its "
                    "function must build all of it at each call, and name no device"
                )
        return slices

    def _built(self, index: int) -> nn.Module:
        try:
            built: object = self.builders[index]()
        except Exception as error:
            raise ModelError(
                f"slice {index} of {self.title} cannot be built: {type(error).__name__}: {error}; "
                "its function is called without arguments, also on torch's device 'meta'"
            ) from error
        if not isinstance(built, nn.Module):
            raise ModelError(
                f"slice {index} of {self.title} must be a torch.nn.Module, got "
                f"{type(built).__name__}"
            )
        trained = [param for param in built.parameters() if param.requires_grad]
        if not trained or not all(param.is_floating_point() for param in trained):
            raise ModelError(
                f"slice {index} of {self.title} must have trainable parameters, all "
                "floating-point; make a layer without any a part of the slice before it"
            )
        return built

    def _checked(self, indices: range) -> range:
        if not indices or indices.step != 1 or not 0 <= indices.start < indices.stop <= len(self):
            raise ValueError(f"expected consecutive slices of {len(self)}, got {indices}")
        return indices


def slices(
    preset_name: str = "nano",
    *,
    custom: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    vocab_size: int,
    seq_len: int,
    allowed: Collection[str] = (),
    source_sha256: str | None = None,
) -> Slices:
    """Return the slices of a run's model; build none.

    Args: as `atoll.peer.training.models.build`.

    Raises:
        ModelError: the preset, the overrides or the custom model are not usable, or the model
            cannot be cut.
    """
    if custom is None:
        config = preset(preset_name, overrides, vocab_size=vocab_size, seq_len=seq_len)
        if (overrides or {}).get("tied"):
            raise ModelError(
                "a model in stages cannot be tied: its embedding is in the first stage and its "
                "output matrix in the last; remove tied from the overrides"
            )
        title, builders = f"preset {preset_name!r}", _of_decoder(preset_name, config)
    else:
        title = f"model {custom!r}"
        builders = slice_builders(
            custom,
            overrides=overrides,
            vocab_size=vocab_size,
            seq_len=seq_len,
            allowed=allowed,
            source_sha256=source_sha256,
        )
    return Slices(title=title, builders=builders, vocab_size=vocab_size, seq_len=seq_len)


def slice_seed(seed: int, index: int) -> int:
    """Return the seed of a slice's first values.

    Args:
        seed: the run's.
        index: the slice's.
    """
    name = f"{seed}/slice/{index}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _of_decoder(name: str, config: ModelConfig) -> Sequence[SliceBuilder]:
    _expect_count(f"preset {name!r}", config.num_layers + 2)
    config = replace(config, tied=False)
    blocks = [partial(BlockSlice, config)] * config.num_layers
    return [partial(EmbeddingSlice, config), *blocks, partial(HeadSlice, config)]


def _expect_count(title: str, count: int) -> None:
    if not 2 <= count <= MAX_SLICES:
        raise ModelError(
            f"{title} must have 2 to {MAX_SLICES} slices to be cut into stages, got {count}; "
            "split it at its blocks, or join small ones"
        )


def _tried(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Return what a slice without values gives; it may be anything."""
    with torch.no_grad():
        return cast(Tensor, module(*inputs))


def _is_floating(found: object) -> bool:
    return isinstance(found, Tensor) and found.is_floating_point()


def _tables(module: nn.Module) -> Iterator[Tensor]:
    return (each.weight for each in module.modules() if isinstance(each, nn.Embedding))


def _numel(params: Iterator[Tensor]) -> int:
    return sum(param.numel() for param in params)
