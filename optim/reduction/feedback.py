"""Error feedback that conserves mass: what a codec loses comes back in a later contribution.

The residual is a mass, g = weight x gradient, kept by the peer over the whole vector in absolute
coordinates, so it survives a change of weights, of parts and of owners.

    sender     x = delta + beta g / w        sends d = decode(encode(x))
    included   g = w (x - d)                 on the cells where it was included
    else       g stays
    owner      g += W (a - u)                a: weighted mean of the d, u: what it sent back

At beta 1, a linear mean and no clipping: sum(w delta + g_old) = W u + sum(g_new).

Where matrices travel as factors, what a contribution lost shows only in the update u that all
apply, g = w (x - u), owner's encoding included, as in PyTorch's PowerSGD hook; then owners have no
credit, and sum(w delta + g_old) = W u + sum(g_new) as well.

This is EF-SGD (arXiv:1901.09847) on both legs. Departures: masses in place of gradients, because
weights change from round to round; the owner's leg goes to the owner's own residual, because
the average exists nowhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.compression import Codec, TopK
from atoll.compression.scratch import room, scratch
from atoll.compression.sparse import Sparse
from atoll.optim.reduction.sent import Sent, encode_sent, sums_of_squares
from atoll.optim.state import vectors
from atoll.optim.state.difference import Difference
from atoll.optim.state.fragments import (
    Dims,
    batches,
    decode_pieces,
    grid,
    piece_slices,
)
from atoll.optim.state.updates import Update, dense

BATCHES_AT_ONCE = 64  # of what was chosen: up to a million values, which stay in the cache


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An encoded contribution, frozen until it is settled; repairs resend the same frames."""

    weight: float
    """w of x = delta + beta g / w; 0 sends delta alone and leaves g."""

    frames: tuple[bytes, ...]
    """Codec frames, one a piece."""

    squares: tuple[float, ...]
    """Sum of squares of d, one a piece."""

    after_N: Tensor | None  # noqa: N815
    """g after an inclusion at this weight: w (x - d). None where g can't change."""

    @property
    def norm(self) -> float:
        """Euclidean norm of d."""
        return float(sum(self.squares) ** 0.5)


