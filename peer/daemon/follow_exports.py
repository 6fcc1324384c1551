"""Exports that a follower makes of its checkpoints by itself.

    exports/NAME-00000100/               a folder for `transformers`
    exports/NAME-00000100.safetensors    or one file of the trained parameters
    exports/.due/                        links to the checkpoint that is next, or under way: it
                                         may be pruned meanwhile

Each is what `atoll export` writes, in a process of its own: a model takes memory, and its code may
be anybody's. That process has low priority and one thread, and following never waits for it: what
is due meanwhile is made of the newest checkpoint afterwards. A result gets its name once it is
whole. What a process that was killed has left is removed at the next start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atoll.coordinator.run.notice import Notice, Report
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.text import clean
from atoll.coordinator.run.tokenizer_file import TokenizerFileError, unpack
from atoll.coordinator.service.server import TOKENIZER_FILE
from atoll.peer import notices
from atoll.peer.daemon.sent_tokenizer import keep_tokenizer
from atoll.peer.errors import DataError, SetupError
from atoll.peer.training.hf.beginning import expect_init
from atoll.peer.training.models import expect_allowed
from atoll.peer.training.one_file import ExportError
from atoll.peer.training.permission import Allowed

Format = Literal["hf", "safetensors"]

KEPT = 3  # exports, unless the owner says otherwise
NICE = 15  # of the process that exports
DUE = ".due"
ENDING_S = 5.0  # in which it ends at a signal
TOLD_CHARS = 500  # of what it says when it fails


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The exports that a follower's owner wants."""

    every: int
    """Rounds between two of them."""
    form: Format = "hf"
    keep: int = KEPT
    """The newest ones that stay."""
    allowed_models: tuple[str, ...] = ()
    """Custom models whose code may run, as `module:function`."""
    any_source: bool = False
    """True if a custom model may have another source than the run's."""
    tokenizer: str | None = None
    """File of this machine; None: the one that travels with the run, if it does."""
    init: str | None = None
    """Folder of the weights beneath what the run trains."""

    def expect_allowed(self, spec: RunSpec, *, is_whole: bool) -> None:
        """Check that exports of a run are possible here, before anything is followed.

        Args:
            spec: of the run.
            is_whole: whether all its stages are followed.

        Raises:
            ExportError: they are not; or the run's custom model is none that the owner has named.
        """
        if not is_whole:
            raise ExportError(
                "an export takes all stages of a pipeline; omit --stages or --export-every"
            )
        if self.form == "safetensors":  # which runs no code and reads no other file
            return
        if spec.model.custom is not None and len(spec.modules) > 1:
            raise ExportError(
                f"the slices of {spec.model.custom!r} are no model of `transformers`; pass "
                "--export-format safetensors"
            )
        try:
            if spec.model.custom is not None:
                expect_allowed(spec.model.custom, frozenset(self.allowed_models))
            if spec.model.lora is not None and self.init is None:
                expect_init(spec, frozenset())
            if self.tokenizer is None and not travels(spec):
                Allowed().expect_tokenizer(spec)
        except SetupError as error:
            raise ExportError(
                f"no exports for `transformers`: {error}; or pass --export-format safetensors"
            ) from None

    def arguments(self, tokenizer: str | None) -> list[str]:
        """Return the arguments of `atoll export` for what the owner has named and allowed."""
        named = {"--tokenizer": tokenizer, "--init": self.init}
        words = [word for option, value in named.items() if value for word in (option, value)]
        words += [word for name in self.allowed_models for word in ("--allow-model", name)]
        return [*words, *(["--any-model-source"] if self.any_source else [])]


def travels(spec: RunSpec) -> bool:
    """Return whether the run's tokenizer travels with it."""
    return spec.data.tokenizer_sha256 is not None and spec.data.tokenizer_bytes is not None


