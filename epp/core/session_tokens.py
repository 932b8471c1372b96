"""Session tokens: what a client sends back to reach the endpoint that served it before.

A token is a keyed hash (HMAC-SHA256) of the endpoint's identity. It tells nothing of the endpoint,
it cannot be made without the key, and every replica that has the key makes the same one. Whoever is
given a token may use it: it names an endpoint and no client.
"""

import base64
import hmac
from collections.abc import Iterable, Sequence
from typing import Final

from epp.core.types import Endpoint

_VERSION: Final = b"\x01"
_TAG_BYTES: Final = 16
_CHARACTERS: Final = 23
"""Of version and tag; base64 of any text, as the field's tokens are, has a multiple of 4."""
_PURPOSE: Final = b"homing session token 1\0"
ENDPOINTS_MAX: Final = 16_384
"""Whose tokens are remembered, 200 bytes each and key; more begin anew."""


class SessionTokens:
    """Makes and reads tokens. Without a key it makes none and knows none.

    A hash takes about 2 us, once for each endpoint and key.
    """

    def __init__(self, keys: Sequence[bytes] = (), *, accept_unsigned: bool = False) -> None:
        """The first of `keys` signs, all are accepted.

        `accept_unsigned`: so is the field's form, base64 of the endpoint's name, which anybody can
        write.
        """
        self._keys = tuple(keys)
        self._accept_unsigned = accept_unsigned
        self._token_of: dict[str, str] = {}
        """Identity of an endpoint -> its token by the first key."""
        self._identity_of: dict[str, str] = {}
        """Token by any key -> identity."""

    def __repr__(self) -> str:
        return f"<SessionTokens [{len(self._keys)} keys]>"

    def of(self, endpoint: Endpoint) -> str:
        """The token of `endpoint`; "" without a key."""
        if not self._keys:
            return ""
        self._learn((endpoint,))
        return self._token_of[endpoint.endpoint_id]

    def holders(self, token: str, endpoints: Iterable[Endpoint]) -> list[bool]:
        """For each of `endpoints` whether `token` is of it; clients may send anything."""
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
        """Hash those that are new."""
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
    """The name that `token` encodes; "" if it encodes none."""
    try:
        return base64.b64decode(token, validate=True).decode()
    except ValueError:
        return ""
