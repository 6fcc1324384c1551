"""What tests say over streams, and count of them."""

from atoll.dht.transport import Refused, TransportError
from atoll.peer.rounds.messages import REDUCE, UPFRONT, tagged


def heads(monkeypatch):
    """How many streams began in each way, by position."""
    seen = {UPFRONT: [], REDUCE: []}
    encode = tagged

    def noted(kind, record):
        if kind in seen:
            seen[kind].append(record.position)
        return encode(kind, record)

    monkeypatch.setattr("atoll.peer.rounds.allreduce.sides.tagged", noted)
    monkeypatch.setattr("atoll.peer.rounds.allreduce.sides.tagged", noted)
    return seen


async def send(stranger, peer, method, *messages):
    """The refusal that these messages get, None if the stream just ends."""
    stream = await stranger.open(peer.identity.peer_id, method, timeout_s=2.0)
    try:
        for message in messages:
            await stream.send(message, timeout_s=2.0)
        while await stream.recv(timeout_s=30.0) is not None:
            pass
    except Refused as error:
        return error
    except TransportError:
        return None
    finally:
        await stream.close()
    return None
