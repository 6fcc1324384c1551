"""Giving orders to the coordinator of an invite, for whoever has the run's key."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client_errors import BadReply
from atoll.coordinator.run.spec import RunSpec, run_id
from atoll.coordinator.run.spec_problems import SpecError
from atoll.optim.log.entry import LogError
from atoll.optim.log.orders import RunSettings, read_settings


@dataclass(frozen=True, kw_only=True)
class OrderStanding:
    """The state of the organiser's orders, as the coordinator tells it."""

    spec: RunSpec
    next_number: int
    settings: RunSettings
    """In force once all of them are decided."""
    decided: int
    """The newest order that all logs of the run hold."""


class OrderClient(StatusClient):
    """Gives orders; the first call connects."""

    async def ask(self) -> OrderStanding:
        """Return how far the orders are."""
        return await self.give(b"")

    async def give(self, signed: bytes) -> OrderStanding:
        """Give an order that the run's key signed.

        Raises:
            CoordinatorError: no answer, or a refusal.
        """
        request = pb.OrderRequest(token=self.invite.token, order=signed, viewer=self._viewer)
        reply = await self._call("Order", request)
        try:
            spec = RunSpec.from_json(reply.spec)
            settings = read_settings(reply.settings)
        except (SpecError, LogError) as error:
            raise BadReply(f"{error}; use the organiser's version of Atoll") from None
        self._expect_run(run_id(spec, self.invite.run_key))
        return OrderStanding(
            spec=spec,
            next_number=max(1, reply.next_number),
            settings=settings,
            decided=min(reply.decided, default=0),
        )
