"""State directories that releases have left on a disk are opened, and their runs continue."""

import json
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.store import LogStore

RELEASES = sorted((Path(__file__).parents[2] / "releases").glob("*.tar.gz"))


@pytest.fixture(params=RELEASES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def kept(request, tmp_path, monkeypatch):
    """What `scripts/keep_release.py` has packed, in this folder; gives what it read itself."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    for name in ("port", "node.port"):  # another program may have them now
        (tmp_path / "coordinator" / name).unlink()
    monkeypatch.chdir(tmp_path)
    return json.loads((tmp_path / "expected.json").read_text())


def test_there_is_a_release():
    assert [path.name for path in RELEASES][:1] == ["0.1.0.tar.gz"]


def test_a_run_continues_from_the_state_of_a_release(kept, organise, kit, start, tmp_path):
    assert RunSpec.load(tmp_path / "RUN.toml").run.name == "kept"
    organiser = organise(RunSpec.from_json((tmp_path / "coordinator" / "spec.json").read_bytes()))
    status = organiser.status()
    found = {"run_id": status.run_id, "position": status.position, "chain": status.chain}
    assert found == {name: kept[name] for name in found}
    peer = start(organiser.invite, "peer", data="text.txt", share=1.0)
    kit.until(lambda: organiser.status().position > kept["position"] + 1, "further rounds")
    assert peer.said("inner optimizer and data position resumed")
    assert peer.said(f"resumed at position {kept['position']}")


def test_what_a_release_wrote_is_read_with_the_same_numbers(kept, tmp_path):
    with closing(LogStore.reading(tmp_path / "coordinator" / "log")) as log:
        assert (log.head.position, log.head.chain.hex()) == (kept["position"], kept["chain"])
        assert log.load_snapshot(kept["snapshot"]).root().hex() == kept["snapshot_root"]
    newest = max((tmp_path / "coordinator" / "checkpoints").glob("*.safetensors"))
    assert load_checkpoint(newest).run_id.hex() == kept["run_id"]
    assert Invite.decode((tmp_path / "invite").read_text()).run_id.hex() == kept["run_id"]
