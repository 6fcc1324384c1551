"""Remarks on the text that a peer found: how much it is, whether it is the run's, and enough.

A text is too little if each of its tokens would be drawn more than `MAX_PASSES` times: up to four
passes are about as good as new text, further ones soon worth nothing (arXiv:2305.16264).
"""

import platform
from collections.abc import Iterator

from atoll.coordinator.run.levels import Level
from atoll.coordinator.run.notice import Notice
from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.text import size
from atoll.peer import notices
from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import Corpus, TextSummary
from atoll.peer.training.data.documents import STDLIB
from atoll.peer.training.data.hub import HUB
from atoll.peer.training.data.tokens import BYTES

MAX_PASSES = 4  # up to four, repeated text is nearly as good as new (arXiv:2305.16264)
ENDLESS_ROUNDS = 100  # a run without an end is judged by so many

Remark = tuple[Level, Notice]


def expect_text(spec: RunSpec, corpus: Corpus) -> None:
    """Check the text of a run in which all peers have the same.

    Raises:
        DataError: it is another one.
    """
    found, sha256 = corpus.summary, spec.data.sha256
    if not spec.data.same_text or found is None or sha256 is None or found.sha256 == sha256:
        return
    raise DataError(
        f"the text is not the run's, and the run asks for the same text on every peer: expected "
        f"the SHA-256 {sha256[:12]}, got {found.sha256[:12]} ({_amount(found)}); name the "
        "organiser's text with --data"
    )


def remarks(spec: RunSpec, corpus: Corpus, *, steps_left: int | None) -> Iterator[Remark]:
    """Yield what the owner of a peer should know of its text.

    Args:
        spec: the spec of the run, with this machine's files.
        corpus: the text.
        steps_left: inner steps until the end of the run; None if it has none.
    """
    found, data = corpus.summary, spec.data
    yield from _unstated(spec)
    if found is None:
        streamed = notices.data_streamed(
            source=data.source.removeprefix(HUB),
            split=data.split,
            revision=data.revision[:12] if data.revision else None,
        )
        yield "info", streamed
        return
    read = notices.data_found(
        _amount(found),
        bytes=found.num_bytes,
        tokens=found.train_tokens + found.valid_tokens,
        sha256=found.sha256,
        not_read=found.not_read,
    )
    yield "info", read
    if data.sha256 is not None and data.sha256 != found.sha256:
        is_library = data.source == STDLIB  # of another Python, as is usual
        whose = f"the library of Python {platform.python_version()}" if is_library else "this text"
        other = notices.data_other(whose, sha256=data.sha256)
        yield "info" if is_library else "warning", other
    yield from _scarcity(spec, found, steps_left)


def _unstated(spec: RunSpec) -> Iterator[Remark]:
    """Name what is not compared: specs of earlier versions state no digests."""
    if spec.data.tokenizer != BYTES and spec.data.tokenizer_sha256 is None:
        yield "warning", notices.tokenizer_unproved(tokenizer=spec.data.tokenizer)
    if spec.model.custom is not None and spec.model.source_sha256 is None:
        yield "warning", notices.model_unproved(model=spec.model.custom)


def _scarcity(spec: RunSpec, found: TextSummary, steps_left: int | None) -> Iterator[Remark]:
    rounds = "the rounds left"
    if steps_left is None:
        steps_left = ENDLESS_ROUNDS * spec.outer.inner_steps
        rounds = f"{ENDLESS_ROUNDS} rounds"
    passes = steps_left * spec.step_tokens / found.train_tokens
    if passes > MAX_PASSES:
        too_short = notices.data_too_short(
            _count(found.train_tokens),
            rounds,
            MAX_PASSES,
            tokens=found.train_tokens,
            passes=round(passes),
        )
        yield "warning", too_short


def _amount(found: TextSummary) -> str:
    count, noun = (found.files, "file") if found.files else (found.documents, "document")
    of = f"{count:,} {noun}" + ("" if count == 1 else "s")
    tokens = found.train_tokens + found.valid_tokens
    return f"{of}, {size(found.num_bytes)}, {_count(tokens)} tokens"


def _count(tokens: int) -> str:
    for unit, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.1f}{suffix}"
    return str(tokens)
