"""The memory of a coordinator process whose run has stages."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.coordinator.checkpoints import load_checkpoint
from atoll.coordinator.rpc.client import CoordinatorClient
from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.invite import Invite
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.log.module import log_id
from atoll.optim.log.replay import Replay
from atoll.optim.state import mapped, vectors
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from support import kit

NUMEL = 8_000_000  # of a stage, whose parameters and momentum then take 64 MB
LAYOUT = Layout(names=("weight",), shapes=((NUMEL,),))
STATE_BYTES = 8 * NUMEL
FEW, MANY = 2, 6

CHILD = """
import asyncio, sys
from pathlib import Path
tests, state_dir, stages, on_disk = sys.argv[1:]
sys.path[:0] = [tests, tests + "/coordinator/service"]
import test_server_stages as here
from atoll.coordinator.service.server import running
from support import kit

async def main():
    spec = here.spec_of(int(stages))
    options = {"state_on_disk": None if on_disk == "default" else False}
    async with running(spec, here.genesis, Path(state_dir), **options) as up:
        for log in up.coordinator.logs.values():
            log.ask_head_with(kit.answering(up.coordinator, None, log))
        print(up.invite, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def spec_of(stages: int) -> RunSpec:
    changes = {
        "topology": {"stages": stages},
        "round": {"min_peers": 3 * stages, "snapshot_every": 2},
        "coordinator": {**kit.SPEC.model_dump()["coordinator"], "checkpoint_every": 1},
    }
    return RunSpec.from_dict(kit.SPEC.model_dump(mode="json") | changes)


def genesis(module: str) -> OuterState:
    return OuterState.genesis(LAYOUT, torch.linspace(-1, 1, NUMEL))


@contextlib.contextmanager
def coordinator(folder: Path, stages: int, on_disk: str) -> Iterator[tuple[int, Invite]]:
    """Run one as a process; yield its number and its invite."""
    tests = str(Path(kit.__file__).parent.parent)
    command = [sys.executable, "-c", CHILD, tests, str(folder), str(stages), on_disk]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            yield child.pid, Invite.decode(child.stdout.readline().decode())
        finally:
            child.kill()


def memory_bytes(pid: int) -> int:
    """Return what a process holds that is no file's: its heap, and bodies on their way."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(told[name].split()[0]) for name in ("RssAnon", "RssShmem"))


async def round_of(invite: Invite, module: str) -> None:
    """Let three peers join a module; publish its first entry when its log has begun."""
    swarm = kit.Swarm(replay=Replay(kit.SPEC.method(), LAYOUT))
    clients = [CoordinatorClient(invite, each, module=module) for each in swarm.identities]
    for index, client in enumerate(clients):
        await client.join()
        await client.heartbeat(swarm.status(index, module=module))
    first = clients[0]
    while not (beat := await first.heartbeat(swarm.status(0, module=module))).epoch:
        await asyncio.sleep(0.1)
    entry, body = swarm.entry(log_id(invite.run_id, module), beat.head)
    words = {"entry": entry.encode(), "certificate": swarm.certify(entry).encode(), "body": body}
    while True:
        with contextlib.suppress(CoordinatorError):  # it takes few bodies at once
            assert (await first.publish(epoch=0, position=0, **words)).accepted
            break
        await asyncio.sleep(0.1)
    for client in clients:
        await client.close()


def after_a_round(folder: Path, stages: int, on_disk: str = "default") -> int:
    """Return the memory of a coordinator whose stages have held a round and have checkpoints."""
    with coordinator(folder, stages, on_disk) as (pid, invite):

        async def all_stages() -> None:
            async with asyncio.TaskGroup() as tasks:
                for module in spec_of(stages).modules:
                    tasks.create_task(round_of(invite, module))
            # Of the moment at which the last stage has held its round.
            while (
                len({path.parent for path in folder.glob("checkpoints/*/*.safetensors")}) < stages
            ):
                await asyncio.sleep(0.1)

        kit.run(all_stages())
        return memory_bytes(pid)


@pytest.mark.parametrize(
    ("kind", "stages", "is_mapped"), [("ext4", 2, True), ("tmpfs", 2, False), ("ext4", 1, False)]
)
def test_states_of_stages_lie_in_files_if_there_is_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stages: int, is_mapped: bool
) -> None:
    monkeypatch.setattr(mapped, "file_system_of", lambda folder: kind)
    spec = spec_of(stages) if stages > 1 else kit.SPEC

    async def main() -> None:
        async with kit.net(tmp_path / "run", spec=spec) as net:
            for log in net.up.coordinator.logs.values():
                assert (log.replica.allocate is not vectors.empty) == is_mapped

    kit.run(main())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_states_of_more_stages(tmp_path: Path) -> None:
    if not mapped.is_on_disk(tmp_path):
        pytest.skip("the tests' folder lies in memory")
    few = after_a_round(tmp_path / "few", FEW)
    many = after_a_round(tmp_path / "many", MANY)
    # Each log has some megabytes of its own whatever its model: SQLite's pages, above all.
    assert many - few < (MANY - FEW) * STATE_BYTES / 3
    path = tmp_path / "many" / "checkpoints" / "stage-6" / "test-00000001.safetensors"
    assert load_checkpoint(path).params_N.shape == (NUMEL,)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_states_in_memory_take_their_size_for_each_stage(tmp_path: Path) -> None:
    few = after_a_round(tmp_path / "few", FEW, "memory")
    many = after_a_round(tmp_path / "many", MANY, "memory")
    assert many - few > 0.8 * (MANY - FEW) * STATE_BYTES
