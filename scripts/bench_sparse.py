"""Count the bytes of sparse updates that are gathered, merged or selected again.

    ./scripts/bench sparse                    a table for 2 to 64 peers
    ./scripts/bench sparse --codec 'topk(k=32)+int4' --peers 4,16 --json

Every row reduces real frames of the same pseudo-gradients (heavy-tailed, with a common part):

    all-gather        each peer sends its frames to every other (DeMo, SparseLoCo as published)
    butterfly, union  owners of parts gather frames and send them on once (`sparseloco`)
    butterfly, select the mean is selected again, so its length is fixed (`merge=select`)
    butterfly, CODEC  the mean comes back dense

Bytes are those of one peer's frames in one round, without transport. The error is that of the
update, relative to the mean of the pseudo-gradients, without error feedback. Means are over all
peers (`average=all`).
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from atoll.compression import parse
from atoll.optim.reduction.cells import Cells, Term

DENSE = ("int8", "int4", "2bit")
COMMON = 0.5  # fraction of each pseudo-gradient's norm; workers at H=30 agree about as much


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to reduce."""

    way: str
    peers: int
    sent_bytes: float
    received_bytes: float
    error: float


def deltas(peers: int, numel: int) -> Tensor:
    """Return the pseudo-gradients of this many peers, [peers, numel]."""
    rng = torch.Generator().manual_seed(peers)

    def heavy(*shape: int) -> Tensor:
        squares = torch.randn(3, *shape, generator=rng).square().mean(dim=0)
        return torch.randn(*shape, generator=rng) / squares.sqrt()

    return COMMON * heavy(numel) + (1 - COMMON**2) ** 0.5 * heavy(peers, numel)


def rows(peers: int, numel: int, codec: str) -> list[Row]:
    """Return all ways to reduce for one number of peers."""
    given_PN = deltas(peers, numel)
    exact_N = given_PN.mean(dim=0)
    cells = Cells.of_vector(parse(codec), numel)
    frames = [cells.encode(given_N) for given_N in given_PN]
    own = sum(map(len, frames[0]))
    sent_PN = torch.stack([decoded(cells, each) for each in frames])
    mean_N = sent_PN.mean(dim=0)

    def row(way: str, body: int, update_N: Tensor) -> Row:
        share = (
            peers - 1
        ) / peers  # a peer does not send its own part to itself; likewise on the way back
        leg = (own + body) * share
        error = float((update_N - exact_N).norm() / exact_N.norm())
        return Row(way=way, peers=peers, sent_bytes=leg, received_bytes=leg, error=error)

    gathered = (peers - 1) * own
    table = [
        Row(
            way="all-gather",
            peers=peers,
            sent_bytes=gathered,
            received_bytes=gathered,
            error=float((mean_N - exact_N).norm() / exact_N.norm()),
        ),
        row("butterfly, union", union_bytes(cells, frames), mean_N),
    ]
    for way, back in (("select", codec), *((name, name) for name in DENSE)):
        down = Cells.of_vector(parse(back), numel)
        reduced = down.encode(mean_N)
        table.append(row(f"butterfly, {way}", sum(map(len, reduced)), decoded(down, reduced)))
    return table


def decoded(cells: Cells, frames: list[bytes]) -> Tensor:
    """Decode the frames of a mean, or of one member."""
    return torch.cat([cells.decode_sent(i, frame) for i, frame in enumerate(frames)])


def union_bytes(cells: Cells, frames: list[list[bytes]]) -> int:
    """Return the length of the gathered frames of all members."""
    by_cell = zip(*frames, strict=True)
    terms = ([Term(share=1.0, weight=1.0, frame=frame) for frame in cell] for cell in by_cell)
    return sum(len(cells.encode_terms(cell)) for cell in terms)


def crossover(table: list[Row], way: str) -> int | None:
    """Return the fewest peers at which a way receives less than the all-gather."""
    by_way = {(row.way, row.peers): row.received_bytes for row in table}
    peers = sorted({row.peers for row in table})
    cheaper = [p for p in peers if by_way[f"butterfly, {way}", p] < by_way["all-gather", p]]
    return cheaper[0] if cheaper else None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--codec",
        default="topk(k=64)+2bit",
        help="codec of the contributions (default topk(k=64)+2bit)",
    )
    parser.add_argument(
        "--peers", default="2,3,4,8,16,24,32,48,64", help="numbers of peers, comma-separated"
    )
    parser.add_argument(
        "--params", type=int, default=1_000_000, help="number of values (default 1M)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the rows as JSON on the last line"
    )
    options = parser.parse_args()
    table: list[Row] = []
    for peers in map(int, options.peers.split(",")):
        table += rows(peers, options.params, options.codec)
        print(f"{peers} peers", file=sys.stderr)
    bits = 8 / options.params
    print("| peers | way | received, bits per value | error |\n|---|---|---|---|")
    for row in table:
        print(f"| {row.peers} | {row.way} | {row.received_bytes * bits:.3f} | {row.error:.1%} |")
    for way in ("union", "select", *DENSE):
        first = crossover(table, way)
        print(
            f"\nbutterfly, {way}: "
            + (
                f"less than the all-gather from {first} peers on"
                if first
                else "never less than the all-gather"
            )
        )
    if options.json:
        print(json.dumps([asdict(row) for row in table]))


if __name__ == "__main__":
    main()
