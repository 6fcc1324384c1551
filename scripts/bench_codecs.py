"""Measure the bits, errors and speed of every codec, next to other libraries.

    ./scripts/bench codecs               print a table
    ./scripts/bench codecs --json        print a list of records
    ./scripts/bench codecs --save        write table, records and plot to docs/benchmarks

One thread is timed in CPU time, which a busy machine disturbs less than wall time. Every round
measures memcpy, hivemind's uniform 8-bit (if it is installed) and one codec on the same values, one
after the other; speeds and ratios are each of the fastest round. Bits count whole frames of a cell
of 65,536 values; errors are relative norms. `real` is a pseudo-gradient from a run of the demo:

    ./scripts/bench codecs --run DIR     the run in DIR, the --out of `atoll demo`

Without --run, a short demo is run once and kept in build/bench_codecs.
"""

import argparse
import json
import platform
import sys
import textwrap
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import codec_rivals
import pictures
import torch
from codec_inputs import demo_run, distributions, pseudo_gradient

from atoll.compression import parse
from atoll.peer.lab.plotting import RUN, VALID

ROOT = Path(__file__).resolve().parent.parent
DEMO_RUN = ROOT / "build" / "bench_codecs" / "run"
SAVED = ROOT / "docs" / "benchmarks"
CELL = 65_536
SPECS = {  # codec: maximum number of values in a speed measurement
    "fp32": 1 << 24,
    "fp16": 1 << 24,
    "bf16": 1 << 24,
    "int8": 1 << 24,
    "int8-dynamic": 1 << 24,
    "int8-uniform": 1 << 22,
    "int4": 1 << 24,
    "fp4": 1 << 24,
    "nf4": 1 << 24,
    "2bit": 1 << 24,
    "2bit(width=1)": 1 << 22,
    "ternary": 1 << 24,
    "ternary(block=4096, stochastic=False)": 1 << 22,
    "sign": 1 << 24,
    "topk(k=256)+int4": 1 << 22,
    "topk+int8": 1 << 22,
    "topk+2bit": 1 << 22,
    "randk": 1 << 22,
    "randk(scaled=False)+int8": 1 << 22,
    "dct": 10_485_760,
    "dct(k=8, bits=1)": 10_485_760,
    "powersgd": 1 << 22,
    "powersgd+int8": 1 << 22,
    "lgreco": 1 << 18,
    "lgreco(bits=2)": 1 << 18,
    "zstd(int8)": 1 << 22,
    "zstd(topk+2bit)": 1 << 22,
}

PLOTTED = {"student": "Student t, 3 degrees of freedom", "real": "a real pseudo-gradient"}
LEAST_ERROR = 1e-4  # plotted for codecs that lose nothing

MEMCPY_TARGETS = {"int8": 0.4, "fp16": 0.4, "bf16": 0.4}  # minimum fraction of memcpy's speed
HIVEMIND_TARGETS = {  # minimum multiple of hivemind's uniform 8-bit
    "int4": 10.0,
    "fp4": 10.0,
    "sign": 10.0,
    "ternary": 4.0,
    "2bit": 4.0,
    "int8-dynamic": 4.0,
}


DEMO_VALUES = 10_485_760
DEMO_SPECS = ("dct", "topk(k=32)+int8", "topk+2bit")


@dataclass(kw_only=True)
class Record:
    codec: str
    bits_per_number: float
    error: dict[str, float]
    encode_gbps: float
    decode_gbps: float
    device: str
    ratio_to_memcpy: float  # for encoding plus decoding
    ratio_to_hivemind: float | None
    encode_to_memcpy: float = 0.0
    decode_to_memcpy: float = 0.0
    encode_to_hivemind: float | None = None
    decode_to_hivemind: float | None = None
    values: int = 0
    notes: list[str] = field(default_factory=list)


