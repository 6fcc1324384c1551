"""A peer of several ranks: processes that train one model together and count as one peer.

    torchrun --nproc-per-node 8 train.py

    ranks = Ranks()
    reducer = RankReducer(ranks, lambda: connect(invite))     # called on the leader alone
    diloco = DiLoCo(model, optimizer, reducer, inner_steps=reducer.spec.outer.inner_steps)

The model may be cut over the ranks (`fully_shard`), or whole on each (DDP). The run's vector is cut
by ranges of cells, whatever the model's placement: each rank keeps synced parameters, drift and
residual of its range, and encodes it. Rank 0, the leader, alone talks to other peers; it gathers
frames, about a byte a value in int8, and hands out new parameters. Frames, residuals and
parameters have the bits of a peer of one rank with the same gradients, so peers of any numbers of
ranks share a log, and a saved state fits any number of them.

    ranks        processes, their messages and their deadlines
    ranges       who keeps what
    placing      own values and the model's parameters
    residuals    the residuals of a reducer, kept by the ranks
    reducer      the reducer that all ranks share

    RanksError (RuntimeError)   a rank that failed, fell silent, or is out of step with the others
"""

from atoll.optim.ranks.ranks import Ranks, RanksError
from atoll.optim.ranks.reducer import RankReducer

__all__ = ["RankReducer", "Ranks", "RanksError"]
