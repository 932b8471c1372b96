"""Implement `epp top`: show the live state of pickers in a terminal."""

import ipaddress
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TextIO, TypeVar

import msgspec
from rich.console import Console
from rich.live import Live as Screen

from epp.commands.debug_client import DebugClient, NoAnswerError, read_token
from epp.commands.replicas_view import as_one, differences
from epp.commands.top_screen import COLUMNS_MIN, top_screen
from epp.core.address import host_of
from epp.core.expectation import misfit
from epp.flags.subcommands import TopFlags
from epp.shell.operators.live.live_view import Live

DONE: Final = 0
NO_ANSWER: Final = 2
_OK: Final = 200
PICKERS_MAX: Final = 32
_PATH: Final = "/debug/live"
_PEERS_PATH: Final = "/debug/peers"

T = TypeVar("T")


class _Peer(msgspec.Struct):
    """A row of the debug page `/debug/peers`, reduced to the address that `epp top` needs."""

    address: str


class _Peers(msgspec.Struct):
    peers: list[_Peer]


_decode: Final = msgspec.json.Decoder(Live).decode
_decode_peers: Final = msgspec.json.Decoder(_Peers).decode


def watch(flags: TopFlags, out: TextIO, err: TextIO) -> int:
    """Show the pickers' state until Ctrl-C, or once.

    Return the exit code: 0, or 2 if an address or the token is invalid or no picker answers the
    first time.
    """
    try:
        clients = _clients(flags)
        live, problem = look(clients)
    except NoAnswerError as error:
        print(f"epp top: {error}", file=err)
        return NO_ANSWER
    console = Console(file=out)
    if flags.once:
        # A pipe has no width of its own.
        columns = console.width if console.is_terminal else max(console.width, COLUMNS_MIN)
        shown = top_screen(live, columns=columns, lines=None, problem=problem)
        Console(file=out, width=columns).print(shown)
        return DONE
    try:
        with Screen(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                shown = top_screen(
                    live, columns=console.width, lines=console.height, problem=problem
                )
                screen.update(shown, refresh=True)
                time.sleep(flags.interval)
                try:
                    live, problem = look(clients)
                except NoAnswerError as error:
                    problem = f"the figures below are old: {error}"
    except KeyboardInterrupt:
        return DONE


def look(clients: Sequence[DebugClient]) -> tuple[Live, str]:
    """Return the merged live view of the pickers and a sentence about problems, or "" if there are
    none.

    All pickers are requested concurrently, so the slowest one determines the time. Raises
    `NoAnswerError` if no picker answers.
    """
    lives: list[Live] = []
    missing: list[NoAnswerError] = []
    with ThreadPoolExecutor(len(clients)) as asking:
        asked = [(client, asking.submit(_look, client)) for client in clients]
        for client, answer in asked:
            try:
                told = answer.result()
                place = client.url if len(clients) > 1 else ""
                lives.append(msgspec.structs.replace(told, process_at=place))
            except NoAnswerError as error:
                missing.append(error)
    if not lives:
        raise missing[0]
    problems = [f"without {len(missing)} of {len(clients)}: {missing[0]}"] if missing else []
    if difference := differences(lives):
        problems.append(difference)
    problems += map(str, missing[1:])
    return as_one(lives), "; ".join(problems)


def _clients(flags: TopFlags) -> list[DebugClient]:
    """Return an HTTP client for each picker of `--url` and, with `--with-peers`, for each replica
    of the first one.

    Raises `NoAnswerError` for invalid or too many addresses, an invalid token, or unknown replicas.
    """
    token = read_token(flags.token_file)
    urls = dict.fromkeys(flags.url)
    if flags.with_peers:
        first = DebugClient(flags.url[0], token)
        urls |= dict.fromkeys(first.at(address) for address in _peers(first))
    if len(urls) > PICKERS_MAX:
        raise NoAnswerError(f"{len(urls)} pickers are too many, expected at most {PICKERS_MAX}")
    return [DebugClient(url, token) for url in urls]


def _peers(client: DebugClient) -> list[str]:
    """Return the IP addresses of the replicas with which a picker shares state.

    Raises `NoAnswerError` if they are unknown.
    """
    rows = _asked(client, _PEERS_PATH, _decode_peers).peers
    hosts = [host_of(row.address) for row in rows]
    try:
        return [str(ipaddress.ip_address(host)) for host in hosts]
    except ValueError as error:
        sentence = "does not know the addresses of its peers: list all replicas with --url"
        raise NoAnswerError(f"{client.url} {sentence}") from error


def _look(client: DebugClient) -> Live:
    return _asked(client, _PATH, _decode)


def _asked(client: DebugClient, path: str, decode: Callable[[bytes], T]) -> T:
    """Return the decoded debug page at `path` of a picker. Raises `NoAnswerError`."""
    status, body = client.get(path, accept="application/json")
    if status != _OK:
        hint = ": give --token-file or HOMING_DEBUG_TOKEN" if status == 401 else ""
        raise NoAnswerError(f"{client.url}{path} answers {status}{hint}")
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        place = f"this version does not understand the answer of {client.url}{path}"
        raise NoAnswerError(misfit(place, error, None)) from error
