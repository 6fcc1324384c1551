"""Contributions: their encoding, their weights, and the residual of the codec's losses.

**Weights, caps and clip factors** are pure functions. The in-process group and the network round
call the same ones, so a simulated run weighs as a real one does. Medians are the lower of the two
middle values when their number is even: with two peers an absurd value then can't raise the bound
that it is held to. An absurdly small one could lower it, so the log carries a norm that bounds clip
factors from below (`carried_norm`).

    WorkRefused (ValueError)   tokens, steps or a norm that no honest peer sends

**Error feedback conserves mass**: the values that a codec loses come back in a later contribution.

The residual is a mass, g = weight x gradient, kept by the peer over the whole vector in absolute
coordinates, so it survives a change of weights, of parts and of owners.

    sender     x = delta + beta g / w        sends d = decode(encode(x))
    included   g = w (x - d)                 on the cells where it was included
    else       g stays
    owner      g += W (a - u)                a: weighted mean of the d, u: the decoded reply

At beta 1, a linear mean and no clipping: sum(w delta + g_old) = W u + sum(g_new).

If matrices travel as factors, the loss of a contribution shows only in the update u that all
peers apply: g = w (x - u), which includes the owner's encoding, as in PyTorch's PowerSGD hook. Then
owners have no credit, and sum(w delta + g_old) = W u + sum(g_new) as well.

This is EF-SGD (arXiv:1901.09847) on both legs. Departures: masses instead of gradients, because
weights change from round to round; the owner's leg goes to the owner's own residual, because
the average exists nowhere else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high, median_low
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from atoll.compression import Codec, TopK, staging
from atoll.compression.base import CPU
from atoll.compression.blocks import Int8, squarable
from atoll.compression.scratch import TILE, room, tiles_at_once
from atoll.compression.sparse import Sparse, SparseCodec
from atoll.compression.threads import share
from atoll.optim.reduction.cells import (
    SHORT,
    Bytes,
    Sent,
    encode_sent,
    sent_in,
    squares_of,
    sums_of_squares,
)
from atoll.optim.state import vectors
from atoll.optim.state.fragments import Difference
from atoll.optim.state.outer_step import to_fp32
from atoll.optim.state.pieces import (
    AT_ONCE,
    AT_ONCE_ON_DEVICE,
    Dims,
    batches,
    decode_pieces,
    grid,
    piece_slices,
)
from atoll.optim.state.updates import Update, dense

_log = logging.getLogger(__name__)

WeightRule = Literal["rate", "tokens", "equal"]

MAX_TOKENS = 1 << 40  # a window of a day at 12 million tokens/s
MAX_STEPS = 1 << 24  # a window of a day at 194 steps/s
WEIGHT_CAP = 4.0  # times the median: one claim of absurd work can't own the average
SHARE_CAP = 4.0  # of weight x clip x norm, in medians: what a weight alone may be
# Times the median. Norms are bounded a step, so without it a claim of 16 million steps would buy a
# norm of as many; honest windows are shorter.
STEPS_CAP = 4
CLIP_AT = 2.0  # times the median norm a step: honest norms stay within it (benchmarks/robust.md)
# Of the norm that the log carries, to which no contribution is clipped further: half of a group can
# lower the medians of norms, weights and steps to anything.
NORM_FLOOR = 0.5
# By which one entry moves that norm at most, up or down. A leader that closes a group of its own
# thus raises the floor to the honest norm at most, which the bound allows in any case.
NORM_MOVES = 2.0
# Times the median norm. Work that was left out for long would outweigh the other peers' windows.
DRIFT_CAP = 3.0
LARGE_PAGE_BYTES = 1 << 21  # of x86 and most of Arm
BATCHES_AT_ONCE = 64  # whose selections are encoded together: up to a million values, in cache


class WorkRefused(ValueError):
    """A contribution's claim of work or norm is not finite or absurd."""


