"""Time the arithmetic of a method on this machine.

One thread computes each part of a round on random values. It is timed by its own clock, which
stands still while other programs use the processor.

# F values of the sample
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from atoll.optim import methods
from atoll.optim.inprocess.rounds import SHAPES, Reduction
from atoll.optim.log.replay import cells_of, residual_of
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Contribution
from atoll.optim.reduction.cells import Bytes, pack
from atoll.optim.state.fragments import Fragment
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.optim.state.pieces import decode_pieces, encode_pieces
from atoll.optim.state.updates import Update
from atoll.peer.rounds.allreduce.reduction import (
    PartRange,
    PartReceiver,
    PartReducer,
    Share,
    batches,
)
from atoll.peer.rounds.messages import PIECE_BYTES, PartDone

REPEATS = 3  # the fastest counts
WEIGHT = 256.0  # of each member
SAMPLE = Layout(
    names=tuple(f"blocks.{block}.weight" for block in range(8)), shapes=((256, 512),) * 8
)
"""A million values, far more than caches hold, in enough blocks for every method's fragments."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one thread per value."""

    offer_s: float
    """Before the round: encode the contribution with error feedback."""
    owner_s: float
    """In the round, at the owner of a part: add one member's frames and encode the mean."""
    owner_more_s: float
    """Add the frames of one more member."""
    receiver_s: float
    """In the round, for another owner's part: decode the result of one member."""
    receiver_more_s: float
    """The same for one more member; about 0 if the result is a mean."""
    apply_s: float
    """After the round: the outer step."""

    def inside_s(self, peers: int) -> float:
        """Return the seconds per value of a fragment in a round of `peers` with equal parts."""
        owned_s = self.owner_s + (peers - 1) * self.owner_more_s
        received_s = self.receiver_s + (peers - 1) * self.receiver_more_s
        return (owned_s + (peers - 1) * received_s) / peers


def timed(method: Method) -> Work:
    """Return the work of a method, which is timed once per process."""
    return _timed(method.spec)


@cache
def _timed(spec: str) -> Work:
    method = methods.parse(spec)
    with _one_thread():
        if method.reduction in SHAPES:
            return _logged(method)
        return _paired(method)


def _logged(method: Method) -> Work:
    fragment = method.fragments(SAMPLE)[0]
    state = method.genesis(SAMPLE, _noise(SAMPLE.numel))
    delta_F = _noise(fragment.numel)
    feedback = residual_of(method, fragment)
    offer_s = _value_s(fragment, lambda: feedback.offer(delta_F, WEIGHT))
    if method.reduction == "low-rank":
        inside_s = _in_process_s(method, fragment, delta_F, state) - offer_s
        inside = {"owner_s": inside_s, "owner_more_s": inside_s}  # the whole round, for any number
        inside |= {"receiver_s": 0.0, "receiver_more_s": 0.0}
    else:
        inside = _by_parts_s(method, fragment, feedback.offer(delta_F, WEIGHT).frames)
    return Work(
        offer_s=offer_s,
        **inside,
        apply_s=_value_s(
            fragment,
            lambda: method.apply(state, delta_F, fragment=fragment, lr=0.1, momentum=0.1),
        ),
    )


def _by_parts_s(method: Method, fragment: Fragment, frames: Sequence[Bytes]) -> dict[str, float]:
    cells = cells_of(method, fragment)
    part = PartRange(start_cell=0, stop_cell=len(cells), cells=cells)
    one, two = (_owner_s(part, [frames] * members) for members in (1, 2))
    back, back_of_two = (_receiver_s(part, [frames] * members) for members in (1, 2))
    return {
        "owner_s": one,
        "owner_more_s": max(0.0, two - one),
        "receiver_s": back,
        "receiver_more_s": max(0.0, back_of_two - back),
    }


def _owner_s(part: PartRange, frames: Sequence[Sequence[Bytes]]) -> float:
    return _value_s(part.cells.fragment, lambda: reduced(part, frames))


def _receiver_s(part: PartRange, frames: Sequence[Sequence[Bytes]]) -> float:
    owner = reduced(part, frames)
    messages, (_, done) = list(batches(owner.frames, PIECE_BYTES)), owner.done(0, 0)
    members = len(frames)
    return _value_s(part.cells.fragment, lambda: received(part, messages, done, members))


def reduced(part: PartRange, frames: Sequence[Sequence[Bytes]]) -> PartReducer:
    """Return an owner that has added all members' chunks of a part, message by message in turn."""
    share = Share(weight=WEIGHT, clip=1.0, norm=math.inf)
    owner = PartReducer(part=part, shares={member: share for member in range(len(frames))})
    cells = slice(part.start_cell, part.stop_cell)
    messages = [batches(map(pack, sent[cells]), PIECE_BYTES) for sent in frames]
    for turn in zip(*messages, strict=True):
        for member, message in enumerate(turn):
            owner.add_all(member, memoryview(message))
        owner.advance()
    return owner


def received(part: PartRange, messages: Iterable[Bytes], done: PartDone, members: int) -> Update:
    """Return the update that a member decodes from a part's messages."""
    receiver = PartReceiver(part=part, members=members)
    for message in messages:
        receiver.take(memoryview(message))
    receiver.finish(done)
    return receiver.decoded_N


def _in_process_s(method: Method, fragment: Fragment, delta_F: Tensor, state: OuterState) -> float:
    # A whole low-rank reduction of one contribution, which takes two exchanges.
    contribution = Contribution(
        fragment=0, window=0, delta=delta_F, tokens=1, steps=1, loss=1.0, lr=1e-3
    )
    reduction: Reduction = SHAPES[method.reduction](method, SAMPLE, fragment, 1)
    return _value_s(fragment, lambda: reduction.reduce([contribution], [1.0], state))


def _paired(method: Method) -> Work:
    # Gossip decodes a partner's pseudo-gradient and weights and averages both states.
    fragment = method.fragments(SAMPLE)[0]
    delta_F = _noise(fragment.numel)
    frames = encode_pieces(method.codec, delta_F, fragment.pieces)

    def meet() -> Tensor:
        other_F = decode_pieces(method.codec, frames, fragment.pieces)
        return (other_F + delta_F).mul_(0.5)

    meet_s = _value_s(fragment, meet)
    offer_s = _value_s(fragment, lambda: encode_pieces(method.codec, delta_F, fragment.pieces))
    return Work(
        offer_s=offer_s,
        owner_s=2 * meet_s,
        owner_more_s=2 * meet_s,
        receiver_s=0.0,
        receiver_more_s=0.0,
        apply_s=meet_s,
    )


def _noise(numel: int) -> Tensor:
    return 1e-3 * torch.randn(numel, generator=torch.Generator().manual_seed(0))


def _value_s(fragment: Fragment, work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        work()
        times_s.append(time.thread_time() - began_s)
    return min(times_s) / fragment.numel


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
