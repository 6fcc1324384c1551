"""The sections of RUN.toml: one frozen model each, whose fields carry their documentation.

Each field's own type and range is checked here; combinations of fields are checked by
`atoll.coordinator.run.spec.RunSpec`.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from atoll.compression import ErrorFeedback, parse
from atoll.compression.activations import parse_activations
from atoll.coordinator.run.addresses import split_address
from atoll.optim import methods
from atoll.optim.log.electorate import Electors
from atoll.optim.log.entry import Trust
from atoll.optim.reduction.robust import ReducerName
from atoll.optim.schedules import QSR, Rate

_CUSTOM_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*", re.ASCII)
_LAYER_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_OWN_KEYS = {
    "lr": "outer.lr",
    "momentum": "outer.momentum",
    "state": "outer.state",
    "codec": "compression.codec",
    "feedback": "compression.feedback",
}
"""Method options that have a key of their own in RUN.toml."""

LONGEST = 10  # times the shortest window; a rate that falls to a tenth would call for 100 times

MAX_STAGES = 64  # of a pipeline: a return names a peer of each, in a header of 12 kB

MAX_PATTERNS = 512  # of all stages, which have at most so many slices

MAX_PATTERN_CHARS = 200

MIN_KEEPERS = 4  # with which one may lie: 3f + 1

MAX_PASS_UNITS = 1 << 40  # the order of rows is computed in 64 bits

MAX_TOKENIZER_BYTES = 32 << 20  # of the JSON; one of 128,000 tokens has 9.5 MB

EXAMPLE_SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

Scalar = bool | int | float | str
Stages = int | list[list[str]]  # of a pipeline: how many, or patterns of each one's parameters
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Section(BaseModel):
    """A frozen, strict model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    later: ClassVar[tuple[str, ...]] = ()
    """Fields that older specs lack; serialised only if they differ from their defaults."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that older specs lack, so that equal runs keep their run ids."""
        fields: dict[str, Any] = handler(self)
        for name in self.later:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if name in fields and getattr(self, name) == default:
                del fields[name]
        return fields


class RunSection(Section):
    """Identity and length of the run."""

    name: str = Field(
        default="my-run",
        description="Run name, used in file names: letters, digits, '.', '_', '-'.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the initial parameters and the data order."
    )
    rounds: int = Field(
        default=0, ge=0, description="Rounds to train. 0: until the organiser stops the run."
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _RUN_NAME.fullmatch(value):
            raise ValueError("expected 1 to 64 letters, digits, '.', '_' or '-'")
        return value


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): all that is trained, if a run has them."""

    rank: int = Field(default=8, ge=1, le=1024, description="Rank of each adapter.")
    alpha: float = Field(
        default=16.0, gt=0, le=65_536, description="Scale: an adapter counts alpha / rank times."
    )
    targets: list[str] = Field(
        default=["qkv", "out", "gate_up"],
        min_length=1,
        max_length=64,
        description="Names of the layers that get an adapter, or ends of their names.",
    )

    @field_validator("targets")
    @classmethod
    def _targets(cls, value: list[str]) -> list[str]:
        wrong = [name for name in value if not _LAYER_NAME.fullmatch(name)]
        if wrong or len(set(value)) != len(value):
            raise ValueError("expected distinct names of layers, such as ['qkv', 'ffn.out']")
        return value


class ModelSection(Section):
    """The model to train."""

    later: ClassVar[tuple[str, ...]] = ("source_sha256", "init", "init_sha256", "lora")

    preset: str = Field(
        default="nano",
        min_length=1,
        description="Built-in model: 'nano' (about 1M parameters, for a CPU) up to '1b'.",
    )
    custom: str | None = Field(
        default=None,
        description="Your own model as 'module:function', installed on every peer; the function is "
        "marked with @model (atoll.peer.training.models). Replaces the preset. Peers start with "
        "--allow-model module:function.",
        examples=["my_package.models:build"],
    )
    source_sha256: Sha256 | None = Field(
        default=None,
        description="SHA-256 of the custom model's source: of the one file that defines the "
        "function, not of what that file imports. Peers refuse another source. Default: that of "
        "the organiser's file at the run's first start.",
        examples=[EXAMPLE_SHA256],
    )
    overrides: dict[str, Scalar] = Field(
        default_factory=dict,
        description="Changed fields of the preset, or arguments of the custom function.",
        examples=[{"num_layers": 6}],
    )
    init: str | None = Field(
        default=None,
        min_length=1,
        description="Weights with which the run begins: a folder with config.json and safetensors "
        "files, as Hugging Face models have. Without a custom model it must be of the Llama "
        "family; it replaces the preset. Peers fetch the first state from the coordinator, or name "
        "their copy of the folder with --init; with LoRA or frozen parameters they must.",
        examples=["SmolLM2-135M"],
    )
    init_sha256: Sha256 | None = Field(
        default=None,
        description="SHA-256 of those weights: of the names, types, shapes and values of the "
        "tensors, in whatever files. Default: that of the organiser's folder at the run's first "
        "start.",
        examples=[EXAMPLE_SHA256],
    )
    lora: LoraSection | None = Field(
        default=None,
        description="Low-rank adapters (LoRA): only they are trained and travel, and every peer "
        "needs the weights beneath them (init). `targets` are names of linear layers or ends of "
        "them; those of the built-in model are qkv, attention.out, gate_up and ffn.out.",
        examples=[{"rank": 8, "alpha": 16, "targets": ["qkv", "out", "gate_up"]}],
    )

    @property
    def title(self) -> str:
        """Return the model's name: its function, the folder it begins with, or its preset."""
        return self.custom or (self.preset if self.init is None else PurePath(self.init).name)

    @field_validator("custom")
    @classmethod
    def _custom(cls, value: str | None) -> str | None:
        if value is not None and not _CUSTOM_MODEL.fullmatch(value):
            raise ValueError("expected 'module:function', such as 'my_package.models:build'")
        return value


