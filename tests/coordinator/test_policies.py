from types import SimpleNamespace

from atoll.coordinator.policies import (
    FASTEST,
    LOST_AGAIN_S,
    RESTARTED_S,
    SILENT_S,
    LostQuorum,
    PublisherChoice,
    ReportLimit,
    StallClock,
    can_decide,
    common_position,
    electable,
    electors_after_stall,
    expected_round_s,
    needs_most,
    window_s,
)
from atoll.coordinator.presence import MAX_PEERS, KnownPeers, Presence
from atoll.coordinator.run.status import PeerStatus
from atoll.optim.log.electorate import TRIAL_ENTRIES, Succession
from atoll.optim.log.entry import Elector, Newcomer


def peer(peer_id: str, **changes: object) -> PeerStatus:
    values = {"peer_id": peer_id, "incarnation": "1", "state": "training"}
    return PeerStatus(**{**values, **changes})  # type: ignore[arg-type]


def test_a_silent_peer_is_gone_and_later_forgotten() -> None:
    peers = KnownPeers()
    peers.update(peer("a"), 0.0)
    peers.update(peer("b"), 8.0)
    assert [m.status.peer_id for m in peers.alive(11.0)] == ["b"]
    shown = {m.status.peer_id: m.shown(11.0).state for m in peers.all()}
    assert shown == {"a": "gone", "b": "training"}
    peers.forget(3605.0)
    assert len(peers) == 1


def test_a_peer_that_says_goodbye_is_gone_at_once() -> None:
    peers = KnownPeers()
    peers.update(peer("a"), 0.0, left=True)
    assert not peers.alive(0.0)


def test_a_flood_of_names_pushes_out_the_oldest() -> None:
    peers = KnownPeers()
    for index in range(MAX_PEERS + 1000):
        peers.update(peer(f"p{index}"), float(index))
    assert len(peers) == MAX_PEERS and peers.get("p0") is None
    assert peers.get("p999") is None and peers.get("p1000") is not None


def test_electors_of_the_first_epoch_are_ready_trainers() -> None:
    peers = KnownPeers()
    peers.update(peer("a", state="ready"), 0.0)
    peers.update(peer("b", state="joining"), 0.0)
    peers.update(peer("c", state="ready", role="follower"), 0.0)
    peers.update(peer("d", state="ready", incarnation=""), 0.0)
    assert [p.peer_id for p in electable(peers.alive(0.0), epoch=None)] == ["a"]


def test_electors_of_a_later_epoch_hold_a_state() -> None:
    peers = KnownPeers()
    for peer_id, state in (("a", "training"), ("b", "syncing"), ("c", "recovering")):
        peers.update(peer(peer_id, state=state), 0.0)
    assert [p.peer_id for p in electable(peers.alive(0.0), epoch=0)] == ["a", "b"]


def test_a_peer_that_cannot_vote_is_not_electable() -> None:
    peers = KnownPeers()
    for peer_id, incarnation in (("a", "1" * 32), ("b", "1" * 33), ("c", "")):
        peers.update(peer(peer_id, incarnation=incarnation), 0.0)
    assert [p.peer_id for p in electable(peers.alive(0.0), epoch=0)] == ["a"]


def test_nothing_is_decided_without_the_votes_of_peers_that_left() -> None:
    first, second, third = (Elector(peer_id=p, incarnation="1") for p in "abc")
    pair, trio = (first, second), (first, second, third)
    assert can_decide(pair, {}, (0, 5))
    assert not can_decide(pair, {("a", "1"): (0, 5)}, (0, 5))
    assert can_decide(pair, {("b", "1"): (0, 5)}, (0, 5))  # half with the first
    assert can_decide(trio, {("a", "1"): (0, 5)}, (0, 5))
    assert not can_decide(trio, {("a", "1"): (0, 5), ("c", "1"): (0, 4)}, (0, 5))
    assert not can_decide(pair, {("a", "1"): (0, 9)}, (1, 5))  # an epoch later
    assert can_decide(pair, {("a", "1"): (0, 6)}, (0, 5))  # it may have voted here
    assert can_decide(pair, {("a", "2"): (0, 5)}, (0, 5))  # another process
    assert can_decide((), {}, (0, 5))