def work_weight(tokens: int, steps: int, rule: WeightRule = "rate") -> float:
    """Return the weight of one contribution, before the cap.

    Args:
        tokens: tokens behind the pseudo-gradient; 0 for a contribution that must not count.
        steps: inner steps behind it.
        rule: "rate" is tokens / steps: a pseudo-gradient already grows with its steps, so plain
            tokens would count speed twice. "tokens" is the plain rule, "equal" gives everyone 1.

    Returns:
        A weight rounded to fp32, as entries carry it.

    Raises:
        WorkRefused: when a number is negative, zero steps did work, or one is absurd.
    """
    if not 0 <= tokens <= MAX_TOKENS or not 0 <= steps <= MAX_STEPS:
        raise WorkRefused(
            f"expected at most {MAX_TOKENS} tokens in at most {MAX_STEPS} steps, "
            f"got {tokens} in {steps}"
        )
    if tokens == 0:
        return 0.0
    if steps == 0:
        raise WorkRefused(f"expected steps behind {tokens} tokens, got 0")
    if rule == "equal":
        return 1.0
    return to_fp32(tokens / steps if rule == "rate" else tokens)


def cap_weights(weights: Sequence[float]) -> list[float]:
    """Cap weights at 4 times their median; weights of 0 stay 0 and do not count in the median.

    Raises:
        WorkRefused: when a weight is negative or not finite.
    """
    _require_amounts(weights, "weight")
    positive = [weight for weight in weights if weight > 0]
    if not positive:
        return [0.0 for _ in weights]
    cap = to_fp32(WEIGHT_CAP * median_low(positive))
    return [min(weight, cap) for weight in weights]


def clip_factors(
    norms: Sequence[float], steps: Sequence[int], *, at: float = CLIP_AT
) -> list[float]:
    """Return factors that bring each contribution's norm a step to at most `at` times the median.

    Args:
        norms: Euclidean norms of the contributions; 0 for one of weight 0.
        steps: inner steps behind each; a norm is divided by them, as it grows with them, but by at
            most 4 times the median of those with a norm.
        at: the bound, in medians; 0 clips none.

    Returns:
        Factors in (0, 1], fp32; 1 for most. A contribution of norm 0 gets 1 and does not count
        in the median.

    Raises:
        WorkRefused: when a norm is negative or not finite, or a norm above 0 took no steps.
    """
    _require_amounts(norms, "norm")
    at = at or math.inf
    if any(norm > 0 and count < 1 for norm, count in zip(norms, steps, strict=True)):
        raise WorkRefused("expected steps behind every norm above 0, got 0")
    # Contributions of norm 0 would pull the medians down, and with them everybody's bound.
    counts = [count for norm, count in zip(norms, steps, strict=True) if norm > 0]
    most = STEPS_CAP * median_low(counts or [1])
    rates = [norm / min(max(count, 1), most) for norm, count in zip(norms, steps, strict=True)]
    positive = [rate for rate in rates if rate > 0]
    if not positive:
        return [1.0 for _ in rates]
    bound = at * median_low(positive)
    return [1.0 if rate <= bound else to_fp32(bound / rate) for rate in rates]


def cap_shares(
    weights: Sequence[float],
    clips: Sequence[float],
    norms: Sequence[float],
    *,
    at: float = CLIP_AT,
) -> list[float]:
    """Return clip factors that cap weight x clip x norm at 4 times the median of that product.

    Each of the three is bounded by itself, but a peer that stays within all bounds at once would
    have ten times the share of three honest ones together.

    Args:
        weights: capped.
        clips: the factors of `clip_factors`.
        norms: of the contributions, before they are clipped.
        at: the bound of norms; of products, if it is above 4.

    Returns:
        Factors in (0, 1], fp32; those given for most.
    """
    shares = [w * c * norm for w, c, norm in zip(weights, clips, norms, strict=True)]
    positive = [share for share in shares if share > 0]
    if not positive:
        return list(clips)
    bound = max(SHARE_CAP, at) * median_low(positive)
    return [
        clip if share <= bound else to_fp32(clip * bound / share)
        for clip, share in zip(clips, shares, strict=True)
    ]


