"""The state with which a run begins: built here if that gives the coordinator's, else fetched."""

import asyncio
import types

import pytest
import torch

from atoll.optim.state.layout import Layout
from atoll.optim.state.outer_state import OuterState
from atoll.peer.daemon.log_run import LogRun
from atoll.peer.errors import SetupError

LAYOUT = Layout(names=("w",), shapes=((4,),))
OURS, THEIRS = (OuterState.genesis(LAYOUT, torch.full((4,), value)) for value in (1.0, 2.0))


def impossible(spec, module):
    raise SetupError("no such tokenizer here")


@pytest.mark.parametrize(
    ("make_first", "root", "fetches"),
    [
        (lambda spec, module: OURS, OURS.root(), 0),
        (lambda spec, module: OURS, THEIRS.root(), 1),
        (impossible, THEIRS.root(), 1),
        (None, THEIRS.root(), 1),
    ],
    ids=["same numbers", "other numbers", "no model", "a loop of its own"],
)
def test_the_first_state_is_fetched_only_if_it_cannot_be_built(make_first, root, fetches):
    fetched = []

    async def compute(work, *arguments):
        return work(*arguments)

    async def fetch_state(memory_numel, position, *, memory_dtype):
        fetched.append(position)
        return THEIRS

    env = types.SimpleNamespace(
        make_first=make_first,
        spec=None,
        compute=compute,
        fetch_state=fetch_state,
        module="",
        enrolment=types.SimpleNamespace(membership=types.SimpleNamespace(genesis_root=root)),
    )
    replay = types.SimpleNamespace(memory_numel=4, memory_dtype=torch.float32)
    run = types.SimpleNamespace(_env=env, _replay=replay)
    state = asyncio.run(LogRun._genesis(run))
    assert state.root() == root
    assert fetched == [0] * fetches