class Feedback:
    """The residual of one peer for one fragment."""

    def __init__(
        self,
        numel: int,
        codec: Codec,
        *,
        beta: float = 1.0,
        pieces: Sequence[Dims] | None = None,
        against_update: bool = False,
    ) -> None:
        """Start with no residual, as a joiner does.

        Args:
            numel: N, numbers of the fragment.
            codec: encodes what is sent; feedback needs one that is not unbiased.
            beta: share of the residual that comes back; 0 keeps none.
            pieces: shapes of what is encoded one by one; the cells of the grid by default.
            against_update: what an inclusion lost is the difference to the update that everyone
                applied, not to what this peer sent; then owners have no credit.

        Raises:
            ValueError: when beta is outside [0, 1], or above 0 with an unbiased codec, whose
                residual would grow without bound.
        """
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"expected a feedback between 0 and 1, got {beta}")
        if beta > 0 and codec.mode == "unbiased":
            raise ValueError(
                f"expected no feedback with the unbiased codec {codec.spec}, got {beta}; "
                "set compression.feedback = 0"
            )
        self.beta = beta
        self.codec = codec
        self.against_update = against_update
        self.numel = numel
        self.pieces = grid(numel) if pieces is None else tuple(pieces)
        self._slices = piece_slices(self.pieces)
        self._batches = list(batches(codec, self.pieces))
        self.mass_N = torch.zeros(numel if beta > 0 else 0)
        self._offered = False
        """whether there is an offer that may be settled"""
        self._credited: list[tuple[slice, Update]] = []
        """since then; it knows nothing of that"""

    def offer(self, delta: Tensor | Difference, weight: float) -> Offer:
        """Encode a contribution together with the residual. Changes nothing.

        Of several offers the last one can be settled.

        Args:
            delta: pseudo-gradient, fp32 on the CPU, or what computes it.
            weight: weight that the peer expects to be counted with.

        Raises:
            CodecError: when delta holds NaN or infinity.
        """
        frames, squares = [b""] * len(self.pieces), [0.0] * len(self.pieces)
        chosen: list[tuple[slice, TopK, Sparse]] = []
        after_N = vectors.empty(self.numel) if self._keeps(weight) else None
        for batch, codec in self._batches:
            pieces, cut = self.pieces[batch], self._values(batch)
            x = self._with_residual(delta, cut, weight)
            if isinstance(codec, TopK) and codec.go_together(len(x) // len(pieces)):
                chosen.append((batch, codec, codec.choose_rows(x.view(len(pieces), -1))))
            else:
                frames[batch], sent = encode_sent(codec, x, pieces)
                squares[batch] = sent.squares(pieces)
                if after_N is not None:
                    sent.take_from_(x)
            if after_N is not None:
                torch.mul(x, weight, out=after_N[cut])
        for some in _alike(chosen):
            self._encode_chosen(some, weight, frames, squares, after_N)
        self._offered, self._credited = True, []
        return Offer(weight=weight, frames=tuple(frames), squares=tuple(squares), after_N=after_N)

    def _encode_chosen(
        self,
        chosen: Sequence[tuple[slice, TopK, Sparse]],
        weight: float,
        frames: list[bytes],
        squares: list[float],
        after_N: Tensor | None,
    ) -> None:
        """Encode what was chosen of some batches together: calls on what one holds cost more."""
        batches, (codec, *_), parts = zip(*chosen, strict=True)
        values = torch.cat([part.values for part in parts])
        rows, numel = sum(part.shape[0] for part in parts), parts[0].shape[1]
        together = Sparse(
            indices=torch.cat([part.indices for part in parts]), values=values, shape=(rows, numel)
        )
        of_rows, sent = codec.encode_chosen(together)
        of_squares = sums_of_squares(sent.values, [(len(values) // rows,)] * rows)
        pieces = [piece for batch in batches for piece in range(batch.start, batch.stop)]
        for piece, frame, square in zip(pieces, of_rows, of_squares, strict=True):
            frames[piece], squares[piece] = frame, square
        if after_N is not None:
            starts = [self._values(batch).start for batch in batches]
            at = torch.cat([p.indices + start for p, start in zip(parts, starts, strict=True)])
            after_N.scatter_(0, at, values.sub_(sent.values).mul_(weight))

    def settle(
        self,
        offer: Offer,
        included: Tensor,
        *,
        weight: float,
        update_F: Update | None = None,
    ) -> None:
        """Take the residual of an offer that was included, piece by piece.

        Args:
            offer: what `offer` gave.
            included: bool a piece.
            weight: weight x clip factor that it was counted with. Where that is less than
                offered, less of the old residual has left, and the rest stays.
            update_F: the decoded update, for residuals against it.

        Raises:
            ValueError: when the update that this residual is against is not given.
        """
        if offer.after_N is None:
            return
        after_N = offer.after_N
        if self.against_update:
            if update_F is None:
                raise ValueError("expected the update that the residual is taken against")
            sent_N = decode_pieces(self.codec, offer.frames, self.pieces)
            after_N = after_N + (sent_N - dense(update_F)) * offer.weight
        for part, lost in self._credited:
            _add(after_N[part], lost)
        self._offered, self._credited = False, []
        share = weight / offer.weight
        if share == 1.0 and bool(included.all()):
            self.mass_N = after_N
            return
        for piece, is_in in zip(self._slices, included.tolist(), strict=True):
            if is_in:
                self.mass_N[piece].lerp_(after_N[piece], share)

    def owner_credit(self, part: slice, lost: Update) -> None:
        """Keep what the owner's encoding of a part lost: g += W (a - u).

        Call it once the entry is decided, and only for a part that the entry names as this
        owner's.

        Args:
            part: values of the part.
            lost: W (a - u): the sum of the weights that were averaged over, times the mean
                before encoding less what was decoded from what was sent. Of a sparse one an index
                may come twice, with the same value.
        """
        if self.beta > 0:
            _add(self.mass_N[part], lost)
            if self._offered:
                self._credited.append((part, lost))

    def reset(self) -> None:
        """Forget the residual, when the outcome of a contribution is unknown."""
        self.mass_N = torch.zeros_like(self.mass_N)
        self._offered = False

    def state_dict(self) -> dict[str, Any]:
        """The residual; an offer under way belongs to whoever holds it."""
        return {"mass_N": self.mass_N.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a residual.

        Raises:
            ValueError: when it has another length.
        """
        if state["mass_N"].shape != self.mass_N.shape:
            raise ValueError(
                f"expected a residual of {self.mass_N.numel()} values, "
                f"got {state['mass_N'].numel()}"
            )
        self.mass_N = state["mass_N"].clone()

    def _keeps(self, weight: float) -> bool:
        """Return whether an inclusion at this weight changes the residual."""
        return self.beta > 0 and weight != 0

    def _values(self, batch: slice) -> slice:
        """The values of some pieces."""
        pieces = self._slices[batch]
        return slice(pieces[0].start, pieces[-1].stop)

    def _with_residual(self, delta: Tensor | Difference, cut: slice, weight: float) -> Tensor:
        """Some values of x = delta + beta g / w; scratch, unless they are delta's own."""
        x = delta[cut] if isinstance(delta, Tensor) else _computed(delta, cut)
        if not self._keeps(weight):
            return x
        share = self.beta / weight
        return torch.add(x, self.mass_N[cut], alpha=share, out=scratch("offered", x))


def _add(mass: Tensor, lost: Update) -> None:
    if isinstance(lost, Tensor):
        mass += lost
    else:
        Sent(values=lost.values, indices=lost.indices).add_to_(mass)


def _computed(delta: Difference, cut: slice) -> Tensor:
    x = room("offered", (cut.stop - cut.start,), torch.device("cpu"), torch.float32)
    delta.write_(cut, x)
    return x


def _alike(
    chosen: Sequence[tuple[slice, TopK, Sparse]],
) -> Iterator[Sequence[tuple[slice, TopK, Sparse]]]:
    """Batches of one codec and of pieces of one length, some at a time."""
    groups: dict[tuple[TopK, int], list[tuple[slice, TopK, Sparse]]] = {}
    for each in chosen:
        groups.setdefault((each[1], each[2].shape[1]), []).append(each)
    for group in groups.values():
        for first in range(0, len(group), BATCHES_AT_ONCE):
            yield group[first : first + BATCHES_AT_ONCE]
