"""The values that one process keeps of a run's vectors, and their places in its model.

Mostly a process keeps them all. Of a peer of several ranks each keeps a range of every fragment
(`atoll.optim.ranks`): R of the N values, its fragments one after another. A worker computes on its
own values alone, so the same code serves both.

    own values    R, in the order of the fragments; of a process that keeps all, N as the vector is
    index         of a fragment; None for all own values
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.compression import staging
from atoll.optim.state import dtensors
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.parts import TensorPart, TensorParts, as_whole, mapped, parts_of

Rule = Callable[..., None]
"""rule(local, *values) changes local value by value."""


class Places(Protocol):
    """Maps own values to a model's parameters. All ranks of a peer call each method together."""

    fragments: tuple[Fragment, ...]
    """Own values of each fragment; their spans are places among the own values."""

    numel: int
    """R, the number of own values."""

    first: int
    """Place in the run's vector of the first own value of the first fragment."""

    def flatten(self, model: nn.Module, index: int) -> Tensor:
        """Copy a fragment's own values of the parameters to a new fp32 vector on the CPU."""
        ...

    def gradient(self, model: nn.Module) -> Tensor:
        """Copy the own values of the gradients, of all fragments."""
        ...

    def held(self, model: nn.Module, values: Tensor, index: int | None = None) -> Tensor:
        """Round own values to the dtypes of the parameters, as `Layout.held` does."""
        ...

    def load_(self, model: nn.Module, values: Tensor) -> None:
        """Set the parameters to the own values of all ranks together."""
        ...

    def change_(self, model: nn.Module, index: int, rule: Rule, *vectors: Tensor) -> None:
        """Change a fragment's parameters by a rule that takes one value after another.

        Args:
            model: whose parameters change.
            index: of the fragment.
            rule: takes a tensor of parameters and those of the vectors that belong to it.
            vectors: own values of the fragment.
        """
        ...

    def all_of(self, is_true: bool) -> bool:
        """Return whether something is true on all ranks."""
        ...

    def total(self, count: int) -> int:
        """Return the sum over the ranks."""
        ...

    def own_total(self, total: int) -> int:
        """Return a count such that all ranks' together are the total."""
        ...

    def common(self, values: Tensor, index: int | None = None) -> Tensor | TensorPart:
        """Return own values as what is saved of them: a part of all ranks'."""
        ...

    def own(self, values: Tensor | TensorParts, index: int | None = None) -> Tensor:
        """Return the own values of what was saved."""
        ...

    def common_pieces(self, included: Tensor, index: int) -> Tensor | TensorPart:
        """Return the bools of own pieces as what is saved of them."""
        ...

    def own_pieces(self, included: Tensor | TensorParts, index: int) -> Tensor:
        """Return the bools of the own pieces."""
        ...

    def common_tree(self, tree: Mapping[str, Any], *, alike: bool = False) -> dict[str, Any]:
        """Return this rank's share of the state of a module or an optimizer.

        Args:
            tree: the state; shards in it become parts.
            alike: whether whole tensors are the same on all ranks, so that each saves a part. Else
                the first one saves them.
        """
        ...

    def gathered(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with whole tensors at the first rank, given all ranks' shares of it."""
        ...

    def shared(
        self, state: Mapping[str, Any], shards: Mapping[int, Sequence[TensorPart]] | None = None
    ) -> Mapping[str, Any]:
        """Return a saved state on all ranks; most tensors in it have no values.

        Args:
            state: what the first rank has saved, at the first one; elsewhere it is ignored.
            shards: parts of other ranks that were read here, by rank.

        Raises:
            LayoutError: the shards are not of one state.
        """
        ...

    def load_model(
        self, model: nn.Module, tree: Mapping[str, Any], *, but: Collection[str] = ()
    ) -> None:
        """Load what `common_tree` returned of the model's state, but for some names."""
        ...

    def load_optimizer(self, inner: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
        """Load what `common_tree` returned of the optimizer's state."""
        ...


class WholePlaces(Places):
    """The places of a process that keeps all values."""

    first = 0

    def __init__(self, layout: Layout, fragments: Sequence[Fragment]) -> None:
        """Keep the values of a layout, in the order of its vector."""
        self.fragments = tuple(fragments)
        self.numel = layout.numel
        self._layout = layout

    def flatten(self, model: nn.Module, index: int) -> Tensor:
        return self._layout.flatten(model, self.fragments[index].spans)

    def gradient(self, model: nn.Module) -> Tensor:
        return self._layout.gradient(model)

    def held(self, model: nn.Module, values: Tensor, index: int | None = None) -> Tensor:
        spans = None if index is None else self.fragments[index].spans
        return self._layout.held(model, values, spans)

    def load_(self, model: nn.Module, values: Tensor) -> None:
        self._layout.load_(model, values)

    def change_(self, model: nn.Module, index: int, rule: Rule, *vectors: Tensor) -> None:
        spans = self.fragments[index].spans
        with torch.no_grad():
            for param, place in self._layout.parameters_in(model, spans):
                local = dtensors.whole(param).to(torch.float32)  # itself, unless bf16 or cut
                views = (
                    staging.on_device(param.device, v[place].view(param.shape)) for v in vectors
                )
                rule(local, *views)
                if local is not param:
                    dtensors.put_whole_(param, local)

    def all_of(self, is_true: bool) -> bool:
        return is_true

    def total(self, count: int) -> int:
        return count

    def own_total(self, total: int) -> int:
        return total

    def common(self, values: Tensor, index: int | None = None) -> Tensor:
        return values

    def own(self, values: Tensor | TensorParts, index: int | None = None) -> Tensor:
        assert isinstance(values, Tensor), "one process has put the parts together"
        return values

    def common_pieces(self, included: Tensor, index: int) -> Tensor:
        return included

    def own_pieces(self, included: Tensor | TensorParts, index: int) -> Tensor:
        assert isinstance(included, Tensor), "one process has put the parts together"
        return included

    def common_tree(self, tree: Mapping[str, Any], *, alike: bool = False) -> dict[str, Any]:
        return dict(tree)

    def gathered(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        return dict(tree)

    def shared(
        self, state: Mapping[str, Any], shards: Mapping[int, Sequence[TensorPart]] | None = None
    ) -> Mapping[str, Any]:
        first = parts_of(state)
        others = list((shards or {}).values())
        if any(len(parts) != len(first) for parts in others):
            raise LayoutError("expected shards that are one state together, got parts of others")
        tensors = iter([as_whole(parts) for parts in zip(first, *others, strict=True)])
        whole: Mapping[str, Any] = mapped(state, lambda part: next(tensors))
        return whole

    def load_model(
        self, model: nn.Module, tree: Mapping[str, Any], *, but: Collection[str] = ()
    ) -> None:
        kept = {name: value for name, value in model.state_dict().items() if name in but}
        model.load_state_dict({**kept, **tree})

    def load_optimizer(self, inner: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
        inner.load_state_dict(dict(tree))
