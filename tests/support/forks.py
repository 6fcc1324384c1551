"""Processes that are forked from one that has imported everything already.

Importing torch and what it imports at the first optimizer takes 2.5 s of a processor, and tests
start a hundred such processes.
"""

import multiprocessing

# A process has one fork server, and whoever names its modules last wins: so they are named here,
# for all. `torch._dynamo` is what torch.optim imports when the first optimizer is made.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "atoll.peer.daemon.reach.bootstrap",
        "atoll.peer.cli.main",
        "atoll.peer.daemon.process",
        "atoll.coordinator.service.server",
        "support.ranks",
        "support.rank_work",
    ]
)
