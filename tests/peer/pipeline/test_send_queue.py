from itertools import count

from atoll.peer.pipeline.actions import SendPass
from atoll.peer.pipeline.messages import Payload
from atoll.peer.pipeline.send_queue import AHEAD_BYTES, LEAST_BEGUN, FairTurns, SendQueue
from support.pipelines import header

NUMBERS = count()


def send(direction="forward", num_bytes=AHEAD_BYTES // 4):
    path = ("c0",) if direction == "backward" else ()
    return SendPass(
        number=next(NUMBERS),
        peer="b0",
        header=header(direction=direction, path=path),
        payload=Payload(b"", bytes(num_bytes), b""),
    )


def taken(queue):
    """All sends that may begin now."""
    found = []
    while (each := queue.take()) is not None:
        found.append(each)
    return found


def test_few_outputs_begin_and_the_oldest_first():
    queue, sends = SendQueue(), [send() for _ in range(10)]
    for each in sends:
        queue.put(each)
    assert taken(queue) == sends[:4]
    queue.end(sends[2])
    assert taken(queue) == [sends[4]]


def test_a_return_waits_for_no_output():
    queue, outputs, returns = SendQueue(), [send() for _ in range(6)], [send("backward")]
    for each in outputs:
        queue.put(each)
    assert len(taken(queue)) == 4
    queue.put(returns[0])
    assert taken(queue) == returns


def test_returns_begin_before_outputs_that_waited_longer():
    queue, output, back = SendQueue(), send(), send("backward")
    queue.put(output)
    queue.put(back)
    assert taken(queue) == [back, output]


def test_two_begin_however_large_they_are():
    queue, sends = SendQueue(), [send(num_bytes=2 * AHEAD_BYTES) for _ in range(3)]
    for each in sends:
        queue.put(each)
    assert taken(queue) == sends[:LEAST_BEGUN]
    queue.end(sends[0])
    queue.end(sends[0])  # a send that fails after its payload has left ends twice
    assert taken(queue) == sends[2:]


def served(fair, want, num_bytes):
    """The peers in the order in which their pieces leave, each asking for one after the other."""
    ranks = {peer: fair.rank(peer, num_bytes) for peer in want}
    left, order = dict(want), []
    while ranks:
        peer = min(ranks, key=ranks.get)
        fair.left(ranks.pop(peer))
        order.append(peer)
        left[peer] -= 1
        if left[peer]:
            ranks[peer] = fair.rank(peer, num_bytes)
    return order


def test_pieces_for_different_peers_alternate():
    order = served(FairTurns(), {"b0": 4, "b1": 4, "b2": 2}, 100)
    assert order[:6] == ["b0", "b1", "b2"] * 2 and order[6:] == ["b0", "b1"] * 2


def test_a_peer_that_had_nothing_to_send_does_not_make_up_for_it():
    fair = FairTurns()
    served(fair, {"b0": 50}, 100)
    assert served(fair, {"b0": 3, "b1": 3}, 100)[:4].count("b0") == 2


def test_a_peer_with_larger_pieces_gets_fewer_turns():
    fair, order = FairTurns(), []
    ranks = {"b0": fair.rank("b0", 300), "b1": fair.rank("b1", 100)}
    for _ in range(12):
        peer = min(ranks, key=ranks.get)
        fair.left(ranks[peer])
        order.append(peer)
        ranks[peer] = fair.rank(peer, 300 if peer == "b0" else 100)
    assert order.count("b1") == 3 * order.count("b0")
