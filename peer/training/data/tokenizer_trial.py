"""Try a tokenizer's file in a process of its own, with limits of time and memory.

A file that travels with a run is the organiser's word. Its parser is native code, and a pattern in
it may never end on some text. The trial parses the file, then encodes and decodes a short text
of many kinds; a crash, a hang or a table too large ends that process alone. It proves nothing about
other text: a pattern that hangs on the run's own text stops this peer, as a model that is too slow
does.

The child runs this file as a script and imports nothing but `tokenizers`.
"""

import importlib
import os
import subprocess
import sys

TRIAL_S = 60.0  # 9.5 MB, 128,000 tokens, take 0.4 s on a server
MEMORY_BYTES = 4 << 30  # of addresses; 128,000 tokens take some 100 MB

SAMPLE = (
    "The quick brown fox, 3.14159 and 1,000,000; don't! def f(x):\n\treturn x ** 2\r\n"
    + "ÄÖÜ ß € — 日本語 한국어 العربية हिन्दी 👩‍👩‍👧 \u0301\u200d\ufeff\0"
    + "a" * 300
    + "!" * 300
    + " " * 300
    + "\n" * 100
    + "aA1 _" * 60
)


class TrialFailed(Exception):
    """The file could not be parsed and used within the limits."""


def try_tokenizer(raw: bytes) -> None:
    """Parse and use a tokenizer's file in another process.

    Raises:
        TrialFailed: with the reason.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=raw,
            capture_output=True,
            timeout=TRIAL_S,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrialFailed(f"it took more than {TRIAL_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr[-2000:].decode(errors="replace").strip().splitlines()
        raise TrialFailed(lines[-1][:300] if lines else f"it ended with {done.returncode}")


def _limit() -> None:
    import resource  # not on every system, and needed in the child alone

    for limit, most in ((resource.RLIMIT_CPU, int(TRIAL_S)), (resource.RLIMIT_AS, MEMORY_BYTES)):
        try:
            resource.setrlimit(limit, (most, most))
        except (OSError, ValueError):
            continue  # macOS does not limit addresses


def _try_out(raw: bytes) -> None:
    package = importlib.import_module("tokenizers")  # of an extra, so type checkers may lack it
    tokenizer = package.Tokenizer.from_buffer(raw)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= highest < size:
        raise ValueError(f"expected token ids below {size}, the number of tokens, got {highest}")
    tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False).ids)


if __name__ == "__main__":
    _limit()
    _try_out(sys.stdin.buffer.read())
