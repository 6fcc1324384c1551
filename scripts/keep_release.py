"""Keep what this release leaves on a disk, for the tests of later ones.

    .venv/bin/python scripts/keep_release.py [--out FILE]

Runs a coordinator and a peer of a tiny model as processes, stops both in the middle of the run, and
packs their state directories with the text, the RUN.toml, the invite and what the present release
reads from them. Run it once for each release, before its tag; the file is never made again, since a
later release has to open what this one wrote. The keys in it are of that run alone.
"""

import argparse
import asyncio
import gzip
import io
import json
import os
import platform
import sys
import tarfile
import tempfile
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec, template
from atoll.coordinator.run.status import RunStatus
from atoll.optim.log.store import LogStore
from atoll.peer.cli.watching import asking
from atoll.peer.lab.children import Child

RELEASES = Path(__file__).parents[1] / "tests" / "releases"
ROUNDS = 5  # at least, before both are stopped: two snapshots, and a checkpoint
MAX_BYTES = 300_000
DEADLINE_S = 180.0
LEFT_OUT = ("lock", "atoll.log", ".new", "-wal", "-shm")  # of a process, not of a run
TEXT = "What a release wrote, the next one opens. " * 100
PEER = ("--name", "kept", "--listen", "/ip4/127.0.0.1/tcp/0", "--device", "cpu", "--yes")


def spec() -> RunSpec:
    return RunSpec.from_dict(
        {
            "run": {"name": "kept", "rounds": 1000},
            "model": {"overrides": {"dim": 4, "num_layers": 1, "num_heads": 1, "ffn_dim": 8}},
            "data": {"source": "text.txt", "seq_len": 32},
            "inner": {"batch_size": 2, "warmup_steps": 2},
            "outer": {"inner_steps": 2},
            "round": {"min_peers": 1, "snapshot_every": 2, "stall_s": 3.0},
            "coordinator": {
                "listen": "127.0.0.1:0",
                "dht_listen": "127.0.0.1:0",
                "checkpoint_every": 2,
            },
        }
    )


async def leave_state(folder: Path) -> RunStatus:
    """Run and stop both; return what the coordinator knew after the peer had left."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "RUN.toml").write_text(template(spec()))
    invite, children = folder / "invite", []
    state = ("--state-dir", folder / "coordinator", "--invite-file", invite)

    async def start(name: str, *arguments: object) -> Child:
        words = [*map(str, arguments), "--stop-with-stdin"]
        child = await Child.start(name, folder / f"{name}.log", words)
        children.append(child)
        return child

    async def until(is_enough) -> None:
        while not is_enough():
            for child in children:
                if not child.running:
                    raise child.failure()
            await asyncio.sleep(0.1)

    try:
        await start("organiser", "coordinator", folder / "RUN.toml", *state)
        await until(invite.exists)
        own = ("--state-dir", folder / "peer", "--data", "text.txt", "--share", 0.1)
        peer = await start("trainer", "peer", invite, *PEER, *own)
        while (await look(invite)).position < ROUNDS:
            await until(lambda: True)
            await asyncio.sleep(0.5)
        await peer.stop()
        children.remove(peer)
        return await look(invite)
    finally:
        for child in reversed(children):
            await child.stop()


async def look(invite: Path) -> RunStatus:
    async with asking(Invite.decode(invite.read_text())) as client:
        return await client.status()


def told(folder: Path, status: RunStatus) -> dict[str, object]:
    """Return what a later release has to find."""
    with closing(LogStore.reading(folder / "coordinator" / "log")) as log:
        head, newest = log.head, max(log.snapshot_positions())
        snapshot = log.load_snapshot(newest)
    return {
        "release": version("atoll"),
        "python": platform.python_version(),
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "run_id": status.run_id,
        "position": head.position,
        "chain": head.chain.hex(),
        "snapshot": newest,
        "snapshot_root": snapshot.root().hex(),
    }


def pack(folder: Path, out: Path) -> None:
    """Write the archive, the same bytes for the same files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.endswith(LEFT_OUT):
                name = path.relative_to(folder).as_posix()
                if name.endswith(".log"):
                    continue
                item = tarfile.TarInfo(name)
                item.size, item.mode = path.stat().st_size, path.stat().st_mode & 0o777
                with path.open("rb") as file:
                    archive.addfile(item, file)
    packed = gzip.compress(raw.getvalue(), mtime=0)
    if len(packed) > MAX_BYTES:
        raise SystemExit(f"{len(packed)} bytes packed, expected at most {MAX_BYTES}")
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(packed)
    print(f"{out}: {len(packed)} bytes", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = RELEASES / f"{version('atoll')}.tar.gz"
    parser.add_argument("--out", type=Path, default=default, help=f"(default: {default.name})")
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists, and stays as that release wrote it; name another")
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), args.out.absolute()
        os.chdir(folder)  # the saved progress names the text as the owner does
        status = asyncio.run(asyncio.wait_for(leave_state(folder), DEADLINE_S))
        (folder / "expected.json").write_text(json.dumps(told(folder, status), indent=1) + "\n")
        pack(folder, out)


if __name__ == "__main__":
    main()
