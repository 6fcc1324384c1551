import asyncio
import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from atoll.coordinator.checkpointing import Checkpointing
from atoll.coordinator.checkpoints import (
    Checkpoint,
    CheckpointError,
    delete_checkpoint,
    load_checkpoint,
    read_header,
    save_checkpoint,
)
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState

LAYOUT = Layout(names=("embed", "head"), shapes=((1000, 100), (40_000,)))
SPEC = RunSpec.from_dict({"run": {"name": "test"}})


def make(position: int = 7, run_id: bytes = b"r" * 32) -> Checkpoint:
    state = OuterState.blank(LAYOUT, position)
    state.params_N.copy_(torch.arange(LAYOUT.numel) * 0.5)
    state.momentum_N.fill_(-1.0)
    return Checkpoint(
        spec=SPEC, run_id=run_id, epoch=1, position=position, chain=b"c" * 32, state=state
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.safetensors"
    save_checkpoint(path, make())
    loaded = load_checkpoint(path)
    assert (loaded.spec, loaded.run_id, loaded.epoch) == (SPEC, b"r" * 32, 1)
    assert (loaded.position, loaded.chain) == (7, b"c" * 32)
    assert loaded.layout == LAYOUT and loaded.state.root() == make().state.root()
    assert loaded.params["embed"].shape == (1000, 100)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_any_tool_can_read_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", make())
    tensors = load_file(tmp_path / "a")
    assert set(tensors) == {"params/embed", "params/head", "momentum/embed", "momentum/head"}


def test_memory_beyond_a_momentum_is_kept(tmp_path: Path) -> None:
    state = OuterState.genesis(LAYOUT, make().params_N, torch.arange(2.0 * LAYOUT.numel + 2))
    save_checkpoint(tmp_path / "a", dataclasses.replace(make(0), state=state))
    assert load_file(tmp_path / "a")["memory"].numel() == LAYOUT.numel + 2
    assert torch.equal(load_checkpoint(tmp_path / "a").state.memory_M, state.memory_M)


def test_the_same_run_replaces_its_own_another_run_does_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, make(7))
    save_checkpoint(path, make(8))
    assert load_checkpoint(path).position == 8
    with pytest.raises(CheckpointError, match="move it away"):
        save_checkpoint(path, make(9, run_id=b"x" * 32))
    assert load_checkpoint(path).position == 8


def test_a_file_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("my thesis")
    with pytest.raises(CheckpointError, match="unknown"):
        save_checkpoint(path, make())
    assert path.read_text() == "my thesis"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "none")


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"\xff" * 100,
        lambda raw: b"\xff\xff\xff\xff\xff\xff\xff\x7f" + raw[8:],
        lambda raw: raw[:-5] + b"\x00\x01\x02\x03\x04",
    ],
)
def test_a_damaged_file_says_so(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, make())
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "atoll checkpoint 1"}, "2', got .*; the version of Atoll that wrote"),
        ({"chain": "zz"}, "damaged"),
        ({"position": "-"}, "damaged"),
        ({"layout": "{}"}, "damaged"),
        ({"root": "00" * 32}, "expected the state root 000000000000"),
        ({"spec": '{"run": {"nam": 1}}'}, "did you mean 'name'"),
    ],
)
def test_wrong_metadata(tmp_path: Path, changes: dict[str, str], told: str) -> None:
    from safetensors import safe_open

    path = tmp_path / "a"
    save_checkpoint(path, make())
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    save_file(load_file(path), tmp_path / "b", metadata={**metadata, **changes})
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path / "b")


