"""A model and a command line that take a second to simulate."""

TINY = {"dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 32}


def command(text, folder, *more: str) -> list[str]:
    shape = [f"{name}={value}" for name, value in TINY.items()]
    return [
        *("simulate", "--methods", "ddp,diloco", "--workers", "2", "--tokens", "400"),
        *("--inner-steps", "2", "--batch-size", "2", "--seq-len", "16", "--set", *shape),
        *("--source", str(text), "--folder", str(folder)),
        *more,
    ]
