"""`atoll run`: orders to a coordinator, and what is wrong with them."""

import json
from dataclasses import replace
from itertools import count

import grpc
import pytest

from atoll.coordinator.rpc.client_errors import Busy
from atoll.coordinator.run.keys import RunKeys
from atoll.coordinator.run.status import PeerStatus
from atoll.dht.identity import Identity
from atoll.dht.testing.virtualtime import run_virtual
from atoll.optim.log.orders import NUMBERS
from atoll.peer.cli import run as run_command
from support.status import make_status


def test_an_order_waits_until_peers_decide_it(atoll, invite, key):
    done = atoll("run", "set", invite, "inner_steps=7", "outer_lr=0.5", "--key", key, "--wait", 0)
    assert done.code == 0
    assert "inner_steps is 7 from here on (given; decided as soon as" in done.err
    first = atoll("run", "pause", invite, "--key", key / "keys.json", "--wait", 0, "--json")
    told = json.loads(first.out)
    assert told["kind"] == "pause" and told["decided"] is False and told["number"] >= 3
    status = json.loads(atoll("status", invite, "--json").out)
    assert status["orders_waiting"] >= 3
    assert "orders" in atoll("status", invite).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "inner_step=7"), "unknown setting 'inner_step'; did you mean inner_steps?"),
        (("set", "colour=7"), "unknown setting 'colour'; expected inner_steps, outer_lr"),
        (("set", "inner_steps"), "expected inner_steps=NUMBER, got inner_steps"),
        (("set", "inner_steps=many"), "expected inner_steps=NUMBER, got inner_steps=many"),
        (("set", "inner_steps=0"), "inner_steps: expected greater than or equal to 1, got 0"),
        (("set", "inner_steps=2.5"), "inner_steps: expected a valid integer, got 2.5"),
        (("set", "outer_momentum=1"), "outer_momentum: expected less than 1, got 1"),
        (("set", "outer_lr=nan"), "outer_lr: expected a finite number, got nan"),
        (("set", "codec="), "expected codec=NAME, such as codec=int4, got codec="),
        (("set", "reducer=mode"), "expected reducer=mean|trimmed-mean|median"),
        (("set", "codec=gzip"), "expected one of the codecs"),
        (("set", "codec=dct"), "dct and int8 cut a model into other chunks"),
        (("stop", "--after-round", "3"), "the run ends after round 3 in any case"),
    ],
)
def test_a_wrong_order_is_told_and_nothing_is_given(atoll, invite, key, arguments, message):
    before = json.loads(atoll("status", invite, "--json").out)["orders_waiting"]
    action, *rest = arguments
    done = atoll("run", action, invite, *rest, "--key", key)
    assert done.code == 2
    assert message in done.err
    assert json.loads(atoll("status", invite, "--json").out)["orders_waiting"] == before


def test_a_peer_is_evicted_and_readmitted(atoll, invite, key):
    peer = Identity.ephemeral().peer_id
    order = ("--key", key, "--wait", 0)
    done = atoll("run", "evict", invite, peer, "--reason", "noise", *order, "--json")
    told = json.loads(done.out)
    assert (done.code, told["kind"], told["peer_id"]) == (0, "evict", peer)
    assert "warning: 0 of 1 trainers are left, so the run waits" in done.err
    again = atoll("run", "evict", invite, peer, *order)
    assert again.code == 2
    assert "the peer is evicted already; `atoll run readmit` lets it come back" in again.err
    back = atoll("run", "readmit", invite, peer, *order)
    assert back.code == 0
    assert f"{peer[-8:]} may take part again (given" in back.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evict", "laptop"), "no peer of this run is named 'laptop'; `atoll status INVITE` lists"),
        (("readmit", "laptop"), "no peer of this run is named 'laptop'"),
        (("evict", "1" * 52, "--reason", "x" * 201), "--reason: expected at most 200 characters"),
    ],
)
def test_nobody_is_evicted_by_a_wrong_name(atoll, invite, key, arguments, message):
    action, *rest = arguments
    done = atoll("run", action, invite, *rest, "--key", key)
    assert done.code == 2
    assert message in done.err


@pytest.mark.parametrize(
    ("named", "min_peers", "min_keepers", "message"),
    [
        ("one", 2, 0, "1 of 2 trainers are left"),
        ("one", 1, 0, ""),
        ("k", 1, 1, "0 of 1 keepers are left; invite others"),
    ],
)
def test_an_eviction_that_leaves_too_few_is_told(named, min_peers, min_keepers, message):
    peers = [
        PeerStatus(peer_id=name, role=role, state="training")
        for name, role in (("one", "trainer"), ("two", "trainer"), ("k", "keeper"))
    ]
    status = replace(make_status(3), peers=peers, min_peers=min_peers, min_keepers=min_keepers)
    found = run_command.shortage(status, named)
    assert message in found and bool(message) == bool(found)


def test_one_wrong_number_of_two_gives_no_order(atoll, invite, key):
    before = json.loads(atoll("status", invite, "--json").out)["orders_waiting"]
    done = atoll("run", "set", invite, "inner_steps=9", "outer_lr=-1", "--key", key)
    assert done.code == 2
    assert json.loads(atoll("status", invite, "--json").out)["orders_waiting"] == before


def test_another_key_than_the_organisers_is_refused(atoll, invite, tmp_path):
    RunKeys.load_or_create(tmp_path / "keys.json")
    done = atoll("run", "pause", invite, "--key", tmp_path)
    assert done.code == 2
    assert "expected the key of the invite's run, got that of another" in done.err


def test_a_machine_without_the_key_gives_no_order(atoll, invite, tmp_path):
    done = atoll("run", "pause", invite)
    assert done.code == 2
    assert "run this on the coordinator's machine, or pass --key" in done.err
    done = atoll("run", "pause", invite, "--key", tmp_path / "absent.json")
    assert done.code == 2
    assert "no such file" in done.err


@pytest.mark.parametrize(("refusals", "reaches"), [(3, True), (1000, False)])
def test_a_busy_coordinator_is_asked_again_for_a_while(refusals, reaches):
    calls = count()

    async def call():
        if next(calls) < refusals:
            raise Busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls; slow down")
        return "answer"

    if reaches:
        assert run_virtual(run_command.patiently(call)) == "answer"
    else:
        with pytest.raises(Busy):
            run_virtual(run_command.patiently(call))
        assert next(calls) <= 1 + run_command.BUSY_S / run_command.LOOK_EVERY_S


def test_help_has_examples(atoll):
    assert "atoll run pause INVITE" in atoll("run", "--help").out
    assert "--after-round" in atoll("run", "stop", "--help").out


def test_the_help_names_all_numbers_that_can_be_set():
    assert run_command.NAMES == (*NUMBERS, "codec", "reducer")
