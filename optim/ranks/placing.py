"""Own values of a rank, and the parameters of a model that lies on all ranks.

Parameters are read and written one after another: each is gathered whole for a moment, of which a
rank copies what lies in its ranges; back, the ranks that hold parts of a parameter broadcast them,
and each rank keeps its own shard. So no rank ever holds more than one whole parameter.

    R own values, N of the layout, F of a fragment
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim.methods import loops
from atoll.optim.ranks.ranges import Range, ranges
from atoll.optim.ranks.ranks import Message, Ranks
from atoll.optim.state import dtensors, vectors
from atoll.optim.state.layout import Fragment, Layout, LayoutError
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

    def common(self, values: Tensor, index: int | None = None) -> Tensor:
        found = self._ranks.gather(Message(tensors=[values]))
        if not found:
            return torch.empty(0)
        if index is not None:
            return vectors.cat([message.tensors[0] for message in found])
        values_N = vectors.empty(self._layout.numel)
        for rank, message in enumerate(found):
            starts, (own,) = self._starts_of(rank), message.tensors
            for each, by_rank in enumerate(self.ranges):
                at = starts[each]
                for start, stop in by_rank[rank].spans:
                    values_N[start:stop] = own[at : at + stop - start]
                    at += stop - start
        return values_N

    def own(self, values: Tensor, index: int | None = None) -> Tensor:
        return self.scatter(values if self._ranks.leads else None, index)

    def common_pieces(self, included: Tensor, index: int) -> Tensor:
        found = self._ranks.gather(Message(tensors=[included]))
        return torch.cat([m.tensors[0] for m in found]) if found else included

    def own_pieces(self, included: Tensor, index: int) -> Tensor:
        messages = [Message(tensors=[included[each.pieces]]) for each in self.ranges[index]]
        return self._ranks.tell_each(messages if self._ranks.leads else None).tensors[0]

    def common_tree(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        whole: dict[str, Any] = self._common(tree)
        return whole

    def _common(self, node: Any) -> Any:  # noqa: ANN401 - a tree of anything
        if isinstance(node, Tensor):
            is_cut = dtensors.is_dtensor(node)
            whole = dtensors.whole(node)
            if not self._ranks.leads:
                return torch.empty(0)
            return whole.cpu() if is_cut else whole
        if isinstance(node, Mapping):
            return {key: self._common(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(self._common(value) for value in node)
        return node

    def shared(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        told = self._ranks.tell(_packed(state) if self._ranks.leads else None)
        if self._ranks.leads:
            return state
        tree: Mapping[str, Any] = _unpacked(told)
        return tree

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
            number: {
                name: self._shard(value, params[number]) if isinstance(value, Tensor) else value
                for name, value in values.items()
            }
            for number, values in saved["state"].items()
        }
        return {**saved, "state": state}

    def _shard(self, saved: Tensor, param: Tensor) -> Tensor:
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

    def _spread(self, saved: Tensor) -> Tensor:
        """Give all ranks a tensor of the leader; the others know its shape."""
        here = torch.empty_like(saved, device="cpu")  # elsewhere than at the leader it has none
        values = saved.detach().cpu().contiguous() if self._ranks.leads else here
        self._ranks.broadcast_(values, 0)
        return values


def _packed(node: Any) -> Any:  # noqa: ANN401 - a tree of anything
    """Return a tree as JSON, of each tensor its dtype and shape."""
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


def _unpacked(node: Any) -> Any:  # noqa: ANN401 - a tree of anything
    """Return the tree of `_packed`, with tensors that have no values."""
    if isinstance(node, list):
        return [_unpacked(value) for value in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return torch.empty(content[1], dtype=getattr(torch, content[0]), device="meta")
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(_unpacked(value) for value in content)
    return {key: _unpacked(value) for key, value in content}
