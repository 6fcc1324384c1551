"""Managing the invites of a run through its coordinator, for whoever has the organiser's key."""

from __future__ import annotations

from collections.abc import Callable

from atoll.coordinator.rpc import service_pb2 as pb
from atoll.coordinator.rpc.channel import StatusClient
from atoll.coordinator.rpc.client_errors import BadReply
from atoll.coordinator.run.invite_request import (
    ORGANISER,
    InviteRequest,
    InviteRequestInvalid,
    ListedInvite,
    read_list,
)
from atoll.coordinator.run.issued_invite import IssuedInvite


class InvitesClient(StatusClient):
    """Asks about invites; the first call connects."""

    async def manage(
        self,
        sign: Callable[[bytes], bytes],
        *,
        issue: IssuedInvite | None = None,
        revoke: str = "",
    ) -> list[ListedInvite]:
        """Issue or revoke an invite, or neither; return all of them.

        Args:
            sign: signs with the organiser's key.
            issue: to be kept.
            revoke: id of one that is to be good for nothing.

        Raises:
            CoordinatorError: no answer, or a refusal.
        """
        challenge = await self._call("Challenge", pb.ChallengeRequest(peer_id=ORGANISER))
        if len(challenge.nonce) != 32:
            raise BadReply(f"expected a nonce of 32 bytes, got {len(challenge.nonce)}")
        request = InviteRequest(
            run_id=self.invite.run_id.hex(),
            nonce=challenge.nonce.hex(),
            issue=issue,
            revoke=revoke,
        )
        data, signature = request.sign(sign)
        reply = await self._call("Invites", pb.InvitesRequest(request=data, signature=signature))
        try:
            return read_list(reply.invites)
        except InviteRequestInvalid as error:
            raise BadReply(f"{error}; use the organiser's version of Atoll") from None
