"""Write the text of a run as shards."""

from dataclasses import asdict
from pathlib import Path

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError
from atoll.peer.training.data.corpus import LocalCorpus, TextSummary
from atoll.peer.training.data.load import open_corpus
from atoll.peer.training.data.shards import expect_no_shards, write_shards


def make_shards(spec: RunSpec, folder: Path) -> TextSummary:
    """Tokenise the text of a run, split it as the run does, and write it to a folder.

    Args:
        spec: the run, with this machine's files; everything that it names is read.
        folder: made if missing; it must not hold shards.

    Returns:
        The text that was found.

    Raises:
        DataError: the text or the tokenizer is not usable, or the text is streamed.
        OSError: a file cannot be written.
    """
    expect_no_shards(folder)
    data = spec.data
    corpus = open_corpus(
        data.source,
        format=data.format,
        tokenizer=data.tokenizer,
        tokenizer_sha256=data.tokenizer_sha256,
        text_field=data.text_field,
        valid_fraction=data.valid_fraction,
        split=data.split,
        revision=data.revision,
        seq_len=data.seq_len,
    )
    if not isinstance(corpus, LocalCorpus) or corpus.summary is None:
        raise DataError(
            f"{data.source!r} is streamed while training; download it, and name the files with "
            "--data PATH"
        )
    write_shards(
        folder,
        train=corpus.train_N,
        valid=corpus.valid_N,
        vocab_size=corpus.tokenizer.vocab_size,
        text=asdict(corpus.summary),
    )
    return corpus.summary
