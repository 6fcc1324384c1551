"""Own values of a rank, and the parameters of a model that lies on all ranks.

Parameters are read and written one after another: each is gathered whole for a moment, of which a
rank copies what lies in its ranges; back, the ranks that hold parts of a parameter broadcast them,
and each rank keeps its own shard. So no rank ever holds more than one whole parameter.

    R own values, N of the layout, F of a fragment
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim import quantized
from atoll.optim.methods import loops
from atoll.optim.ranks.ranges import Range, ranges
from atoll.optim.ranks.ranks import Message, Ranks
from atoll.optim.state import dtensors, parts, vectors
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout, LayoutError
from atoll.optim.state.parts import (
    Run,
    TensorPart,
    TensorParts,
    as_whole,
    expect_all,
    mapped,
    part_here,
    parts_of,
)
from atoll.optim.state.places import Places, Rule

Spans = tuple[tuple[int, int], ...]
Runs = list[list[tuple[slice, slice]]]


class RankPlaces(Places):
    """The places of a rank, which keeps a range of each fragment."""

    def __init__(self, ranks: Ranks, layout: Layout, fragments: Sequence[Fragment]) -> None:
        """Share the fragments of a layout out among the ranks."""
        self._ranks, self._layout, self._fragments = ranks, layout, tuple(fragments)
        self.ranges = [ranges(fragment, ranks.size) for fragment in fragments]
        """By fragment, then by rank."""
        starts = [self._starts_of(rank) for rank in range(ranks.size)]
        self._starts = starts[ranks.rank]
        own = [by_rank[ranks.rank] for by_rank in self.ranges]
        self.fragments = tuple(
            share.fragment(fragment, start)
            for share, fragment, start in zip(own, fragments, self._starts, strict=False)
        )
        self.numel = self._starts[-1]
        self.first = own[0].spans[0][0] if own[0].spans else 0
        self._runs = [
            [layout.runs(by_rank[rank].spans) for rank in range(ranks.size)]
            for by_rank in self.ranges
        ]
        """By fragment, then by rank: where each parameter lies among the rank's values of it."""

    def flatten(self, model: nn.Module, index: int) -> Tensor:
        return self._layout.flatten(model, self._own(index).spans)

    def gradient(self, model: nn.Module) -> Tensor:
        parts = [
            self._layout.gradient(model, self._own(index).spans)
            for index in range(len(self.fragments))
        ]
        return parts[0] if len(parts) == 1 else vectors.cat(parts)

    def held(self, model: nn.Module, values: Tensor, index: int | None = None) -> Tensor:
        indices = range(len(self.fragments)) if index is None else (index,)
        parts = []
        for each in indices:
            part = values if index is not None else self.fragments[each].cut(values)
            parts.append(self._layout.held(model, part, self._own(each).spans))
        return parts[0] if len(parts) == 1 else vectors.cat(parts)

    def load_(self, model: nn.Module, values: Tensor) -> None:
        for index, fragment in enumerate(self.fragments):
            self._load_one_(model, index, fragment.cut(values))

    def change_(self, model: nn.Module, index: int, rule: Rule, *vectors: Tensor) -> None:
        local_F = self.flatten(model, index)
        rule(local_F, *vectors)
        self._load_one_(model, index, local_F)

    def all_of(self, is_true: bool) -> bool:
        return self._ranks.all_of(is_true)

    def total(self, count: int) -> int:
        (total,) = self._ranks.totals(count)
        return int(total)

    def own_total(self, total: int) -> int:
        return total if self._ranks.leads else 0  # whoever has it: it is added up again

    @torch.no_grad()
    def _load_one_(self, model: nn.Module, index: int, values_F: Tensor) -> None:
        """Set the parameters of a fragment to all ranks' values of it."""
        ranks, by_rank = self._ranks, self._runs[index]
        for number, param in enumerate(self._layout.trained(model)):
            runs = [(rank, run) for rank in range(ranks.size) for run in by_rank[rank][number]]
            if not runs:
                continue
            whole = torch.empty(self._layout.sizes[number])
            for rank, (place, own) in runs:
                if rank == ranks.rank:
                    whole[place] = values_F[own]
                ranks.broadcast_(whole[place], rank)
            dtensors.put_whole_(param, whole.view(param.shape))

    def _own(self, index: int) -> Range:
        return self.ranges[index][self._ranks.rank]

    def _starts_of(self, rank: int) -> list[int]:
        """Return where each fragment begins among a rank's own values, and their number."""
        starts = [0]
        for by_rank in self.ranges:
            values = by_rank[rank].values
            starts.append(starts[-1] + values.stop - values.start)
        return starts

    # between the leader and the ranks

    def cut(self, vector_N: Tensor, rank: int, index: int | None = None) -> Tensor:
        """Return a rank's values of a vector, at the leader.

        Args:
            vector_N: of the layout; if there is an index, F values in the order of `Fragment.cut`.
            rank: whose.
            index: of a fragment; None for all, one after another.
        """
        if index is not None:
            return vector_N[self.ranges[index][rank].values]
        parts = [self.cut_fragment(vector_N, rank, each) for each in range(len(self.fragments))]
        return parts[0] if len(parts) == 1 else vectors.cat(parts)

    def cut_fragment(self, vector_N: Tensor, rank: int, index: int) -> Tensor:
        """Return a rank's values of one fragment, given all of the layout's vector."""
        pieces = [vector_N[start:stop] for start, stop in self.ranges[index][rank].spans]
        if len(pieces) == 1:
            return pieces[0]
        return vectors.cat(pieces) if pieces else torch.empty(0)

    def scatter(self, values: Tensor | None, index: int | None = None) -> Tensor:
        """Give each rank its values of a vector that the leader has."""
        messages = None
        if values is not None:
            each = range(self._ranks.size)
            messages = [Message(tensors=[self.cut(values, rank, index)]) for rank in each]
        return self._ranks.tell_each(messages).tensors[0]

    # saving and loading

    def common(self, values: Tensor, index: int | None = None) -> TensorPart:
        runs = self._runs_of(index)
        numel = self._layout.numel if index is None else self._fragments[index].numel
        return TensorPart(values=values, runs=runs, shape=(numel,))

    def own(self, values: Tensor | TensorParts, index: int | None = None) -> Tensor:
        if isinstance(values, TensorParts):
            return self._taken(values, self._runs_of(index))
        return self.scatter(values if self._ranks.leads else None, index)

    def common_pieces(self, included: Tensor, index: int) -> TensorPart:
        pieces = self._own(index).pieces
        return TensorPart(
            values=included,
            runs=((pieces.start, pieces.stop),),
            shape=(len(self._fragments[index].pieces),),
        )

    def own_pieces(self, included: Tensor | TensorParts, index: int) -> Tensor:
        if isinstance(included, TensorParts):
            pieces = self._own(index).pieces
            return self._taken(included, ((pieces.start, pieces.stop),))
        messages = [Message(tensors=[included[each.pieces]]) for each in self.ranges[index]]
        return self._ranks.tell_each(messages if self._ranks.leads else None).tensors[0]

    def _runs_of(self, index: int | None) -> tuple[Run, ...]:
        """Return the runs of own values in the layout's vector, or in that of one fragment."""
        if index is not None:
            values = self._own(index).values
            return ((values.start, values.stop),)
        return tuple(run for each in range(len(self.fragments)) for run in self._own(each).spans)

    def common_tree(self, tree: Mapping[str, Any], *, alike: bool = False) -> dict[str, Any]:
        share: dict[str, Any] = self._share(tree, alike)
        return share

    def _share(self, node: Any, alike: bool) -> Any:  # noqa: ANN401 - a tree of anything
        if isinstance(node, TensorPart):
            return node
        if isinstance(node, Tensor):
            if dtensors.is_dtensor(node):
                runs = dtensors.local_runs(node)
                return part_here(node.to_local().reshape(-1), runs, tuple(node.shape))
            if alike and node.dim():
                rank, size, numel = self._ranks.rank, self._ranks.size, node.numel()
                start, stop = numel * rank // size, numel * (rank + 1) // size
                values = node.reshape(-1)[start:stop]
                return TensorPart(values=values, runs=((start, stop),), shape=tuple(node.shape))
            return node if self._ranks.leads else torch.empty(0)
        if isinstance(node, Mapping):
            return {key: self._share(value, alike) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self._share(value, alike) for value in node)
        return node

    def gathered(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = mapped(tree, self._gathered)
        return whole

    def _gathered(self, part: TensorPart) -> Tensor:
        runs = torch.tensor(part.runs, dtype=torch.int64).reshape(-1, 2)
        found = self._ranks.gather(Message(tensors=[part.values.detach().cpu(), runs]))
        if not found:
            return torch.empty(0)
        parts = [
            TensorPart(
                values=message.tensors[0],
                runs=tuple((start, stop) for start, stop in message.tensors[1].tolist()),
                shape=part.shape,
            )
            for message in found
        ]
        return as_whole(parts)

    def shared(
        self, state: Mapping[str, Any], shards: Mapping[int, Sequence[TensorPart]] | None = None
    ) -> Mapping[str, Any]:
        ranks = self._ranks
        read = dict(shards or {}) | ({0: parts_of(state)} if ranks.leads else {})
        described = {str(shard): list(map(_described, some)) for shard, some in read.items()}
        found = ranks.gathered(described)
        told: dict[str, Any] | None = None
        with ranks.leading():
            if ranks.leads:
                sources = [(rank, s, each[s]) for rank, each in enumerate(found) for s in each]
                if len({len(some) for _, _, some in sources}) > 1:
                    raise LayoutError(
                        "expected shards that are one state together, got parts of others"
                    )
                told = {"state": _packed(state), "sources": sources}
        told = ranks.tell(told)
        assert told is not None, "the leader has it"
        by_tensor = zip(
            *(
                [(rank, shard, n, each) for n, each in enumerate(some)]
                for rank, shard, some in told["sources"]
            ),
            strict=True,
        )
        tensors = []
        for of_tensor in by_tensor:
            kept = tuple(
                (rank, read[int(shard)][n] if rank == ranks.rank else _undescribed(each))
                for rank, shard, n, each in of_tensor
            )
            expect_all([part for _, part in kept])
            tensors.append(TensorParts(parts=kept))
        each_tensor = iter(tensors)
        tree: Mapping[str, Any] = _unpacked(told["state"], each_tensor)
        if ranks.leads:
            each_tensor = iter(tensors)
            tree = mapped(state, lambda part: next(each_tensor))
        return tree

    def _taken(self, saved: TensorParts, runs: Sequence[Run]) -> Tensor:
        """Return the values of some runs of a tensor that ranks have read; all ranks take some."""
        taken = parts.empty(sum(stop - start for start, stop in runs), saved.dtype)
        for rank, part in saved.parts:
            numel = sum(stop - start for start, stop in part.runs)
            values = torch.empty(numel, dtype=saved.dtype)
            if rank == self._ranks.rank:
                values = part.values.detach().cpu().contiguous()
            self._ranks.broadcast_(values, rank)
            parts.copy_common_(taken, runs, replace(part, values=values))
        return taken

    def load_model(
        self, model: nn.Module, tree: Mapping[str, Any], *, but: Collection[str] = ()
    ) -> None:
        dtensors.reshard(model)
        state = model.state_dict()
        own = {k: v for k, v in state.items() if isinstance(v, Tensor) and k not in but}
        if set(own) - set(tree):
            missing = sorted(set(own) - set(tree))
            raise LayoutError(f"expected the state of this model, got one without {missing[0]}")
        with torch.no_grad():
            for name, tensor in own.items():
                dtensors.put_whole_(tensor, self._spread(tree[name]))

    def load_optimizer(self, inner: Optimizer, tree: Mapping[str, Any]) -> None:
        parts = loops.parts_of(inner)
        saved = tree["optimizers"] if "optimizers" in tree else [tree]
        own = [self._of_rank(part, each) for part, each in zip(parts, saved, strict=True)]
        inner.load_state_dict({"optimizers": own} if "optimizers" in tree else own[0])

    def _of_rank(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with this rank's shards of it."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = {
            number: {name: self._shard(value, params[number]) for name, value in values.items()}
            for number, values in saved["state"].items()
        }
        return {**saved, "state": state}

    def _shard(self, saved: Any, param: Tensor) -> Any:  # noqa: ANN401 - as an optimizer has it
        """Return this rank's shard of what belongs to a parameter."""
        if isinstance(saved, Mapping):
            whole = {
                name: self._spread(value) if isinstance(value, Tensor | TensorParts) else value
                for name, value in saved.items()
            }
            return quantized.shard_of(whole, param)
        if not isinstance(saved, Tensor | TensorParts):
            return saved
        values = self._spread(saved)
        is_count = values.dim() == 0 and param.dim() > 0
        if not dtensors.is_dtensor(param) or is_count:
            return values
        if values.shape != param.shape:
            raise LayoutError(
                f"expected an optimizer's state in its parameter's shape, {list(param.shape)}, got "
                f"{list(values.shape)}: it can't be cut over ranks; begin without it"
            )
        shard = torch.zeros_like(param, dtype=values.dtype)
        dtensors.put_whole_(shard, values)
        return shard

    def _spread(self, saved: Tensor | TensorParts) -> Tensor:
        """Give all ranks a tensor of the leader, of which the others know the shape, or of all."""
        if isinstance(saved, TensorParts):
            return self._taken(saved, ((0, math.prod(saved.shape)),)).view(saved.shape)
        here = torch.empty_like(saved, device="cpu")  # elsewhere than at the leader it has none
        values = saved.detach().cpu().contiguous() if self._ranks.leads else here
        self._ranks.broadcast_(values, 0)
        return values


def _packed(node: Any) -> Any:  # noqa: ANN401 - a tree of anything
    """Return a tree as JSON, of each tensor its dtype and shape."""
    if isinstance(node, TensorPart):
        return {"parts": None}
    if isinstance(node, Tensor):
        return {"tensor": [str(node.dtype).removeprefix("torch."), list(node.shape)]}
    if isinstance(node, bytes | bytearray):
        return {"bytes": node.hex()}
    if isinstance(node, Mapping):
        return {"map": [[key, _packed(value)] for key, value in node.items()]}
    if isinstance(node, tuple):
        return {"tuple": [_packed(value) for value in node]}
    if isinstance(node, list):
        return [_packed(value) for value in node]
    return node


def _described(part: TensorPart) -> list[Any]:
    """Return a part as JSON, without its values."""
    dtype = str(part.values.dtype).removeprefix("torch.")
    return [dtype, list(map(list, part.runs)), list(part.shape)]


def _undescribed(described: Sequence[Any]) -> TensorPart:
    dtype, runs, shape = described
    return TensorPart(
        values=torch.empty(0, dtype=getattr(torch, dtype)),
        runs=tuple((start, stop) for start, stop in runs),
        shape=tuple(shape),
    )


def _unpacked(node: Any, tensors: Iterator[TensorParts]) -> Any:  # noqa: ANN401 - a tree of anything
    """Return the tree of `_packed`, with tensors that have no values, and those in parts."""
    if isinstance(node, list):
        return [_unpacked(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "parts":
        return next(tensors)
    if kind == "tensor":
        return torch.empty(content[1], dtype=getattr(torch, content[0]), device="meta")
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(_unpacked(value, tensors) for value in content)
    return {key: _unpacked(value, tensors) for key, value in content}
