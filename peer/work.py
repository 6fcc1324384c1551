"""What a method's arithmetic costs a peer's processor, timed on this machine.

Each part of a round is done once with random values, by one thread and its own clock, which stands
still while other programs have the processor.

# F values of the sample
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from atoll.optim import methods
from atoll.optim.fragments import Fragment, decode_pieces, encode_pieces
from atoll.optim.layout import Layout
from atoll.optim.methods.base import Method
from atoll.optim.reducer import Contribution
from atoll.optim.reduction import SHAPES, Reduction
from atoll.optim.replay import residual_of

REPEATS = 3
SAMPLE = Layout(
    names=tuple(f"blocks.{block}.weight" for block in range(8)), shapes=((256, 512),) * 8
)
"""A million values: far more than caches hold, and blocks for as many fragments."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one thread, a value of the fragment."""

    offer_s: float
    """Before the round: the contribution encoded, with what earlier ones lost."""
    reduce_s: float
    """In it: a part of everyone's frames reduced, and what comes back decoded."""
    frame_s: float
    """A frame of one more member decoded, where everyone decodes everyone's."""
    apply_s: float
    """After it: the outer step."""

    def inside_s(self, method: Method, peers: int) -> float:
        """In the round, of so many peers."""
        return self.reduce_s + (self.frame_s * (peers - 1) if method.reduction == "gather" else 0.0)


def timed(method: Method) -> Work:
    """The work of a method; the same at each call in one process."""
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
    contribution = Contribution(
        fragment=0, window=0, delta_N=delta_F, tokens=1, steps=1, loss=1.0, lr=1e-3
    )
    reduction: Reduction = SHAPES[method.reduction](method, SAMPLE, fragment, 1)
    feedback = residual_of(method, fragment)
    offer = feedback.offer(delta_F, 1.0)
    update_F = reduction.reduce([contribution], [1.0], state).update_F
    offer_s = _value_s(fragment, lambda: feedback.offer(delta_F, 1.0))
    both_s = _value_s(fragment, lambda: reduction.reduce([contribution], [1.0], state))
    return Work(
        offer_s=offer_s,
        reduce_s=max(0.0, both_s - offer_s),
        frame_s=_frame_s(method, fragment, offer.frames),
        apply_s=_value_s(
            fragment,
            lambda: method.apply(state, update_F, fragment=fragment, lr=0.1, momentum=0.1),
        ),
    )


def _frame_s(method: Method, fragment: Fragment, frames: tuple[bytes, ...]) -> float:
    if method.reduction != "gather":
        return 0.0
    return _value_s(fragment, lambda: decode_pieces(method.codec, frames, fragment.pieces))


def _paired(method: Method) -> Work:
    """By gossip: one other's pseudo-gradient and weights decoded, and both states averaged."""
    fragment = method.fragments(SAMPLE)[0]
    delta_F = _noise(fragment.numel)
    frames = encode_pieces(method.codec, delta_F, fragment.pieces)

    def meet() -> Tensor:
        other_F = decode_pieces(method.codec, frames, fragment.pieces)
        return (other_F + delta_F).mul_(0.5)

    meet_s = _value_s(fragment, meet)
    offer_s = _value_s(fragment, lambda: encode_pieces(method.codec, delta_F, fragment.pieces))
    return Work(offer_s=offer_s, reduce_s=2 * meet_s, frame_s=0.0, apply_s=meet_s)


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
