"""Certificate pinning: a client accepts only the server certificate named in the invite.

A first TLS handshake, which sends nothing, reads the certificate; its SHA-256 is compared, and it
becomes the only root of the gRPC channel. An attacker in between can neither present another
certificate nor use this one without its key.

Raises WrongCertificate and CoordinatorUnreachable of `atoll.coordinator.rpc.client_errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import ssl
from collections.abc import AsyncIterator

import grpc

from atoll.coordinator.rpc import proxies
from atoll.coordinator.rpc.client_errors import CoordinatorUnreachable, WrongCertificate
from atoll.coordinator.rpc.messages import CHANNEL_OPTIONS
from atoll.coordinator.run.addresses import split_address
from atoll.coordinator.run.keys import TLS_NAME

REMEDY = "ask the organiser whether it runs and is reachable there, or for the current invite"


async def pinned_channel(address: str, sha256: bytes, *, timeout_s: float) -> grpc.aio.Channel:
    """Return a channel to the coordinator that holds this certificate.

    Raises:
        WrongCertificate: another certificate, or no TLS at all.
        CoordinatorUnreachable: no server answers.
    """
    certificate = await pinned_certificate(address, sha256, timeout_s=timeout_s)
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    override = ("grpc.ssl_target_name_override", TLS_NAME)
    return grpc.aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, override])


async def pinned_certificate(address: str, sha256: bytes, *, timeout_s: float) -> bytes:
    """Return the server's certificate as PEM if its SHA-256 is the expected one."""
    try:
        async with asyncio.timeout(timeout_s), _peer_certificate(address) as certificate:
            found = hashlib.sha256(certificate).digest()
    except ssl.SSLError:
        raise WrongCertificate(f"{address}: the server does not speak TLS") from None
    except (OSError, TimeoutError) as error:
        remedy = proxies.remedy(split_address(address)[0]) or REMEDY
        raise CoordinatorUnreachable(
            f"{address}: the coordinator cannot be reached ({_what(error, timeout_s)}); {remedy}"
        ) from None
    if not hmac.compare_digest(found, sha256):
        raise WrongCertificate(
            f"{address}: expected the certificate {sha256.hex()[:16]} of the invite, got "
            f"{found.hex()[:16]}; another coordinator or an attacker answers there, or this "
            "network's proxy or virus scanner intercepts TLS: ask the organiser for the current "
            "invite, or use another network"
        )
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


def _what(error: OSError | TimeoutError, timeout_s: float) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:.0f} s"
    return str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def _peer_certificate(address: str) -> AsyncIterator[bytes]:
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # every certificate has the name TLS_NAME
    context.verify_mode = ssl.CERT_NONE  # the pin is compared before anything is sent
    context.set_alpn_protocols(["h2"])  # gRPC servers refuse a handshake without it
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=TLS_NAME)
    try:
        yield writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