def test_tensors_of_another_model(tmp_path: Path) -> None:
    other = dataclasses.replace(make())
    save_checkpoint(tmp_path / "a", other)
    from safetensors import safe_open

    with safe_open(tmp_path / "a", framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(tmp_path / "a")
    tensors["params/head"] = tensors["params/head"].double()
    save_file(tensors, tmp_path / "b", metadata=metadata)
    with pytest.raises(CheckpointError, match="fp32"):
        load_checkpoint(tmp_path / "b")
    del tensors["params/head"]
    save_file(tensors, tmp_path / "b", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"b: damaged: its tensors do not match its layout$"):
        load_checkpoint(tmp_path / "b")


class Replica:
    """Stands where it is told to."""

    run_id = b"r" * 32
    is_current = True

    def __init__(self) -> None:
        self.position = 0

    @property
    def head(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(position=self.position, epoch=1, chain=b"c" * 32)

    @property
    def standing(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(head=self.head, state=self.state())

    def state(self) -> OuterState:
        return make(self.position).state


def positions_kept(folder: Path, *, last: int, **coordinator: int) -> list[int]:
    """The positions of checkpoints that a run has kept at a position."""
    spec = RunSpec.from_dict({"run": {"name": "test"}, "coordinator": coordinator})
    replica, said = Replica(), []

    async def run() -> None:
        checkpoints = Checkpointing(
            spec, {"": replica}, {"": folder}, lambda level, text: said.append((level, text))
        )
        for replica.position in range(1, last + 1):
            checkpoints.look()
            if checkpoints._writing is not None:
                await checkpoints._writing
        await checkpoints.close()

    asyncio.run(run())
    assert {level for level, _ in said} == {"info"}
    return sorted(int(path.stem[-8:]) for path in folder.iterdir())


def test_the_newest_checkpoints_are_kept_and_every_tenth(tmp_path: Path) -> None:
    kept = positions_kept(tmp_path / "a", last=47, checkpoint_every=2)
    assert kept == [20, 40, 44, 46, 47]
    assert positions_kept(tmp_path / "b", last=7, checkpoint_every=1, keep_checkpoints=1) == [7]


def test_all_checkpoints_can_be_kept(tmp_path: Path) -> None:
    every = positions_kept(tmp_path, last=9, checkpoint_every=2, keep_checkpoints=0)
    assert every == [2, 4, 6, 8, 9]


def test_a_checkpoint_waits_for_the_state_after_one_that_gave_way(tmp_path: Path) -> None:
    """The next entry has overwritten the state, and the loop does not know it yet."""
    spec = RunSpec.from_dict({"run": {"name": "test"}, "coordinator": {"checkpoint_every": 1}})
    replica, said = Replica(), list[str]()
    replica.position, gone = 1, make(1).state
    assert gone.give_way(params=True)

    async def run() -> None:
        checkpoints = Checkpointing(
            spec, {"": replica}, {"": tmp_path}, lambda level, text: said.append(level)
        )
        states = iter([gone, gone])
        replica.state = lambda: next(states, None) or make(2).state
        checkpoints.look()
        async with asyncio.timeout(60):
            await checkpoints.close()

    asyncio.run(run())
    assert said == ["info"] and len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_of_another_run_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, make())
    with pytest.raises(CheckpointError, match="of run"):
        delete_checkpoint(path, b"x" * 32)
    assert load_checkpoint(path).position == 7
    delete_checkpoint(path, b"r" * 32)
    assert not path.exists()


def test_a_checkpoint_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.safetensors"
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(caught.value) == (
        f"{path}: cannot be read: No such file or directory; name a file of the folder "
        "checkpoints in the coordinator's state directory"
    )


def test_a_header_is_what_the_whole_checkpoint_says(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, make())
    header, whole = read_header(path), load_checkpoint(path)
    assert (header.path, header.layout) == (path, LAYOUT)
    for field in ("spec", "run_id", "epoch", "position", "chain"):
        assert getattr(header, field) == getattr(whole, field)


def test_a_header_that_claims_other_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_checkpoint(path, make())
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    huge = Layout(names=("embed", "head"), shapes=((1 << 20, 1 << 12), (40_000,)))
    for changed, told in (
        ({"layout": huge.to_json()}, "expected params/embed as fp32"),
        ({"layout": "[]"}, "damaged"),
        ({"chain": "no"}, "damaged"),
        ({"format": "pt"}, "expected the format"),
    ):
        save_file(tensors, tmp_path / "b", metadata=metadata | changed)
        with pytest.raises(CheckpointError, match=told):
            read_header(tmp_path / "b")


# --- all stages of a pipeline


class Stages:
    """Three stages of a run, which move on as they are told to, and their checkpoints."""

    def __init__(self, folder: Path, **coordinator: int) -> None:
        names = ("stage-1", "stage-2", "stage-3")
        self.spec = RunSpec.from_dict(
            {"run": {"name": "test"}, "topology": {"stages": 3}, "coordinator": coordinator}
        )
        self.folder = folder
        self.replicas = {name: Replica() for name in names}
        self.said: list[tuple[str, str]] = []
        self.open()

    def open(self) -> None:
        self.checkpoints = Checkpointing(
            self.spec,
            self.replicas,  # type: ignore[arg-type]
            {name: self.folder / name for name in self.replicas},
            lambda level, text: self.said.append((level, text)),
        )

    def go_to(self, *positions: int) -> None:
        for replica, position in zip(self.replicas.values(), positions, strict=True):
            replica.position = position
        asyncio.run(self._look())

    async def _look(self) -> None:
        self.checkpoints.look()
        if self.checkpoints._writing is not None:
            await self.checkpoints._writing
            self.checkpoints._writing = None

    @property
    def files(self) -> list[tuple[int, ...]]:
        return [
            tuple(sorted(int(path.stem[-8:]) for path in (self.folder / name).glob("*")))
            for name in self.replicas
        ]


def test_all_stages_are_written_when_the_last_one_is_due(tmp_path: Path) -> None:
    run = Stages(tmp_path, checkpoint_every=5)
    run.go_to(5, 5, 4)  # the others do not count
    assert run.files == [(), (), ()]
    run.go_to(3, 7, 5)
    assert run.files == [(3,), (7,), (5,)]
    run.go_to(4, 8, 5)  # once for each of its positions
    run.replicas["stage-2"].is_current = False
    run.go_to(6, 9, 10)
    assert run.files == [(3,), (7,), (5,)]  # a stage that lacks its newest state delays all
    run.replicas["stage-2"].is_current = True
    run.go_to(7, 9, 10)
    assert run.files == [(3, 7), (7, 9), (5, 10)]
    for name, position in (("stage-1", 7), ("stage-2", 9), ("stage-3", 10)):
        header = read_header(run.checkpoints.path(name, position))
        assert header.moment == {"stage-1": 7, "stage-2": 9, "stage-3": 10}
    assert run.said == [
        ("info", "checkpoint of all stages written, after rounds 3, 7 and 5"),
        ("info", "checkpoint of all stages written, after rounds 7, 9 and 10"),
    ]
    run.open()  # as after a restart
    asyncio.run(run.checkpoints.close())
    assert len(run.said) == 2  # nothing has changed since
    run.replicas["stage-1"].position = 8
    asyncio.run(run.checkpoints.close())
    # A newer set with the same file of the last stage takes the place of the earlier one.
    assert run.files == [(3, 8), (7, 9), (5, 10)]
    assert read_header(run.checkpoints.path("stage-3", 10)).moment["stage-1"] == 8


def test_states_of_stages_are_taken_before_the_first_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Stages(tmp_path, checkpoint_every=1)

    def save(path: Path, checkpoint: Checkpoint, **options: Any) -> None:
        for replica in run.replicas.values():
            replica.position += 1  # rounds go on meanwhile
        save_checkpoint(path, checkpoint, **options)

    monkeypatch.setattr("atoll.coordinator.checkpointing.save_checkpoint", save)
    run.go_to(4, 2, 6)
    assert run.files == [(4,), (2,), (6,)]


def test_files_of_sets_that_stay_are_not_removed(tmp_path: Path) -> None:
    run = Stages(tmp_path, checkpoint_every=1, keep_checkpoints=2)
    for position in range(1, 14):
        run.go_to(position + 30, min(position, 9), position)  # the second stage is held up
    # The newest two, and a landmark of the last stage's tenth round.
    assert run.files == [(40, 42, 43), (9,), (10, 12, 13)]