def admitted_clips(
    weights: Sequence[float],
    norms: Sequence[float],
    steps: Sequence[int],
    *,
    at: float,
    carried: float,
) -> list[float]:
    """Return the clip factors of a group's contributions; all are 1 if the method has no bound.

    Args:
        weights: capped. A contribution of weight 0 costs no work, so its norm counts nowhere.
        norms: of the contributions, before they are clipped.
        steps: inner steps behind each.
        at: the method's bound, in medians; 0 for none.
        carried: `carried_norm` of the fragment's entries so far; 0 if there is none.

    Raises:
        WorkRefused: when a norm is negative or not finite, or a norm above 0 took no steps.
    """
    counting = [norm if w > 0 else 0.0 for norm, w in zip(norms, weights, strict=True)]
    clips = clip_factors(counting, steps, at=at)
    if not at:
        return clips
    clips = cap_shares(weights, clips, counting, at=at)
    floor = NORM_FLOOR * carried
    return [
        clip if clip * norm >= floor or clip == 1.0 else to_fp32(min(1.0, floor / norm))
        for clip, norm in zip(clips, counting, strict=True)
    ]


def carried_norm(before: float, norms: Sequence[float]) -> float:
    """Return the norm that the log carries after an entry, for the next one of its fragment.

    It stays between the lower and the upper median of the norms, and moves no further than that
    takes: half of a group, whatever it declares, cannot move it beyond the norms of the others.

    Args:
        before: the one that the entries before it carried; 0 if there is none.
        norms: of the members that count, as they declared them; zeros are none.
    """
    positive = [norm for norm in norms if norm > 0]
    if not positive:
        return before
    if not before:
        return median_low(positive)
    near = min(max(before, median_low(positive)), median_high(positive))
    return min(max(near, before / NORM_MOVES), before * NORM_MOVES)


def drift_ratio(norm: float, others: Sequence[float], carried: float = 0.0) -> float:
    """Return a left-out contribution's norm as a multiple of the others' median; 0 if unknown.

    The norm is not divided by steps: left-out work gains norm and steps with every window, so its
    norm a step stays the same.

    Args:
        norm: of the contribution.
        others: norms of the contributions that counted; zeros are none.
        carried: `carried_norm` after them; half of them may be tiny, so that all others would drop
            their work.

    Raises:
        WorkRefused: when a norm is negative or not finite.
    """
    _require_amounts([norm, *others], "norm")
    positive = [other for other in others if other > 0]
    return norm / max(median_low(positive), carried) if positive else 0.0


def _require_amounts(values: Sequence[float], what: str) -> None:
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise WorkRefused(f"expected each {what} to be finite and not negative, got {value}")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An encoded contribution, frozen until it is settled; repairs resend the same frames."""

    weight: float
    """w of x = delta + beta g / w; 0 sends delta alone and leaves g."""

    frames: tuple[Bytes, ...]
    """Codec frames, one a piece; views of one memory where a pass writes many."""

    squares: tuple[float, ...]
    """Sum of squares of d, one a piece."""

    after_N: Tensor | None  # noqa: N815
    """g after an inclusion at this weight: w (x - d). None if g can't change."""

    @property
    def norm(self) -> float:
        """Return the Euclidean norm of d."""
        return float(sum(self.squares) ** 0.5)


