"""The terms that one peer leads: who may begin one, and what becomes of its decision."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from atoll.dht.refusals import RefusalCode
from atoll.dht.tasks import Tasks, race
from atoll.dht.transport import Refused, Stream, TransportError
from atoll.optim.log.entry import Certificate, Entry
from atoll.optim.log.units import UnitsInvalid, count_of, expect_held, read_units
from atoll.optim.reduction.cells import Bytes
from atoll.optim.reduction.contribution import work_weight
from atoll.peer.rounds import notices
from atoll.peer.rounds.conduct import Fault
from atoll.peer.rounds.consensus.ballots import Ballots, Leads, Place
from atoll.peer.rounds.consensus.dissemination import Dissemination
from atoll.peer.rounds.consensus.leader import Leadership
from atoll.peer.rounds.consensus.local_stream import LocalStream, stream_pair
from atoll.peer.rounds.consensus.voter import Voter
from atoll.peer.rounds.context import AttemptFailed, Context, failure_key
from atoll.peer.rounds.messages import PROTOCOL, READY, Decided, Ready, report_payload
from atoll.peer.rounds.policies import MAX_AHEAD, positions_ahead

# Terms that one caller may have begun here and that are not over: as many as positions in flight.
# A leadership has tasks, and asks the others each second.
MAX_BEGUN = MAX_AHEAD + 1

OnLed = Callable[[Entry, Certificate, Bytes], None]
"""(entry, certificate, body) of what was led here to its certificate."""

Reach = Callable[[int], Awaitable[None]]
"""Waits a moment until this peer stands at a position, and looks for what it misses."""

Commit = Callable[[Entry, Certificate, Bytes], Awaitable[None]]


class Leading:
    """Leaderships by (epoch, position, term)."""

    def __init__(
        self,
        ctx: Context,
        voter: Voter,
        *,
        dissemination: Dissemination,
        reach: Reach,
        commit: Commit,
        on_led: OnLed,
        ballots: Ballots | None = None,
    ) -> None:
        """`commit` applies an entry here; `on_led` gets it after that.

        `ballots` remembers where this elector may have proposed.
        """
        self._ctx = ctx
        self._voter = voter
        self._dissemination = dissemination
        self._reach = reach
        self._ahead = positions_ahead(len(ctx.replay.fragments))
        self._commit = commit
        self._on_led = on_led
        self._leads = Leads(ctx.me, ballots, ctx.replica.trust)
        self._leaderships: dict[tuple[int, int, int], Leadership] = {}
        self._tasks = Tasks()

    def at(self, place: Place, term: int) -> Leadership | None:
        """The leadership of a term, if it is under way here."""
        return self._leaderships.get((place.epoch, place.position, term))

    def left_out(self, place: Place) -> dict[str, str]:
        """Return the peers without which groups of a position were closed, and why."""
        found: dict[str, str] = {}
        for (epoch, position, _), leadership in self._leaderships.items():
            if (epoch, position) == place:
                found |= leadership.round.left_out
        return found

    async def close(self) -> None:
        """End everything that is under way."""
        for leadership in list(self._leaderships.values()):
            await leadership.close()
        await self._tasks.close()

    def line_to_myself(self) -> Stream:
        """A stream by which this peer is a member of a term that it leads."""
        here, there = stream_pair(self._ctx.me.peer_id, "round")
        self._tasks.spawn(self._serve_myself(there))
        return here

    async def _serve_myself(self, stream: LocalStream) -> None:
        try:
            await self.serve(self._ctx.me.peer_id, stream)
        except Refused as error:
            stream.refuse(error)
        except TransportError:
            pass
        finally:
            await stream.close()

    async def serve(self, remote: str, stream: Stream) -> None:
        """Take a member's report, and hold its session.

        Raises:
            Refused: with the reason.
        """
        message = await stream.recv(timeout_s=self._ctx.settings.stall_s)
        if message is None or message[:1] != READY:
            raise Refused(RefusalCode.BAD_READY, "expected a Ready record first")
        ready = Ready.decode(message[1:])
        await self._check(remote, ready)
        replica = self._ctx.replica
        place = Place(ready.epoch, ready.position)
        self._leads.check(place, ready.term, replica.electorate)
        self._voter.expect_near(ready.term)
        if ready.position == replica.position and ready.term < self._voter.term:
            raise Refused(RefusalCode.SUPERSEDED, f"term {self._voter.term} is under way")
        await self._lead(remote, place, ready.term).serve(remote, ready, stream)

    async def _check(self, remote: str, ready: Ready) -> None:
        barred = self._ctx.conduct.barred(remote, self._ctx.now())
        if barred is not None:
            raise Refused(RefusalCode.BARRED, str(barred))
        if ready.protocol != PROTOCOL:
            raise Refused(
                RefusalCode.PROTOCOL, f"expected protocol {PROTOCOL}, got {ready.protocol}"
            )
        self._check_report(remote, ready)
        await self._check_place(ready)
        self._check_units(remote, ready)

    def _check_report(self, remote: str, ready: Ready) -> None:
        """Check a report as voters will; the weight is 0, or follows from the work."""
        report = ready.report
        due = work_weight(report.tokens, report.steps, self._ctx.replay.method.weights)
        # Others take -0.0 for 0: for them its sender would have signed another report.
        if report.weight not in (0.0, due) or math.copysign(1.0, report.weight) < 0:
            self._ctx.fault(remote, Fault.BAD_WEIGHT)
            raise Refused(
                RefusalCode.BAD_WEIGHT,
                f"expected a weight of 0 or {due:g} for {report.tokens} tokens in {report.steps} "
                f"steps, got {report.weight:g}",
            )
        payload = report_payload(self._ctx.replica.run_id, report)
        if not self._ctx.verify(remote, payload, ready.signature):
            self._ctx.fault(remote, Fault.BAD_REPORT)
            raise Refused(RefusalCode.BAD_READY, "expected a report that its sender signed")

    def _check_units(self, remote: str, ready: Ready) -> None:
        """Refuse a report that names other units than its sender holds.

        An entry with it would be invalid. It is no fault: the sender may have lost its lease with
        an entry that it has not seen.
        """
        replica, report = self._ctx.replica, ready.report
        held = 0
        if replica.module.units:
            held = count_of(read_units(replica.standing.units or b"").held_by(remote))
        counts = report.weight > 0 if replica.module.units else report.units > 0
        try:
            expect_held(remote, report.units, held, counts=counts)
        except UnitsInvalid as error:
            raise Refused(RefusalCode.BAD_UNITS, str(error)) from error

    async def _check_place(self, ready: Ready) -> None:
        """Raise Refused unless both stand on one log, at the position or a little before it."""
        replica = self._ctx.replica
        await self._reach(ready.stands_at)
        if replica.position > ready.position:
            raise Refused(
                RefusalCode.DECIDED, f"expected a report at {replica.position} or beyond it"
            )
        same = (replica.position, replica.chain) == (ready.stands_at, ready.chain)
        on_the_log = replica.epoch == ready.epoch and (same or ready.stands_at < replica.position)
        near = ready.stands_at <= ready.position <= ready.stands_at + self._ahead
        first = ready.term == 0 or ready.position == replica.position
        if not (on_the_log and near and first):
            raise Refused(
                RefusalCode.ELSEWHERE,
                f"this peer is at (epoch, position) {(replica.epoch, replica.position)} and takes "
                f"at most {self._ahead} ahead of it, got {(ready.epoch, ready.position)} "
                f"from {ready.stands_at}; fetch the missing entries",
            )

    def bring_order(self, place: Place, term: int) -> None:
        """Lead a term of ours for an order, whether or not anybody reports.

        Raises:
            Refused: it is not ours to lead.
        """
        self._leads.check(place, term, self._ctx.replica.electorate)
        self._lead(self._ctx.me.peer_id, place, term).call()

    def _lead(self, remote: str, place: Place, term: int) -> Leadership:
        """Return the leadership of a term of ours; it starts with the first call.

        Raises:
            Refused: the caller has begun too many.
        """
        key = (place.epoch, place.position, term)
        if key not in self._leaderships:
            begun = sum(one.begun_by == remote for one in self._leaderships.values())
            if remote != self._ctx.me.peer_id and begun >= MAX_BEGUN:
                raise Refused(
                    RefusalCode.BUSY, f"you have begun {begun} terms here that are not over"
                )
            leadership = Leadership(
                ctx=self._ctx,
                voter=self._voter,
                leads=self._leads,
                place=place,
                term=term,
                check=self._check,
                begun_by=remote,
            )
            self._leaderships[key] = leadership
            self._tasks.spawn(self._run(key, leadership))
        return self._leaderships[key]

    async def _run(self, key: tuple[int, int, int], leadership: Leadership) -> None:
        try:
            outcome = await race(
                leadership.run(), self._await_end(leadership), expected=(AttemptFailed,)
            )
            if outcome is None:
                return
            announced = self._tasks.spawn(
                self._announce(leadership, outcome.entry, outcome.certificate)
            )
            body = await self._voter.gather(outcome.entry, self._ctx.me.peer_id)
            await self._commit(outcome.entry, outcome.certificate, body)
            self._on_led(outcome.entry, outcome.certificate, body)
            await announced
            await leadership.until_left()
        except (AttemptFailed, TransportError, ValueError) as error:
            # An entry before the position may name another leader for it, which is no failure.
            if not (isinstance(error, Refused) and error.code is RefusalCode.NOT_THE_LEADER):
                self._voter.give_up(leadership.place, leadership.term)
                self._ctx.on_event(
                    "warning",
                    notices.own_term_failed(round=key[1] + 1, term=key[2], reason=str(error)),
                    key=("own term failed", key[1], failure_key(error)),
                )
        finally:
            self._leaderships.pop(key, None)  # first, so that nobody joins what is over
            await leadership.close()

    async def _await_end(self, leadership: Leadership) -> None:
        """Return once the position is decided, its epoch over, or another elector to lead it."""
        replica, place = self._ctx.replica, leadership.place
        with suppress(Refused):
            while replica.epoch == place.epoch and replica.position <= place.position:
                self._leads.check(place, leadership.term, replica.electorate)
                await replica.passed(replica.position)

    async def _announce(
        self, leadership: Leadership, entry: Entry, certificate: Certificate
    ) -> None:
        decided = Decided(entry=entry.encode(), certificate=certificate.encode())
        live = sorted(leadership.round.live)  # first: they surely live, and pass it on
        others = set(leadership.sessions) | set(self._ctx.seen)
        others |= {elector.peer_id for elector in entry.electorate}
        await self._dissemination.tell(decided, [*live, *sorted(others)])
