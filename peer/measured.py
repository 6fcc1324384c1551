"""Losses that were measured; scripts/measured.py writes this file from docs/."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How a method ended in a simulation of `atoll simulate`."""

    spec: str
    """Without what follows the run by itself."""
    to_diloco: float
    """Share above the loss of `diloco` with int8, in the same settings."""
    to_ddp: float
    """Share above the loss of data parallel."""
    params: int
    tokens: int
    """Of all workers together."""
    workers: int
    inner_steps: int
    seeds: int


GAP_BY_WINDOW = (
    (1, 0.0),
    (10, 0.0244),
    (25, 0.0391),
    (50, 0.0528),
    (100, 0.0629),
)
"""H, and the share by which `diloco` with int8 ends above data parallel."""

METHODS = (
    Measured(
        spec="sparseloco(merge=select, tau=30)",
        to_diloco=0.2288,
        to_ddp=0.2418,
        params=934_848,
        tokens=14_022_720,
        workers=4,
        inner_steps=30,
        seeds=1,
    ),
    Measured(
        spec="diloco",
        to_diloco=0.0,
        to_ddp=0.0106,
        params=934_848,
        tokens=14_022_720,
        workers=4,
        inner_steps=30,
        seeds=1,
    ),
    Measured(
        spec="ddp",
        to_diloco=-0.0105,
        to_ddp=0.0,
        params=934_848,
        tokens=14_022_720,
        workers=4,
        inner_steps=30,
        seeds=1,
    ),
    Measured(
        spec="muloco",
        to_diloco=-0.0086,
        to_ddp=0.0759,
        params=98_624,
        tokens=1_479_360,
        workers=4,
        inner_steps=20,
        seeds=3,
    ),
    Measured(
        spec="sparseloco(average=senders)",
        to_diloco=0.0562,
        to_ddp=0.1635,
        params=98_624,
        tokens=1_479_360,
        workers=4,
        inner_steps=20,
        seeds=1,
    ),
    Measured(
        spec="streaming(tau=2)",
        to_diloco=0.0177,
        to_ddp=0.121,
        params=98_624,
        tokens=1_479_360,
        workers=4,
        inner_steps=20,
        seeds=1,
    ),
    Measured(
        spec="diloco(codec=int4)",
        to_diloco=0.0006,
        to_ddp=0.1021,
        params=98_624,
        tokens=1_479_360,
        workers=4,
        inner_steps=20,
        seeds=1,
    ),
    Measured(
        spec="co2(lr=0.5, momentum=0.0)",
        to_diloco=0.1019,
        to_ddp=0.1935,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="co2",
        to_diloco=0.4048,
        to_ddp=0.5215,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="dlion",
        to_diloco=0.2649,
        to_ddp=0.37,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="eager(lr=0.5, momentum=0.0)",
        to_diloco=0.0776,
        to_ddp=0.1672,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="eager",
        to_diloco=0.2245,
        to_ddp=0.3263,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="noloco",
        to_diloco=0.0668,
        to_ddp=0.1554,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="sparseloco",
        to_diloco=0.0943,
        to_ddp=0.1853,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
    Measured(
        spec="muloco(codec=2bit)",
        to_diloco=0.0551,
        to_ddp=0.1428,
        params=98_624,
        tokens=400_000,
        workers=4,
        inner_steps=10,
        seeds=1,
    ),
)