class Exports:
    """Makes exports, one at a time."""

    def __init__(
        self,
        options: ExportOptions | None,
        root: Path,
        spec: RunSpec,
        report: Report,
    ) -> None:
        """Continue after those in the follower's folder.

        Args:
            options: of its owner; None: none are made.
            root: the follower's folder.
            spec: of the run.
            report: logs an event for each that was made or failed.
        """
        self._options = options
        self._root, self._folder = root, root / "exports"
        self._spec = spec
        self._report = report
        self._due: Path | None = None
        """The file of a checkpoint that is next, in a folder of links; of a pipeline the last."""
        self._working: asyncio.Task[None] | None = None
        for left in self._folder.glob(".*"):  # by a process that was killed
            _remove(left)
        self._newest = max(map(_position, self._made()), default=0)

    @property
    def is_writing(self) -> bool:
        """Return whether an export is being made."""
        return self._working is not None and not self._working.done()

    def look(self, checkpoint: Sequence[Path], *, last: bool = False) -> None:
        """Export a new checkpoint if it is due, or the run's `last`; it has a file a module."""
        options, position = self._options, _position(checkpoint[-1])
        if options is None or position <= self._newest:
            return
        if not (last or is_due(position, self._newest, options.every)):
            return
        if self._due is not None:
            _remove(self._links(self._due))
            self._due = None
        try:
            self._due = self._linked(checkpoint)
        except OSError as error:
            self._report("error", _failed(checkpoint[-1].name, error))
        if not self.is_writing:
            self._working = asyncio.create_task(self._work(options))

    async def close(self) -> None:
        """Give up the export under way, and begin none."""
        self._options = None
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await asyncio.to_thread(_remove, self._folder / DUE)

    async def _work(self, options: ExportOptions) -> None:
        while (checkpoint := self._due) is not None:
            self._due = None
            self._newest = max(self._newest, _position(checkpoint))  # one that fails is not retried
            name = checkpoint.stem if options.form == "hf" else checkpoint.name
            out = self._folder / name
            try:
                if not out.exists():
                    given = options.arguments(await self._tokenizer(options))
                    await _export(checkpoint, out, ["--format", options.form, *given])
                    self._report("info", notices.export_written(file=name))
                await asyncio.to_thread(self._remove_old, options.keep)
            except (OSError, SetupError) as error:
                self._report("error", _failed(name, error))
            finally:
                await asyncio.to_thread(_remove, self._links(checkpoint))

    def _links(self, checkpoint: Path) -> Path:
        """Return the folder of links to a checkpoint."""
        return self._folder / DUE / str(_position(checkpoint))

    def _linked(self, checkpoint: Sequence[Path]) -> Path:
        """Link the files of a checkpoint; return the last one's link. Raises OSError."""
        links = self._links(checkpoint[-1])
        linked = [links.joinpath(*_inside(path)) for path in checkpoint]
        for path, link in zip(checkpoint, linked, strict=True):
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
        return linked[-1]

    async def _tokenizer(self, options: ExportOptions) -> str | None:
        """Return the file of the run's tokenizer, if it is needed. Raises DataError, OSError."""
        if options.form != "hf" or options.tokenizer is not None or not travels(self._spec):
            return options.tokenizer
        packed, kept = self._root / TOKENIZER_FILE, self._root / "tokenizer.json"

        async def read(*, sha256: str, size: int) -> bytes:
            try:
                return await asyncio.to_thread(
                    lambda: unpack(packed.read_bytes(), sha256=sha256, size=size)
                )
            except (OSError, TokenizerFileError) as error:
                raise DataError(f"{packed}: {error}; pass --tokenizer PATH") from None

        await keep_tokenizer(self._spec, read, kept)
        return str(kept)

    def _made(self) -> list[Path]:
        made = [path for path in self._folder.glob("*-*[0-9]*") if not path.name.startswith(".")]
        return sorted((path for path in made if _position(path)), key=_position)

    def _remove_old(self, keep: int) -> None:
        for path in self._made()[:-keep]:
            _remove(path)


def is_due(position: int, newest: int, every: int) -> bool:
    """Return whether a checkpoint is the first at or after another multiple of `every`."""
    return position // every > newest // every


async def _export(checkpoint: Path, out: Path, arguments: Sequence[str]) -> None:
    """Run `atoll export`. Raises ExportError, OSError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "atoll.peer.cli.main", "export", str(checkpoint)),
        *("--out", str(out), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a Ctrl-C means the follower, which then ends this one
    )
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    try:
        _, told = await process.communicate()
    except asyncio.CancelledError:
        await _end(process)
        raise
    if process.returncode:
        text = clean(told.decode(errors="replace").strip()[-TOLD_CHARS:])
        raise ExportError(text or f"`atoll export` ended with {process.returncode}")


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(ENDING_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _position(path: Path) -> int:
    """Return the round in the name of a checkpoint or an export; 0 if it has none."""
    digits = path.name.removesuffix(".safetensors").rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _inside(path: Path) -> tuple[str, ...]:
    """Return the name of a checkpoint's file, of a pipeline with the folder of its stage."""
    return (path.name,) if path.parent.name == "checkpoints" else (path.parent.name, path.name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _failed(file: str, error: Exception) -> Notice:
    return notices.export_failed(file=file, reason=str(error))
