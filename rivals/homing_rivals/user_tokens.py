"""An index of the recent tokens of each user, on which AIBrix's fairness is based."""

from collections import OrderedDict, deque
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import xxhash
from msgspec import Meta, Struct

from epp.plugins import contract
from epp.plugins.contract import Affinity, AffinityIndex, InferenceRequest, Parameters, Seconds

TOKENS: Final = "tokens"
"""Name of the column with the weighted tokens of this request's user; the same number for all
endpoints.
"""
TOKENS_MIN: Final = "tokens_min"
TOKENS_MAX: Final = "tokens_max"
"""Names of the columns with the lowest and the highest tokens of any user; the same numbers for all
endpoints.
"""

_BUCKET_S: Final = 5


class UserTokensSettings(Parameters, frozen=True):
    """`user-tokens-producer`: an index of the recent tokens of each user: by default prompt tokens
    plus twice the estimated answer tokens of the last five minutes.
    """

    type_name: ClassVar[str] = "user-tokens-producer"
    abilities: ClassVar[contract.Abilities] = contract.Abilities(names_sessions=True)

    header_name: Annotated[str, Meta(min_length=1)] = "user"
    """Request header that names the user. Without it, the session counts as the user."""
    window_s: Annotated[int, Meta(ge=_BUCKET_S, le=86_400)] = 300
    input_weight: Annotated[float, Meta(ge=0)] = 1.0
    output_weight: Annotated[float, Meta(ge=0)] = 2.0
    output_per_input: Annotated[float, Meta(ge=0)] = 1.5
    """Estimated number of answer tokens for each prompt token."""
    users_max: Annotated[int, Meta(ge=1)] = 10_000
    """Maximum number of users. Beyond it, the user whose last request is longest ago is dropped."""

    def session_in(self, request: InferenceRequest, /) -> str:
        """Return the name of the user of `request`, or else its session; "" if it has neither."""
        return request.headers.get(self.header_name.lower(), "") or request.session_id

    def open(self) -> AffinityIndex:
        """Return a new, empty index of the tokens of users, with these settings as its parameters."""
        return UserTokens(self)

    def adopt(self, index: AffinityIndex) -> bool:
        """Apply these settings to the running index `index`, and return True; the weights apply
        only to later requests. Return False if `index` has another type.
        """
        return isinstance(index, UserTokens) and index.configure(self)


class _User(Struct, eq=False):
    """The recent tokens of one user."""

    tokens: float
    buckets: deque[list[float]]
    """Start and tokens of each period of five seconds in which the user sent a request, oldest
    first.
    """


class UserTokens:
    """An `AffinityIndex` of the tokens of users, which belong to no endpoint.

    `matched` is 0 for all endpoints, of a total of 1 if the request has a user and 0 otherwise. Old
    tokens are dropped about once a second, and the lowest and the highest tokens are computed again
    then.
    """

    def __init__(self, settings: UserTokensSettings) -> None:
        self._users: OrderedDict[bytes, _User] = OrderedDict()
        """Tokens of each user by a hash of the user's name, ordered by the last request, oldest
        first.
        """
        self._least = self._most = 0.0
        self.configure(settings)

    def configure(self, settings: UserTokensSettings) -> bool:
        """Apply `settings` to this index, and return True; users beyond the limit are dropped at
        once.
        """
        self._settings = settings
        self._fit()
        self._find_extremes()
        return True

    def __len__(self) -> int:
        return len(self._users)

    def match(self, request: InferenceRequest, slots: int, now: Seconds) -> Affinity:
        """Return columns with the tokens of the request's user, and the lowest and the highest
        tokens of any user.
        """
        name = self._name_of(request)
        user = self._users.get(name)
        told = {
            TOKENS: user.tokens if user else 0.0,
            TOKENS_MIN: self._least,
            TOKENS_MAX: self._most,
        }
        columns = {column: np.full(slots, value) for column, value in told.items()}
        return Affinity(np.zeros(slots, dtype=np.int64), 1 if name else 0, columns)

    def record(self, request: InferenceRequest, slot: int, now: Seconds) -> Any:
        """Count the tokens of the request for its user, whatever endpoint it was sent to, and drop
        the users beyond `users_max` whose last request is longest ago. Do nothing without a user.
        """
        name = self._name_of(request)
        if not name:
            return None
        settings = self._settings
        weight = settings.input_weight + settings.output_weight * settings.output_per_input
        tokens = weight * request.prompt_tokens
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = _User(0.0, deque())
        self._users.move_to_end(name)
        start = now // _BUCKET_S * _BUCKET_S
        if not user.buckets or user.buckets[-1][0] < start:
            user.buckets.append([start, 0.0])
        bucket = user.buckets[-1]
        bucket[1] += tokens
        user.tokens += tokens
        self._fit()
        self._most = max(self._most, user.tokens)
        self._least = min(self._least, user.tokens) if len(self._users) > 1 else user.tokens
        return user, bucket, tokens

    def retract(self, request: InferenceRequest, slot: int, recorded: Any, now: Seconds) -> None:
        """Subtract the tokens of the request from those of its user, unless they were dropped
        meanwhile.

        If another endpoint serves it, `record` counts them again.
        """
        if recorded is None:
            return
        user, bucket, tokens = recorded
        if any(one is bucket for one in user.buckets):
            bucket[1] -= tokens
            user.tokens -= tokens

    def forget(self, slot: int) -> None:
        """Drop nothing for an endpoint that left, because tokens of users belong to no endpoint."""

    def expire(self, now: Seconds) -> None:
        """Drop the tokens of each period of five seconds that began before the window, and users
        without tokens. Compute the lowest and the highest tokens of any user again.
        """
        oldest = now - self._settings.window_s
        for name, user in tuple(self._users.items()):
            while user.buckets and user.buckets[0][0] <= oldest:
                user.tokens -= user.buckets.popleft()[1]
            if not user.buckets:
                del self._users[name]
        self._find_extremes()

    def resize(self, slot: int, blocks_total: int, block_size_tokens: int) -> None:
        """Ignore the size of an engine's cache, because the index does not depend on it."""

    def _name_of(self, request: InferenceRequest) -> bytes:
        """Return a hash of 16 bytes of the user's name, or b"" if the request has no user."""
        user = self._settings.session_in(request)
        return xxhash.xxh3_128_digest(user.encode("utf-8", "surrogatepass")) if user else b""

    def _fit(self) -> None:
        while len(self._users) > self._settings.users_max:
            self._users.popitem(last=False)

    def _find_extremes(self) -> None:
        tokens = [user.tokens for user in self._users.values()]
        self._least, self._most = min(tokens, default=0.0), max(tokens, default=0.0)
