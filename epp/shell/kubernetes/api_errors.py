"""Kinds of failures of requests to the API server, distinguished by how the picker must react."""

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from epp.core.types import Seconds


class ApiFailure(StrEnum):
    """The kind of failure of a request to the API server."""

    GONE = "gone"
    """Status 410 of a request or in the stream of a watch: the resource version or page token is
    too old, so the list must be restarted.
    """
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    ABSENT = "absent"
    """HTTP status 404 of the API server: the kind does not exist because its CRD is missing, or the
    object does not exist.
    """
    CONFLICT = "conflict"
    """Kind of a failure with HTTP status 409: another client created the object, or wrote it since
    the picker read it.
    """
    THROTTLED = "throttled"
    SERVER = "server"
    """Kind of a failure with HTTP status 5xx: an error inside the API server."""
    STATUS = "status"
    """An HTTP status of the API server other than 2xx for which there is no kind of its own."""
    UNREACHABLE = "unreachable"
    """The connection to the API server failed or broke."""
    SILENT = "silent"
    """The API server accepted no connection or sent no byte in time."""
    WATCH = "watch"
    """The API server reported an error other than 410 in the stream of a watch."""
    UNREADABLE = "unreadable"
    """The API server's answer is not JSON, is too long, or lacks a required member such as the name
    of an object.
    """
    INTERNAL = "internal"
    """A defect of the picker made one step of a list or watch fail."""


class ApiError(Exception):
    """Raised if a request to the API server failed. The message is one sentence."""

    def __init__(
        self, kind: ApiFailure, sentence: str, *, retry_after_s: Seconds | None = None
    ) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.retry_after_s = retry_after_s


class KubeConfigError(Exception):
    """Raised if no API server is configured, or its configuration is unusable. The message is one
    sentence.
    """


_BY_STATUS: Final[Mapping[int, ApiFailure]] = {
    HTTPStatus.GONE: ApiFailure.GONE,
    HTTPStatus.UNAUTHORIZED: ApiFailure.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN: ApiFailure.FORBIDDEN,
    HTTPStatus.NOT_FOUND: ApiFailure.ABSENT,
    HTTPStatus.CONFLICT: ApiFailure.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS: ApiFailure.THROTTLED,
}


def failure_of_status(status: int) -> ApiFailure:
    """Return the kind of failure for an HTTP `status` of the API server other than 2xx."""
    known = _BY_STATUS.get(status) if status < 500 else ApiFailure.SERVER
    return known or ApiFailure.STATUS
