"""`epp top` in a real terminal, and where there is none."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec
import pytest

from epp.__main__ import main
from tests.commands.test_debug_client import Server, answer
from tests.commands.test_top_screen import live

SEEN = answer(body=msgspec.json.encode(live()))
ROOT = Path(__file__).parents[2]
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A command in a terminal of 80 columns and 24 lines of its own."""

    def __init__(self, *arguments):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {
            name: at for name, at in os.environ.items() if name not in {"COLUMNS", "LINES"}
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "epp", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=environment | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = b""

    def until(self, text, timeout_s=50.0):
        """Read until `text` was shown, or until it ends if that is None."""
        ends_s = time.monotonic() + timeout_s
        while text is None or text not in self.seen:
            ready, _, _ = select.select([self._ours], [], [], ends_s - time.monotonic())
            assert ready, self.seen
            try:
                piece = os.read(self._ours, 65_536)
            except OSError:
                # Linux says so when the other side is closed.
                piece = b""
            if not piece:
                assert text is None, self.seen
                return
            self.seen += piece

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_a_terminal_shows_the_picker_until_ctrl_c():
    """Again and again, on a screen of its own that is gone afterwards; a picker that leaves is told."""
    with Server(SEEN) as server, Terminal("top", "--url", server.url, "--interval=1s") as terminal:
        terminal.until(ENTER)
        terminal.until(b"config.yaml")
        first = terminal.seen
        asked = len(server.asked)
        server.answer_with(answer("503 Service Unavailable"))
        terminal.until(b"the figures below are old")
        assert len(server.asked) > asked
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(LEAVE)
        terminal.until(None)
        assert terminal.process.wait(20) == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", first).decode()
    lines = text.splitlines()
    assert any("llama-pool" in line and "4 of 4 ready" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert b"\x1b[3" in first, "scorers have colours"
    assert b"Traceback" not in terminal.seen


def test_one_look_can_be_printed(capsys):
    """For a pipe or a ticket, without colours and as wide as it needs."""
    with Server(SEEN) as server:
        assert main(["top", "--once", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "llama-pool" in shown
    assert "\x1b" not in shown
    assert server.asked[0].startswith(b"GET /debug/live HTTP")


@pytest.mark.parametrize(
    ("spoken", "told"),
    [
        (answer("401 Unauthorized"), "answers 401: give --token-file"),
        (answer("404 Not Found"), "/debug/live answers 404"),
        (answer(body=b"[]"), "does not understand"),
        (answer(body=b"\xff"), "does not understand"),
        (answer(body=json.dumps({"version": 1}).encode()), "does not understand"),
    ],
)
def test_what_is_no_picker_is_told_in_a_sentence(spoken, told, capsys):
    """Of another version, without the token, or something else."""
    with Server(spoken) as server:
        assert main(["top", "--once", "--url", server.url]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("epp top: ")
    assert told in errors


def test_without_the_library_it_says_what_to_install(monkeypatch, capsys):
    """It is an extra: a picker does not need it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "epp.commands.top", raising=False)
    monkeypatch.delitem(sys.modules, "epp.commands.top_screen", raising=False)
    assert main(["top", "--once"]) == 1
    assert capsys.readouterr().err == "epp top: it needs rich: pip install 'homing-epp[top]'\n"


@pytest.mark.parametrize("wrong", ["--interval=0.5s", "--interval=2m", "--interval=x", "now"])
def test_a_command_line_that_makes_no_sense_is_refused(wrong, capsys):
    """A picker is not asked more often than it looks."""
    assert main(["top", wrong]) == 2
    assert capsys.readouterr().err.startswith("epp top: ")


def test_several_pickers_are_shown_as_one_and_who_is_missing_is_named(capsys):
    """Each is asked; one that does not answer costs itself alone."""
    with Server(SEEN) as first, Server(SEEN) as second, Server(answer("503 Busy")) as third:
        urls = ",".join(server.url for server in (first, second, third))
        assert main(["top", "--once", "--url", urls]) == 0
        missing = third.url
    shown = capsys.readouterr().out.replace("\n", "")
    assert "10.0/s" in shown, "twice 300 in 60 s"
    assert f"without 1 of 3: {missing}/debug/live answers 503" in shown


def test_peers_are_asked_at_the_port_of_the_first(capsys):
    """A picker knows the addresses of those that it shares with."""
    rows = {"peers": [{"address": "127.0.0.1:9004", "origin": "ab", "bytes_sent": 1}]}
    pages = Server(answer(body=json.dumps(rows).encode()))
    with pages as server:
        # It answers the same to everything: what matters is who was asked for what.
        assert main(["top", "--once", "--with-peers", "--url", server.url]) == 2
        asked = [one.split(b" ")[1] for one in server.asked]
    assert asked[0] == b"/debug/peers"
    assert asked[1:] == [b"/debug/live"], "it is its own peer here, and asked once"
    assert "does not understand" in capsys.readouterr().err


def test_a_broker_tells_no_addresses(capsys):
    """Then the operator has to."""
    rows = {"peers": [{"address": "through valkey:6379"}]}
    with Server(answer(body=json.dumps(rows).encode())) as server:
        assert main(["top", "--once", "--with-peers", "--url", server.url]) == 2
    assert "list all replicas with --url" in capsys.readouterr().err


def test_more_pickers_than_can_be_asked_are_refused(capsys):
    """Each would be a thread."""
    urls = ",".join(f"http://127.0.0.1:{port}" for port in range(1, 40))
    assert main(["top", "--once", "--url", urls]) == 2
    assert "39 pickers are too many, expected at most 32" in capsys.readouterr().err
