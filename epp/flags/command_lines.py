"""Parse the command line of each subcommand and check flags against each other."""

from collections.abc import Mapping, Sequence

import msgspec

from epp.flags import subcommands
from epp.flags.reading import FlagError, convert, expect_none, split
from epp.flags.reference_picker import FOREIGN, REMOVED, ZAP, translate_zap
from epp.flags.row import flags_of
from epp.flags.serve import ServeFlags
from epp.flags.values import PEER_URL, is_peer_url


def parse_serve(arguments: Sequence[str], environment: Mapping[str, str]) -> ServeFlags:
    """Return the flags of `epp serve` from its command line.

    The environment supplies defaults (`NAMESPACE`, `POD_NAME`, `POD_IP` and the variables of the
    flags). Raises `FlagError` if a flag is unknown, invalid or in conflict with another flag.
    """
    foreign = {name: flag.boolean for name, flag in FOREIGN.items()}
    foreign |= dict.fromkeys((*REMOVED, *ZAP), False)
    given, rest = split(arguments, ServeFlags, foreign)
    expect_none(rest)
    for name in given:
        if name in REMOVED:
            raise FlagError(f"--{name} {REMOVED[name]}")
    warnings = [
        f"--{name} has no effect: {flag.sentence}"
        for name, flag in FOREIGN.items()
        if name in given and given.pop(name) != flag.ours
    ]
    translate_zap(given, warnings)
    rows = {name: flag.row for name, flag in flags_of(ServeFlags).items()}
    for name, row in rows.items():
        if row.environment and environment.get(row.environment):
            given.setdefault(name, environment[row.environment])
    given.setdefault("pool-namespace", "default")
    flags = convert(
        given,
        ServeFlags,
        own_namespace=environment.get("NAMESPACE") or given["pool-namespace"],
        instance=environment.get("POD_NAME", ""),
        own_address=environment.get("POD_IP", ""),
    )
    _check_serve(flags)
    if flags.endpoints_file:
        unused = [
            name
            for name, row in rows.items()
            if row.kubernetes and given.get(name, "false") != "false"
        ]
        warnings += [f"--{name} has no effect: --endpoints-file is given" for name in unused]
    if flags.last_good_dir and not (flags.config_file or flags.endpoints_file):
        warnings.append(
            "--last-good-dir has no effect: neither --config-file nor --endpoints-file is given"
        )
    for needed, there in (("decisions-dir", flags.decisions_dir), ("capture", flags.capture)):
        unread = [name for name in given if rows[name].needs == needed and not there]
        warnings += [f"--{name} has no effect: --{needed} is not given" for name in unread]
    warnings += _peer_warnings(flags)
    return msgspec.structs.replace(flags, warnings=tuple(warnings))


def parse_envoy(arguments: Sequence[str]) -> subcommands.EnvoyFlags:
    """Return the flags of `epp envoy-config` from its command line. Raises `FlagError`."""
    given, rest = split(arguments, subcommands.EnvoyFlags)
    expect_none(rest)
    return convert(given, subcommands.EnvoyFlags)


def parse_check(arguments: Sequence[str]) -> subcommands.CheckFlags:
    """Return the flags of `epp check-config` from its command line. Raises `FlagError`."""
    given, rest = split(arguments, subcommands.CheckFlags)
    if len(rest) > 1:
        raise FlagError(f"unexpected argument {rest[1]!r}, expected one FILE")
    flags = convert(given, subcommands.CheckFlags, file=rest[0] if rest else "")
    if not flags.file and not flags.explain:
        raise FlagError("expected FILE (- for standard input), or --explain to print the default")
    if flags.upgrade and (not flags.file or flags.diff or flags.explain or flags.capture):
        raise FlagError("--upgrade needs FILE and no other flag, because it prints a document")
    return flags


def parse_explain(arguments: Sequence[str]) -> subcommands.ExplainFlags:
    """Return the flags of `epp explain` from its command line. Raises `FlagError`."""
    given, rest = split(arguments, subcommands.ExplainFlags)
    if len(rest) != 1 or not rest[0]:
        raise FlagError("expected one REQUEST_ID, the x-request-id header of the response")
    flags = convert(given, subcommands.ExplainFlags, request_id=rest[0])
    if not flags.url:
        raise FlagError("--url: expected at least one http://host:port")
    return flags


