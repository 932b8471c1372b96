"""Flags that the reference picker has and Homing does not."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from epp.flags.reading import FlagError


class Foreign(Struct, frozen=True):
    """A flag of the reference picker that does nothing here."""

    sentence: str
    ours: str | None = None
    """The value that says what we do anyhow; it is no reason to warn."""
    boolean: bool = False


FOREIGN: Final[Mapping[str, Foreign]] = {
    "emit-endpoint-scores": Foreign(
        "scores are in the log of decisions (--v 4)", "false", boolean=True
    ),
    "refresh-prometheus-metrics-interval": Foreign("our metrics are computed when they are read"),
    "health-checking": Foreign("gRPC health is always served", "true", boolean=True),
    "enable-grpc-stream-metrics": Foreign("streams are always counted", "true", boolean=True),
    "metrics-endpoint-auth": Foreign(
        "our metrics are served without authentication", "false", boolean=True
    ),
    "metrics-client-ca-file": Foreign("our metrics are served without TLS", ""),
    "metrics-cert-dir": Foreign("our metrics are served without TLS", ""),
    "enable-pprof": Foreign(
        "there is no profiler of Go in a Python process", "false", boolean=True
    ),
    "tls-min-version": Foreign("gRPC takes TLS 1.2 and newer", ""),
    "tls-cipher-suites": Foreign("gRPC chooses them", ""),
    "grpc-max-send-msg-size": Foreign("our messages stay below 64 KiB", ""),
    "allow-experimental-plugins": Foreign("every plugin may be used", "true", boolean=True),
    "zap-devel": Foreign("use --log-format console", "false", boolean=True),
    "zap-stacktrace-level": Foreign("an unexpected error is always logged with its traceback"),
    "zap-time-encoding": Foreign("times are logged in ISO 8601", "iso8601"),
}

REMOVED: Final = dict.fromkeys(
    (
        "total-queued-requests-metric",
        "total-running-requests-metric",
        "kv-cache-usage-percentage-metric",
        "lora-info-metric",
        "cache-info-metric",
    ),
    "was removed: name metrics in engineConfigs of core-metrics-extractor, in the configuration",
)

ZAP: Final = ("zap-encoder", "zap-log-level")
_ZAP_LEVELS: Final = {"debug": 4, "info": 2, "error": 0, "panic": 0}


def translate_zap(given: dict[str, str], warnings: list[str]) -> None:
    """The reference picker's log flags, in terms of ours."""
    encoder, level = given.pop("zap-encoder", ""), given.pop("zap-log-level", "")
    if encoder not in {"", "json", "console"}:
        raise FlagError(f"--zap-encoder: expected json or console, got {encoder!r}")
    if encoder:
        given.setdefault("log-format", encoder)
    if not level:
        return
    if level not in _ZAP_LEVELS and not level.isdecimal():
        known = ", ".join(_ZAP_LEVELS)
        raise FlagError(f"--zap-log-level: expected {known} or a number, got {level!r}")
    given.setdefault("v", str(_ZAP_LEVELS.get(level, level)))
