"""Computing while another thread waits for a round."""

import threading
import time

import pytest

from atoll.peer.training.beside import BesideWaits, ParameterTurns


def test_whoever_asks_goes_before_the_others_next_turn():
    """A stage has always something to compute, and its round must not wait for a pause."""
    turns, has_changed = ParameterTurns(), threading.Event()

    def changes():
        with turns.taken():
            has_changed.set()

    with turns.taken():
        other = threading.Thread(target=changes)
        other.start()
        until_s = time.monotonic() + 10.0
        while not turns._asking.locked():
            assert time.monotonic() < until_s
        assert not has_changed.is_set()
    with turns.taken():
        assert has_changed.is_set()
    other.join()


def test_the_waiting_thread_computes_until_the_other_is_done():
    computed, arrived = [], threading.Event()

    def computes(turns, is_over):
        while not is_over():
            with turns.taken():
                computed.append(arrived.is_set())

    beside = BesideWaits(computes)

    def waits():
        while not computed:
            pass
        with beside.turns.taken():
            arrived.set()

    beside.wait(waits)
    beside.close()
    assert computed[0] is False and arrived.is_set()


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
