"""What can go wrong between us and the API server, by the kind of answer it calls for."""

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from epp.core.types import Seconds


class ApiFailure(StrEnum):
    GONE = "gone"
    """410: the resource version or the page token is too old; list anew."""
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    ABSENT = "absent"
    """404: no such kind, because its CRD is missing, or no such object."""
    CONFLICT = "conflict"
    """409: somebody else wrote the object in between."""
    THROTTLED = "throttled"
    SERVER = "server"
    """5xx."""
    STATUS = "status"
    """Any other status."""
    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    SILENT = "silent"
    """No byte for too long."""
    WATCH = "watch"
    """The watch itself reported an error."""
    UNREADABLE = "unreadable"
    """An answer that is no JSON, has no name where one must be, or is too long."""
    INTERNAL = "internal"
    """A bug on our side, contained to the one step."""


class ApiError(Exception):
    """A request to the API server that failed; the message is one sentence."""

    def __init__(
        self, kind: ApiFailure, sentence: str, *, retry_after_s: Seconds | None = None
    ) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.retry_after_s = retry_after_s


class KubeConfigError(Exception):
    """There is no way to the API server: one sentence."""


_BY_STATUS: Final[Mapping[int, ApiFailure]] = {
    HTTPStatus.GONE: ApiFailure.GONE,
    HTTPStatus.UNAUTHORIZED: ApiFailure.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN: ApiFailure.FORBIDDEN,
    HTTPStatus.NOT_FOUND: ApiFailure.ABSENT,
    HTTPStatus.CONFLICT: ApiFailure.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS: ApiFailure.THROTTLED,
}


def failure_of_status(status: int) -> ApiFailure:
    """The kind of failure that an HTTP `status` other than 2xx is."""
    known = _BY_STATUS.get(status) if status < 500 else ApiFailure.SERVER
    return known or ApiFailure.STATUS