class DataSection(Section):
    """The training data."""

    later: ClassVar[tuple[str, ...]] = (
        "split",
        "revision",
        "sha256",
        "same_text",
        "tokenizer_sha256",
        "tokenizer_bytes",
        "packing",
        "once",
        "units",
    )

    source: str = Field(
        default="stdlib",
        min_length=1,
        description="Training text: 'stdlib' (the source code of Python's standard library, always "
        "available), a Hugging Face data set as 'hf:OWNER/NAME' or 'hf:OWNER/NAME@CONFIG', or a "
        "path. A peer reads no path that this file names: each names its own copy with --data.",
    )
    split: str = Field(
        default="train",
        pattern=r"^\w[\w.]{0,63}$",
        description="Split of a Hugging Face data set.",
    )
    revision: str | None = Field(
        default=None,
        description="Revision of a Hugging Face data set: a commit, branch or tag. Default: the "
        "commit that is the newest at the run's first start, if the hub can be asked.",
        examples=["main"],
    )
    sha256: Sha256 | None = Field(
        default=None,
        description="SHA-256 of the text: of the names and contents of its documents, in order. A "
        "peer that reads another text warns. Default: that of the organiser's text at the run's "
        "first start, if it is on that machine and not larger than 1 GiB.",
        examples=[EXAMPLE_SHA256],
    )
    same_text: bool = Field(
        default=False,
        description="Refuse peers whose text has another SHA-256 than the run's, instead of a "
        "warning. Without this, each peer may train on a text of its own, and the validation loss "
        "is a mean over different texts.",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "hf"] = Field(
        default="auto", description="Format of the source: auto, text, jsonl, parquet or hf."
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        description="Tokenizer: 'bytes' (256 tokens, nothing to download) or the path of a "
        "tokenizers JSON file, or of a folder with a tokenizer.json, on the organiser's machine "
        "(`atoll tokenizer` trains one). It travels with the run if it has at "
        "most 4 MiB compressed; for a larger one each peer names its copy with --tokenizer.",
    )
    tokenizer_sha256: Sha256 | None = Field(
        default=None,
        description="SHA-256 of the tokenizer's file. Peers refuse another file. Default: that of "
        "the organiser's file at the run's first start.",
        examples=[EXAMPLE_SHA256],
    )
    tokenizer_bytes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENIZER_BYTES,
        description="Size of the tokenizer's file in bytes, if it travels with the run. Filled in "
        "at the run's first start.",
        examples=[1_355_256],
    )
    text_field: str = Field(
        default="text", min_length=1, description="Column that holds the text (jsonl, parquet, hf)."
    )
    valid_fraction: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="Fraction of the files (or documents) held out for validation.",
    )
    seq_len: int = Field(default=128, ge=8, le=1_048_576, description="Sequence length in tokens.")
    packing: Literal["stream", "documents"] = Field(
        default="stream",
        description="Attention over documents that share a sequence: stream (each position attends "
        "to all before it) or documents (to those of its own document; for built-in models and "
        "tokenizers with an end token).",
    )
    once: bool = Field(
        default=False,
        description="Train on each row of the text once in a pass: the log hands out units of rows "
        "to peers, and again what a lost peer held. A row is a sequence, a unit the rows of an "
        "inner step (inner.batch_size times inner.grad_accumulation). Needs same_text, and a text "
        "or shards on the peers' disks. Without this, each peer draws sequences at random.",
    )
    units: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PASS_UNITS,
        description="Units of a pass, with once. Default: as many whole ones as the organiser's "
        "text has at the run's first start.",
        examples=[12_000],
    )

    @property
    def num_units(self) -> int:
        """Units of a pass; 0 in a run without `once`."""
        return self.units or 0 if self.once else 0

    @field_validator("revision")
    @classmethod
    def _revision(cls, value: str | None) -> str | None:
        if value is not None and not (len(value) <= 100 and _REVISION.fullmatch(value)):
            raise ValueError("expected a commit, branch or tag, such as 'main'")
        return value


