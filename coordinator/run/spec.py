"""RUN.toml: everything that defines a run, validated as a whole.

Nine small sections describe a run; each is a frozen model whose fields carry their documentation
(`atoll.coordinator.run.sections`). `atoll init` generates its commented template from those
descriptions, so the two cannot disagree.

    RunSpec.load(path)      read a file; SpecError lists every problem at once
    RunSpec.from_json(raw)  read what a coordinator sent; the same checks
    spec.canonical()        sorted compact JSON: equal specs have equal bytes
    spec.digest()           SHA-256 of everything but [coordinator]: the run's identity

The run's id binds the digest to the run's public key (`run_id`), so a peer that trusts its invite
can tell whether the spec it receives is the organiser's. `SpecError` reports what is wrong with a
spec (`atoll.coordinator.run.spec_problems`).
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from atoll.compression import parse
from atoll.coordinator.run.sections import (
    MIN_KEEPERS,
    CompressionSection,
    CoordinatorSection,
    DataSection,
    InnerSection,
    ModelSection,
    OuterSection,
    RoundSection,
    RunSection,
    Section,
    TopologySection,
)
from atoll.coordinator.run.spec_problems import (
    SpecError,
    SpecProblem,
    key_lines,
    problems_of,
    toml_problem,
)
from atoll.optim import methods, schedules
from atoll.optim.log.module import WHOLE
from atoll.optim.schedules import Timetable

MAX_SPEC_BYTES = 256 * 1024  # a RUN.toml is a few kB; a peer refuses more before parsing it


class RunSpec(Section):
    """The full description of a run. Every section and every field has a default."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    inner: InnerSection = Field(default_factory=InnerSection)
    outer: OuterSection = Field(default_factory=OuterSection)
    compression: CompressionSection = Field(default_factory=CompressionSection)
    round: RoundSection = Field(default_factory=RoundSection)
    topology: TopologySection = Field(default_factory=TopologySection)
    coordinator: CoordinatorSection = Field(default_factory=CoordinatorSection)

    later: ClassVar[tuple[str, ...]] = ("topology",)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        self._expect_state()
        try:
            method = self.method()
        except ValueError as error:  # the sections have checked their own fields
            raise ValueError(f"outer.method: {error}") from None
        if not method.logged and method.reduction != "pairs":
            raise ValueError(
                f"outer.method: a run needs a method whose state the log can hold, or a gossip "
                f"method, got {method.name!r}; `atoll simulate` runs it"
            )
        if not method.logged and self.round.electors != "members":
            raise ValueError(
                f"round.electors: must be 'members' with {method.name!r}, which has no votes, "
                f"got {self.round.electors!r}"
            )
        if self.round.trust == "byzantine" and self.round.electors != "keepers":
            raise ValueError(
                f"round.trust: 'byzantine' needs keepers, at least {MIN_KEEPERS}, of which one may "
                f"lie: set round.electors to 'keepers', got {self.round.electors!r}"
            )
        self._expect_windows(method)
        self._expect_digests()
        self._expect_units(method)
        self._expect_stages(method)
        if method.feedback and method.codec.mode == "unbiased":
            raise ValueError(
                f"compression.feedback: must be 0 with the unbiased codec {method.codec.spec!r} "
                f"(feedback makes it diverge), got {method.feedback}"
            )
        if self.inner.state == "8bit" and method.inner != "adamw":
            raise ValueError(
                f"inner.state: '8bit' is for AdamW, and {method.name!r} trains with "
                f"{method.inner}; remove it"
            )
        if self.data.packing == "documents" and self.model.custom is not None:
            raise ValueError(
                "data.packing: 'documents' is for the built-in models; a custom model masks what "
                "it attends to itself; remove it"
            )
        if method.reduction != "mean" and self.round.reducer != "mean":
            raise ValueError(
                f"round.reducer: must be 'mean' with {method.name!r}, whose contributions are not "
                f"reduced by an owner, got {self.round.reducer!r}"
            )
        return self

    def _expect_state(self) -> None:
        """Refuse a format of a momentum that the method does not keep."""
        outer = self.outer
        if outer.state != "fp32" and not methods.has_option(outer.method, "state"):
            raise ValueError(
                f"outer.state: {outer.state!r} is for methods with an outer momentum in a log, "
                f"and {outer.method!r} has none; remove it"
            )

    def _expect_digests(self) -> None:
        model, data = self.model, self.data
        if model.source_sha256 is not None and model.custom is None:
            raise ValueError("model.source_sha256: is for a custom model; remove it")
        if model.init_sha256 is not None and model.init is None:
            raise ValueError("model.init_sha256: is of the weights in model.init; remove it")
        if model.lora is not None and model.init is None and model.custom is None:
            raise ValueError(
                "model.lora: adapts weights that exist; name their folder as model.init"
            )
        if data.tokenizer_bytes is not None and data.tokenizer_sha256 is None:
            raise ValueError("data.tokenizer_bytes: needs data.tokenizer_sha256; remove it")
        is_hub = data.source.startswith("hf:") or data.format == "hf"
        if is_hub and (data.sha256 is not None or data.same_text):
            raise ValueError(
                "data.sha256 and data.same_text: are for text on the peers' disks; set "
                "data.revision for a Hugging Face data set"
            )

    def _expect_units(self, method: methods.Method) -> None:
        """Refuse `data.once` where the log cannot know which rows an update holds."""
        data = self.data
        if not data.once:
            return
        if data.source.startswith("hf:") or data.format == "hf":
            raise ValueError(
                "data.once: the number of rows of a streamed data set is not known; write it as "
                "shards with `atoll shards`, and name their folder as data.source"
            )
        if not data.same_text:
            raise ValueError("data.once: all peers need the same rows; set data.same_text to true")
        if self.topology.num_stages > 1:
            raise ValueError(
                "data.once: a pipeline has a log for each stage, and its first stage draws the "
                "rows alone; remove it, or set topology.stages to 1"
            )
        if not method.logged or method.every_step:
            raise ValueError(
                f"data.once: needs a log, and contributions that keep the work that was left out; "
                f"{method.name!r} does not have both: choose 'diloco', or remove it"
            )
        if self.round.electors != "members":
            raise ValueError(
                "data.once: the first units go to the acceptors, which have to train; set "
                f"round.electors to 'members', got {self.round.electors!r}"
            )
        if getattr(method, "count", 1) > 1:
            raise ValueError(
                f"data.once: {method.name!r} sends a row's gradient in several fragments, each "
                "decided by itself; choose 'diloco', or remove it"
            )

    def _expect_stages(self, method: methods.Method) -> None:
        """Refuse what a pipeline cannot do."""
        if self.topology.num_stages == 1:
            return
        if not method.logged:
            raise ValueError(
                f"topology.stages: each stage is decided in a log, and {method.name!r} has none; "
                "choose another outer.method, or 1 stage"
            )
        if self.round.electors != "members":
            raise ValueError(
                "round.electors: must be 'members' with topology.stages above 1, as a keeper "
                f"follows one log, got {self.round.electors!r}"
            )
        if self.model.init is not None or self.model.lora is not None:
            raise ValueError(
                "topology.stages: a pipeline begins with weights of its own, drawn by stage; "
                "remove model.init and model.lora, or set 1 stage"
            )
        if self.inner.compile:
            raise ValueError(
                "inner.compile: a stage computes the two halves of a backward pass apart, which a "
                "compiled one cannot; remove it, or set topology.stages to 1"
            )
        if self.data.packing == "documents":
            raise ValueError(
                "topology.stages: stages after the first do not see the documents' ends; set "
                "data.packing to 'stream', or 1 stage"
            )

    def _expect_windows(self, method: methods.Method) -> None:
        outer, hidden = self.outer, method.hidden_steps(self.outer.inner_steps)
        if method.every_step and outer.inner_steps != 1:
            raise ValueError(
                f"outer.inner_steps: must be 1 with {method.name!r}, which communicates at every "
                f"step, got {outer.inner_steps}"
            )
        if method.every_step and outer.windows != "equal":
            raise ValueError(
                f"outer.windows: must be 'equal' with {method.name!r}, whose windows are one "
                f"step, got {outer.windows!r}"
            )
        if hidden > outer.inner_steps:
            raise ValueError(
                f"outer.method: a round can be hidden behind at most one window, "
                f"{outer.inner_steps} steps (outer.inner_steps), got {hidden}"
            )
        if outer.windows == "qsr":
            self._expect_growth()
        elif outer.growth or outer.max_inner_steps:
            raise ValueError(
                'outer.growth and outer.max_inner_steps apply only to windows = "qsr", '
                f'got windows = {outer.windows!r}; remove them or set "qsr"'
            )

    def _expect_growth(self) -> None:
        """Refuse QSR settings under which every window would have the same length."""
        outer, inner = self.outer, self.inner
        longest = outer.longest
        if self.run.rounds == 0 or inner.min_lr_ratio == 1:
            raise ValueError(
                "outer.windows: 'qsr' needs a learning rate that falls; set run.rounds above 0 and "
                "inner.min_lr_ratio below 1"
            )
        if longest <= outer.inner_steps:
            raise ValueError(
                f"outer.max_inner_steps: must be more than outer.inner_steps, "
                f"{outer.inner_steps}, got {longest}"
            )
        last_lr = inner.lr * inner.min_lr_ratio
        low, high = last_lr * math.sqrt(outer.inner_steps + 1), inner.lr * math.sqrt(longest)
        if outer.growth == 0 or not low <= outer.growth < high:
            raise ValueError(
                f"outer.growth: expected {low:.3g} to {high:.3g}, so that windows grow from "
                f"{outer.inner_steps} to at most {longest} steps while the rate falls from "
                f"{inner.lr:g} to {last_lr:g}, got {outer.growth:g}"
            )

    def timetable(self, num_fragments: int, *, rounds: int | None = None) -> Timetable:
        """Return the run's inner steps and windows by position.

        Args:
            num_fragments: number of fragments into which the method cuts the model.
            rounds: position at which the run ends; the spec's own by default.
        """
        outer, rounds = self.outer, rounds or self.run.rounds
        if outer.windows == "qsr":
            return schedules.growing_over(
                outer.qsr, self.inner.rate, rounds=rounds, num_fragments=num_fragments
            )
        return schedules.equal(outer.inner_steps, rounds=rounds, num_fragments=num_fragments)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the run, each with a log of its own: a dense run has one, `WHOLE`."""
        if self.topology.num_stages == 1:
            return (WHOLE,)
        return tuple(stage_name(number) for number in range(self.topology.num_stages))

    @property
    def planned_members(self) -> int:
        """Peers that a round is planned for: in a pipeline those of one stage."""
        return -(-self.round.min_peers // self.topology.num_stages)

    @property
    def step_tokens(self) -> int:
        """Tokens of one peer's inner step."""
        return self.inner.batch_size * self.inner.grad_accumulation * self.data.seq_len

    @property
    def unbounded(self) -> str:
        """Return a warning if a single member may send an update of any norm; else nothing."""
        method = self.method()
        if method.clip_at:
            return ""
        return f"{method.name} does not bound the norms of updates: run it with people you know"

    def method(self) -> methods.Method:
        """Return the outer method with all of its options.

        Raises:
            ValueError: the options contradict each other.
        """
        outer, compression = self.outer, self.compression
        given = {
            "lr": outer.lr,
            "momentum": outer.momentum,
            "codec": compression.codec,
            "feedback": compression.feedback,
        }
        options = methods.defaults_for(
            outer.method,
            rounds=self.run.rounds,
            inner_steps=outer.inner_steps,
            peers=self.planned_members,
        )
        options |= {key: value for key, value in given.items() if value != "auto"}
        if outer.state != "fp32":
            options["state"] = outer.state
        if compression.codec != "auto" and parse(compression.codec).mode == "unbiased":
            options.setdefault("feedback", 0.0)
        return methods.parse(outer.method, **options)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a RUN.toml. Raises SpecError with every problem found."""
        return cls.from_toml(_read_text(Path(path)), source=str(path))

    @classmethod
    def from_toml(cls, text: str, *, source: str = "RUN.toml") -> Self:
        """Parse the text of a RUN.toml; `source` names it in messages."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError([toml_problem(error)], source=source) from None
        return cls.from_dict(data, source=source, lines=key_lines(text))

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Parse canonical bytes received from elsewhere. Raises SpecError."""
        if len(raw) > MAX_SPEC_BYTES:
            message = f"expected at most {MAX_SPEC_BYTES} bytes, got {len(raw)}"
            raise SpecError([SpecProblem(line=None, path="", message=message)])
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError):
            problem = SpecProblem(line=None, path="", message="expected a JSON object")
            raise SpecError([problem]) from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(
        cls, data: object, *, source: str = "run spec", lines: Mapping[str, int] | None = None
    ) -> Self:
        """Validate plain data against the schema. Raises SpecError."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(problems_of(error, cls, lines or {}), source=source) from None

    def canonical(self) -> bytes:
        """Return sorted, compact JSON: the bytes that are sent and stored.

        Nobody but the organiser's own machine learns where its copies go.
        """
        return _canonical_json(self.model_dump(mode="json", exclude={"coordinator": {"copies"}}))

    def digest(self) -> str:
        """Return the SHA-256, in hex, of everything but [coordinator], which may move."""
        identity = self.model_dump(mode="json", exclude={"coordinator"})
        return hashlib.sha256(_canonical_json(identity)).hexdigest()

    def differences(self, other: RunSpec) -> list[str]:
        """List the fields that make `other` another run, as 'section.field: mine != theirs'."""
        mine, theirs = (
            {name: dict(section) for name, section in spec if name != "coordinator"}
            for spec in (self, other)
        )
        return [
            f"{section}.{key}: {value!r} != {theirs[section][key]!r}"
            for section, values in mine.items()
            for key, value in values.items()
            if value != theirs[section][key]
        ]


