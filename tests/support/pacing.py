"""Pacers for tests whose network has no rate."""

from atoll.peer.rounds.pacing import Pacer


def unlimited():
    """Turns as long as nobody reads what is confirmed."""
    pacer = Pacer()
    pacer.expect_confirmations(False)
    return pacer