class Ours:
    """An Atoll codec with reused buffers, like those of a long-lived peer."""

    def __init__(self, spec, max_values):
        self.codec, self.name, self.max_values = parse(spec), spec, max_values
        self.buffer, self.out = bytearray(), torch.empty(0)

    def encode(self, x):
        if len(self.buffer) < self.codec.wire_bytes(x.shape):
            self.buffer = bytearray(self.codec.wire_bytes(x.shape))
            self.out = torch.empty(x.shape)
        return memoryview(self.buffer)[: self.codec.encode_into(x, self.buffer)]

    def decode(self, frame):
        return self.codec.decode(frame, self.out.shape, out=self.out)

    def wire_bytes(self, frame):
        return len(frame)


class OursOnDevice(Ours):
    """An Atoll codec that encodes from and decodes to an accelerator."""

    def decode(self, frame):
        return self.codec.decode(frame, self.out.shape, device="cuda")


def error_of(codec, x):
    """Return the relative error: per cell for Atoll codecs, as in a run; whole for others."""
    cells = x.split(CELL) if isinstance(codec, Ours) else [x[: x.numel() // 262_144 * 262_144]]
    lost = kept = 0.0
    for cell in cells:
        decoded = restored(codec, cell)
        lost += float((decoded.reshape(-1) - cell).double().square().sum())
        kept += float(cell.double().square().sum())
    return (lost / kept) ** 0.5


def restored(codec, x):
    if isinstance(codec, Ours):
        return codec.codec.decode(codec.codec.encode(x), x.shape)
    return codec.decode(codec.encode(x.clone()))


def bits_of(codec):
    x = torch.randn(CELL, generator=torch.Generator().manual_seed(1))
    return 8 * codec.wire_bytes(codec.encode(x)) / CELL


def seconds(action):
    """Time an action: CPU time of this thread, or wall time on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = action()
        torch.cuda.synchronize()
        return time.perf_counter() - started, result
    started = time.thread_time()
    result = action()
    return time.thread_time() - started, result


def speed(codec, x, yardstick, rounds):
    """Return the seconds of memcpy, encode, decode, hivemind's encode and decode, per round."""
    copy = torch.empty_like(x)
    rows = []
    for _ in range(rounds + 1):
        memcpy, _ = seconds(lambda: copy.copy_(x))
        encode, message = seconds(lambda: codec.encode(x))
        decode, _ = seconds(lambda message=message: codec.decode(message))
        theirs = hivemind_speed(yardstick, x.cpu()) if yardstick else (float("nan"),) * 2
        rows.append((memcpy, encode, decode, *theirs))
    return rows[1:]


def hivemind_speed(yardstick, x):
    encode, message = seconds(lambda: yardstick.encode(x))
    decode, _ = seconds(lambda: yardstick.decode(message))
    return encode, decode


def measure(codec, inputs, yardstick, *, rounds, device):
    x = inputs["gaussian"][: codec.max_values].to(device)
    bits, errors = bits_of(codec), {}
    for name, values in inputs.items():
        errors[name] = error_of(codec, values[: 1 << 20])
    rows = speed(codec, x, yardstick, rounds)
    if "hook" in codec.name:  # does all its work in one call
        rows = [(memcpy, encode, encode, *theirs) for memcpy, encode, _, *theirs in rows]
    fastest = [min(column) for column in zip(*rows, strict=True)]
    memcpy, encode, decode, their_encode, their_decode = fastest
    gigabytes = 4 * x.numel() / 1e9

    def times(theirs, ours):
        return round(theirs / ours, 2) if yardstick else None

    return Record(
        codec=codec.name,
        bits_per_number=round(bits, 4),
        error={name: round(value, 5) for name, value in errors.items()},
        encode_gbps=round(gigabytes / encode, 3),
        decode_gbps=round(gigabytes / decode, 3),
        device=device,
        ratio_to_memcpy=round(2 * memcpy / (encode + decode), 3),
        ratio_to_hivemind=times(their_encode + their_decode, encode + decode),
        encode_to_memcpy=round(memcpy / encode, 3),
        decode_to_memcpy=round(memcpy / decode, 3),
        encode_to_hivemind=times(their_encode, encode),
        decode_to_hivemind=times(their_decode, decode),
        values=x.numel(),
    )


def run(options, real):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    inputs = distributions(1 << 24, real)
    rivals = codec_rivals.available()
    yardstick = next((r for r in rivals if r.name == "hivemind uniform 8-bit"), None)
    cls = Ours if options.device == "cpu" else OursOnDevice
    codecs = [cls(spec, size) for spec, size in SPECS.items()]
    if options.device == "cpu":
        codecs += rivals
    records = []
    for codec in codecs:
        if options.only and not any(text in codec.name for text in options.only):
            continue
        record = measure(codec, inputs, yardstick, rounds=options.rounds, device=options.device)
        records.append(record)
        print(line(record), file=sys.stderr, flush=True)
    return records


HEADER = (
    f"{'codec':40} {'bits':>7} {'gauss':>7} {'laplace':>7} {'student':>7} {'real':>7} "
    f"{'enc GB/s':>8} {'dec GB/s':>8} {'/memcpy':>13} {'/hivemind':>13}"
)


def line(r):
    errors = " ".join(
        f"{r.error[name]:7.4f}" for name in ("gaussian", "laplace", "student", "real")
    )
    theirs = (
        f"{r.encode_to_hivemind:6.1f} {r.decode_to_hivemind:6.1f}" if r.ratio_to_hivemind else ""
    )
    return (
        f"{r.codec:40} {r.bits_per_number:7.3f} {errors} {r.encode_gbps:8.2f} {r.decode_gbps:8.2f} "
        f"{r.encode_to_memcpy:6.2f} {r.decode_to_memcpy:6.2f} {theirs}"
    )


def decoding(r):
    """Format the decoding speed; the PowerSGD hook does all its work in one call."""
    return "with encode" if "hook" in r.codec else f"{r.decode_gbps:.2f}"


def markdown(records):
    rows = [
        "| codec | bits | gaussian | laplace | Student t | real | encode GB/s | decode GB/s "
        "| of memcpy | times hivemind |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        errors = " | ".join(
            f"{100 * r.error[n]:.2f}%" for n in ("gaussian", "laplace", "student", "real")
        )
        theirs = (
            f"{r.encode_to_hivemind:.1f} / {r.decode_to_hivemind:.1f}"
            if r.ratio_to_hivemind
            else ""
        )
        rows.append(
            f"| `{r.codec}` | {r.bits_per_number:.3f} | {errors} | {r.encode_gbps:.2f} "
            f"| {decoding(r)} | {r.encode_to_memcpy:.2f} / {r.decode_to_memcpy:.2f} "
            f"| {theirs} |"
        )
    return "\n".join(rows)


def against_demo(rounds, num_threads):
    """Time our sparse codecs and the DeMo reference on the same values, alternating.

    Returns {name: (ms to compress, ms to decode)}, each the fastest round by wall time.
    """
    torch.set_num_threads(num_threads)
    contenders = [Ours(spec, DEMO_VALUES) for spec in DEMO_SPECS] + [codec_rivals.demo_reference()]
    x = torch.randn(DEMO_VALUES, generator=torch.Generator().manual_seed(0))
    best = {}
    for _ in range(rounds + 1):
        for codec in contenders:
            ways = by_the_clock(codec, x)
            best[codec.name] = tuple(map(min, zip(ways, best.get(codec.name, ways), strict=True)))
    torch.set_num_threads(1)
    return best


def by_the_clock(codec, x):
    """Return (ms to compress, ms to decode)."""
    began = time.perf_counter()
    message = codec.encode(x)
    encoded = time.perf_counter()
    codec.decode(message)
    return (encoded - began) * 1e3, (time.perf_counter() - encoded) * 1e3


def demo_section(rounds):
    """Return the section of the page that compares with DeMo."""
    rows = ["| codec | threads | compress ms | decode ms |", "|---|---|---|---|"]
    for num_threads in (1, 2):
        rows += [
            f"| `{name}` | {num_threads} | {compress:.0f} | {decode:.0f} |"
            for name, (compress, decode) in against_demo(rounds, num_threads).items()
        ]
    intro = f"{DEMO_VALUES:,} values, wall time, fastest of {rounds} rounds, alternating.\n\n"
    return "## Against the DeMo reference\n\n" + intro + "\n".join(rows) + "\n"


def verdicts(records):
    """Return one line per speed target: met or not, and the numbers."""
    return [
        *(
            verdict(r, MEMCPY_TARGETS[r.codec], "memcpy")
            for r in records
            if r.codec in MEMCPY_TARGETS
        ),
        *(
            verdict(r, HIVEMIND_TARGETS[r.codec], "hivemind")
            for r in records
            if r.codec in HIVEMIND_TARGETS and r.ratio_to_hivemind
        ),
    ]


def verdict(r, target, yardstick):
    ratios = [getattr(r, f"{way}_to_{yardstick}") for way in ("encode", "decode")]
    words = ["met" if ratio >= target else "NOT MET" for ratio in ratios]
    digits = 2 if target < 1 else 1
    ways = ", ".join(
        f"{way} {ratio:.{digits}f} {word}"
        for way, ratio, word in zip(("encode", "decode"), ratios, words, strict=True)
    )
    return f"- `{r.codec}`, at least {target:g} times {yardstick}: {ways}"


def plot(records, path):
    """Draw error over bits for two distributions, ours and theirs."""
    figure, panels = pictures.page(
        "Codecs: Atoll (dots) and others (crosses); lower left is better",
        widths=(1, 1),
        size=(13, 7),
    )
    drawn = [
        (axes, [point(record, record.error[key]) for record in records if record.error[key] < 1.2])
        for axes, key in zip(panels, PLOTTED, strict=True)
    ]
    for (axes, points), title in zip(drawn, PLOTTED.values(), strict=True):
        axes.loglog()
        axes.set_ylim(6e-5, 4)
        pictures.dress(
            axes, title=title, x="bits per value, everything counted", y="relative error"
        )
        pictures.scatter(axes, points)
    for axes, points in drawn:
        pictures.label(axes, points)
    pictures.save(figure, path)


def point(record, error):
    ours = record.codec in SPECS
    return pictures.Point(
        x=record.bits_per_number,
        y=max(error, LEAST_ERROR),
        name=record.codec,
        color=RUN if ours else VALID,
        marker="o" if ours else "X",
    )


def conditions(real):
    return (
        f"Made by `./scripts/bench codecs --save`: one thread of {platform.machine()}, "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}. Up to 16M fp32 "
        "values. Bits include headers, checksums, scales and codebooks. Errors are relative norms. "
        "Ratios (encode / decode) are of the fastest rounds, on the same values. `real` is "
        f"{real.source}."
    )


def save(records, real, rounds):
    SAVED.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(record) for record in records], indent=1)
    (SAVED / "codecs.json").write_text(text + "\n")
    page = (
        "# Codecs\n\n" + textwrap.fill(conditions(real), 88, break_on_hyphens=False) + "\n\n"
        "![rate and distortion](codecs.png)\n\n" + markdown(records) + "\n\n"
        "## Speed targets\n\n" + "\n".join(verdicts(records)) + "\n\n" + demo_section(rounds)
    )
    (SAVED / "codecs.md").write_text(page)
    plot(records, SAVED / "codecs.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write docs/benchmarks/codecs.{md,json,png}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds per codec (default 5)")
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="device of the tensors (default %(default)s)",
    )
    parser.add_argument(
        "--run", metavar="DIR", help="output folder of a demo run, for the real values"
    )
    parser.add_argument("--only", nargs="*", help="only codecs whose name contains one of these")
    options = parser.parse_args()
    real = pseudo_gradient(options.run or demo_run(DEMO_RUN))
    if not options.json:
        print(f"real: {real.source}\n{HEADER}", file=sys.stderr)
    records = run(options, real.values)
    if options.json:
        print(json.dumps([asdict(record) for record in records], indent=1))
    else:
        print(markdown(records))
    if options.save:
        save(records, real, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
