"""Orders in a pipeline: two stages of two peers each, as processes, of which one is away."""

import json
import os
import signal
import time
from contextlib import suppress

import pytest

from atoll.optim.log.entry import Entry
from atoll.optim.log.orders import read_order, read_settings
from atoll.peer.cli.main import main
from support.forks import Forked
from support.limits import DEADLINE_S
from support.organiser import LOOPBACK, stand_on_one_log, until

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(400)]

STAGES = ("stage-1", "stage-2")
PEERS = tuple(f"peer-{number}" for number in range(4))


@pytest.fixture
def organiser(organise, kit):
    return organise(
        kit.tiny_spec(
            run={"rounds": 0},
            inner={"batch_size": 2, "grad_accumulation": 2, "warmup_steps": 2},
            round={"min_peers": 4, "snapshot_every": 1, "grace_s": 5.0, "stall_s": 3.0},
            topology={"stages": 2, "deadline_s": 30.0},
        )
    )


@pytest.fixture
def spawn(tmp_path):
    """Starts peers as processes; what is left of them is killed."""
    started = []

    def begin(invite, name):
        words = ("--state-dir", tmp_path / name, "--name", name, "--device", "cpu", "--yes")
        with (tmp_path / f"{name}.log").open("a") as log:
            process = Forked(
                "peer", invite.encode(), *words, "--listen", *LOOPBACK, stdout=log, stderr=log
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture
def order(organiser, capsys):
    """Gives orders as their organiser does, and waits until all stages have decided them."""

    def give(action, *arguments):
        words = ["run", action, str(organiser.invite), *arguments, "--key", str(organiser.folder)]
        assert main([*words, "--wait", str(DEADLINE_S), "--json"]) == 0
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(each["decided"] for each in told), told

    return give


def stands(organiser):
    return {each.name: each.position for each in organiser.status().modules}


def until_further(organiser, rounds):
    """Wait for rounds of each stage."""
    before = stands(organiser)
    until(
        lambda: all(stands(organiser)[name] >= before[name] + rounds for name in STAGES),
        f"{rounds} more rounds of each stage",
    )


def log_of(organiser, stage):
    store = organiser.up.coordinator.logs[stage].replica.store
    return [Entry.decode(record.entry) for record in store.headers(0, 10_000)]


def begin_run(organiser, spawn):
    """Four peers, two for each stage, that have decided rounds; processes and modules by name."""
    running = {}
    for number, name in enumerate(PEERS, 1):  # one after the other
        running[name] = spawn(organiser.invite, name)
        until(lambda joined=number: len(organiser.status().peers) == joined, name)
    modules = {peer.name: peer.module for peer in organiser.status().peers}
    assert sorted(modules.values()) == ["stage-1", "stage-1", "stage-2", "stage-2"]
    until(
        lambda: len(stands(organiser)) == 2 and all(stands(organiser).values()),
        "rounds",
    )
    until_further(organiser, 1)
    return running, modules


@pytest.mark.parametrize("away", ["stopped", "frozen"])
def test_all_stages_follow_orders_and_so_does_a_peer_that_was_away(
    organiser, spawn, order, away, tmp_path
):
    running, modules = begin_run(organiser, spawn)
    gone = PEERS[-1]
    send = signal.SIGINT if away == "stopped" else signal.SIGSTOP
    os.killpg(running[gone].pid, send)
    if away == "stopped":
        assert running[gone].wait(60) == 128 + signal.SIGINT
    order("pause")
    paused = stands(organiser)
    assert organiser.status().state == "paused"
    time.sleep(8.0)  # a round takes less
    assert stands(organiser) == paused
    order("set", "inner_steps=3", "codec=int4")
    after = {name: position + 2 for name, position in paused.items()}
    assert stands(organiser) == after, "an order takes one position of each stage, and nothing else"
    order("resume")
    until_further(organiser, 2)

    if away == "stopped":
        running[gone] = spawn(organiser.invite, gone)
    else:
        os.killpg(running[gone].pid, signal.SIGCONT)
    until(lambda: is_member(organiser, modules[gone], gone), "the peer in rounds again")
    until(lambda: stand_on_one_log(organiser), "the coordinator to have every entry")
    order("stop")
    for name, process in running.items():
        assert process.wait(60) == 0, (tmp_path / f"{name}.log").read_text()[-2000:]
    for stage in STAGES:
        expect_followed(log_of(organiser, stage))


def is_member(organiser, stage, name):
    """Whether one of the newest entries has a contribution of a peer, with weight."""
    peer_id = next(peer.peer_id for peer in organiser.status().peers if peer.name == name)
    newest = log_of(organiser, stage)[-3:]
    return any(m.peer_id == peer_id and m.weight for e in newest for m in e.members)


def expect_followed(log):
    """Expect all orders, in a row, and that each changed what came after it."""
    kinds = [read_order(entry.order).change.kind for entry in log if entry.order]
    assert kinds == ["pause", "inner_steps", "codec", "resume", "stop"]
    at = [entry.position for entry in log if entry.order]
    assert at[:4] == list(range(at[0], at[0] + 4)), "nothing but orders in a pause"
    assert at[-1] == log[-1].position
    before = [entry for entry in log[: at[0]] if entry.kind == "update"]
    later = [entry for entry in log[at[3] :] if entry.kind == "update"]
    assert {read_settings(entry.settings).codec for entry in later} == {"int4"}
    steps = [{member.steps for member in entry.members if member.weight} for entry in later]
    assert steps[-1] == {3} and {2} in [{m.steps for m in e.members} for e in before]
    sizes = [
        [sum(part.wire_bytes for part in entry.parts) for entry in some] for some in (before, later)
    ]
    assert max(sizes[1]) < 0.7 * min(sizes[0]), sizes


def test_a_stage_goes_on_without_its_first_acceptor_once_it_is_evicted(organiser, spawn, order):
    """Of two acceptors the first alone is a quorum, and so is none without it."""
    running, modules = begin_run(organiser, spawn)
    names = {peer.peer_id: peer.name for peer in organiser.status().peers}
    first = organiser.up.coordinator.logs["stage-1"].replica.electorate[0].peer_id
    out = names[first]
    order("evict", out, "--reason", "a test")
    assert running[out].wait(60) == 2
    assert {peer.name for peer in organiser.status().peers if peer.module == "stage-1"} >= {
        name for name, module in modules.items() if module == "stage-1" and name != out
    }
    at = {stage: len(log_of(organiser, stage)) for stage in STAGES}
    until_further(organiser, 2)
    for stage in STAGES:
        for entry in log_of(organiser, stage)[at[stage] :]:
            assert read_settings(entry.settings).evicted == (first,)
            assert first not in {each.peer_id for each in (*entry.electorate, *entry.members)}
    order("readmit", first)
    running[out] = spawn(organiser.invite, out)
    until(lambda: is_member_anywhere(organiser, first), "the readmitted peer in rounds")
    until(lambda: stand_on_one_log(organiser), "the coordinator to have every entry")


def is_member_anywhere(organiser, peer_id):
    newest = [entry for stage in STAGES for entry in log_of(organiser, stage)[-3:]]
    return any(m.peer_id == peer_id and m.weight for entry in newest for m in entry.members)
