"""Flags of the reference picker that Homing does not have."""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from epp.flags.reading import FlagError


class Foreign(Struct, frozen=True):
    """A flag of the reference picker that is accepted and has no effect."""

    sentence: str
    ours: str | None = None
    """Value of the flag that describes what Homing does anyway, so that it causes no warning; None
    if every value causes one.
    """
    boolean: bool = False


FOREIGN: Final[Mapping[str, Foreign]] = {
    "emit-endpoint-scores": Foreign(
        "scores are in the log of decisions (--v 4)", "false", boolean=True
    ),
    "refresh-prometheus-metrics-interval": Foreign("metrics are computed whenever they are read"),
    "health-checking": Foreign("the gRPC health service is always enabled", "true", boolean=True),
    "enable-grpc-stream-metrics": Foreign(
        "metrics of streams are always collected", "true", boolean=True
    ),
    "metrics-endpoint-auth": Foreign(
        "metrics are served without authentication", "false", boolean=True
    ),
    "metrics-client-ca-file": Foreign("metrics are served without TLS", ""),
    "metrics-cert-dir": Foreign("metrics are served without TLS", ""),
    "enable-pprof": Foreign(
        "Go's profiler does not exist in a Python process", "false", boolean=True
    ),
    "tls-min-version": Foreign("gRPC accepts TLS 1.2 and newer", ""),
    "tls-cipher-suites": Foreign("gRPC selects the cipher suites", ""),
    "grpc-max-send-msg-size": Foreign("messages sent by Homing stay below 64 KiB", ""),
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
    "was removed: set the metric's name in engineConfigs of core-metrics-extractor in the "
    "configuration",
)

ZAP: Final = ("zap-encoder", "zap-log-level")
_ZAP_LEVELS: Final = {"debug": 4, "info": 2, "error": 0, "panic": 0}


def translate_zap(given: dict[str, str], warnings: list[str]) -> None:
    """Replace the reference picker's log flags in `given` by `--log-format` and `--v`.

    If Homing's own flags are given as well, they take precedence. Raises `FlagError` for an unknown
    value.
    """
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
