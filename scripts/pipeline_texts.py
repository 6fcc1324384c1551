#!/usr/bin/env python3
"""Ask the peers of a pipeline for one text after the other, for `bench_pipeline.py`.

    pipeline_texts.py INVITE CLIENTS

One line of JSON for each token. Each client is a follower of the run with a key of its own.
"""

import asyncio
import json
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from atoll.peer.cli.watching import read_invite
from atoll.peer.daemon.live_text import LiveOptions, live_run
from atoll.peer.training.sampling import SamplingOptions

PROMPT = "def "
BEYOND = 8  # positions of the context that stay free: a text within it costs a row for each token


async def ask(invite: str, client: int, folder: Path) -> None:
    """Ask for texts until this process is ended."""
    options = LiveOptions(invite=read_invite(invite), state_dir=folder / str(client))
    async with live_run(options) as run:
        tokens = run.spec.data.seq_len - len(PROMPT) - BEYOND
        for seed in count():
            chosen = SamplingOptions(max_tokens=tokens, seed=seed)
            async for _ in run.generate(PROMPT, chosen):
                print(json.dumps({"time": time.time(), "token": client}), flush=True)


async def main(invite: str, clients: int) -> None:
    """Ask with several clients at once."""
    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.TaskGroup() as tasks:
            for client in range(clients):
                tasks.create_task(ask(invite, client, Path(folder)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
