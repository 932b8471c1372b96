"""`epp top`: looks at a picker again and again, in a terminal."""

import time
from typing import Final, TextIO

import msgspec
from rich.console import Console
from rich.live import Live as Screen

from epp.configuration.flags import TopFlags
from epp.shell.operators.debug_client import DebugClient, NoAnswerError, read_token
from epp.shell.operators.live_view import Live
from epp.shell.operators.top_screen import COLUMNS_MIN, top_screen

DONE: Final = 0
NO_ANSWER: Final = 2
_OK: Final = 200
_PATH: Final = "/debug/live"
_decode: Final = msgspec.json.Decoder(Live).decode


def watch(flags: TopFlags, out: TextIO, err: TextIO) -> int:
    """Until Ctrl-C, or once. Exit code: 0, or 2 if there is no answer at first."""
    try:
        client = DebugClient(flags.url, read_token(flags.token_file))
        live = look(client)
    except NoAnswerError as error:
        print(f"epp top: {error}", file=err)
        return NO_ANSWER
    console = Console(file=out)
    if flags.once:
        # A pipe has no width of its own.
        columns = console.width if console.is_terminal else max(console.width, COLUMNS_MIN)
        Console(file=out, width=columns).print(top_screen(live, columns=columns, lines=None))
        return DONE
    try:
        with Screen(console=console, screen=True, auto_refresh=False) as screen:
            problem = ""
            while True:
                shown = top_screen(
                    live, columns=console.width, lines=console.height, problem=problem
                )
                screen.update(shown, refresh=True)
                time.sleep(flags.interval)
                try:
                    live, problem = look(client), ""
                except NoAnswerError as error:
                    problem = str(error)
    except KeyboardInterrupt:
        return DONE


def look(client: DebugClient) -> Live:
    """What the picker tells. Raises `NoAnswerError`."""
    status, body = client.get(_PATH, accept="application/json")
    if status != _OK:
        hint = ": give --token-file" if status == 401 else ""
        raise NoAnswerError(f"{client.url}{_PATH} answers {status}{hint}")
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoAnswerError(
            f"{client.url}{_PATH} answers with what this version does not understand: {error}"
        ) from error
