"""An elector votes for nothing that breaks a rule of the log: a lying leader is refused by name."""

import pytest

from atoll.optim.log.entry import Entry, StateRoot
from atoll.peer.rounds.consensus.leader import Leadership
from atoll.peer.rounds.consensus.round import leader_of
from support.swarm import run_swarm


def longer(entry):
    last = entry.parts[-1].model_copy(update={"wire_bytes": entry.parts[-1].wire_bytes + (1 << 30)})
    return {"parts": (*entry.parts[:-1], last)}


LIES = {
    "next electorate": (lambda e: {"electorate": e.electorate[:1]}, "bad-electorate"),
    "learning rate": (lambda e: {"lr": 0.25}, "bad-scalars"),
    "momentum": (lambda e: {"momentum": 0.25}, "bad-scalars"),
    "state root": (
        lambda e: {"state_root": StateRoot(position=e.position - 2, root=b"x" * 32)},
        "bad-root",
    ),
    "position of the root": (
        lambda e: {"state_root": StateRoot(position=e.position - 1, root=b"x" * 32)},
        "bad-root",
    ),
    "fragment": (lambda e: {"fragment": 1}, "bad-proposal"),
    "length of a part": (longer, "bad-proposal"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_leader_is_refused_and_the_next_one_decides(tmp_path, monkeypatch, lie):
    change, code = LIES[lie]
    honest = Leadership._entry

    async def scenario(swarm):
        peers = await swarm.start(3, window_s=1.0)
        at = 4  # carries a root
        await swarm.until(lambda: all(p.replica.position >= 3 for p in peers))
        liar = leader_of(peers[0].replica.electorate, at, 0)

        def entry_of(self, *args):
            entry = honest(self, *args)
            lies = self.ctx.me == liar and self.place.position == at and entry.kind == "update"
            return entry.model_copy(update=change(entry)) if lies else entry

        monkeypatch.setattr(Leadership, "_entry", entry_of)
        await swarm.until(lambda: all(p.replica.position >= at + 2 for p in peers))
        reported = [e for p in peers if p.ctx.me == liar for e in p.events]
        assert any(code in text for text in reported), reported
        entry = Entry.decode(peers[0].replica.store.get(at).entry)
        assert (entry.lr, entry.momentum, entry.fragment) == (0.5, 0.5, 0)
        assert len(entry.electorate) == 3
        assert swarm.same_bits(peers)

    run_swarm(tmp_path, scenario)
