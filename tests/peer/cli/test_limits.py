"""What a volunteer may set on a peer: wrong limits, and limits that do not go together."""

import argparse

import pytest

from atoll.peer.cli.limits import add_limits, rates_of, rules_of, rules_of_one
from atoll.peer.daemon.options import RELAY_MBIT_S, LinkRates
from atoll.peer.errors import DeviceError, SetupError
from atoll.peer.paths import PeerPaths
from support.environment import NOBODY


@pytest.fixture
def limits(tmp_path):
    """Reads limits, with the other options of `atoll peer` that they depend on."""

    def read(*words, **options):
        parser = argparse.ArgumentParser()
        add_limits(parser)
        values = {"uplink": 0.0, "downlink": 0.0, "relay_mbit": None, "device": "cpu"}
        values |= {"invite": str(NOBODY), "yes": False, "state_dir": tmp_path} | options
        return parser.parse_args(words, argparse.Namespace(**values))

    return read


@pytest.fixture
def closed(monkeypatch):
    """No hours are now."""
    monkeypatch.setattr("atoll.peer.daemon.hours.Hours.holds", lambda hours, local: False)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--max-mbit", "4", "at least 5 Mbit/s"),
        ("--max-mbit", "0", "at least 5 Mbit/s"),
        ("--max-mbit", "fast", "expected a number of Mbit/s"),
        ("--max-mbit", "inf", "expected a number of Mbit/s"),
        ("--hours", "late", "expected hours such as 22-8"),
    ],
)
def test_a_limit_without_sense_is_refused_at_once(limits, capsys, option, value, told):
    with pytest.raises(SystemExit, match="2"):
        limits(option, value)
    assert told in capsys.readouterr().err


def test_a_cap_is_what_relaying_leaves(limits):
    assert rates_of(limits()) == (LinkRates(), RELAY_MBIT_S)
    assert rates_of(limits("--max-mbit", "10")) == (
        LinkRates(downlink_mbit_s=10.0, most_mbit_s=10.0),
        0.0,
    )
    capped = limits("--max-mbit", "10", relay_mbit=4.0, uplink=50.0, downlink=3.0)
    expected = LinkRates(uplink_mbit_s=50.0, downlink_mbit_s=3.0, most_mbit_s=6.0)
    assert rates_of(capped) == (expected, 4.0)
    with pytest.raises(SetupError, match="leaves 4 of --max-mbit 10 Mbit/s, expected 5"):
        rates_of(limits("--max-mbit", "10", relay_mbit=6.0))


def test_a_peer_that_would_ask_at_night_is_refused(limits, closed, tmp_path):
    with pytest.raises(SetupError, match="start once without these limits and answer, or pass"):
        rules_of(limits("--hours", "22-8"), print)
    assert len(rules_of(limits("--hours", "22-8", yes=True), print)) == 1
    PeerPaths(root=tmp_path).consent.write_text("{}")
    assert len(rules_of(limits("--hours", "22-8"), print)) == 1


def test_without_limits_there_are_no_rules(limits):
    assert rules_of(limits(), print) == ()


def test_the_gpu_of_a_peer_without_one_is_refused(limits):
    with pytest.raises(DeviceError, match="expected an NVIDIA GPU for --yield-gpu, got cpu"):
        rules_of(limits("--yield-gpu"), print)


def test_a_rank_leaves_the_clock_to_its_launcher_and_torchrun_has_none(limits, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert rules_of_one(limits(), print) == ()
    with pytest.raises(SetupError, match="use --gpus instead of torchrun"):
        rules_of_one(limits("--hours", "22-8"), print)
    monkeypatch.setenv("ATOLL_RANKS_PIPE", "3")
    assert rules_of_one(limits("--hours", "22-8"), print) == ()
