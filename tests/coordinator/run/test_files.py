"""Small files of a coordinator."""

from pathlib import Path

import pytest

from atoll.coordinator.run import files
from atoll.coordinator.run.files import KNOWN_FILE, keep_known_peers, known_peers


def test_what_is_not_there_or_not_text_is_no_address(tmp_path: Path) -> None:
    assert known_peers(tmp_path) == ()
    (tmp_path / KNOWN_FILE).write_bytes(b"\xff\xfe\x00")
    assert known_peers(tmp_path) == ()
    keep_known_peers(tmp_path, ("/ip4/127.0.0.1/tcp/1/p2p/a", "/dns/host/tcp/2/p2p/b"))
    assert known_peers(tmp_path) == ("/ip4/127.0.0.1/tcp/1/p2p/a", "/dns/host/tcp/2/p2p/b")


def test_addresses_are_on_the_disk_with_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[bool]()
    monkeypatch.setattr(
        files.os, "fsync", lambda fd: synced.append((tmp_path / KNOWN_FILE).exists())
    )
    keep_known_peers(tmp_path, ("/ip4/127.0.0.1/tcp/1/p2p/a",))
    assert synced == [False, True]