def test_a_keeper_may_lie_about_its_resignation():
    four = [Elector(peer_id=name, incarnation="1") for name in "abcd"]
    gone = {(name, "1"): (0, 5) for name in "abc"}
    two = dict(list(gone.items())[:2])
    assert can_decide(four, two, (0, 5), "byzantine")
    assert not can_decide(four, gone, (0, 5), "byzantine")


def test_a_stall_is_60_s_and_new_epochs_come_ever_more_slowly() -> None:
    stall = StallClock()
    stall.note(5, 0.0, 1.0)
    assert not stall.is_stalled(59.0) and stall.is_stalled(61.0)
    stall.restart(61.0, again=True)
    assert not stall.is_stalled(170.0) and stall.is_stalled(182.0)
    for _ in range(20):
        stall.restart(200.0, again=True)
    assert stall.is_stalled(200.0 + 3601)
    stall.note(6, 300.0)
    assert stall.is_stalled(361.0)


def test_a_slow_run_gets_three_rounds_unless_it_cannot_move() -> None:
    stall = StallClock()
    stall.note(5, 0.0, 100.0)
    assert not stall.is_stalled(290.0) and stall.is_stalled(301.0)
    assert stall.is_stalled(61.0, can_move=False)


def test_trainers_that_wait_and_seem_ever_slower_put_off_no_epoch() -> None:
    stall = StallClock()
    stall.note(5, 0.0)  # nobody has reported a speed yet
    for now_s in range(30, 200):
        stall.note(5, float(now_s), 0.9 * now_s)  # three such rounds are never over
    assert stall.is_stalled(82.0)
    stall.note(6, 200.0, 100.0)  # with progress, what was measured then counts
    assert not stall.is_stalled(490.0) and stall.is_stalled(501.0)


def test_a_window_takes_as_long_as_the_median_trainer_reports() -> None:
    peers = KnownPeers()
    assert window_s(peers.alive(0.0), tokens=1000) == 0.0
    for peer_id, speed in (("a", 10.0), ("b", 1e-6), ("c", 5.0), ("unknown", 0.0)):
        peers.update(peer(peer_id, tokens_per_s=speed), 0.0)
    peers.update(peer("follower", tokens_per_s=1e-6, role="follower"), 0.0)
    assert window_s(peers.alive(0.0), tokens=1000) == 200.0


def test_a_round_is_expected_to_take_about_as_long_as_the_last_ones() -> None:
    assert expected_round_s(7000.0, 0.0) == 7000.0  # nothing else is known
    assert expected_round_s(7000.0, 60.0) == 240.0  # trainers that count other tokens
    assert expected_round_s(90.0, 60.0) == 90.0  # windows that grow
    assert expected_round_s(0.0, 60.0) == 60.0


def test_time_without_anybody_does_not_count() -> None:
    stall = StallClock()
    stall.note(5, 0.0)
    stall.pause(1000.0)
    assert not stall.is_stalled(1059.0)


def test_one_peer_publishes_until_it_fails_to() -> None:
    peers = KnownPeers()
    for peer_id in ("a", "b", "c"):
        peers.update(peer(peer_id, position=4), 0.0)
    peers.update(peer("behind", position=2), 0.0)
    publisher = PublisherChoice()

    def asked(position: int, now_s: float) -> list[str]:
        alive = peers.alive(0.0)
        names = ["a", "b", "c", "behind"]
        return [
            p for p in names if publisher.asked(p, alive, epoch=0, position=position, now_s=now_s)
        ]

    (first,) = asked(2, 0.0)
    assert asked(2, 10.0) == [first]
    assert asked(3, 20.0) == [first]
    (second,) = asked(3, 40.0)[-1:]
    assert second != first
    assert asked(4, 41.0) == []


def test_a_liar_is_asked_once_in_a_while_only() -> None:
    peers, publisher = KnownPeers(), PublisherChoice()
    peers.update(peer("honest", position=2), 0.0)
    peers.update(peer("liar", position=2**62), 0.0)
    asked = {"honest": 0, "liar": 0}
    for second in range(100):
        for name in asked:
            chosen = publisher.asked(
                name, peers.alive(0.0), epoch=0, position=1, now_s=float(second)
            )
            asked[name] += chosen
    assert min(asked.values()) <= 17


def test_one_liar_does_not_move_the_common_position() -> None:
    peers = KnownPeers()
    for peer_id, position in (("a", 5), ("b", 6), ("liar", 2**62)):
        peers.update(peer(peer_id, position=position), 0.0)
    assert common_position(peers.alive(0.0), epoch=0) == 6
    peers.update(peer("a", position=9, epoch=1), 0.0)
    assert common_position(peers.alive(0.0), epoch=0) == 6
    assert common_position([], epoch=0) == 0


