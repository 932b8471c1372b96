"""Types of flag values other than numbers and text, with their spelling."""

import re
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]


class ByteCount(int):
    """A number of bytes, written as a number or as a Kubernetes quantity: 4194304, 4Mi, 4M."""

    __slots__ = ()


class MemoryBytes(int):
    """A number of bytes of memory or disk space, written like `ByteCount`; it may exceed the size
    of a gRPC message.
    """

    __slots__ = ()


class IpAddress(str):
    """An IP address on which a server listens; "::" means all addresses, including IPv4."""

    __slots__ = ()


class Transport(StrEnum):
    GRPCIO = "grpcio"
    NGH2 = "ngh2"


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


class CompatMetrics(StrEnum):
    """Sets of metric names that the metrics page can contain in addition to Homing's own names."""

    NONE = "none"
    GIE = "gie"
    LLM_D = "llm-d"
    ALL = "all"


class BodyMode(StrEnum):
    """Modes in which Envoy sends a request or response body to the picker, in Envoy's spelling."""

    NONE = "NONE"
    STREAMED = "STREAMED"
    BUFFERED = "BUFFERED"
    BUFFERED_PARTIAL = "BUFFERED_PARTIAL"
    FULL_DUPLEX_STREAMED = "FULL_DUPLEX_STREAMED"


PEER_URL: Final = "valkey://[user:password@]host[:port][/db], or redis://, valkeys://, rediss://"
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
}
_QUANTITY: Final = re.compile(r"(\d{1,12})(|k|M|G|Ki|Mi|Gi)", re.ASCII)
_HOST_PORT: Final = re.compile(
    r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9][A-Za-z0-9._-]{0,252}))(?::(\d{1,5}))?", re.ASCII
)
_URL: Final = re.compile(r"(valkeys?|rediss?)://[^\s/]+(/\d{0,4})?", re.ASCII)
_BYTES_MAX: Final = 2**31 - 1
"""Maximum value in bytes of a flag that is written as a byte count, because gRPC accepts no larger
setting.
"""
_MEMORY_BYTES_MIN: Final = 64 * 2**20
_MEMORY_BYTES_MAX: Final = 2**40


def parse_byte_count(text: str) -> ByteCount:
    """Return the number of bytes that `text` spells: at least 1 and less than 2 GiB.

    Raises `ValueError` for any other text.
    """
    return ByteCount(_bytes_of(text, 1, _BYTES_MAX))


def parse_memory_bytes(text: str) -> MemoryBytes:
    """Return the number of bytes that `text` spells: 64 MiB to 1 TiB.

    Raises `ValueError` for any other text.
    """
    return MemoryBytes(_bytes_of(text, _MEMORY_BYTES_MIN, _MEMORY_BYTES_MAX))


def _bytes_of(text: str, least: int, most: int) -> int:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a number of bytes such as 4194304 or 4Mi")
    count = int(match[1]) * _UNITS[match[2]]
    if not least <= count <= most:
        raise ValueError(f"{text!r} is out of range, expected {least} to {most} bytes")
    return count


def parse_ip_address(text: str) -> IpAddress:
    """Return the IPv4 or IPv6 address in `text`, which must not contain a port.

    Raises `ValueError` for any other text.
    """
    try:
        return IpAddress(ip_address(text))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not an IP address without a port such as 127.0.0.1 or ::1"
        ) from error


def parse_host_port(text: str, port: int) -> tuple[str, int]:
    """Return host and port in `text`: "host:port", or "host" with the default `port`.

    An IPv6 address is written in brackets, which the result omits. Raises `ValueError` for any
    other text.
    """
    match = _HOST_PORT.fullmatch(text)
    if not match or not 1 <= int(match[3] or port) <= 65_535:
        raise ValueError(f"{text!r} is not host:port such as replica-1:9004 or [::1]:9004")
    if match[1]:
        parse_ip_address(match[1])
    return match[1] or match[2], int(match[3] or port)


def is_peer_url(text: str) -> bool:
    """Return whether `text` has the form of a URL of Valkey or Redis."""
    return _URL.fullmatch(text) is not None
