"""Invitations to a meeting: the inviting peer commits first, the invited peer follows.

An invited peer keeps the inviting one waiting until it is ready, or refuses.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import NoReturn

from atoll.coordinator.run.phases import RoundPhase
from atoll.dht.refusals import RefusalCode
from atoll.dht.transport import DeadlineExceeded, Refused, Stream, TransportError
from atoll.optim.inprocess.gossip import Met
from atoll.optim.log.entry import MalformedRecord
from atoll.peer.gossip.meeting import BROKEN, InDoubt, Meeting, check_weight
from atoll.peer.gossip.messages import AHEAD, ALIVE, PROTOCOL, TERMS, Ahead, Terms, tagged
from atoll.peer.gossip.peer import GossipPeer, GossipRound
from atoll.peer.gossip.policies import Invited, Verdict, answer
from atoll.peer.rounds import notices

ANSWERED_STALLS = 2.0  # stall times for the first answer of a peer that may have to be dialed
LOOK_S = 1.0  # between checks of a partner that should send an invitation
MAX_PATIENCE_S = 3600.0  # limit on the time that an inviting peer is kept waiting
KEPT_IDS = 256  # of meetings that others began, to refuse replays


class Inviter:
    """Invites partners and decides the meetings with them."""

    def __init__(self, peer: GossipPeer) -> None:
        self._peer, self._ctx = peer, peer.ctx

    async def invite(self, here: GossipRound, partner: str) -> Met | None:
        """Invite a partner and meet it; return None if it refuses or the meeting fails."""
        name = os.urandom(16)
        self._peer.meeting, self._peer.outcomes.deciding = partner, name
        watch = self._ctx.link.watch(self._ctx.transport)
        try:
            timeout_s = ANSWERED_STALLS * self._ctx.settings.stall_s
            async with await self._ctx.transport.open(
                partner, "gossip", timeout_s=timeout_s
            ) as stream:
                return await self._propose(here, partner, stream, name)
        except BROKEN as error:
            watch.disturbed = True
            self._peer.note_failure(here, partner, error)
            return None
        finally:
            watch.close()
            self._peer.meeting = self._peer.outcomes.deciding = None

    async def _propose(
        self, here: GossipRound, partner: str, stream: Stream, name: bytes
    ) -> Met | None:
        mine = self._peer.mine(here.window)
        meeting = Meeting(self._ctx, stream, mine, name)
        left_s = max(0.0, here.deadline_s - self._ctx.now())
        await meeting.send_terms(patience_s=left_s)
        async with asyncio.timeout(left_s + ANSWERED_STALLS * self._ctx.settings.stall_s):
            await meeting.receive_terms()
        here.times = meeting.times
        self._peer.agreed(partner)
        met = await meeting.trade()
        await meeting.decide(lambda: self._commit(name, met))
        return met

    def _commit(self, name: bytes, met: Met) -> None:
        # On record before the partner hears of it: one that loses the message asks.
        self._peer.outcomes.commit(name)
        self._peer.move(met.state, met.mass)


class Invitee:
    """Answers invitations and takes part in the meetings."""

    def __init__(self, peer: GossipPeer) -> None:
        self._peer, self._ctx = peer, peer.ctx
        self._invited: deque[bytes] = deque(maxlen=KEPT_IDS)
        self._waiting: set[str] = set()
        """PeerIDs whose invitations have no answer yet."""

    async def wait(self, here: GossipRound, partner: str) -> Met | None:
        """Wait for a partner's invitation and the meeting; return None if there is none."""
        here.is_open = True
        self._peer.wake()
        why = await self._until_asked(here, partner)
        here.is_open = False
        if here.ended is None:
            here.without[partner] = why
            return None
        return await here.ended

    async def _until_asked(self, here: GossipRound, partner: str) -> str:
        """Wait for the partner's invitation; return why it will not come, or an empty string."""
        looked_s = self._ctx.now()
        while here.ended is None:
            now = self._ctx.now()
            if now >= here.deadline_s:
                return "sent no invitation in time"
            if now >= looked_s:
                looked_s = now + LOOK_S
                if why := await self._look_at(partner, here):
                    return why
            await self._peer.change_within(self._ctx.alive_s)
        return ""

    async def _look_at(self, partner: str, here: GossipRound) -> str:
        """Return why a partner will not send an invitation; an empty string if it may."""
        head = await self._peer.known.head(partner)
        if isinstance(head, str):
            return head
        here.is_refused = True  # online: its answers below say why it will not come
        if head.round > self._peer.position:
            return "is ahead"
        if head.partner not in ("", self._ctx.me.peer_id):
            return "meets another peer"
        left_s = here.deadline_s - self._ctx.now()
        if head.ready_in_s is None or head.ready_in_s > left_s:
            return "is not ready in time"
        return ""

    async def serve(self, remote: str, stream: Stream) -> None:
        """Answer an invitation and take part in the meeting.

        Raises:
            Refused: this peer declines, or the inviting peer broke the rules.
            TransportError: the inviting peer is gone or too slow.
        """
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != TERMS:
            raise MalformedRecord("expected terms, got another message")
        terms = Terms.decode(message[1:])
        check_weight(self._ctx, terms)
        self._expect_welcome(remote, terms)
        self._peer.known.hear(remote, terms.round)
        self._waiting.add(remote)
        try:
            here = await self._until_ready(remote, terms, stream)
        finally:
            self._waiting.discard(remote)
        here.ended = asyncio.get_running_loop().create_future()
        self._peer.meeting = remote
        self._peer.wake()
        watch = self._ctx.link.watch(self._ctx.transport)
        met: Met | None = None
        try:
            met = await self._take_part(here, remote, terms, stream)
        except BROKEN as error:
            watch.disturbed = True
            self._peer.note_failure(here, remote, error)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the exchange took too long", peer=remote) from error
            if isinstance(error, TransportError):
                raise  # gone or slow, which is no fault
            raise Refused(RefusalCode.BAD_MESSAGE, str(error)) from error
        finally:
            watch.close()
            self._peer.meeting = None
            if not here.ended.cancelled():  # as with its waiter, when this peer leaves meanwhile
                here.ended.set_result(met)

    def _expect_welcome(self, remote: str, terms: Terms) -> None:
        now = self._ctx.now()
        barred = self._ctx.conduct.barred(remote, now) or self._ctx.lags.barred(remote, now)
        if barred is not None:
            raise Refused(RefusalCode.BARRED, str(barred))
        if terms.protocol != PROTOCOL:
            raise Refused(
                RefusalCode.PROTOCOL, f"expected protocol {PROTOCOL}, got {terms.protocol}"
            )
        if terms.exchange in self._invited:
            raise Refused(RefusalCode.REPLAYED, "this exchange has already begun")
        if remote in self._waiting:
            raise Refused(RefusalCode.PAIRED, "another invitation from this peer awaits an answer")
        if not self._peer.begun or self._peer.closing:
            raise Refused(RefusalCode.NOT_BEGUN, "this peer does not take part in rounds")
        self._invited.append(terms.exchange)

    async def _until_ready(self, remote: str, terms: Terms, stream: Stream) -> GossipRound:
        """Keep an inviting peer waiting until this one is ready, or refuse."""
        until = self._ctx.now() + min(terms.patience_s, MAX_PATIENCE_S)
        while True:
            here = self._peer.round
            view = Invited(
                remote=remote,
                their_round=terms.round,
                own_round=self._peer.position,
                partner=here.draw.partner if here is not None else None,
                meeting=self._peer.meeting,
                has_window=here is not None,
                is_open=here is not None and here.is_open and here.ended is None,
                ready_in_s=self._ctx.ready_in_s() if self._peer.window is None else 0.0,
                left_s=until - self._ctx.now(),
            )
            verdict = answer(view)
            if verdict is Verdict.ACCEPT and here is not None:
                return here
            if verdict is Verdict.WAIT and self._ctx.now() >= until:  # it waits no longer either
                verdict = RefusalCode.TRAINING
            if isinstance(verdict, RefusalCode):
                await self._refuse(verdict, stream)
            await stream.send(ALIVE, timeout_s=self._ctx.settings.stall_s)
            await self._peer.change_within(self._ctx.alive_s)

    async def _refuse(self, code: RefusalCode, stream: Stream) -> NoReturn:
        position = self._peer.position
        if code is RefusalCode.AHEAD:
            await stream.send(
                tagged(AHEAD, Ahead(round=position)), timeout_s=self._ctx.settings.stall_s
            )
        raise Refused(code, f"this peer is in round {position}")

    async def _take_part(
        self, here: GossipRound, remote: str, terms: Terms, stream: Stream
    ) -> Met | None:
        mine = self._peer.mine(here.window)
        meeting = Meeting(self._ctx, stream, mine, terms.exchange)
        meeting.take_terms(terms)
        here.times = meeting.times
        await meeting.send_terms()
        self._peer.agreed(remote)
        met = await meeting.trade()
        try:
            await meeting.follow()
        except InDoubt:
            self._peer.enter(RoundPhase.DOUBT)
            known = await self._peer.outcomes.ask(remote, terms)
            if known == "unknown":
                self._give_up(remote)
            if known != "committed":
                return None
        self._peer.move(met.state, met.mass)
        return met

    def _give_up(self, partner: str) -> None:
        # The mass may have been handed over. Without it, nothing is counted twice.
        self._peer.mass = 0.0
        number = self._peer.position + 1
        self._ctx.on_event("warning", notices.exchange_unknown(round=number, peer=partner))