def test_reports_are_limited() -> None:
    limit = ReportLimit()
    assert [limit.take(0.0) for _ in range(60)] == [True] * 50 + [False] * 10
    assert [limit.take(1.0) for _ in range(12)] == [True] * 10 + [False] * 2


def test_a_peer_of_another_epoch_is_not_asked() -> None:
    peers = KnownPeers()
    peers.update(peer("a", position=4, epoch=1), 0.0)
    assert not PublisherChoice().asked("a", peers.alive(0.0), epoch=0, position=2, now_s=0.0)


def test_a_peer_that_said_goodbye_has_left_and_is_not_gone() -> None:
    peers = KnownPeers()
    peers.update(peer("a", state="leaving"), 0.0, left=True)
    peers.update(peer("b"), 0.0, left=True)  # evicted
    assert {m.status.peer_id: m.shown(1.0).state for m in peers.all()} == {"a": "left", "b": "gone"}


def test_a_pair_that_stays_apart_is_logged_once() -> None:
    logged: list[str] = []
    history = SimpleNamespace(peers=lambda: [])
    events = SimpleNamespace(report_once=lambda level, text, key: logged.append(text))
    presence = Presence(history, events, 0.0)  # type: ignore[arg-type]
    presence.peers.update(peer("a", unreached=["b", "elsewhere"]), 0.0)
    presence.look(1.0)
    assert logged == []
    presence.peers.update(peer("b", unreached=["a"]), 1.0)
    presence.look(2.0)
    presence.look(3.0)
    (text,) = logged
    assert text.startswith("a and b cannot reach each other")


def elector(peer_id: str, incarnation: str = "1") -> Elector:
    return Elector(peer_id=peer_id, incarnation=incarnation)


def after_stall(online: str, *, known: str = "") -> str:
    """Return who votes of those online: a to d do now, p to t were tried, x and y were not."""
    voters = Succession(
        electorate=tuple(map(elector, "abcd")),
        newcomers=(
            *(
                Newcomer(peer_id=peer_id, since=0, last=9, entries=TRIAL_ENTRIES)
                for peer_id in "pqrst"
            ),
            *(
                Newcomer(peer_id=peer_id, since=0, last=9, entries=TRIAL_ENTRIES - 1)
                for peer_id in "xy"
            ),
        ),
    )
    found = electors_after_stall(
        [elector(peer_id, "2") for peer_id in online], voters, known=set(known)
    )
    assert all(each.incarnation == "2" for each in found)
    return "".join(each.peer_id for each in found)


def test_a_newcomer_goes_where_the_peers_can_do_least() -> None:
    assert needs_most({"a": [], "b": []}) == "a"
    assert needs_most({"a": [0.0], "b": []}) == "b"
    assert needs_most({"a": [1.0], "b": [0.5, 0.5], "c": []}) == "c"  # vacant before slow
    assert needs_most({"a": [1.0, 1.0], "b": [3.0]}) == "a"  # by what they can do, not by number
    assert needs_most({"a": [4.0, 0.0], "b": [2.0, 2.0, 2.0]}) == "b"
    assert needs_most({"a": [2.0, 0.0], "b": [4.0, 1.0]}) == "a"


def test_a_stage_that_costs_more_gets_more_newcomers() -> None:
    """Before anybody has measured anything, and by what equal peers measure."""
    costs = (1.0, 4.0, 2.0)
    for speed in (0.0, 3.0):
        rates: dict[str, list[float]] = {"light": [], "heavy": [], "middle": []}
        for _ in range(14):
            chosen = needs_most(rates, costs)
            rates[chosen].append(speed / costs[list(rates).index(chosen)])
        assert [len(each) for each in rates.values()] == [2, 8, 4]
    # A light stage's peer does many more tokens than others, and claims no more than it can do.
    assert needs_most({"light": [100.0], "heavy": [1.0] * 12}, (1.0, 100.0)) == "heavy"


def test_no_claimed_rate_keeps_newcomers_away() -> None:
    rates = {"a": [1e12], "b": [1.0] * 3}
    while len(rates["b"]) < 3 * FASTEST and needs_most(rates) == "b":
        rates["b"].append(1.0)
    assert needs_most(rates) == "a" and len(rates["b"]) == FASTEST


