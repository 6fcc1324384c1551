"""What a peer says while a round has no quorum does not fill its log."""

from atoll.peer.daemon.reporting import KEPT_KEYS, QUIET_S, Repeats


def test_what_repeats_is_said_less_and_less_often():
    repeats = Repeats()
    said = [
        repeats.shown(f"round 1, term {term}: no quorum", 1.5 * term, key=("no quorum", 1))
        for term in range(100)
    ]
    assert [term for term, text in enumerate(said) if text is not None] == [0, 1, 3, 7, 15, 31, 63]
    assert said[0] == "round 1, term 0: no quorum"
    assert said[7] == "round 1, term 7: no quorum (reported 8 times)"


def test_another_round_and_another_peer_are_news():
    repeats = Repeats()
    for text in ("round 1: ann refused", "round 2: ann refused", "round 2: bob refused"):
        assert repeats.shown(text, 0.0) == text


def test_a_wait_that_names_its_pause_repeats():
    repeats = Repeats()
    said = [
        repeats.shown(f"refused; retrying in {pause:.1f} s", 15.0, key="cannot join")
        for pause in range(9)
    ]
    assert sum(text is not None for text in said) == 4


def test_after_a_while_it_is_news_again():
    repeats = Repeats()
    lost = "out of touch with the coordinator"
    outages_s = [n * (QUIET_S + 1.0) for n in range(5)]
    assert [repeats.shown(lost, at_s) for at_s in outages_s] == [lost] * 5


def test_no_more_is_remembered_than_that():
    repeats = Repeats()
    assert all(repeats.shown(f"round {n}", 0.0) for n in range(10 * KEPT_KEYS))
    assert repeats.shown("round 0", 0.0) == "round 0"
    assert (
        repeats.shown(f"round {10 * KEPT_KEYS - 1}", 0.0)
        == f"round {10 * KEPT_KEYS - 1} (reported 2 times)"
    )
