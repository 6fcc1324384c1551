import stat
from pathlib import Path

import pytest

from atoll.coordinator.run.keys import KeysError, RunKeys


def test_made_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.json"
    keys = RunKeys.load_or_create(path)
    assert RunKeys.load_or_create(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["keys.json"]
    assert len(keys.run_public_key) == len(keys.tls_sha256) == 32


def test_secrets_are_not_shown() -> None:
    keys = RunKeys.generate()
    assert keys.token.hex() not in repr(keys)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b'{"version": 1}', b"\xff" * 10])
def test_a_damaged_file_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(KeysError, match="damaged"):
        RunKeys.load_or_create(path)
    assert path.read_bytes() == content


def test_keys_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b'{"version": 9}')
    with pytest.raises(KeysError, match="expected keys of version 1, got 9"):
        RunKeys.load_or_create(path)
