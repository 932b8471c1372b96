"""The flags of every subcommand but `epp serve`, a row each."""

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from epp.core.duration import Duration
from epp.flags.row import Row
from epp.flags.values import BodyMode, ByteCount, Port

DECISIONS_DIR: Final = "/decisions"
"""Where the chart mounts the volume of `--decisions-dir`."""

OUTPUT: Final = "Output"
LISTENING: Final = "Listening"
PICKER: Final = "Picker"
PICKERS: Final = "Pickers"
FILES: Final = "Files"
WHICH: Final = "Which"

_DEBUG_PORT: Final = "http://127.0.0.1:9090"
_URL: Final = (
    "http://host:port of --metrics-port, as `kubectl port-forward deploy/homing 9090` opens it"
)
_MOMENT: Final = "UTC, as 02:10, 2026-03-02T02:10:30, or 30m for so long ago"

_TokenFile: TypeAlias = Annotated[
    str,
    Row(
        PICKERS,
        "file with the token that `epp serve --debug-token-file` asks for; without: "
        "HOMING_DEBUG_TOKEN_FILE names it, or HOMING_DEBUG_TOKEN is the token",
    ),
]
_DecisionsDir: TypeAlias = Annotated[
    str,
    Row(
        FILES,
        "directory of `epp serve --decisions-dir`, or of several of them; the default is where the "
        "chart has it",
    ),
]


class EnvoyFlags(Struct, frozen=True, kw_only=True):
    """What `epp envoy-config` is told; all but `out` are options of `BootstrapOptions`."""

    out: Annotated[str, Row(OUTPUT, "file to write (default: standard output)")] = ""

    listen_host: Annotated[str, Row(LISTENING, "address of the gateway's listener")] = "0.0.0.0"  # noqa: S104 - it is a gateway
    listen_port: Annotated[Port, Row(LISTENING, "its port")] = 8081
    admin_port: Annotated[Port, Row(LISTENING, "port of Envoy's admin interface, on loopback")] = (
        19_000
    )
    readiness_port: Annotated[Port, Row(LISTENING, "port of /ready and /stats/prometheus")] = 19_001

    picker_address: Annotated[
        str, Row(PICKER, "host:port of `epp serve`; of several replicas, with commas between them")
    ] = "127.0.0.1:9002"
    second_picker_address: Annotated[
        str,
        Row(
            PICKER,
            "as --picker-address: of pickers to ask while none of those is healthy; empty: none",
        ),
    ] = ""
    round_robin: Annotated[
        tuple[str, ...],
        Row(PICKER, "serve these ip:port in turn without a picker, separated by commas"),
    ] = ()
    plaintext: Annotated[
        bool, Row(PICKER, "speak to it without TLS (`epp serve --secure-serving=false`)")
    ] = False
    picker_ca_file: Annotated[
        str, Row(PICKER, "PEM of who signs its certificate (default: whoever signed it)")
    ] = ""
    picker_server_name: Annotated[
        str, Row(PICKER, "DNS name that its certificate must have, with --picker-ca-file")
    ] = ""
    client_cert_path: Annotated[
        str, Row(PICKER, "directory with tls.crt and tls.key to show to it")
    ] = ""
    fail_open: Annotated[bool, Row(PICKER, "let requests pass when it is down")] = False
    message_timeout: Annotated[Duration, Row(PICKER, "how long it may take for one answer")] = (
        Duration(10.0)
    )
    request_body_mode: Annotated[BodyMode, Row(PICKER, "how request bodies reach it")] = (
        BodyMode.FULL_DUPLEX_STREAMED
    )
    response_body_mode: Annotated[
        BodyMode,
        Row(
            PICKER,
            "how response bodies reach it; STREAMED lets `epp serve --parse-response-usage` read them",
        ),
    ] = BodyMode.NONE
    request_body_max_bytes: Annotated[ByteCount, Row(PICKER, "as of `epp serve`")] = ByteCount(
        33_554_432
    )


