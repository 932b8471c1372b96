"""Session tokens. A client sends its token back, so that its request reaches the endpoint that
served it before.

A token is a keyed hash (HMAC-SHA256) of the endpoint's identity. It reveals nothing about the
endpoint, and it cannot be created without the key. Every replica with the key creates the same
token. Any client that receives a token may use it, because it names an endpoint and no client.
"""

import base64
import hmac
from collections.abc import Iterable, Sequence
from typing import Final

from epp.core.types import Endpoint

_VERSION: Final = b"\x01"
_TAG_BYTES: Final = 16
_CHARACTERS: Final = 23
"""Number of characters of a session token: version and tag in base64 without padding. The reference
picker's tokens are padded base64, so their length is a multiple of 4.
"""
_PURPOSE: Final = b"homing session token 1\0"
ENDPOINTS_MAX: Final = 16_384
"""Maximum number of endpoints whose tokens are cached (about 200 bytes for each endpoint and key);
the cache is cleared when it is full.
"""


class SessionTokens:
    """An object that creates and reads session tokens. Without a key it creates no token and
    recognises none.

    A token is hashed once for each endpoint and key, which takes about 2 µs.
    """

    def __init__(self, keys: Sequence[bytes] = (), *, accept_unsigned: bool = False) -> None:
        """Create tokens with the first of `keys`, and accept tokens of all `keys`.

        `accept_unsigned` also accepts the reference picker's form, the base64-encoded name of the
        endpoint, which any client can forge.
        """
        self._keys = tuple(keys)
        self._accept_unsigned = accept_unsigned
        self._token_of: dict[str, str] = {}
        """Session token of each endpoint by the first key, by identity of the endpoint."""
        self._identity_of: dict[str, str] = {}
        """Identity of the endpoint for which each session token stands, by token of any key."""

    def __repr__(self) -> str:
        return f"<SessionTokens [{len(self._keys)} keys]>"

    def of(self, endpoint: Endpoint) -> str:
        """Return the session token of `endpoint`, or "" if no key to sign tokens is configured."""
        if not self._keys:
            return ""
        self._learn((endpoint,))
        return self._token_of[endpoint.endpoint_id]

    def holders(self, token: str, endpoints: Iterable[Endpoint]) -> list[bool]:
        """Return, for each of `endpoints`, whether `token` stands for it. Clients may send any text
        as a token.
        """
        endpoints = tuple(endpoints)
        identity = self._identity_of.get(token)
        if identity is None and len(token) == _CHARACTERS and self._keys:
            self._learn(endpoints)
            identity = self._identity_of.get(token)
        if identity is not None:
            return [endpoint.endpoint_id == identity for endpoint in endpoints]
        name = _unsigned_name(token) if self._accept_unsigned else ""
        return [endpoint.name == name != "" for endpoint in endpoints]

    def _learn(self, endpoints: Sequence[Endpoint]) -> None:
        """Create and cache the tokens of those `endpoints` that have none in the cache; a full
        cache is cleared first.
        """
        for endpoint in endpoints:
            identity = endpoint.endpoint_id
            if identity in self._token_of:
                continue
            if len(self._token_of) >= ENDPOINTS_MAX:
                self._token_of.clear()
                self._identity_of.clear()
            tokens = [_token(key, identity) for key in self._keys]
            self._token_of[identity] = tokens[0]
            self._identity_of.update(dict.fromkeys(tokens, identity))


NO_TOKENS: Final = SessionTokens()


def _token(key: bytes, identity: str) -> str:
    text = _PURPOSE + identity.encode("utf-8", "surrogatepass")
    tag = hmac.digest(key, text, "sha256")[:_TAG_BYTES]
    return base64.urlsafe_b64encode(_VERSION + tag).decode("ascii").rstrip("=")


def _unsigned_name(token: str) -> str:
    """Return the endpoint name that an unsigned `token` encodes in base64, or "" if it is not valid
    base64.
    """
    try:
        return base64.b64decode(token, validate=True).decode()
    except ValueError:
        return ""
