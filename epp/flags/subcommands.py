"""Flags of every subcommand except `epp serve`, one row per flag."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from epp.core.duration import Duration
from epp.flags.row import Row
from epp.flags.values import BodyMode, ByteCount, Port

DECISIONS_DIR: Final = "/decisions"
"""Directory at which the chart mounts the volume for `--decisions-dir`."""

OUTPUT: Final = "Output"
LISTENING: Final = "Listening"
PICKER: Final = "Picker"
PICKERS: Final = "Pickers"
FILES: Final = "Files"
WHICH: Final = "Which"

_DEBUG_PORT: Final = "http://127.0.0.1:9090"
_URL: Final = (
    "http://host:port of --metrics-port, as opened by `kubectl port-forward deploy/homing 9090`"
)
_MOMENT: Final = "a UTC time (02:10 or 2026-03-02T02:10:30) or an age (30m)"

_TokenFile: TypeAlias = Annotated[
    str,
    Row(
        PICKERS,
        "file with the token that `epp serve --debug-token-file` requires (default: the file "
        "named by HOMING_DEBUG_TOKEN_FILE, or else the value of HOMING_DEBUG_TOKEN)",
    ),
]
_DecisionsDir: TypeAlias = Annotated[
    str,
    Row(
        FILES,
        "directory of `epp serve --decisions-dir`, or a directory that contains several of them; "
        "the default is the mount path of the chart",
    ),
]


class EnvoyFlags(Struct, frozen=True, kw_only=True):
    """Flags of `epp envoy-config`; all but `out` are options of `BootstrapOptions`."""

    out: Annotated[
        str, Row(OUTPUT, "file to write the Envoy bootstrap to (default: standard output)")
    ] = ""

    listen_host: Annotated[
        str, Row(LISTENING, "IP address on which Envoy accepts requests of clients")
    ] = "0.0.0.0"  # noqa: S104 - it is a gateway
    listen_port: Annotated[
        Port, Row(LISTENING, "port on which Envoy accepts requests of clients")
    ] = 8081
    admin_port: Annotated[
        Port, Row(LISTENING, "port of Envoy's admin interface on the loopback address")
    ] = 19_000
    readiness_port: Annotated[
        Port, Row(LISTENING, "port of Envoy's pages /ready and /stats/prometheus")
    ] = 19_001

    picker_address: Annotated[
        str, Row(PICKER, "host:port of `epp serve`; list several replicas separated by commas")
    ] = "127.0.0.1:9002"
    second_picker_address: Annotated[
        str,
        Row(
            PICKER,
            "host:port of pickers to use while no --picker-address is healthy; empty for none",
        ),
    ] = ""
    round_robin: Annotated[
        tuple[str, ...],
        Row(
            PICKER,
            "route round robin to this list of ip:port, separated by commas, without a picker",
        ),
    ] = ()
    plaintext: Annotated[
        bool, Row(PICKER, "connect to the picker without TLS (`epp serve --secure-serving=false`)")
    ] = False
    picker_ca_file: Annotated[
        str,
        Row(
            PICKER,
            "PEM file with the CA of the picker's certificate (default: any certificate is "
            "accepted)",
        ),
    ] = ""
    picker_server_name: Annotated[
        str,
        Row(
            PICKER,
            "DNS name that the picker's certificate must contain; used with --picker-ca-file",
        ),
    ] = ""
    client_cert_path: Annotated[
        str,
        Row(
            PICKER,
            "directory with the client certificate (tls.crt and tls.key) that the gateway "
            "presents to the picker",
        ),
    ] = ""
    fail_open: Annotated[
        bool,
        Row(
            PICKER,
            "forward requests without a decision of the picker while it is unavailable, "
            "instead of refusing them",
        ),
    ] = False
    message_timeout: Annotated[
        Duration, Row(PICKER, "maximum time that Envoy waits for each message from the picker")
    ] = Duration(10.0)
    request_body_mode: Annotated[
        BodyMode, Row(PICKER, "how Envoy sends request bodies to the picker")
    ] = BodyMode.FULL_DUPLEX_STREAMED
    response_body_mode: Annotated[
        BodyMode,
        Row(
            PICKER,
            "how Envoy sends response bodies to the picker; `epp serve --parse-response-usage` "
            "needs STREAMED",
        ),
    ] = BodyMode.NONE
    request_body_max_bytes: Annotated[
        ByteCount,
        Row(
            PICKER,
            "maximum size of a request body; use the value of `epp serve --request-body-max-bytes`",
        ),
    ] = ByteCount(33_554_432)


class CheckFlags(Struct, frozen=True, kw_only=True):
    """Flags of `epp check-config`."""

    file: str = ""
    """Path of the configuration to check; "-" for standard input, "" for the built-in default."""

    diff: Annotated[
        str, Row(OUTPUT, "another configuration file; print the changes from it to FILE")
    ] = ""
    explain: Annotated[
        bool, Row(OUTPUT, "describe the effective configuration, including defaults")
    ] = False
    upgrade: Annotated[
        bool,
        Row(
            OUTPUT,
            "print FILE with names that llm-d-router renamed or removed replaced, and list each "
            "replacement with its line on standard error",
        ),
    ] = False
    capture: Annotated[
        str,
        Row(
            OUTPUT,
            "directory of `epp serve --capture`; count the captured decisions that FILE would "
            "change",
        ),
    ] = ""


class ExplainFlags(Struct, frozen=True, kw_only=True):
    """Flags of `epp explain`."""

    request_id: str = ""
    """ID of the request, the only positional argument."""
    url: Annotated[
        tuple[str, ...],
        Row(PICKERS, f"{_URL}; list several replicas separated by commas"),
    ] = (_DEBUG_PORT,)
    token_file: _TokenFile = ""

    endpoint: Annotated[
        str,
        Row(
            OUTPUT, "name or address of an endpoint; explain also why this endpoint was not chosen"
        ),
    ] = ""
    json: Annotated[bool, Row(OUTPUT, "print the complete decision record as JSON")] = False

    dir: Annotated[
        str,
        Row(
            FILES, "directory of `epp serve --decisions-dir` to read instead of requesting a picker"
        ),
    ] = ""


class DecisionsFlags(Struct, frozen=True, kw_only=True):
    """Flags of `epp decisions`."""

    dir: _DecisionsDir = DECISIONS_DIR

    since: Annotated[str, Row(WHICH, f"show decisions since {_MOMENT}")] = "30m"
    until: Annotated[
        str, Row(WHICH, "show decisions until this time or age, written as for --since")
    ] = "0s"
    endpoint: Annotated[
        str,
        Row(
            WHICH,
            "show only decisions for this endpoint: its name, with or without namespace, or "
            "its address",
        ),
    ] = ""
    model: Annotated[
        str, Row(WHICH, "show only decisions for this model, as the client named it")
    ] = ""
    refused: Annotated[
        str,
        Row(
            WHICH,
            "show only refused requests (true), only routed ones (false), or one reason of refusal",
        ),
    ] = ""

    n: Annotated[
        int,
        Meta(ge=1, le=10_000),
        Row(OUTPUT, "number of latest decisions to list, 1 to 10000; sums always include all"),
    ] = 20
    json: Annotated[bool, Row(OUTPUT, "print the result as JSON")] = False


class ChangesFlags(Struct, frozen=True, kw_only=True):
    """Flags of `epp changes`."""

    dir: _DecisionsDir = DECISIONS_DIR

    at: Annotated[
        str,
        Row(
            WHICH,
            f"time of the change to compare around: {_MOMENT} (default: the last change of the "
            "configuration)",
        ),
    ] = ""
    window: Annotated[
        Duration,
        Row(
            WHICH,
            "length of the compared periods before and after the change, 1s to 24h",
            least=1,
            most=86_400,
        ),
    ] = Duration(900.0)

    json: Annotated[bool, Row(OUTPUT, "print the result as JSON")] = False


class TopFlags(Struct, frozen=True, kw_only=True):
    """Flags of `epp top`."""

    url: Annotated[
        tuple[str, ...],
        Row(PICKERS, f"{_URL}; list several pickers separated by commas to show them as one"),
    ] = (_DEBUG_PORT,)
    token_file: _TokenFile = ""
    with_peers: Annotated[
        bool,
        Row(
            PICKERS,
            "show also the replicas that the first picker shares state with, on the same port of "
            "their addresses; these are reachable only inside the cluster",
        ),
    ] = False

    interval: Annotated[
        Duration, Row(OUTPUT, "time between two updates of the screen, 1s to 60s", least=1, most=60)
    ] = Duration(2.0)
    once: Annotated[bool, Row(OUTPUT, "print the current state once and exit")] = False
