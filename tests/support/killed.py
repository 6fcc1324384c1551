"""A peer with its state on a disk, which is killed while it applies an entry."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.coordinator.run.keys import RunKeys
from atoll.optim.log.claims import Claim
from atoll.optim.methods import parse
from atoll.optim.state import fragments, layout, mapped, outer_step
from support.forks import FORKS
from support.limits import DEADLINE_S
from support.logs import open_replica

CELLS = 3  # of an entry here, each of which is a run by itself


def killed_within(
    entry: int,
    folder: Path,
    spec: str,
    keys: Path,
    epoch: bytes,
    entries: Sequence[tuple[Claim, bytes]],
) -> int | None:
    """Apply entries in a process that is killed after the second cell of one; return its code."""
    arguments = (CELLS * entry + 2, folder, spec, keys, epoch, entries)
    process = FORKS.Process(target=_apply, args=arguments)
    process.start()
    process.join(DEADLINE_S)
    return process.exitcode


def _apply(
    runs: int,
    folder: Path,
    spec: str,
    keys: Path,
    epoch: bytes,
    entries: Sequence[tuple[Claim, bytes]],
) -> None:
    mapped.IN_MEMORY = ()  # the tests' folder may lie there
    fragments.RUN = layout.CELL  # else each entry is one run
    replica = open_replica(
        folder,
        RunKeys.load_or_create(keys),
        is_ledger=False,
        method=parse(spec),
        allocate=mapped.MappedVectors(folder).empty,
    )
    replica.adopt(epoch)
    apply_rule, done = outer_step._apply_rule, 0

    def apply(*arguments: Any) -> None:
        nonlocal done
        apply_rule(*arguments)
        done += 1
        if done == runs:
            os.kill(os.getpid(), signal.SIGKILL)

    outer_step._apply_rule = apply
    for claim, body in entries:
        replica.accept(claim, body)
        replica.save_due()
