"""Processes of two releases, as people start them: a coordinator and peers that are newer or older.

The other release is this tree under a later version number; where it speaks another protocol, its
packages are links to the ones here but for the file with the number.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

from atoll.coordinator.rpc.messages import PROTOCOL
from atoll.coordinator.run.status import RunStatus
from atoll.peer.lab.children import BAD_INPUT, Child
from support.child_runs import PEER, status_when, until, write_spec
from support.limits import DEADLINE_S

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
TEXT = "Owners upgrade when they like, or when nobody reminds them. " * 2000
OURS, LATER = version("atoll"), "99.0.0"
NUMBER = "PROTOCOL: Final = "
OURS_HERE: Mapping[str, str] = {}


def later_release(folder: Path, *, protocol: int) -> Mapping[str, str]:
    """Make another release; return the environment in which a process is of it."""
    (told := folder / f"atoll-{LATER}.dist-info").mkdir(parents=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: atoll\nVersion: {LATER}\n")
    tree = folder / "atoll"
    for package in ("compression", "dht", "optim", "peer"):
        (tree / package).parent.mkdir(exist_ok=True)
        (tree / package).symlink_to(ROOT / package)
    link_but(ROOT / "coordinator", tree / "coordinator", "rpc", "messages.py", protocol=protocol)
    return {"PYTHONPATH": str(folder)}


def link_but(source: Path, made: Path, *way: str, protocol: int) -> None:
    """Link all files of a folder but the one on the way, which gets another protocol."""
    made.mkdir()
    for path in source.iterdir():
        if path.name != way[0]:
            (made / path.name).symlink_to(path)
    if len(way) > 1:
        return link_but(source / way[0], made / way[0], *way[1:], protocol=protocol)
    text = (source / way[0]).read_text()
    assert f"{NUMBER}{PROTOCOL} " in text
    (made / way[0]).write_text(text.replace(f"{NUMBER}{PROTOCOL} ", f"{NUMBER}{protocol} "))


@dataclass
class Meeting:
    """A run in a folder, whose processes may be of either release."""

    folder: Path
    children: list[Child] = field(default_factory=list)
    invite: str = ""

    async def start(self, name: str, release: Mapping[str, str], *arguments: object) -> Child:
        log, words = self.folder / f"{name}.log", list(map(str, arguments))
        child = await Child.start(name, log, words, environment=release)
        self.children.append(child)
        return child

    async def coordinator(self, release: Mapping[str, str]) -> Child:
        """Start it, or start it again where it was."""
        file = self.folder / "invite"
        file.unlink(missing_ok=True)
        state = ("--state-dir", self.folder / "coordinator", "--invite-file", file)
        spec = self.folder / "RUN.toml"
        child = await self.start("organiser", release, "coordinator", spec, *state)
        await until(file.exists, child)
        self.invite = file.read_text().strip()
        return child

    async def trainer(self, release: Mapping[str, str]) -> Child:
        named = ("--name", "one", "--share", 0.1, "--state-dir", self.folder / "one", "--data")
        return await self.start(
            "one", release, "peer", self.invite, *PEER, *named, self.folder / "text.txt"
        )

    async def seen(self, condition) -> RunStatus:
        return await status_when(self.invite, condition, self.children, patience_s=DEADLINE_S)

    async def end(self, child: Child) -> None:
        await child.stop()
        self.children.remove(child)

    async def close(self) -> None:
        for child in reversed(self.children):
            await child.stop()

    def told(self, name: str, text: str) -> int:
        return (self.folder / f"{name}.log").read_text().count(text)


@pytest.fixture
def meet(tmp_path):
    """Runs a coroutine with a meeting in the test's folder."""

    def run(use) -> None:
        run, round_ = {"name": "meeting", "rounds": 0}, {"min_peers": 1, "snapshot_every": 2}
        write_spec(tmp_path, text=TEXT, run=run, round=round_)
        meeting = Meeting(tmp_path)

        async def main() -> None:
            try:
                await use(meeting)
            finally:
                await meeting.close()
            for log in tmp_path.glob("*.log"):
                assert "Traceback" not in log.read_text()

        asyncio.run(main())

    return run


