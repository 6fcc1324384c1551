"""P15: an owner names its parts, keeps the bytes, and loses one part after each proposal."""

import asyncio

from atoll.dht.transport import PeerUnreachable
from atoll.optim.log.entry import sha256
from atoll.optim.state.layout import Layout
from atoll.peer.rounds import policies
from atoll.peer.rounds.allreduce.sides import Owner
from atoll.peer.rounds.consensus.polls import Polls
from atoll.peer.rounds.consensus.round_events import SendProposal
from atoll.peer.rounds.messages import ALIVE
from support.attackers import report, stop_at
from support.cells import use_cells
from support.swarm import SETTINGS, reached, run_swarm

CELL_VALUES = 64
CELLS = 64


def test_parts_that_an_owner_loses_in_turn_end_no_term(tmp_path, monkeypatch):
    """Each cost a proposal, of which a term has four; electors refused before the leader knew."""
    use_cells(monkeypatch, CELL_VALUES)
    monkeypatch.setattr(policies, "MIN_PART_BYTES", 1)
    send, ask = Owner.send_results, Polls.ask
    lost, owned_parts, proposals = set(), {}, []

    async def scenario(swarm):
        *honest, liar = await swarm.start(4)
        await swarm.until(lambda: reached([*honest, liar], 2))

        async def keep(owner, owned, head, stream):
            if owner._state.ctx.me != liar.ctx.me:
                return await send(owner, owned, head, stream)
            owned_parts.setdefault(head.group, set()).add(head.part)
            while (head.group, head.part) not in lost:
                await asyncio.sleep(SETTINGS.stall_s / 10)
                await stream.send(ALIVE, timeout_s=SETTINGS.stall_s)
            raise PeerUnreachable("lost on purpose", peer=stream.remote)

        def asked(polls, question, electorate):
            if isinstance(question, SendProposal):
                proposals.append((question.entry.position, question.attempt))
                group = list(owned_parts)[-1] if owned_parts else b""
                left = [p for p in sorted(owned_parts.get(group, ())) if (group, p) not in lost]
                lost.update((group, part) for part in left[:1])
            ask(polls, question, electorate)

        def named(done, _):
            return done.model_copy(update={"digest": sha256(b"nobody has part %d" % done.part)})

        stop_at(monkeypatch, liar.ctx.me, "_form")  # its own terms decide nothing
        monkeypatch.setattr(Owner, "send_results", keep)
        monkeypatch.setattr(Polls, "ask", asked)
        report(monkeypatch, liar.ctx.me, named)
        at = max(p.replica.position for p in honest)
        await swarm.until(lambda: reached(honest, at + 1), timeout_s=30.0)
        assert lost
        assert {attempt for position, attempt in proposals if position == at} == {0, 1}

    layout = Layout(names=("w",), shapes=((CELLS * CELL_VALUES,),))
    run_swarm(tmp_path, scenario, codec="int8", layout=layout)