class InnerSection(Section):
    """The inner optimizer: AdamW, run by each peer on its own between two rounds."""

    later: ClassVar[tuple[str, ...]] = ("state",)

    lr: float = Field(default=1.5e-3, gt=0, le=10, description="Peak learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay rate of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="Decoupled weight decay.")
    clip_norm: float = Field(
        default=1.0, ge=0, description="Largest L2 norm of a step's gradient. 0: no clipping."
    )
    warmup_steps: int = Field(
        default=30, ge=0, description="Warm-up from zero to the peak rate, in inner steps."
    )
    min_lr_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Final learning rate as a fraction of the peak, reached by a cosine over "
        "run.rounds. Averaging over peers already reduces noise: 0.1 ended with a higher loss. "
        "Without run.rounds the rate stays at the peak.",
    )
    batch_size: int = Field(default=8, ge=1, description="Sequences per micro-batch of one peer.")
    grad_accumulation: int = Field(default=1, ge=1, description="Micro-batches per inner step.")
    state: Literal["fp32", "8bit"] = Field(
        default="fp32",
        description="Format of AdamW's moments: fp32 (8 bytes per parameter), or 8bit (2 bytes; "
        "each peer needs the package torchao).",
    )
    compile: bool = Field(
        default=False, description="Compile the model with torch.compile (slower to start)."
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Precision of the forward pass: auto (bfloat16 on CUDA, float16 with a scaled "
        "loss on older cards, else float32), float32, bfloat16 or float16. Parameters are always "
        "float32.",
    )

    @property
    def rate(self) -> Rate:
        """The learning-rate schedule."""
        return Rate(peak=self.lr, warmup_steps=self.warmup_steps, min_ratio=self.min_lr_ratio)


class OuterSection(Section):
    """The outer optimizer: how peers combine their updates at the end of a window."""

    later: ClassVar[tuple[str, ...]] = ("state",)

    method: str = Field(
        default="diloco",
        description="Outer method, with its options in parentheses: 'diloco', 'sparseloco', "
        "'streaming(count=4, tau=5)', ...",
    )
    inner_steps: int = Field(
        default=30,
        ge=1,
        le=100_000,
        description="Inner steps per window, the H of DiLoCo. More steps mean less traffic.",
    )
    windows: Literal["equal", "deadline", "qsr"] = Field(
        default="equal",
        description="Window length: 'equal' (inner_steps for every peer), 'deadline' (each peer "
        "does as many steps as fit while the median peer does inner_steps, from half to twice "
        "that, so that peers of different speeds finish together) or 'qsr' (windows grow for all "
        "peers as the learning rate falls: (growth / rate)^2 steps, from inner_steps to "
        "max_inner_steps).",
    )
    growth: float = Field(
        default=0.0,
        ge=0,
        description="Growth coefficient of 'qsr', alpha in its paper: windows grow once the rate "
        "falls below growth / sqrt(inner_steps + 1). 0 with other windows.",
    )
    max_inner_steps: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Longest window of 'qsr', in inner steps. 0: ten times inner_steps.",
    )
    lr: float | Literal["auto"] = Field(
        default="auto",
        description="Outer learning rate above 0, or 'auto': the method's default; that of diloco "
        "depends on the length of the run.",
    )
    momentum: float | Literal["auto"] = Field(
        default="auto", description="Outer momentum in [0, 1), or 'auto': the method's default."
    )
    state: methods.StateFormat = Field(
        default="fp32",
        description="Format of the outer momentum, which every peer and the coordinator hold: fp32 "
        "(4 bytes per parameter) or bf16 (2, rounded alike everywhere; snapshots and checkpoints "
        "are smaller by as much). Parameters are always fp32. For methods with an outer momentum "
        "in a log: diloco, muloco, streaming, eager and co2.",
    )

    @property
    def longest(self) -> int:
        """Inner steps of the longest window that all peers share."""
        if self.windows != "qsr":
            return self.inner_steps
        return self.max_inner_steps or LONGEST * self.inner_steps

    @property
    def qsr(self) -> QSR:
        """The QSR rule that sets the window lengths."""
        return QSR(shortest=self.inner_steps, longest=self.longest, growth=self.growth)

    @field_validator("method")
    @classmethod
    def _method(cls, value: str) -> str:
        elsewhere = sorted(methods.given(value) & _OWN_KEYS.keys())
        if elsewhere:
            keys = " and ".join(f"{name} as {_OWN_KEYS[name]}" for name in elsewhere)
            raise ValueError(f"set {keys}, not in the method's parentheses (got {value!r})")
        return value

    @field_validator("lr")
    @classmethod
    def _lr(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 < value <= 10:
            raise ValueError("expected 'auto' or a number above 0 and at most 10")
        return value

    @field_validator("momentum")
    @classmethod
    def _momentum(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value < 1:
            raise ValueError("expected 'auto' or a number in [0, 1)")
        return value


class CompressionSection(Section):
    """Compression of the updates on the wire."""

    codec: str = Field(
        default="auto",
        description="Codec of the updates in both directions: 'int8', 'int4', 'topk(k=64)+2bit', "
        "..., or 'auto': the method's default (int8 for diloco).",
    )
    feedback: float | Literal["auto"] = Field(
        default="auto",
        description="Error feedback: fraction of the compression error added to the next update. "
        "0: none. 'auto': the method's default, or 0 if the codec allows none.",
    )

    @field_validator("codec")
    @classmethod
    def _codec(cls, value: str) -> str:
        codec = None if value == "auto" else parse(value)
        if isinstance(codec, ErrorFeedback):
            raise ValueError(
                f"expected a codec without feedback of its own, got {value!r}; each peer applies "
                f'feedback itself: set codec = "{codec.codec.spec}" and '
                f"feedback = {codec.decay:g}"
            )
        return value

    @field_validator("feedback")
    @classmethod
    def _feedback(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError("expected 'auto' or a number between 0 and 1")
        return value


class RoundSection(Section):
    """Timing and reduction of a round, and who decides it."""

    later: ClassVar[tuple[str, ...]] = ("electors", "trust")

    min_peers: int = Field(
        default=2, ge=1, le=4096, description="Peers that must be ready before the run starts."
    )
    electors: Electors = Field(
        default="members",
        description="Peers that lead and vote: 'members' (peers that have contributed for some "
        "rounds) or 'keepers' (only peers with an invite for keepers, see `atoll invite --role "
        "keeper`; they need not train, and the run waits for at least one).",
    )
    trust: Trust = Field(
        default="crash",
        description="Faults of voting peers under which no round is decided twice: 'crash' (they "
        "stop, or are too late) or 'byzantine' (fewer than a third of the keepers also lie; needs "
        "keepers as electors, waits for four of them, and takes one more round trip per round).",
    )
    grace_s: float = Field(
        default=3.0,
        gt=0,
        le=600,
        description="Longest wait of a ready group for late members, in seconds. A later member "
        "misses the round and loses no work.",
    )
    stall_s: float = Field(
        default=1.5,
        ge=0.1,
        le=60,
        description="Seconds without a byte after which a peer is dropped from the round.",
    )
    snapshot_every: int = Field(
        default=4,
        ge=1,
        le=1024,
        description="Rounds between two state roots, that is, between snapshots that joining peers "
        "can fetch.",
    )
    reducer: ReducerName = Field(
        default="mean",
        description="Reduction by the owner of each part: 'mean' (weighted) or, if peers are not "
        "trusted, 'trimmed-mean', 'median', 'centered-clip' or 'flag-aggregator', which weight all "
        "members equally.",
    )
    log_mb: int = Field(
        default=512,
        ge=1,
        description="Old updates that each peer keeps for peers that catch up, in megabytes.",
    )

    @property
    def min_keepers(self) -> int:
        """Keepers that must be ready before an epoch opens; 0 if members vote."""
        if self.electors == "members":
            return 0
        return MIN_KEEPERS if self.trust == "byzantine" else 1


class TopologySection(Section):
    """Division of the model among peers that each hold a part of it (docs/pipelines.md)."""

    stages: Stages = Field(
        default=1,
        description="Stages that the model's blocks are cut into, evenly; each peer holds one. 1: "
        "every peer holds the whole model. Or the patterns of the parameters of each stage: "
        "[['slices.0.*', 'slices.1.*'], ['slices.[2-9].*']].",
    )
    activations: str = Field(
        default="int8",
        description="Codec of the activations between stages: 'fp32', 'bf16', 'int8', 'int4' or "
        "'subspace(k=64)'.",
    )
    gradients: str = Field(
        default="int8",
        description="Codec of their gradients: as for activations, or 'int4(rounding=random)'.",
    )
    staleness: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Inner steps that a peer may take between the forward and the backward pass of "
        "a microbatch. 0: it waits for all that is under way before each step.",
    )
    exact: bool = Field(
        default=False,
        description="Hold gradients until their origin has confirmed the microbatch, so that none "
        "counts at two peers of a stage; costs one more way through the pipeline.",
    )
    deadline_s: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="Seconds after which a microbatch that has not come back is given up.",
    )
    rebalance_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="Seconds between two looks whether a peer should move to another stage. 0: "
        "peers move only to a stage without any peer.",
    )

    @property
    def num_stages(self) -> int:
        """Number of stages; 1 in a dense run."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @field_validator("stages", mode="before")
    @classmethod
    def _stages(cls, value: object) -> object:
        """Report one problem, whichever of the two forms was meant."""
        if isinstance(value, list):
            _expect_patterns(value)
        elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STAGES:
            raise ValueError(
                f"expected a number of stages, 1 to {MAX_STAGES}, or a list of patterns for each "
                "stage"
            )
        return value

    @field_validator("activations", "gradients")
    @classmethod
    def _codec(cls, value: str) -> str:
        parse_activations(value)
        return value


class CoordinatorSection(Section):
    """Addresses and storage of the coordinator. May change at a restart; the run stays the same."""

    listen: str = Field(
        default="0.0.0.0:7700", description="Address of the gRPC service, 'host:port'."
    )
    advertise: str | None = Field(
        default=None,
        description="Host name or IP address at which peers reach this machine. Default: detected.",
        examples=["203.0.113.7"],
    )
    dht_listen: str = Field(
        default="0.0.0.0:7701",
        description="Address of the run's first DHT node, 'host:port', through which peers find "
        "each other.",
    )
    relay_mbit: float = Field(
        default=100.0,
        ge=0,
        description="Bandwidth in Mbit/s at which this machine relays between peers that cannot "
        "reach each other, because both are behind routers. 0: relays nothing.",
    )
    invite_only: bool = Field(
        default=True, description="Admit only peers whose invite contains the run's token."
    )
    admission_hours: float = Field(
        default=168.0,
        gt=0,
        le=24 * 366,
        description="Validity of an admission in hours; renewed while the peer is in contact.",
    )
    checkpoint_every: int = Field(
        default=25,
        ge=0,
        description="Rounds between two checkpoints, of a pipeline's last stage. 0: only at the "
        "end of the run.",
    )
    keep_checkpoints: int = Field(
        default=3,
        ge=0,
        description="Newest checkpoints to keep; of the older ones every tenth stays. 0: all.",
    )
    metrics_listen: str | None = Field(
        default=None,
        description="Address of a Prometheus endpoint, 'host:port'. Default: none.",
        examples=["127.0.0.1:9700"],
    )
    copies: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Where copies of the run go, from which another machine can continue it: a "
        "folder, or any URL of fsspec, such as 's3://bucket/path'. Default: none.",
        examples=["s3://bucket/my-run"],
    )

    @field_validator("listen", "dht_listen", "metrics_listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


def _expect_patterns(stages: list[object]) -> None:
    """Check the patterns of a pipeline's stages, as far as that is possible without its model."""
    if not 2 <= len(stages) <= MAX_STAGES:
        raise ValueError(
            f"expected patterns for each of 2 to {MAX_STAGES} stages, got {len(stages)} lists; 1 "
            "without patterns is a run whose peers hold the whole model"
        )
    total = 0
    for number, patterns in enumerate(stages, start=1):
        if not isinstance(patterns, list) or not patterns:
            raise ValueError(
                f"expected a list of patterns for stage {number}, such as ['slices.0.*'], got "
                f"{patterns!r:.80}"
            )
        total += len(patterns)
        for each in patterns:
            if not (isinstance(each, str) and 0 < len(each) <= MAX_PATTERN_CHARS):
                raise ValueError(
                    f"expected a pattern of 1 to {MAX_PATTERN_CHARS} characters in stage {number}, "
                    f"got {each!r:.80}"
                )
    if total > MAX_PATTERNS:
        raise ValueError(f"expected at most {MAX_PATTERNS} patterns in all, got {total}")