def stage_name(index: int) -> str:
    """Return the module's name of a stage, counted from 0 here and from 1 in the name."""
    return f"stage-{index + 1}"


def run_id(spec: RunSpec, run_public_key: bytes) -> str:
    """Return the run id, SHA-256 in hex, of a spec under the run's key."""
    material = b"atoll run v1\0" + run_public_key + bytes.fromhex(spec.digest())
    return hashlib.sha256(material).hexdigest()


def template(values: RunSpec | None = None) -> str:
    """Return a commented RUN.toml with every field, generated from the schema."""
    spec = values or RunSpec()
    head = "# The description of an Atoll run. Any line may be omitted: these are the defaults."
    sections = [_render_section(name, getattr(spec, name)) for name in RunSpec.model_fields]
    return "\n\n".join([head, *sections]) + "\n"


def _render_section(name: str, section: Section) -> str:
    lines = [f"[{name}]", f"# {(type(section).__doc__ or '').strip()}"]
    for key, info in type(section).model_fields.items():
        lines += ["", *_wrap_comment(info.description or "")]
        lines.append(_render_value(key, getattr(section, key), info.examples or []))
    return "\n".join(lines)


def _render_value(key: str, value: object, examples: list[Any]) -> str:
    absent = value is None or value == {}
    shown = examples[0] if absent else value
    return ("# " if absent else "") + f"{key} = {_toml_value(shown)}"


def _toml_value(value: object) -> str:
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def _wrap_comment(text: str, width: int = 88) -> list[str]:
    lines: list[str] = []
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > width:
            lines, line = [*lines, line], "#"
        line += " " + word
    return [*lines, line]


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()[: MAX_SPEC_BYTES + 1]
        text = raw.decode("utf-8")
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); `atoll init` writes a commented one"
    except UnicodeDecodeError:
        reason = "expected UTF-8 text"
    else:
        if len(raw) <= MAX_SPEC_BYTES:
            return text
        reason = f"expected at most {MAX_SPEC_BYTES} bytes"
    problem = SpecProblem(line=None, path="", message=reason)
    raise SpecError([problem], source=str(path)) from None
