"""Names that the owner of a machine allows a spec to use: code to run and files to read.

A spec comes from the run's organiser, or from the metadata of a checkpoint. By itself it may use
only built-in models, `stdlib`, the byte tokenizer and public data sets of the Hugging Face hub. The
owner allows each other name, exactly as the spec spells it:

    custom model    `--allow-model module:function`
    data            `--data PATH`, which also replaces the spec's source
    tokenizer       `--tokenizer PATH`, which also replaces the spec's
    weights         `--init PATH`, which also replaces the spec's; needed if parameters are frozen

A tokenizer that travels with the run is no file of this machine's owner: the peer keeps it in its
own state directory, and reads it there if it has the digest that the spec states.

The code that builds a model or opens a file asks `Allowed` first, so that commands and the library
follow one rule.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from atoll.coordinator.run.spec import RunSpec
from atoll.peer.errors import DataError, ModelError
from atoll.peer.training.data.documents import STDLIB
from atoll.peer.training.data.hub import HUB
from atoll.peer.training.data.tokens import BYTES
from atoll.peer.training.hf.beginning import expect_init
from atoll.peer.training.models import expect_allowed

# A bare word may be a loader of the `datasets` package: `hf:text` reads the working directory.
_PUBLIC_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]*)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Names beyond the built-in ones that a spec may use; none by default."""

    models: frozenset[str] = frozenset()
    """Custom models, as `module:function`."""
    files: frozenset[str] = frozenset()
    """Data sources, tokenizers and folders of weights, as the spec spells them."""
    sent_tokenizer: Path | None = None
    """The tokenizer that travelled with the run."""
    any_source: bool = False
    """True if a custom model may have another source than the run's."""

    @classmethod
    def everything_in(cls, spec: RunSpec) -> Self:
        """Allow what a spec names; only for a spec that this machine's owner wrote."""
        custom = spec.model.custom
        return cls(
            models=frozenset() if custom is None else frozenset({custom}),
            files=frozenset(
                name
                for name in (spec.data.source, spec.data.tokenizer, spec.model.init)
                if name is not None
            ),
        )

    def expect(self, spec: RunSpec) -> None:
        """Check a whole spec; import and open nothing.

        Raises:
            ModelError: the custom model is not allowed, or weights beneath adapters are not.
            DataError: the data or the tokenizer is not allowed.
        """
        if spec.model.custom is not None:
            expect_allowed(spec.model.custom, self.models)
        if spec.model.lora is not None:  # other weights come with the run's first state
            expect_init(spec, self.files)
        self.expect_data(spec)
        self.expect_tokenizer(spec)

    def expect_data(self, spec: RunSpec) -> None:
        """Check the data source.

        Raises:
            DataError: it is a path, or the name of something other than a public data set.
        """
        source = spec.data.source
        if source in self.files:
            return
        if source.startswith(HUB) or spec.data.format == "hf":
            name = source.removeprefix(HUB)
            # `datasets` prefers a local folder of this name to the hub.
            if not _PUBLIC_NAME.fullmatch(name) or Path(name.partition("@")[0]).exists():
                raise DataError(
                    f"the run names the data set {name!r}; expected OWNER/NAME on the Hugging Face "
                    "hub and no local folder of that name; name this machine's copy with --data"
                )
        elif source != STDLIB:
            raise DataError(
                f"the run names the data source {source!r}, a path on this machine; "
                "only files that this machine's owner names are read: name your copy with "
                "--data PATH"
            )

    def expect_tokenizer(self, spec: RunSpec) -> None:
        """Check the tokenizer.

        Raises:
            DataError: it is a path.
        """
        tokenizer = spec.data.tokenizer
        if spec.data.tokenizer_sha256 is not None and tokenizer == str(self.sent_tokenizer):
            return
        if tokenizer != BYTES and tokenizer not in self.files:
            raise DataError(
                f"the run names the tokenizer {tokenizer!r}, a path on this machine; only "
                "files that this machine's owner names are read: name your copy with "
                "--tokenizer PATH"
            )


def options_for(spec: RunSpec) -> list[str]:
    """Return the options of `atoll peer` that a spec needs beyond its invite."""
    options, nothing = [], Allowed()
    if spec.model.custom is not None:
        options.append(f"--allow-model {spec.model.custom}")
    if spec.model.lora is not None and spec.model.init is not None:
        options.append("--init PATH")
    for option, expect in (
        ("--data PATH", nothing.expect_data),
        ("--tokenizer PATH", nothing.expect_tokenizer),
    ):
        try:
            expect(spec)
        except DataError:
            options.append(option)
    if spec.data.tokenizer_bytes is not None:  # it travels with the run
        options = [option for option in options if option != "--tokenizer PATH"]
    return options


def with_own_files(
    spec: RunSpec,
    *,
    data: str | None,
    tokenizer: str | None,
    init: str | None = None,
    sent_tokenizer: Path | None = None,
) -> RunSpec:
    """Return a spec that names the owner's data, tokenizer and weights instead of its own.

    Args:
        spec: the spec of the run.
        data: the owner's data; None for the spec's.
        tokenizer: the owner's tokenizer; None for the one that travels with the run, or the spec's.
        init: the owner's folder of weights; None for the spec's.
        sent_tokenizer: where this machine keeps the one that travels with the run.

    Raises:
        DataError: the run's tokenizer is built in and the owner's is not, or the reverse.
        ModelError: the run begins with no weights, and the owner names some.
    """
    if init is not None:
        if spec.model.init is None:
            raise ModelError("the run begins with fresh parameters, not with weights; omit --init")
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"init": init})})
    if tokenizer is not None and (tokenizer == BYTES) != (spec.data.tokenizer == BYTES):
        is_file = spec.data.tokenizer != BYTES
        raise DataError(
            f"the run's tokenizer is {'a file' if is_file else 'bytes, built in'}, not "
            f"{tokenizer!r}; omit --tokenizer{', or name a copy of the file' * is_file}"
        )
    if tokenizer is None and sent_tokenizer is not None and spec.data.tokenizer_bytes is not None:
        tokenizer = str(sent_tokenizer)
    own: dict[str, object] = {"source": data, "tokenizer": tokenizer}
    if data is not None and data != spec.data.source:
        own |= {"revision": None, "split": "train"}  # of the spec's own data set
    changes = {key: value for key, value in own.items() if value is not None or key == "revision"}
    return spec.model_copy(update={"data": spec.data.model_copy(update=changes)})


def by_contents(spec: RunSpec, text_sha256: str | None) -> RunSpec:
    """Return a spec in which digests stand for files, so that it is the same under other paths.

    A file whose digest nobody knows keeps its path.

    Args:
        spec: as `with_own_files` returned it.
        text_sha256: of the text that was read here; None if none was, or of a streamed data set.
    """
    data, model = dict[str, object](), dict[str, object]()
    if text_sha256 is not None:
        data["source"] = f"sha256:{text_sha256}"
    if spec.data.tokenizer_sha256 is not None:
        data["tokenizer"] = f"sha256:{spec.data.tokenizer_sha256}"
    if spec.model.init is not None and spec.model.init_sha256 is not None:
        model["init"] = f"sha256:{spec.model.init_sha256}"
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update=data),
            "model": spec.model.model_copy(update=model),
        }
    )
