"""A peer and its trainer follow the organiser's orders, which `atoll run` gives."""

import json

from atoll.optim.log.entry import Entry
from atoll.peer.cli.main import main


def ordered(capsys, organiser, action, *arguments):
    """Give orders, and wait until they are decided."""
    words = ["run", action, str(organiser.invite), *arguments, "--key", str(organiser.folder)]
    assert main([*words, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(each["decided"] for each in told)


def test_a_peer_follows_orders_to_the_end_of_its_run(organise, kit, start, capsys):
    organiser = organise(kit.tiny_spec(run={"rounds": 0}))
    daemon = start(organiser.invite, share=0.3)
    kit.until(lambda: organiser.status().position >= 2, "rounds")
    ordered(capsys, organiser, "set", "inner_steps=3", "outer_lr=0.25")
    changed = organiser.status()
    assert (changed.inner_steps, changed.settings["outer_lr"]) == (3, 0.25)
    kit.until(lambda: organiser.status().position >= changed.position + 3, "more rounds")
    ordered(capsys, organiser, "pause")
    paused = organiser.status()
    assert paused.state == "paused"
    assert daemon.said("the run is paused")
    ordered(capsys, organiser, "resume")
    kit.until(lambda: organiser.status().position >= paused.position + 3, "rounds again")
    ordered(capsys, organiser, "stop")
    assert daemon.join() is True
    status = organiser.status()
    assert (status.state, status.rounds_total) == ("finished", status.position)

    store = organiser.up.coordinator.log.replica.store
    log = [Entry.decode(record.entry) for record in store.headers(0, status.position)]
    at = [entry.position for entry in log if entry.kind == "control"]
    assert len(at) == 5 and at[-1] == status.position - 1 and at[3] == at[2] + 1
    steps = {entry.position: entry.members[0].steps for entry in log if entry.kind == "update"}
    assert {steps[p] for p in steps if p < at[0]} == {2}
    assert {steps[p] for p in steps if p > at[1] + 2} == {3}
    assert {entry.lr for entry in log[at[1] + 1 :]} == {0.25}