def test_an_epoch_keeps_the_electors_and_half_as_many_tried_newcomers() -> None:
    assert after_stall("abcdpqrstxyz", known="abcdpxyz") == "abcdpq"
    assert after_stall("xyzrb", known="bxyz") == "br"
    assert after_stall("xyzb", known="bxyz") == "b"
    assert after_stall("xyzsr", known="xyz") == "rs"  # no elector: all that were tried
    assert after_stall("xyz", known="xz") == "xz"  # nor those
    assert after_stall("z") == ""


def test_electors_that_did_not_restart_come_first() -> None:
    voters = Succession(electorate=tuple(map(elector, "abc")))
    found = electors_after_stall([elector("a", "2"), elector("b")], voters, known=())
    assert found == [elector("b"), elector("a", "2")]


class Watched:
    """What `LostQuorum` says of electors a, b, ... second by second."""

    def __init__(self, names: str = "ab") -> None:
        self.electorate = [elector(name) for name in names]
        self.lost = LostQuorum()
        self.now_s = 0.0
        self.position = 5
        self.look(names)

    def look(self, here: str, **changes: object) -> str:
        """One look; capitals are restarted peers."""
        self.now_s += 1.0
        peers = KnownPeers()
        for name in here:
            incarnation = "2" if name.isupper() else "1"
            peers.update(peer(name.lower(), incarnation=incarnation, **changes), self.now_s)
        found = self.lost.look(
            self.electorate,
            peers.alive(self.now_s),
            position=self.position,
            now_s=self.now_s,
        )
        return "".join(sorted(each.peer_id for each in found))

    def until_lost(self, here: str, **changes: object) -> float:
        """The seconds until electors count as lost."""
        began_s = self.now_s
        while not self.look(here, **changes):
            assert self.now_s - began_s < 5000.0
        return self.now_s - began_s - 1.0


def test_a_quorum_is_lost_when_a_restarted_elector_is_back() -> None:
    assert Watched().look("Ab") == "a"
    assert Watched().look("aB") == ""  # half, with the first
    assert Watched("abc").look("ABc") == "ab"
    assert Watched("abc").look("Abc") == ""


def test_a_restarted_elector_that_fetches_its_state_is_awaited_a_while() -> None:
    assert Watched().until_lost("Ab", state="joining") == RESTARTED_S
    watched = Watched()
    assert watched.look("Ab", state="joining") == ""
    assert watched.look("Ab") == "a"


def test_a_silent_elector_is_lost_after_a_while_that_others_are_heard() -> None:
    assert Watched().until_lost("b") == SILENT_S
    assert Watched().until_lost("bc") == SILENT_S  # whoever else is there
    assert Watched("a").until_lost("c") == SILENT_S  # who fills a stage without a peer
    watched = Watched()
    for _ in range(100):  # the coordinator hears nobody: its own link is down
        assert watched.look("") == ""
    assert watched.look("b") == watched.look("b") == ""
    assert watched.look("ab") == ""
    assert watched.until_lost("b") == SILENT_S


def test_an_elector_that_was_never_heard_is_not_lost() -> None:
    """The coordinator itself has just started, and its peers come back one by one."""
    watched = Watched()
    watched.lost = LostQuorum()
    assert [watched.look("b") for _ in range(100)] == [""] * 100
    assert watched.look("ab") == ""
    assert watched.until_lost("b") == SILENT_S


def test_half_of_many_electors_are_not_presumed_dead() -> None:
    assert Watched("abcdefg").until_lost("abc") == SILENT_S
    many = Watched("abcdefgh")
    assert [many.look("abc") for _ in range(100)] == [""] * 100
    assert many.look("ABCDEFGh") == ""  # nor do few decide while the others are restarted


def test_epochs_for_lost_electors_come_ever_more_slowly() -> None:
    watched, waits = Watched(), []
    for _ in range(5):
        waits.append(watched.until_lost("Ab"))
        watched.lost.note_opened(watched.now_s)
    assert waits == [0.0] + [2**n * LOST_AGAIN_S - 1.0 for n in range(4)]
    watched.position += 1  # a round was decided
    watched.until_lost("Ab")
    watched.lost.note_opened(watched.now_s)
    assert watched.until_lost("Ab") == LOST_AGAIN_S - 1.0