def parse_top(arguments: Sequence[str]) -> subcommands.TopFlags:
    """Return the flags of `epp top` from its command line. Raises `FlagError`."""
    given, rest = split(arguments, subcommands.TopFlags)
    expect_none(rest)
    flags = convert(given, subcommands.TopFlags)
    if not flags.url:
        raise FlagError("--url: expected at least one http://host:port")
    return flags


def parse_decisions(arguments: Sequence[str]) -> subcommands.DecisionsFlags:
    """Return the flags of `epp decisions` from its command line. Raises `FlagError`."""
    given, rest = split(arguments, subcommands.DecisionsFlags)
    expect_none(rest)
    return convert(given, subcommands.DecisionsFlags)


def parse_changes(arguments: Sequence[str]) -> subcommands.ChangesFlags:
    """Return the flags of `epp changes` from its command line. Raises `FlagError`."""
    given, rest = split(arguments, subcommands.ChangesFlags)
    expect_none(rest)
    return convert(given, subcommands.ChangesFlags)


def _check_serve(flags: ServeFlags) -> None:
    """Raise `FlagError` if flags of `epp serve` contradict each other, or if one of them lacks
    another that it needs.
    """
    if flags.config_file and flags.config_text:
        raise FlagError("--config-file and --config-text are both given, expected one")
    if flags.pool_name and flags.endpoint_selector:
        raise FlagError("--pool-name and --endpoint-selector are both given, expected one")
    if flags.client_ca_file and not flags.secure_serving:
        raise FlagError(
            "--client-ca-file needs --secure-serving, because client certificates are part of TLS"
        )
    _check_peers(flags)
    if flags.capture_max_bytes < 2 * flags.capture_file_max_bytes:
        raise FlagError(
            f"--capture-max-bytes: expected at least twice --capture-file-max-bytes, "
            f"{2 * flags.capture_file_max_bytes}, got {flags.capture_max_bytes}"
        )
    ports = (flags.grpc_port, flags.grpc_health_port, flags.metrics_port)
    if len(set(ports)) < len(ports):
        names = "--grpc-port, --grpc-health-port and --metrics-port"
        raise FlagError(
            f"{names} are {ports[0]}, {ports[1]} and {ports[2]}; the three ports must differ"
        )
    if not flags.endpoints_file:
        _check_discovery(flags)


def _check_peers(flags: ServeFlags) -> None:
    ways = {
        "--peers": flags.peers,
        "--peer-service": flags.peer_service,
        "--peer-url": flags.peer_url,
        "--peer-url-file": flags.peer_url_file,
    }
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise FlagError(f"{' and '.join(given)} are given, expected only one of them")
    # The message does not quote the URL, because it may contain a password.
    if flags.peer_url and not is_peer_url(flags.peer_url):
        raise FlagError(f"--peer-url: expected {PEER_URL}")
    flag = "--peers" if flags.peers else "--peer-service"
    try:
        targets = flags.peer_targets
    except ValueError as error:
        raise FlagError(f"{flag}: {error}") from error
    for name, port in (
        ("--grpc-port", flags.grpc_port),
        ("--grpc-health-port", flags.grpc_health_port),
        ("--metrics-port", flags.metrics_port),
    ):
        if targets and port == flags.peer_port:
            raise FlagError(f"{name} and --peer-port are both {port}; they must differ")


def _peer_warnings(flags: ServeFlags) -> list[str]:
    if flags.peer_secret_file and not flags.meshes:
        return ["--peer-secret-file has no effect: neither --peers nor --peer-service is given"]
    if flags.meshes and flags.secure_serving and not flags.peer_secret_file:
        sentence = "replicas connect to each other in plaintext although gateways connect with TLS"
        return [f"{sentence}: give --peer-secret-file"]
    return []


def _check_discovery(flags: ServeFlags) -> None:
    if not (flags.pool_name or flags.endpoint_selector):
        raise FlagError(
            "no endpoints are configured: give --pool-name, --endpoint-selector or --endpoints-file"
        )
    if flags.endpoint_selector and not flags.endpoint_target_ports:
        raise FlagError("--endpoint-selector needs --endpoint-target-ports")
    if flags.config_map and not flags.config_file:
        raise FlagError(
            "--config-map needs --config-file: the file is used at start and while the API server "
            "is unreachable"
        )
