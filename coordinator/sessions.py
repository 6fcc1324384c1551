"""Nonces and session tokens that need no table: HMACs under the coordinator's secret.

    nonce    u64 big-endian milliseconds | 8 random bytes | first 16 bytes of HMAC-SHA256
    session  u64 big-endian seconds of expiry | HMAC-SHA256

Both name the peer inside the HMAC. As the secret is on disk, tokens outlive a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

_NONCE_BYTES = 32
_SESSION_BYTES = 40


class Sessions:
    """Makes and checks the tokens of one coordinator."""

    def __init__(self, secret: bytes) -> None:
        """`secret` is 32 random bytes."""
        self._secret = secret

    def nonce(self, peer_id: str, now_s: float) -> bytes:
        """Something for `peer_id` to sign."""
        head = struct.pack(">Q", int(now_s * 1000)) + secrets.token_bytes(8)
        return head + self._mac(b"nonce", peer_id, head)[:16]

    def is_nonce(self, nonce: bytes, peer_id: str, now_s: float, *, ttl_s: float) -> bool:
        """Whether we made it for this peer within the last `ttl_s`."""
        if len(nonce) != _NONCE_BYTES:
            return False
        head, mac = nonce[:16], nonce[16:]
        age_s = now_s - struct.unpack(">Q", head[:8])[0] / 1000
        return self._same(mac, self._mac(b"nonce", peer_id, head)[:16]) and abs(age_s) <= ttl_s

    def session(self, peer_id: str, expires_s: float) -> bytes:
        """The secret token of `peer_id`."""
        head = struct.pack(">Q", int(expires_s))
        return head + self._mac(b"session", peer_id, head)

    def is_session(self, session: bytes, peer_id: str, now_s: float) -> bool:
        """Whether this is the current token of `peer_id`."""
        if len(session) != _SESSION_BYTES:
            return False
        head, mac = session[:8], session[8:]
        current = now_s <= struct.unpack(">Q", head)[0]
        return self._same(mac, self._mac(b"session", peer_id, head)) and current

    def _mac(self, use: bytes, peer_id: str, head: bytes) -> bytes:
        message = use + b"\0" + peer_id.encode(errors="replace") + b"\0" + head
        return hmac.digest(self._secret, message, hashlib.sha256)

    @staticmethod
    def _same(one: bytes, other: bytes) -> bool:
        return hmac.compare_digest(one, other)
