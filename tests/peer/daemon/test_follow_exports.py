"""Exports of a follower: which rounds, nothing half done, and no code that nobody has named."""

import asyncio

import pytest

from atoll.coordinator.checkpoints import Checkpoint, save_checkpoint
from atoll.coordinator.run.spec import RunSpec
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon import follow_exports
from atoll.peer.daemon.follow_exports import ExportOptions, Exports, is_due
from atoll.peer.training.one_file import ExportError
from support.organiser import first_state, tiny_spec

STAGES = ("stage-1", "stage-2")
CUSTOM = RunSpec.from_dict({"model": {"custom": "their.code:model"}})


def test_the_first_checkpoint_after_each_interval_is_due():
    checkpoints, newest, made = (3, 6, 9, 12, 20, 40, 41), 0, []
    for position in checkpoints:
        if is_due(position, newest, 10):
            made.append(position)
            newest = position
    assert made == [12, 20, 40]


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        (CUSTOM, {}, "not allowed; read that code, then pass --allow-model their.code:model"),
        (
            CUSTOM,
            {"allowed_models": ("their.code:other",)},
            "which its owner|owner has not allowed",
        ),
        (
            RunSpec.from_dict({"model": {"custom": "a:b"}, "topology": {"stages": 2}}),
            {"allowed_models": ("a:b",)},
            "pass --export-format safetensors",
        ),
        (RunSpec.from_dict({"data": {"tokenizer": "theirs.json"}}), {}, "--tokenizer"),
    ],
)
def test_an_export_that_its_owner_has_not_allowed_is_refused(spec, options, why):
    with pytest.raises(ExportError, match=why):
        ExportOptions(every=1, **options).expect_allowed(spec, is_whole=True)
    ExportOptions(every=1, form="safetensors").expect_allowed(spec, is_whole=True)


def test_some_stages_alone_are_no_model():
    with pytest.raises(ExportError, match="takes all stages"):
        ExportOptions(every=1).expect_allowed(RunSpec(), is_whole=False)


class Made:
    """Exports whose process is a function of the test."""

    def __init__(self, root, monkeypatch, **options):
        self.root, self.said, self.asked = root, [], []
        self.may_end, self.fails = asyncio.Event(), False
        monkeypatch.setattr(follow_exports, "_export", self.export)
        options = ExportOptions(**{"every": 1, "form": "safetensors", "keep": 2} | options)
        self.exports = Exports(options, root, RunSpec(), self.report)

    def report(self, level, text):
        self.said.append(f"{level}: {text}")

    async def export(self, checkpoint, out, arguments):
        self.asked.append((checkpoint.name, arguments))
        await self.may_end.wait()
        if self.fails:
            raise ExportError("no space")
        out.write_bytes(b"".join(path.read_bytes() for path in sorted(siblings(checkpoint))))

    async def look(self, *positions, last=False):
        """Tell of checkpoints of two stages, which are pruned at once."""
        for position in positions:
            paths = [self.root / "checkpoints" / stage / name_of(position) for stage in STAGES]
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(path.parent.name)
            self.exports.look(paths, last=last)
            for path in paths:
                path.unlink()
            await asyncio.sleep(0)

    async def ended(self):
        self.may_end.set()
        async with asyncio.timeout(5):
            while self.exports.is_writing:
                await asyncio.sleep(0.01)

    @property
    def files(self):
        return sorted(
            path.name for path in (self.root / "exports").iterdir() if path.name != ".due"
        )


def name_of(position):
    return f"run-{position:08d}.safetensors"


def siblings(checkpoint):
    return checkpoint.parent.parent.glob(f"stage-*/{checkpoint.name}")


def test_following_goes_on_while_one_is_made_and_the_newest_is_next(tmp_path, monkeypatch):
    async def main():
        made = Made(tmp_path, monkeypatch)
        await made.look(1)
        await asyncio.sleep(0.1)
        await made.look(2, 3, 4)
        await made.ended()
        assert [name for name, _ in made.asked] == [name_of(1), name_of(4)]
        assert made.asked[0][1] == ["--format", "safetensors"]
        for position in (5, 6):
            await made.look(position)
            await made.ended()
        assert made.files == [name_of(5), name_of(6)]  # the newest two stay
        assert (tmp_path / "exports" / name_of(6)).read_text() == "stage-1stage-2"
        assert list((tmp_path / "exports" / ".due").iterdir()) == []
        assert made.said[-1] == f"info: export {name_of(6)} written"

    asyncio.run(main())


def test_what_failed_is_told_and_the_next_one_is_made(tmp_path, monkeypatch):
    async def main():
        made = Made(tmp_path, monkeypatch)
        made.fails = True
        await made.look(1)
        await made.ended()
        made.fails = False
        await made.look(2)
        await made.ended()
        assert made.said == [
            f"error: no export {name_of(1)}: no space",
            f"info: export {name_of(2)} written",
        ]

    asyncio.run(main())


def test_a_restart_removes_what_was_half_written_and_makes_none_again(tmp_path, monkeypatch):
    folder = tmp_path / "exports"
    (folder / ".run-00000008.77").mkdir(parents=True)
    (folder / ".run-00000008.77" / "model.safetensors").write_bytes(b"half")
    (folder / ".run-00000009.safetensors.78").write_bytes(b"half")
    (folder / "run-00000007").mkdir()

    async def main():
        made = Made(tmp_path, monkeypatch)
        assert made.files == ["run-00000007"]
        await made.look(7)
        assert not made.exports.is_writing
        await made.look(8)
        await made.exports.close()  # given up
        assert made.files == ["run-00000007"]

    asyncio.run(main())


def test_the_runs_last_model_is_exported_whatever_its_round(tmp_path, monkeypatch):
    async def main():
        made = Made(tmp_path, monkeypatch, every=100)
        await made.look(101)
        await made.ended()
        await made.look(130)
        await made.look(130, last=True)
        await made.look(130, last=True)
        await made.ended()
        await made.exports.close()
        await made.look(200)
        assert not made.exports.is_writing
        assert made.files == [name_of(101), name_of(130)]

    asyncio.run(main())


@pytest.mark.exhaustive  # a process that imports torch
@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_a_process_writes_the_model(tmp_path, form):
    spec, said = tiny_spec(), []
    begun = first_state(spec)
    state = OuterState.blank(begun.layout, 4)
    state.params_N.copy_(begun.params_N)
    path = tmp_path / "checkpoints" / "tiny-00000004.safetensors"
    checkpoint = Checkpoint(
        spec=spec, run_id=bytes(32), epoch=0, position=4, chain=bytes(32), state=state
    )
    save_checkpoint(path, checkpoint)

    async def main():
        options = ExportOptions(every=4, form=form)
        exports = Exports(options, tmp_path, spec, lambda level, text: said.append(text))
        exports.look([path])
        async with asyncio.timeout(60):
            while exports.is_writing:
                await asyncio.sleep(0.1)
        await exports.close()

    asyncio.run(main())
    name = path.stem if form == "hf" else path.name
    assert said == [f"export {name} written"]
    assert [each.name for each in (tmp_path / "exports").iterdir()] == [name]
    assert (tmp_path / "exports" / name).is_dir() == (form == "hf")
