"""The residuals of a reducer, when ranks keep them.

The leader's reducer settles and credits residuals as ever, perhaps in a thread of its own. Here
that is written down, and the ranks do it in the same order, each for its range, before they encode
the next contribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.compression.base import Codec
from atoll.compression.sparse import Sparse
from atoll.optim.ranks.placing import RankPlaces
from atoll.optim.reducer import Residual
from atoll.optim.reduction.contribution import Feedback, Offer
from atoll.optim.state.parts import TensorPart
from atoll.optim.state.updates import Update, dense


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """Settlements of one fragment that the ranks have not applied to their residuals yet."""

    kind: str
    """`settle`, `credit`, `reset` or `load`"""

    fragment: int
    share: float = 1.0
    """Weight x clip of a contribution that is settled."""

    included: Tensor | None = None
    """Bool a piece, in a settlement."""

    at: int = 0
    """First value of a credit."""

    values: Update | None = None
    """The update of a settlement that needs it, or a credit."""

    def write_to(self, residual: Residual) -> None:
        """Write it down once more, as it came from another process."""
        assert isinstance(residual, RemoteResidual), "ranks keep it"
        residual.ledger.append(self)


class RemoteResidual:
    """One fragment's residual, as the leader's reducer sees it."""

    def __init__(self, fragment: int, ledger: deque[Settlement]) -> None:
        """Write down what becomes of it."""
        self.mass: Tensor | TensorPart = torch.empty(0)
        """The leader's part of it, to be saved."""
        self._fragment, self.ledger = fragment, ledger

    def offer(self, delta: object, weight: float) -> Offer:
        """Return a contribution that the ranks have encoded."""
        assert isinstance(delta, Offer), "ranks hand in what they have encoded"
        return delta

    def encode_on(self, device: torch.device) -> None:
        raise AssertionError("each rank chooses its own device")

    def use_codec(self, codec: Codec) -> None:
        """Do nothing: each rank hears of it with the course of training."""

    def settle(
        self, offer: Offer, included: Tensor, *, weight: float, update_F: Update | None = None
    ) -> None:
        self._write("settle", share=weight, included=included, values=update_F)

    def owner_credit(self, part: slice, lost: Update) -> None:
        self._write("credit", at=part.start, values=lost)

    def reset(self) -> None:
        self._write("reset")

    def state_dict(self) -> dict[str, Any]:
        return {"mass_N": self.mass}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._write("load")

    def _write(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - of a settlement
        self.ledger.append(Settlement(kind=kind, fragment=self._fragment, **fields))


def cut(
    entries: Sequence[Settlement], places: RankPlaces, rank: int, *, with_update: bool
) -> tuple[list[Any], list[Tensor]]:
    """Return the share of one rank in some settlements: JSON, and tensors in the same order."""
    fields, tensors = list[Any](), list[Tensor]()
    for entry in entries:
        own = places.ranges[entry.fragment][rank]
        start, stop = own.values.start, own.values.stop
        field = {"kind": entry.kind, "fragment": entry.fragment, "share": entry.share}
        if entry.kind == "settle":
            assert entry.included is not None
            tensors.append(entry.included[own.pieces])
            if with_update:
                assert entry.values is not None
                tensors.append(dense(entry.values)[start:stop])
        elif entry.kind == "credit":
            assert entry.values is not None
            at, lost = _clipped(entry.values, entry.at, start, stop)
            field["at"], field["sparse"] = at, isinstance(lost, Sparse)
            tensors += [lost] if isinstance(lost, Tensor) else [lost.indices, lost.values]
        fields.append(field)
    return fields, tensors


def apply(
    fields: Sequence[Mapping[str, Any]],
    tensors: Sequence[Tensor],
    feedback: Sequence[Feedback],
    offers: dict[int, Offer],
    loaded: Sequence[Tensor],
    *,
    with_update: bool,
) -> list[Tensor]:
    """Do what `cut` described; return the tensors that it did not use.

    A residual to load is the one in `loaded`: each rank has taken its own.
    """
    left = deque(tensors)
    for field in fields:
        residual = feedback[field["fragment"]]
        if field["kind"] == "settle":
            included = left.popleft()
            update_F = left.popleft() if with_update else None
            offer = offers.pop(field["fragment"])
            if included.numel():
                residual.settle(offer, included, weight=field["share"], update_F=update_F)
        elif field["kind"] == "credit":
            first = left.popleft()
            lost: Update = first
            if field["sparse"]:
                lost = Sparse(indices=first, values=left.popleft(), shape=(residual.numel,))
            length = residual.numel if field["sparse"] else field["at"] + first.numel()
            residual.owner_credit(slice(field["at"], length), lost)
        elif field["kind"] == "load":
            residual.load_state_dict({"mass_N": loaded[field["fragment"]]})
        else:
            residual.reset()
    return list(left)


def _clipped(lost: Update, at: int, start: int, stop: int) -> tuple[int, Update]:
    """Return the part of a credit that lies in a range, and where it begins there."""
    if isinstance(lost, Tensor):
        first, last = max(at, start), min(at + lost.numel(), stop)
        return (first - start, lost[first - at : last - at]) if first < last else (0, lost[:0])
    indices = lost.indices + (at - start)
    inside = (indices >= 0) & (indices < stop - start)
    shape = (stop - start,)
    return 0, Sparse(indices=indices[inside], values=lost.values[inside], shape=shape)
