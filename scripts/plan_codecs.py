"""Choose a codec per layer: the `mixed` for RUN.toml with the least loss in a budget of bytes.

    scripts/plan_codecs.py --run DIR --bits 3

DIR is the --out of an `atoll demo` with the model and the data. Its newest checkpoint is trained
for a window, and every candidate codec encodes the result, layer by layer.
"""

import argparse

from codec_inputs import layers, pseudo_gradient

from atoll.compression import parse, planned


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, metavar="DIR", help="output folder of a demo run")
    parser.add_argument(
        "--bits", type=float, default=3.0, help="budget in bits per value (default 3)"
    )
    options = parser.parse_args()
    real = pseudo_gradient(options.run)
    named = layers(real)
    codec = planned(named, bits=options.bits)
    print(f"# {summary(codec, named)}")
    print(f'[compression]\ncodec = "{codec.spec}"')
    print(f"# {summary(parse('int4'), named)}")


def summary(codec, named):
    lost = kept = size = numel = 0
    for name, x in named.items():
        mine = codec.for_layer(name)
        frame = mine.encode(x)
        lost += float((mine.decode(frame, x.shape) - x).double().square().sum())
        kept += float(x.double().square().sum())
        size, numel = size + len(frame), numel + x.numel()
    short = codec.spec if len(codec.spec) < 20 else "the plan"
    return (
        f"{short}: {8 * size / numel:.2f} bits per value, error {100 * (lost / kept) ** 0.5:.1f}%"
    )


if __name__ == "__main__":
    main()
