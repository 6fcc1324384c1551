"""One step along the log, as every follower of it takes it."""

from __future__ import annotations

from torch import Tensor

from atoll.compression import Codec
from atoll.optim.log import Entry, split_body
from atoll.optim.outer import nesterov
from atoll.optim.state import OuterState
from atoll.optim.update import decode_update


def next_state(
    state: OuterState,
    entry: Entry,
    body: bytes | memoryview,
    codec: Codec,
    update_N: Tensor | None = None,
) -> OuterState:
    """state(p+1) = apply(state(p), entry(p)).

    Args:
        state: the state before the entry; left as it is.
        entry: the entry; that it follows and is certified is the caller's to check.
        body: the bytes of its parts, checked here against their digests.
        codec: the run's codec.
        update_N: the decoded body, where the caller has verified and decoded it already.

    Raises:
        MalformedRecord: the body is not the one that the entry names.
        UpdateError: the body does not decode to finite numbers.
    """
    if entry.kind == "null":
        return state.at(entry.position + 1)
    if update_N is None:
        split_body(entry, body)
        update_N = decode_update([body], codec, state.layout.numel)
    return nesterov(state, update_N, lr=entry.lr, momentum=entry.momentum)
