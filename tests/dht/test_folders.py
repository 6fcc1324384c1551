import os
import shutil
import tempfile

import pytest

from atoll.dht.folders import claim_folder, give_up_folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder):
    os.utime(folder, (0, 0))


def test_a_folder_whose_owner_was_killed_is_removed(temporary):
    folder, lock = claim_folder("atoll-p2pd-")
    age(folder)
    lock.close()
    new, new_lock = claim_folder("atoll-p2pd-")
    assert not folder.exists()
    assert new.exists()
    new_lock.close()


def test_who_gives_up_a_folder_removes_what_a_killed_one_has_left(temporary):
    folder, lock = claim_folder("atoll-p2pd-")
    last, last_lock = claim_folder("atoll-p2pd-")
    age(folder)
    lock.close()
    give_up_folder(last, last_lock, "atoll-p2pd-")
    assert not list(temporary.iterdir())


def test_a_folder_whose_owner_lives_is_kept(temporary):
    folder, lock = claim_folder("atoll-p2pd-")
    age(folder)
    claim_folder("atoll-p2pd-")[1].close()
    assert folder.exists()
    lock.close()


def test_a_folder_that_is_not_ours_is_kept(temporary):
    for name in ("atoll-p2pd-without-lock", "atoll-other", "hivemind-x"):
        (temporary / name).mkdir()
        age(temporary / name)
    claim_folder("atoll-p2pd-")[1].close()
    assert len(list(temporary.iterdir())) == 4
    shutil.rmtree(temporary / "atoll-other")