def beyond(position: int):
    return lambda now: now.position > position + 1 and any(p.name == "one" for p in now.peers)


def test_a_peer_of_a_newer_coordinator_trains_and_is_told(meet, tmp_path):
    later = later_release(tmp_path / "later", protocol=PROTOCOL)

    async def use(run: Meeting) -> None:
        organiser = await run.coordinator(OURS_HERE)
        await run.trainer(OURS_HERE)
        before = await run.seen(beyond(0))
        assert not run.told("one", "newer version")
        await run.end(organiser)  # the update: the peer runs on
        organiser = await run.coordinator(later)
        text = f"there is a newer version: the coordinator runs Atoll {LATER}, this peer {OURS}"
        await until(lambda: run.told("one", text), organiser)
        await run.seen(beyond(before.position + 2))
        assert run.told("one", text) == 1

    meet(use)


def test_a_newer_peer_trains_and_the_organiser_is_told(meet, tmp_path):
    later = later_release(tmp_path / "later", protocol=PROTOCOL)

    async def use(run: Meeting) -> None:
        await run.coordinator(OURS_HERE)
        await run.trainer(later)
        now = await run.seen(beyond(0))
        texts = [event.text for event in now.events]
        assert f"joined as trainer (version {LATER}, newer than the {OURS} here)" in texts
        assert not run.told("one", "newer version")

    meet(use)


@pytest.mark.parametrize("peer_is_newer", [False, True])
def test_releases_of_two_protocols_part_with_a_remedy(meet, tmp_path, peer_is_newer):
    later = later_release(tmp_path / "later", protocol=PROTOCOL + 1)
    releases = [(OURS_HERE, OURS, PROTOCOL), (later, LATER, PROTOCOL + 1)]
    (mine, _, spoken), (other, its, expected) = releases[::-1] if peer_is_newer else releases
    refusal = (
        f"expected protocol {expected}, got {spoken}: this run's coordinator is of Atoll {its}; "
        "install that version here"
    )

    async def use(run: Meeting) -> None:
        organiser = await run.coordinator(mine)
        peer = await run.trainer(mine)
        before = await run.seen(beyond(0))
        await run.end(organiser)
        organiser = await run.coordinator(other)

        # A peer that runs is told once, trains on, and goes on asking.
        log = run.folder / "one.log"
        await until(lambda: refusal in log.read_text(), peer, organiser)
        await asyncio.sleep(5.0)
        assert peer.running and run.told("one", refusal) == 1
        away = await run.seen(lambda now: now.position >= before.position)

        # It is there again when the coordinator is.
        await run.end(organiser)
        organiser = await run.coordinator(mine)
        await run.seen(beyond(away.position + 2))
        assert run.told("one", "in touch with the coordinator again") == 1

        # One that starts is refused at once, with nothing changed on its disk.
        await run.end(organiser)
        await run.end(peer)
        kept = state_of(run.folder / "one")
        organiser = await run.coordinator(other)
        peer = await run.trainer(mine)
        async with asyncio.timeout(DEADLINE_S):
            while peer.running:
                await asyncio.sleep(0.1)
        run.children.remove(peer)
        assert peer.exit_code == BAD_INPUT and run.told("one", refusal) == 2
        assert state_of(run.folder / "one") == kept

        # The remedy is one: the state directory is taken over.
        peer = await run.trainer(other)
        resumed = "inner optimizer and data position resumed"
        await until(lambda: resumed in log.read_text(), peer, organiser)
        now = await run.seen(beyond(away.position))
        await run.seen(beyond(now.position))

    meet(use)


def state_of(folder: Path) -> dict[str, bytes]:
    """Return what a peer keeps of its run, without what it logs."""
    kept = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.read_bytes() for path in kept if path.suffix != ".log"}
