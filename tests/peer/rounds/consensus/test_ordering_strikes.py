"""A fault at every message of the positions that decide orders: each is decided, and once.

What must hold is in ``support.orders``.
"""

import pytest

from atoll.optim.log.orders import (
    EvictPeer,
    ReadmitPeer,
    RotateKey,
    SetCodec,
    SetInnerSteps,
    SetReducer,
)
from support.orders import (
    LONGER_THAN_AN_ORDER,
    NEW_KEYS,
    StruckOrders,
    id_of,
    leader_at,
    strike_orders,
)
from support.strikes import KINDS

SET = SetInnerSteps(value=7)


def evict_last(swarm):
    return [], [EvictPeer(peer_id=id_of(swarm.peers[-1]))]


def evict_leader(swarm):
    here = max(peer.replica.position for peer in swarm.peers)
    return [], [EvictPeer(peer_id=id_of(leader_at(swarm, here)))]


def readmit_last(swarm):
    out = id_of(swarm.peers[-1])
    return [EvictPeer(peer_id=out)], [ReadmitPeer(peer_id=out)]


def rotate(swarm):
    """The next order is known with the rotation, and needs the new key."""
    return [], [RotateKey(value=NEW_KEYS.run_public_key), SET]


def change_codec(swarm):
    return [], [SetCodec(value="int8")]


def change_reducer(swarm):
    return [], [SetReducer(value="median")]


ORDERS = {
    "set": StruckOrders(changes=lambda swarm: ([], [SET])),
    "evict": StruckOrders(changes=evict_last, peers=4),
    "evict the leader": StruckOrders(changes=evict_leader, peers=4),
    "evict in a round": StruckOrders(changes=evict_last, peers=4, in_round=True),
    "evict in flight": StruckOrders(changes=evict_last, peers=4, in_flight=True),
    "set in flight": StruckOrders(changes=lambda swarm: ([], [SET]), in_flight=True),
    "readmit": StruckOrders(changes=readmit_last, peers=4),
    "readmit in a round": StruckOrders(changes=readmit_last, peers=4, in_round=True),
    "rotate": StruckOrders(changes=rotate),
    "codec in a round": StruckOrders(changes=change_codec, in_round=True, sums=False),
    "reducer in a round": StruckOrders(changes=change_reducer, in_round=True, sums=False),
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("set", 5),
        ("evict the leader", 6),
        ("evict in a round", 8),
        ("readmit", 7),
        ("rotate", 13),
        ("codec in a round", 11),
    ],
)
def test_orders_survive_a_fault_at_a_message(tmp_path, name, message):
    kind, end = KINDS[message % len(KINDS)]
    assert strike_orders(tmp_path / "swarm", ORDERS[name], message, kind, end) is not None


def test_a_leader_that_failed_and_answers_holds_up_no_order(tmp_path):
    """One acceptor is frozen, the other was an entry behind when the leader proposed."""
    took_s = strike_orders(tmp_path / "swarm", ORDERS["rotate"], 15, "freeze", 0)
    assert took_s is not None and took_s < 8.0


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "end"), KINDS)
@pytest.mark.parametrize("name", ORDERS)
def test_orders_survive_a_fault_at_every_message(tmp_path, name, kind, end):
    struck = 0
    for message in range(1, LONGER_THAN_AN_ORDER):
        if strike_orders(tmp_path / str(message), ORDERS[name], message, kind, end) is None:
            break
        struck += 1
    assert 10 < struck < LONGER_THAN_AN_ORDER - 1
