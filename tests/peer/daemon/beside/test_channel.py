"""Messages between two processes: what arrives, and what is refused."""

import math
import socket

import pytest
import torch

from atoll.compression.sparse import Sparse
from atoll.coordinator.rpc.client_errors import CoordinatorRefused
from atoll.optim.ranks.residuals import Settlement
from atoll.optim.reducer import Commit
from atoll.optim.reduction.contribution import Offer
from atoll.optim.state.vectors import joined_bytes
from atoll.peer.daemon.beside import channel
from atoll.peer.daemon.beside.channel import HEADER, Channel, ChannelClosed
from atoll.peer.errors import DataError


def passed(ends, value):
    ends[0].send("value", value)
    kind, (got,) = ends[1].receive()
    assert kind == "value"
    return got


@pytest.mark.parametrize(
    "value", [None, True, -(1 << 63), 1.5, "é\udcff", b"\0", (1, (2,)), {"a": ()}]
)
def test_plain_values_arrive(ends, value):
    assert passed(ends, value) == value


def test_a_number_that_is_none_arrives(ends):
    assert math.isnan(passed(ends, math.nan))


def test_a_commit_arrives(ends):
    mine = Commit(position=3, params_N=torch.ones(5), included=torch.tensor([True]), members=2)
    got = passed(ends, mine)
    assert (got.position, got.members, got.counts) == (3, 2, True)
    assert torch.equal(got.params_N, mine.params_N)


def test_an_encoded_contribution_arrives(ends):
    mine = Offer(weight=2.0, frames=(b"abc", b"", b"z"), squares=(0.1, 0.2, 0.3), after_N=None)
    assert passed(ends, mine) == mine


def test_frames_are_copied_once(ends):
    mine = Offer(weight=2.0, frames=(b"a" * 70_000, b"b" * 70_000), squares=(), after_N=None)
    together = joined_bytes(passed(ends, mine).frames)
    assert isinstance(together, memoryview), "they lie side by side where they were put"
    assert together == b"".join(mine.frames)


def test_a_sparse_settlement_arrives(ends):
    lost = Sparse(indices=torch.tensor([1, 4]), values=torch.tensor([0.5, 2.0]), shape=(9,))
    got = passed(ends, Settlement(kind="credit", fragment=1, at=4, values=lost))
    assert (got.kind, got.fragment, got.at) == ("credit", 1, 4)
    assert torch.equal(got.values.dense(), lost.dense())


@pytest.mark.parametrize(
    "error", [DataError("no data"), FileNotFoundError(2, "no such file", "x"), KeyboardInterrupt()]
)
def test_an_error_arrives_as_what_it_was(ends, error):
    got = passed(ends, error)
    assert type(got) is type(error) and str(got) == str(error)


def test_an_error_with_arguments_of_its_own_keeps_its_text(ends):
    import grpc

    error = CoordinatorRefused(grpc.StatusCode.PERMISSION_DENIED, "the token is unknown")
    got = passed(ends, error)
    assert type(got) is CoordinatorRefused and str(got) == str(error)


def test_an_error_of_a_class_that_is_not_here_is_named(ends):
    class Elsewhere(Exception):
        pass

    got = passed(ends, Elsewhere("gone"))
    assert type(got) is RuntimeError and "Elsewhere: gone" in str(got)


def test_a_name_that_is_no_error_is_not_called():
    got = channel._error("os", "getpid", (), "text")
    assert type(got) is RuntimeError and str(got) == "getpid: text"


def test_a_value_that_does_not_travel_is_refused(ends):
    with pytest.raises(TypeError, match="expected a value that travels"):
        ends[0].send("value", object())
    assert passed(ends, 1) == 1  # and nothing of it was sent


def test_a_length_out_of_bounds_ends_the_channel(ends):
    ends[0]._socket.sendall(HEADER.pack(channel.MAX_BYTES + 1, 0))
    with pytest.raises(ChannelClosed, match="expected at most"):
        ends[1].receive()


def test_descriptors_that_were_announced_and_are_missing_end_the_channel(ends):
    ends[0]._socket.sendall(HEADER.pack(1, 3))
    with pytest.raises(ChannelClosed, match="3 descriptors"):
        ends[1].receive()


def test_both_directions_notice_an_end_that_is_gone():
    ours, theirs = socket.socketpair()
    here = Channel(ours)
    theirs.close()
    with pytest.raises(ChannelClosed):
        here.receive()
    with pytest.raises(ChannelClosed):
        here.send("value", bytes(1 << 20))
    here.close()
