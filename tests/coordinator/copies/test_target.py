"""Targets: a folder, fsspec's own memory, and a bucket on a real server."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.coordinator.copies.restoring import find, restore
from atoll.coordinator.copies.target import CopyDamaged, Target, TargetFailed, within
from support.copies import ROUNDS, Run, opened, past, run_template, writer_of

__all__ = ["past", "run_template"]


def copied_and_restored(run: Run, url: str) -> None:
    """Copy a run into a target twice, prune, and restore it from there."""
    target = Target(url)
    target.expect_writable()
    with opened(run.state_dir) as log:
        writer = writer_of(target, run.state_dir, log)
        assert writer.write().positions == (ROUNDS,)
        (run.state_dir / "orders.json").write_text("[]")
        assert writer.write().is_new
        (run.state_dir / "orders.json").write_text("[] ")
        writer.write()
        before = len(target.names(writer._owner))
        writer.prune()
        assert len(target.names(writer._owner)) == before - 2  # a manifest and its sealed files
    found = find(target, run.key)
    (module,) = found.manifest.modules
    place = run.state_dir.with_name("restored")
    restore(target, run.key, found, place)
    with opened(place) as log:
        assert log.store.head.position == ROUNDS
    target.delete(module.bodies[0].name)
    with pytest.raises(CopyDamaged, match="it is not there"):
        restore(target, run.key, found, place.with_name("again"))
    assert len(target.names()) == 2  # the owner that wrote them, and the restored one


@pytest.mark.parametrize("url", ["folder", "file", "memory"])
def test_a_run_is_restored_from_any_file_system(past: Run, url: str) -> None:
    path = past.state_dir.with_name("place") / "of" / "copies"
    urls = {
        "folder": str(path),
        "file": path.as_uri(),
        "memory": f"memory://{secrets.token_hex(4)}",
    }
    copied_and_restored(past, urls[url])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A bucket of a server of its own process, as people have one: s3fs over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    for name, value in (
        ("AWS_ENDPOINT_URL", address),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    with (tmp_path / "s3.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", code, "-p", str(port)], stdout=log, stderr=log
        )
    try:
        for _ in range(300):
            assert server.poll() is None, (tmp_path / "s3.log").read_text()
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        urllib.request.urlopen(
            urllib.request.Request(f"{address}/atoll-test", method="PUT"), timeout=10
        ).close()
        yield "s3://atoll-test/a/run"
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of botocore and s3fs, which are not ours
def test_a_run_is_restored_from_a_bucket(past: Run, bucket: str) -> None:
    copied_and_restored(past, bucket)
    with pytest.raises(TargetFailed, match=r"s3://no-such-bucket/x: .* cannot be written: "):
        Target("s3://no-such-bucket/x").expect_writable()


def test_unknown_file_systems_are_refused() -> None:
    with pytest.raises(TargetFailed, match="pass a folder or a URL of fsspec"):
        Target("no-such-protocol://x")


def test_a_target_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetFailed, match="cannot be written"):
        Target(str(tmp_path / "file" / "below")).expect_writable()


def test_a_target_that_does_not_answer_is_left() -> None:
    with pytest.raises(TargetFailed, match="did not answer within 0 s"):
        within(0.01, lambda: time.sleep(0.5))


def test_latest_is_replaced_whole_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between opening and writing must not leave an empty one."""
    target = Target(str(tmp_path))
    target.replace("latest", b"first")
    monkeypatch.setattr(target._fs, "mv", lambda *names: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(TargetFailed):
        target.replace("latest", b"second")
    assert target.read("latest", 100) == b"first"
