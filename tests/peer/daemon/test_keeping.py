"""Keepers as people start them: by their invite, without a model, and after a restart."""

import asyncio
import dataclasses
import json

import pytest

from atoll.coordinator.invites import issue
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.entry import Entry
from atoll.optim.state.layout import Layout
from atoll.peer.daemon.consent import Consent, ConsentMissing, RunTerms
from atoll.peer.daemon.keeping import KeptBallots
from atoll.peer.daemon.membership import Membership
from atoll.peer.daemon.network import connect
from atoll.peer.errors import WrongRole
from atoll.peer.lab.own_keeper import LOG_FILE, keep_beside
from atoll.peer.paths import PeerPaths
from atoll.peer.rounds.consensus.ballots import NOWHERE, Place
from atoll.peer.training.permission import Allowed
from support.limits import DEADLINE_S
from support.organiser import LOOPBACK


def for_keepers(organiser, uses):
    _, token = issue(organiser.folder, kind="keeper", uses=uses)
    return dataclasses.replace(organiser.invite, token=token)


def test_a_keeper_remembers_its_incarnation_and_its_furthest_place(tmp_path):
    path = tmp_path / "ballots.json"
    first = KeptBallots.open(path)
    assert first.left == NOWHERE and len(first.incarnation) == 32
    ballots = first.ballots()
    for place in (Place(0, 3), Place(0, 4), Place(0, 4)):
        ballots.note(place)
    again = KeptBallots.open(path)
    assert (again.incarnation, again.left) == (first.incarnation, Place(0, 4))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"incarnation": "1"}', '{"epoch": 1}', "null"])
def test_a_keeper_with_a_damaged_file_is_another_elector(tmp_path, text):
    path = tmp_path / "ballots.json"
    first = KeptBallots.open(path)
    path.write_text(text)
    again = KeptBallots.open(path)
    assert again.incarnation != first.incarnation
    assert KeptBallots.open(path).incarnation == again.incarnation


def test_a_keeper_is_asked_for_no_model_and_no_data(tmp_path):
    model = {"custom": "somebodys.code:build"}
    data = {"source": "/somebodys/data", "tokenizer": "/somebodys/tokens"}
    spec = RunSpec.from_dict({"model": model, "data": data, "round": {"electors": "keepers"}})
    terms = RunTerms(spec=spec, layout=Layout(names=("w",), shapes=((1000,),)), is_keeper=True)
    shown = []
    paths = PeerPaths(root=tmp_path)
    consent = Consent(paths=paths, run_id=bytes(32), allowed=Allowed(), show=shown.append)
    with pytest.raises(ConsentMissing):
        consent.admit(terms)
    assert any("keeper" in line for line in shown)
    assert not any("somebodys" in line for line in shown)
    yes = dataclasses.replace(consent, yes=True)
    yes.admit(terms)
    consent.admit(terms)  # the answer is kept


def test_a_membership_keeps_the_role(tmp_path):
    membership = Membership(
        spec=RunSpec(),
        layout=Layout(names=("w",), shapes=((1000,),)),
        genesis_root=bytes(32),
        admission=b"",
        bootstrap=(),
        role="keeper",
    )
    raw = membership.to_json(bytes(32))
    assert Membership.from_json(raw) == membership
    older = json.loads(raw)
    del older["role"]
    assert Membership.from_json(json.dumps(older).encode()).role == "trainer"


def test_a_training_loop_of_ones_own_is_no_keeper(organise, kit, tmp_path, network_threads):
    organiser = organise(kit.tiny_spec(round={"electors": "keepers"}))
    with pytest.raises(WrongRole, match="the invite is for keepers"):
        connect(str(for_keepers(organiser, uses=1)), state_dir=tmp_path / "own", listen=LOOPBACK)


@pytest.mark.exhaustive  # in memory: tests/peer/rounds/test_keepers.py
def test_keepers_hold_the_rounds_of_trainers(organise, kit, start):
    organiser = organise(kit.tiny_spec(round={"min_peers": 2, "electors": "keepers"}))
    trainers = [start(organiser.invite, name) for name in ("one", "two")]
    kit.until(lambda: len(organiser.status().peers) == 2, "both trainers")
    assert organiser.status().state == "waiting"
    invite = for_keepers(organiser, uses=2)
    keepers = [start(invite, name) for name in ("left", "right")]
    for daemon in (*trainers, *keepers):
        assert daemon.join() is True
    status = organiser.status()
    assert (status.state, status.position) == ("finished", 3)
    roles = {peer.name: peer.role for peer in status.peers}
    assert roles == {"one": "trainer", "two": "trainer", "left": "keeper", "right": "keeper"}
    assert len({peer.state_digest for peer in status.peers}) == 1
    assert all(row.left_out == [] for row in status.history)
    assert keepers[0].said("it leads and votes", kind="ready")
    assert keepers[0].said("round 3/3", kind="round")
    store = organiser.up.coordinator.log.replica.store
    keeps = {peer.peer_id for peer in status.peers if peer.role == "keeper"}
    for record in store.headers(0, 3):
        entry = Entry.decode(record.entry)
        assert {elector.peer_id for elector in entry.electorate} <= keeps
        assert not {member.peer_id for member in entry.members} & keeps


@pytest.mark.slow
def test_the_coordinators_own_keeper_holds_the_rounds_of_a_trainer(organise, kit, start):
    organiser = organise(kit.tiny_spec(round={"electors": "keepers"}))
    trainer, said = start(organiser.invite, "one"), []
    try:
        asyncio.run(asyncio.wait_for(keep_beside(organiser.up, said.append), DEADLINE_S))
    except TimeoutError:
        log = (organiser.up.state_dir / LOG_FILE).read_text()
        told = "\n".join(event.text for event in organiser.status().events)
        pytest.fail(f"the run does not end\n{told}\nthe keeper:\n{log[-4000:]}")
    assert said == [], "it ends by itself, with the run"
    assert trainer.join() is True
    status = organiser.status()
    assert (status.state, status.position) == ("finished", 3)
    assert {peer.name: peer.role for peer in status.peers} == {
        "one": "trainer",
        "coordinator": "keeper",
    }


@pytest.mark.exhaustive  # in memory: tests/peer/rounds/test_keepers.py
def test_a_run_resumes_with_the_only_keeper_in_the_same_epoch(organise, kit, start):
    organiser = organise(
        kit.tiny_spec(run={"rounds": 0}, round={"electors": "keepers", "min_peers": 1})
    )
    start(organiser.invite, "one")
    invite = for_keepers(organiser, uses=1)
    keeper = start(invite, "keeper")
    kit.until(lambda: organiser.status().position >= 2, "rounds")
    for _ in range(2):
        keeper.stop.set()
        assert keeper.join() is False
        there = organiser.status().position
        keeper = start(invite, "keeper")  # its use is not counted again
        kit.until(lambda there=there: organiser.status().position > there + 1, "more rounds")
    assert organiser.status().epoch == 0
