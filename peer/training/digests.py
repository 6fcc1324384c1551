"""Digests of what a run trains with, filled into its spec by the organiser's machine.

A run keeps the digests with which it began: they are in the spec that its id covers, and a restart
takes them from the state directory. `RUN.toml` may name them itself.

    model.source_sha256     of the file that defines the custom model's function
    model.init_sha256       of the weights with which the run begins (`hf.folder`);
                            `model.overrides` gets the shape of their model
    data.tokenizer_sha256   of the tokenizer's file; `data.tokenizer_bytes` if it is small enough to
                            travel with the run
    data.revision           the commit of a Hugging Face data set
    data.sha256             of the documents of a local text (`text_digest`)
    data.units              how many units of rows that text has, with `data.once`
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.coordinator.run.spec import RunSpec
from atoll.coordinator.run.tokenizer_file import pack
from atoll.peer.errors import DataError, ModelError, SetupError
from atoll.peer.extras import extra
from atoll.peer.training import models
from atoll.peer.training.data.documents import text_digest, text_size
from atoll.peer.training.data.hub import HUB, newest_revision
from atoll.peer.training.data.tokenizer_trial import TrialFailed, try_tokenizer
from atoll.peer.training.data.tokens import BYTES, expect_digest, tokenizer_file
from atoll.peer.training.data.units import count_units
from atoll.peer.training.hf.beginning import with_shape
from atoll.peer.training.hf.folder import weights_digest
from atoll.peer.training.opening import open_corpus
from atoll.peer.training.permission import Allowed

MAX_TEXT_BYTES = 1 << 30  # read once more at the first start: some seconds

Say = Callable[[str], None]


def with_digests(spec: RunSpec, stored: RunSpec | None, say: Say = lambda line: None) -> RunSpec:
    """Return a run's spec with the digests that RUN.toml leaves open.

    Args:
        spec: as RUN.toml describes the run.
        stored: the spec with which the run began; None for a new run.
        say: takes what could not be filled in, and why.

    Raises:
        SpecError: the digests do not fit the spec.
        ModelError, DataError: model, tokenizer or text is not the one that RUN.toml names, or not
            usable.
    """
    found = _kept(spec, stored) if stored is not None else _computed(spec, say)
    fields = spec.model_dump(mode="json")
    for section, values in found.items():
        for name, value in values.items():
            if name == "overrides":
                fields[section][name] = value | fields[section][name]
            elif fields[section].get(name) is None and value is not None:
                fields[section][name] = value
    return type(spec).from_dict(fields, source="RUN.toml with its digests")


def read_tokenizer(spec: RunSpec) -> bytes:
    """Return the file of the run's tokenizer on the organiser's machine.

    Raises:
        DataError: it cannot be read, or is another than the spec states.
    """
    path = tokenizer_file(spec.data.tokenizer)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the tokenizer {spec.data.tokenizer!r} cannot be read: {error.strerror}; name a "
            "tokenizers JSON file, or 'bytes'"
        ) from None
    expect_digest(path, raw, spec.data.tokenizer_sha256)
    return raw


def _kept(spec: RunSpec, stored: RunSpec) -> dict[str, dict[str, Any]]:
    """Return the stored digests of what the spec still names."""
    model, data = stored.model, stored.data
    kept: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    if spec.model.custom == model.custom:
        kept["model"] = {"source_sha256": model.source_sha256}
        if spec.model.init is not None and spec.model.init == model.init:
            shape = model.overrides if model.custom is None else {}
            kept["model"] |= {"init_sha256": model.init_sha256, "overrides": shape}
    if spec.data.tokenizer == data.tokenizer:
        kept["data"] |= {
            "tokenizer_sha256": data.tokenizer_sha256,
            "tokenizer_bytes": data.tokenizer_bytes,
        }
    if spec.data.source == data.source:
        kept["data"] |= {"revision": data.revision, "sha256": data.sha256}
        if spec.data.once:
            kept["data"] |= {"units": data.units}
    return kept


def _computed(spec: RunSpec, say: Say) -> dict[str, dict[str, Any]]:
    return {
        "model": _of_model(spec, say),
        "data": _of_tokenizer(spec, say) | _of_text(spec, say) | _of_units(spec),
    }


def _of_model(spec: RunSpec, say: Say) -> dict[str, Any]:
    return _of_source(spec, say) | _of_weights(spec, say)


def _of_weights(spec: RunSpec, say: Say) -> dict[str, Any]:
    init, stated = spec.model.init, spec.model.init_sha256
    if init is None:
        return {}
    shape = with_shape(spec).model.overrides  # before the longer read
    digest = weights_digest(init, say)
    if stated not in (None, digest):
        raise ModelError(
            f"the weights in {init!r} have the SHA-256 {digest}, but model.init_sha256 states "
            "another; correct it, or omit it"
        )
    return {"init_sha256": digest, "overrides": shape}


def _of_source(spec: RunSpec, say: Say) -> dict[str, Any]:
    custom = spec.model.custom
    if custom is None:
        return {}
    digest = models.source_sha256(custom)
    if digest is None:
        say(f"model {custom}: its module has no source file, so peers do not compare it")
    elif spec.model.source_sha256 not in (None, digest):
        raise ModelError(
            f"the source of model {custom!r} has the SHA-256 {digest}, but model.source_sha256 "
            "states another; correct it, or omit it"
        )
    return {"source_sha256": digest}


def _of_tokenizer(spec: RunSpec, say: Say) -> dict[str, Any]:
    if spec.data.tokenizer == BYTES:
        if spec.data.tokenizer_sha256 is not None:
            raise DataError(
                "data.tokenizer_sha256 is of a file, but data.tokenizer is 'bytes'; omit one"
            )
        return {}
    raw = read_tokenizer(spec)
    extra("tokenizers", f"the tokenizer {spec.data.tokenizer!r}")  # before a process without it
    try:
        try_tokenizer(raw)
    except TrialFailed as error:
        raise DataError(
            f"expected 'bytes' or a tokenizers JSON file, got {spec.data.tokenizer!r} ({error})"
        ) from None
    if spec.data.tokenizer_bytes not in (None, len(raw)):
        raise DataError(
            f"data.tokenizer_bytes is {spec.data.tokenizer_bytes}, but the tokenizer "
            f"{spec.data.tokenizer!r} has {len(raw)} bytes; omit data.tokenizer_bytes"
        )
    if pack(raw) is None:
        if spec.data.tokenizer_bytes is not None:
            raise DataError(
                f"the tokenizer {spec.data.tokenizer!r} is too large to travel with the run; omit "
                "data.tokenizer_bytes"
            )
        say(
            "the tokenizer has more than 4 MiB compressed and does not travel with the run: each "
            "peer names its own copy with --tokenizer PATH"
        )
        return {"tokenizer_sha256": hashlib.sha256(raw).hexdigest()}
    return {
        "tokenizer_sha256": hashlib.sha256(raw).hexdigest(),
        "tokenizer_bytes": len(raw),
    }


def _of_text(spec: RunSpec, say: Say) -> dict[str, Any]:
    data = spec.data
    if data.source.startswith(HUB) or data.format == "hf":
        return _of_data_set(spec, say)
    if data.revision is not None or data.split != "train":
        raise DataError(
            "data.revision and data.split are for Hugging Face data sets, but data.source is "
            f"{data.source!r}; omit them"
        )
    if data.sha256 is not None:
        return {}
    try:
        is_small = text_size(data.source) <= MAX_TEXT_BYTES
        digest = (
            text_digest(data.source, format=data.format, text_field=data.text_field)
            if is_small
            else None
        )
    except (DataError, OSError):
        digest, is_small = None, True  # peers may have it all the same
    if digest:
        return {"sha256": digest}
    if data.same_text:
        raise DataError(
            "data.same_text needs the SHA-256 of the text, and "
            + ("the text is not on this machine" if is_small else "the text has more than 1 GiB")
            + "; set data.sha256, which `atoll peer` prints"
        )
    if is_small:
        say(f"the text {data.source!r} cannot be read here, so peers do not compare theirs")
    return {}


def _of_units(spec: RunSpec) -> dict[str, Any]:
    """Count the units of a pass; peers compare theirs (`data.units`)."""
    if not spec.data.once or spec.data.units is not None:
        return {}
    try:
        own = Allowed(files=frozenset({spec.data.source, spec.data.tokenizer}))
        return {"units": count_units(spec, open_corpus(spec, own))}
    except DataError as error:
        raise DataError(
            f"data.once needs the number of units, and the text cannot be read here ({error}); "
            "start it on a machine that has the text, or set data.units"
        ) from None


def _of_data_set(spec: RunSpec, say: Say) -> dict[str, Any]:
    if spec.data.revision is not None:
        return {}
    name = spec.data.source.removeprefix(HUB)
    if Path(name.partition("@")[0]).exists():
        return {}  # a folder of this machine
    try:
        return {"revision": newest_revision(name)}
    except SetupError as error:
        say(f"{error}; peers read its newest revision: set data.revision to fix one")
        return {}