class CheckFlags(Struct, frozen=True, kw_only=True):
    """What `epp check-config` is told."""

    file: str = ""
    """The one argument that is no flag; "-": standard input; "": the built-in default."""

    diff: Annotated[str, Row(OUTPUT, "another configuration; say what FILE changes in it")] = ""
    explain: Annotated[bool, Row(OUTPUT, "print what is in effect, defaults filled in")] = False
    upgrade: Annotated[
        bool,
        Row(
            OUTPUT,
            "print FILE with what llm-d-router has renamed or removed as it loads today, and on "
            "standard error what was rewritten, by its line",
        ),
    ] = False
    capture: Annotated[
        str,
        Row(
            OUTPUT,
            "directory of `epp serve --capture`; say how many of the decisions in it would have "
            "been others by FILE",
        ),
    ] = ""


class ExplainFlags(Struct, frozen=True, kw_only=True):
    """What `epp explain` is told."""

    request_id: str = ""
    """The one argument that is no flag."""
    url: Annotated[
        tuple[str, ...],
        Row(PICKERS, f"{_URL}; of several replicas, with commas between them"),
    ] = (_DEBUG_PORT,)
    token_file: _TokenFile = ""

    endpoint: Annotated[
        str, Row(OUTPUT, "say besides why it did not go to this one: name or address")
    ] = ""
    json: Annotated[bool, Row(OUTPUT, "all that is known, as JSON")] = False

    dir: Annotated[
        str,
        Row(
            FILES, "directory of `epp serve --decisions-dir` to look in, instead of asking a picker"
        ),
    ] = ""


class DecisionsFlags(Struct, frozen=True, kw_only=True):
    """What `epp decisions` is told."""

    dir: _DecisionsDir = DECISIONS_DIR

    since: Annotated[str, Row(WHICH, f"not older; {_MOMENT}")] = "30m"
    until: Annotated[str, Row(WHICH, "not newer; as --since")] = "0s"
    endpoint: Annotated[str, Row(WHICH, "name, with or without its namespace, or address")] = ""
    model: Annotated[str, Row(WHICH, "as it was asked for")] = ""
    refused: Annotated[str, Row(WHICH, "true, false or a reason")] = ""

    n: Annotated[
        int,
        Meta(ge=1, le=10_000),
        Row(OUTPUT, "how many to list, the last ones, 1 to 10000; sums are of all"),
    ] = 20
    json: Annotated[bool, Row(OUTPUT, "as JSON")] = False


class ChangesFlags(Struct, frozen=True, kw_only=True):
    """What `epp changes` is told."""

    dir: _DecisionsDir = DECISIONS_DIR

    at: Annotated[
        str,
        Row(
            WHICH,
            f"the moment to compare around, {_MOMENT} (default: the last change of the configuration)",
        ),
    ] = ""
    window: Annotated[
        Duration, Row(WHICH, "how long before and after, 1s to 24h", least=1, most=86_400)
    ] = Duration(900.0)

    json: Annotated[bool, Row(OUTPUT, "as JSON")] = False


class TopFlags(Struct, frozen=True, kw_only=True):
    """What `epp top` is told."""

    url: Annotated[
        tuple[str, ...],
        Row(PICKERS, f"{_URL}; several, with commas between them, are shown as one"),
    ] = (_DEBUG_PORT,)
    token_file: _TokenFile = ""
    with_peers: Annotated[
        bool,
        Row(
            PICKERS,
            "show the replicas too that the first one shares with, at the same port of their "
            "addresses; these are reached from inside the cluster only",
        ),
    ] = False

    interval: Annotated[
        Duration, Row(OUTPUT, "time between two looks, 1s to 60s", least=1, most=60)
    ] = Duration(2.0)
    once: Annotated[bool, Row(OUTPUT, "print what is seen now and end")] = False
