#!/usr/bin/env python3
"""Ask the peers of a pipeline for one text after the other, for `bench_pipeline.py`.

    pipeline_texts.py INVITE CLIENTS ASKING

One line of JSON for each token, and one when all clients have joined. Each client is a follower of
the run with a key of its own. They ask while the file ASKING is there.
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import aclosing
from itertools import count
from pathlib import Path

from atoll.peer.cli.watching import read_invite
from atoll.peer.daemon.live_text import LiveOptions, live_run
from atoll.peer.training.sampling import SamplingOptions

PROMPT = "def "
BEYOND = 8  # positions of the context that stay free: a text within it costs a row for each token
POLL_S = 0.1


async def ask(
    invite: str, client: int, folder: Path, asking: Path, joined: asyncio.Barrier
) -> None:
    """Ask for texts until this process is ended."""
    options = LiveOptions(invite=read_invite(invite), state_dir=folder / str(client))
    async with live_run(options) as run:
        tokens = run.spec.data.seq_len - len(PROMPT) - BEYOND
        if await joined.wait() == 0:
            tell(joined=True)
        for seed in count():
            while not asking.exists():
                await asyncio.sleep(POLL_S)
            chosen = SamplingOptions(max_tokens=tokens, seed=seed)
            async with aclosing(run.generate(PROMPT, chosen)) as tokens_of_text:
                async for _ in tokens_of_text:
                    tell(token=client)
                    if not asking.exists():
                        break


def tell(**fields: object) -> None:
    """Print what happened, and when."""
    print(json.dumps({"time": time.time()} | fields), flush=True)


async def main(invite: str, clients: int, asking: Path) -> None:
    """Ask with several clients at once."""
    joined = asyncio.Barrier(clients)
    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.TaskGroup() as tasks:
            for client in range(clients):
                tasks.create_task(ask(invite, client, Path(folder), asking, joined))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
