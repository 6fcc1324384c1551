import logging
import subprocess
import sys
import time

import pytest

from atoll.dht import bindings, clock


@pytest.fixture
def an_hour_off():
    clock.set_offset(3600)
    yield
    clock.set_offset(0)


def test_hivemind_follows_the_learnt_offset(an_hour_off):
    from hivemind.dht import node, protocol
    from hivemind.utils import timed_storage

    assert bindings.DHTNode is node.DHTNode
    for module in (node, protocol, timed_storage):
        assert module.get_dht_time() == pytest.approx(clock.now_s(), abs=1)
    assert clock.now_s() - time.time() == pytest.approx(3600, abs=1)


def test_a_jump_is_followed_and_a_slow_call_is_not(an_hour_off):
    clock.follow(3605.0, 5.0)  # the call took so long that nothing need have jumped
    clock.follow(3600.9, 0.01)
    assert clock.now_s() - time.time() == pytest.approx(3600, abs=0.1)
    clock.follow(3496.0, 5.0)
    assert clock.now_s() - time.time() == pytest.approx(3496, abs=0.1)


def test_hivemind_leaves_logging_alone():
    assert logging.getLevelName(logging.WARNING) == "WARNING"
    assert logging.getLogger("hivemind").handlers == []


def test_importing_the_package_does_not_load_hivemind():
    code = "import sys, atoll.dht.testing, atoll.dht.roster; print('hivemind' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_exported_members_exist():
    import atoll.dht

    assert sorted(atoll.dht.__all__) == atoll.dht.__all__
    assert all(hasattr(atoll.dht, name) for name in atoll.dht.__all__)
