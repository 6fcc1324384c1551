"""Computing while another thread waits for a round."""

import threading

import pytest

from atoll.peer.training.beside import BesideWaits, ParameterTurns


def test_what_arrives_changes_parameters_between_two_computations():
    """The one that computes never pauses by itself, and the other one gets its turn."""
    is_computing, seen, arrived = threading.Event(), [], threading.Event()
    has_begun = threading.Event()

    def computes(turns, is_over):
        while not is_over():
            with turns.taken():
                is_computing.set()
                seen.append(arrived.is_set())
                has_begun.set()
                is_computing.clear()

    beside = BesideWaits(computes)

    def waits():
        assert has_begun.wait(10)
        for _ in range(100):
            with beside.turns.taken():
                assert not is_computing.is_set()
        arrived.set()

    beside.wait(waits)
    beside.close()
    assert False in seen


def test_a_wait_that_fails_ends_the_computing():
    def computes(turns, is_over):
        while not is_over():
            with turns.taken():
                pass

    def fails():
        raise OSError("the disk is full")

    beside = BesideWaits(computes)
    with pytest.raises(OSError, match="disk is full"):
        beside.wait(fails)
    beside.close()


def test_turns_are_free_again_after_a_failure():
    turns = ParameterTurns()
    with pytest.raises(ValueError), turns.taken():
        raise ValueError
    with turns.taken():
        pass
