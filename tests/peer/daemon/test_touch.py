import grpc
import pytest

from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable, WrongRunOrVersion
from atoll.peer.daemon import touch
from atoll.peer.daemon.touch import Touch

AWAY = CoordinatorUnreachable("127.0.0.1:9: connection refused")
OTHER = WrongRunOrVersion(
    grpc.StatusCode.FAILED_PRECONDITION, "expected protocol 3, got 2; install that version here"
)
LOST = "warning: out of touch with the coordinator, training continues: "
BACK = "info: in touch with the coordinator again"


class Peer:
    def __init__(self, *, in_touch=True):
        self.said = []
        self.touch = Touch(
            lambda level, text, key=None: self.said.append(f"{level}: {text}"), in_touch=in_touch
        )


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(touch, "version", lambda name: "0.2.0")


def test_an_absence_and_a_refusal_are_reported_once_each():
    """The refusal alone names the remedy, and an update begins with an absence."""
    peer = Peer()
    for error in (AWAY, AWAY, OTHER, OTHER, AWAY, OTHER):
        peer.touch.failed(error)
    assert peer.said == [f"{LOST}{AWAY}", f"{LOST}{OTHER}"]
    peer.touch.answered("0.2.0")
    assert peer.said[2:] == [BACK]
    peer.touch.failed(AWAY)
    assert peer.said[3:] == [f"{LOST}{AWAY}"]


def test_an_absence_that_is_known_is_not_reported_again():
    peer = Peer(in_touch=False)
    peer.touch.failed(AWAY)
    assert peer.said == []
    peer.touch.failed(OTHER)
    assert peer.said == [f"{LOST}{OTHER}"]


def test_each_newer_version_is_reported_once():
    peer = Peer()
    for release in ("", "0.1.9", "0.2.0", "0.3.0", "0.3.0", "0.2.0", "0.3.0", "0.4.0"):
        peer.touch.answered(release)
    assert ["0.3.0" in peer.said[0], "0.4.0" in peer.said[1], len(peer.said)] == [True, True, 2]
    assert "this peer 0.2.0" in peer.said[0]
