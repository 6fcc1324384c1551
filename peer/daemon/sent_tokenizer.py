"""The tokenizer that travels with a run: fetched once, tried, and kept in the state directory.

It is parsed only if it has the digest of the spec, and first in a process of its own
(`atoll.peer.training.data.tokenizer_trial`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from atoll.coordinator.rpc.client_errors import CoordinatorError
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.spec import RunSpec
from atoll.peer import notices
from atoll.peer.daemon.membership import FetchTokenizer
from atoll.peer.errors import DataError
from atoll.peer.training.data.tokenizer_trial import TrialFailed, try_tokenizer

REMEDY = "start again while the coordinator is up, or name a copy with --tokenizer PATH"


async def keep_tokenizer(
    spec: RunSpec,
    fetch: FetchTokenizer | None,
    kept: Path,
    *,
    show: Callable[[Notice], None] = lambda notice: None,
    remedy: str = REMEDY,
) -> None:
    """Fetch the run's tokenizer, unless it is here; keep it once a trial has parsed it.

    Args:
        spec: of a run whose tokenizer travels with it.
        fetch: gets it from the coordinator; None without one.
        kept: where it belongs on this machine.
        show: takes an event for the owner.
        remedy: what the owner can do if it does not arrive.

    Raises:
        DataError: it did not arrive, or cannot be parsed.
    """
    sha256, length = spec.data.tokenizer_sha256, spec.data.tokenizer_bytes
    assert sha256 is not None and length is not None
    if kept.is_file() and kept.stat().st_size == length:
        if hashlib.sha256(kept.read_bytes()).hexdigest() == sha256:
            return
    if fetch is None:
        raise DataError(f"the run's tokenizer is not on this machine; {remedy}")
    try:
        raw = await fetch(sha256=sha256, size=length)
        await asyncio.to_thread(try_tokenizer, raw)
    except CoordinatorError as error:
        raise DataError(f"the run's tokenizer did not arrive: {error}; {remedy}") from None
    except TrialFailed as error:
        raise DataError(
            f"the tokenizer that travels with the run cannot be used: {error}; ask the "
            "organiser for another run"
        ) from None
    partial = kept.with_suffix(".new")
    partial.write_bytes(raw)
    partial.replace(kept)
    show(notices.tokenizer_received(bytes=length))