class _Encoded(NamedTuple):
    """A batch, encoded."""

    frames: Sequence[Bytes]
    squares: Sequence[float]
    selected: Sparse | None = None
    """what Top-k has selected, of which the fields above are not known yet"""


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
            against_update: measure the loss of an inclusion against the update that all peers
                applied, not against this peer's frames; then owners have no credit.

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
        self._use(CPU)
        self.mass_N = torch.zeros(numel if beta > 0 else 0)
        self._offered = False
        """An offer may still be settled."""
        self._credited: list[tuple[slice, Update]] = []
        """Credits since that offer; its `after_N` lacks them, so `settle` adds them."""

    def encode_on(self, device: torch.device) -> None:
        """Encode what is sent on a device from now on, unless it is sent as it is.

        Frames from another device may differ in the codecs whose codes follow from sums (`fp16`,
        `int8-uniform`, `ternary`) or from ties (`topk`). All decode alike, and the residual is that
        of the frames.
        """
        if not self.against_update:
            self._use(device)

    def use_codec(self, codec: Codec) -> None:
        """Encode in another codec from now on, with the same share of losses that comes back.

        The residual stays: it is what earlier frames lost, in values, whatever encoded them. What
        is on offer can't be settled any more.
        """
        self.codec = codec
        self._offered = False
        self._use(self._device)

    def _use(self, device: torch.device) -> None:
        self._device = device
        at_once = AT_ONCE if device.type == "cpu" else AT_ONCE_ON_DEVICE
        self._batches = list(batches(self.codec, self.pieces, at_once))

    def offer(self, delta: Tensor | Difference, weight: float) -> Offer:
        """Encode a contribution together with the residual, which stays as it is.

        Only the last of several offers can be settled.

        Args:
            delta: pseudo-gradient, N values, fp32 on the CPU, or the `Difference` that computes it;
                one that spends its memory is of no use afterwards.
            weight: weight that the peer expects its contribution to get.

        Raises:
            CodecError: when delta holds NaN or infinity.
        """
        try:
            with staging.beside(self._device):
                return self._offer(delta, weight)
        except torch.OutOfMemoryError:  # training has the rest of the GPU, and goes first
            _log.info("the GPU has no memory left to encode: the CPU does it from now on")
            self._use(CPU)
            return self._offer(delta, weight)

    def _offer(self, delta: Tensor | Difference, weight: float) -> Offer:
        after_N = self._room_after(delta) if self._keeps(weight) else None
        rooms = {} if after_N is None else self._rooms_in_steps()
        encode = partial(self._encode_batch, delta, weight, after_N, rooms)
        # A device has a stream of this thread's.
        on_cpu = self._device == CPU
        encoded = share(encode, self._batches) if on_cpu else list(map(encode, self._batches))
        frames = [frame for each in encoded for frame in each.frames]
        squares = [square for each in encoded for square in each.squares]
        chosen = [
            (batch, codec, each.selected)
            for (batch, codec), each in zip(self._batches, encoded, strict=True)
            if isinstance(codec, TopK) and each.selected is not None
        ]
        for some in _alike(chosen):
            self._encode_chosen(some, weight, frames, squares, after_N)
        self._offered, self._credited = True, []
        return Offer(weight=weight, frames=tuple(frames), squares=tuple(squares), after_N=after_N)

    def _encode_batch(
        self,
        delta: Tensor | Difference,
        weight: float,
        after_N: Tensor | None,
        rooms: Mapping[int, memoryview],
        batch_and_codec: tuple[slice, Codec],
    ) -> _Encoded:
        """Encode a batch, and write its residual after an inclusion."""
        (batch, codec), cut = batch_and_codec, self._values(batch_and_codec[0])
        pieces = self.pieces[batch]
        if after_N is not None and self._goes_in_steps(codec, pieces[0]):
            room_for_frames = rooms[batch.start]
            squares = self._encode_in_steps(codec, room_for_frames, delta, cut, weight, after_N)
            return _Encoded(_rows_of(room_for_frames, len(pieces)), squares)
        x = self._with_residual(delta, cut, weight)
        # Top-k is selected now, while x is in scratch; the selections are encoded later, many
        # batches at once, because passes over x evict the encoder's code from the cache.
        if isinstance(codec, TopK) and codec.go_together(len(x) // len(pieces)):
            there = self._there(x)
            selected = codec.choose_rows(there.view(len(pieces), -1)).cpu()
            encoded = _Encoded([b""] * len(pieces), [0.0] * len(pieces), selected)
        else:
            x = x if isinstance(codec, SparseCodec) else self._there(x)
            frames, sent = encode_sent(codec, x, pieces)
            encoded = _Encoded(frames, sent.squares(pieces))
            if after_N is not None:
                sent.take_from_(x)
        if after_N is not None:
            self._put_product(x, weight, after_N[cut])
        return encoded

    def _room_after(self, delta: Tensor | Difference) -> Tensor:
        """Return memory for the residual after an inclusion, maybe that of the contribution.

        Not if a device encodes: when its memory is full, the CPU begins again.
        """
        spent_N = delta.spent_F if isinstance(delta, Difference) else None
        if spent_N is None or self._device != CPU or spent_N.dtype != torch.float32:
            return vectors.empty(self.numel)
        return spent_N

    def _goes_in_steps(self, codec: Codec, dims: Dims) -> TypeGuard[Int8]:
        """Return whether pieces of this shape may take all passes while they are in cache."""
        on_cpu = self._device == CPU
        return on_cpu and isinstance(codec, Int8) and codec.goes_in_steps(dims)

    def _rooms_in_steps(self) -> dict[int, memoryview]:
        """Return memory for the frames of each batch that is encoded in steps, by its first piece.

        The batches' memory is one, so that most of it is in large pages.
        """
        lengths = {
            batch.start: (batch.stop - batch.start) * codec.wire_bytes(TILE)
            for batch, codec in self._batches
            if self._goes_in_steps(codec, self.pieces[batch.start])
        }
        memory, rooms = _in_large_pages(sum(lengths.values())), dict[int, memoryview]()
        for first, length in lengths.items():
            rooms[first], memory = memory[:length], memory[length:]
        return rooms

    def _encode_in_steps(
        self,
        codec: Int8,
        frames: memoryview,
        delta: Tensor | Difference,
        cut: slice,
        weight: float,
        after_N: Tensor,
    ) -> list[float]:
        """Write the frames of a batch, side by side, and its residual; return squares."""
        num_pieces = (cut.stop - cut.start) // TILE
        frames_RB = torch.frombuffer(frames, dtype=torch.uint8).view(num_pieces, -1)
        at_once, share = tiles_at_once(), self.beta / weight
        numel = at_once * TILE
        old, new = torch.split(self.mass_N[cut], numel), torch.split(after_N[cut], numel)
        norms = torch.empty((cut.stop - cut.start) // SHORT)
        of_steps = torch.split(norms, numel // SHORT)

        def load(step: int, x: Tensor) -> None:
            start = cut.start + step * numel
            values = _some_of(delta, slice(start, start + len(x)), x)
            torch.add(values, old[step], alpha=share, out=x)

        def done(step: int, x: Tensor, sent: Tensor) -> None:
            torch.linalg.vector_norm(sent.view(-1, SHORT), 2, dim=1, out=of_steps[step])
            torch.mul(torch.sub(x, sent, out=sent), weight, out=new[step])

        codec.encode_in_steps(frames_RB, at_once, load, done)
        if squarable(norms):
            return squares_of(norms, num_pieces)
        pieces = [(TILE,)] * num_pieces
        return sent_in(codec, _rows_of(frames, num_pieces), pieces).squares(pieces)

    def _encode_chosen(
        self,
        chosen: Sequence[tuple[slice, TopK, Sparse]],
        weight: float,
        frames: list[Bytes],
        squares: list[float],
        after_N: Tensor | None,
    ) -> None:
        """Encode the selections of some batches together: calls cost more than their values."""
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
            offer: the last result of `offer`.
            included: bool a piece.
            weight: weight x clip factor of the contribution in the entry. If it is less than
                offered, less of the old residual has left, and the rest stays.
            update_F: the decoded update; needed only if losses are measured against it.

        Raises:
            ValueError: when losses are measured against the update and it is not given.
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
        if share == 1.0 and bool(included.all()):  # counted whole: replace instead of copying
            self.mass_N = after_N
            return
        for piece, is_in in zip(self._slices, included.tolist(), strict=True):
            if is_in:
                self.mass_N[piece].lerp_(after_N[piece], share)

    def owner_credit(self, part: slice, lost: Update) -> None:
        """Keep the loss of the owner's encoding of a part: g += W (a - u).

        Call it once the entry is decided, and only for a part that the entry names as this
        owner's: another owner's encoding lost other values.

        Args:
            part: values of the part.
            lost: W (a - u): the sum of the averaged weights, times the difference between the mean
                before encoding and the mean as the peers decode it. In a sparse one an index may
                come twice, with the same value.
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
        """Return the residual itself, as torch does; a pending offer is its holder's to keep."""
        return {"mass_N": self.mass_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the residual of a `state_dict`.

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

    def _there(self, x: Tensor) -> Tensor:
        """Return values where they are encoded."""
        return x if self._device == CPU else staging.on_device(self._device, x)

    def _put_product(self, x: Tensor, weight: float, out: Tensor) -> None:
        """Write the product of values and a weight to the host."""
        if x.device.type == "cpu":
            torch.mul(x, weight, out=out)
        else:
            staging.to_host([(x.mul_(weight), out)])

    def _values(self, batch: slice) -> slice:
        """Return the values of some pieces."""
        pieces = self._slices[batch]
        return slice(pieces[0].start, pieces[-1].stop)

    def _with_residual(self, delta: Tensor | Difference, cut: slice, weight: float) -> Tensor:
        """Return some values of x = delta + beta g / w; scratch, or a view of delta."""
        out = room("offered", (cut.stop - cut.start,), CPU, torch.float32)
        x = _some_of(delta, cut, out)
        if not self._keeps(weight):
            return x
        return torch.add(x, self.mass_N[cut], alpha=self.beta / weight, out=out)


def _some_of(delta: Tensor | Difference, run: slice, out: Tensor) -> Tensor:
    """Return some values of a pseudo-gradient: a view of it, or `out`."""
    if isinstance(delta, Tensor):
        return delta[run]
    delta.write_(run, out)
    return out


def _in_large_pages(num_bytes: int) -> memoryview:
    """Return zeros that begin with a large page and end in one.

    A mapping begins anywhere. Small pages before its first large one and after the last took 0.1 ns
    a byte of 10 MB.
    """
    if num_bytes < LARGE_PAGE_BYTES:
        return vectors.buffer(num_bytes)
    memory = vectors.buffer(num_bytes + 2 * LARGE_PAGE_BYTES)  # what nobody touches takes nothing
    start = -np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE_BYTES
    return memory[start : start + num_bytes]


def _rows_of(frames: memoryview, num_rows: int) -> list[memoryview]:
    """Split frames of one length that lie side by side."""
    length, whole = len(frames) // num_rows, frames.toreadonly()
    return [whole[at : at + length] for at in range(0, len(frames), length)]


def _add(mass: Tensor, lost: Update) -> None:
    """Add a loss to a residual; an index that comes twice counts once."""
    if isinstance(lost, Tensor):
        mass += lost
    else:
        Sent(values=lost.values, indices=lost.indices).add_to_(mass)


def _alike(
    chosen: Sequence[tuple[slice, TopK, Sparse]],
) -> Iterator[Sequence[tuple[slice, TopK, Sparse]]]:
    """Group batches by codec and length of a piece, at most `BATCHES_AT_ONCE` at a time."""
    groups: dict[tuple[TopK, int], list[tuple[slice, TopK, Sparse]]] = {}
    for each in chosen:
        groups.setdefault((each[1], each[2].shape[1]), []).append(each)
    for group in groups.values():
        for first in range(0, len(group), BATCHES_AT_ONCE):
            yield group[first : first + BATCHES_AT_ONCE]
