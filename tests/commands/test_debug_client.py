"""Whoever answers, or does not, the operator reads one sentence."""

import socket
import threading

import pytest

from epp.commands import debug_client
from epp.commands.debug_client import DebugClient, NoAnswerError, read_token


class Server:
    """Answers every connection with the same bytes, and keeps what it was asked."""

    def __init__(self, answer, *, more=b""):
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.asked = []
        self._answer, self._more = answer, more
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def answer_with(self, answer):
        """From the next connection on."""
        self._answer = answer

    def _serve(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(65_536))
                try:
                    connection.sendall(self._answer)
                    while self._more:
                        connection.sendall(self._more)
                except OSError:
                    continue

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Closing alone does not wake who accepts.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


def answer(status="200 OK", body=b"why", **headers):
    named = {"content-length": str(len(body))} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def test_a_page_is_asked_for_with_the_token():
    """Status and body come back, whatever they are."""
    with Server(answer("404 Not Found")) as server:
        found = DebugClient(f"{server.url}/", "s3cret").get("/debug/x?a=b", accept="text/plain")
    assert found == (404, b"why")
    (asked,) = server.asked
    assert asked.startswith(b"GET /debug/x?a=b HTTP/1.1\r\n")
    assert b"authorization: Bearer s3cret\r\n" in asked
    assert b"accept: text/plain\r\n" in asked


def test_a_redirect_is_not_followed():
    """The token would go along."""
    with Server(answer("302 Found", location="http://127.0.0.1:1/")) as server:
        assert DebugClient(server.url, "s3cret").get("/", accept="*/*")[0] == 302
    assert len(server.asked) == 1


def test_nobody_there_is_told_with_what_to_try():
    """The port is forwarded in another terminal, most of the time."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NoAnswerError, match="port-forward"):
        DebugClient(f"http://127.0.0.1:{port}").get("/", accept="*/*")


CUT = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"


@pytest.mark.parametrize("spoken", [b"SSH-2.0-OpenSSH\r\n", b"", CUT])
def test_what_speaks_something_else_is_told(spoken):
    """Not a picker, or not a page."""
    with Server(spoken) as server, pytest.raises(NoAnswerError, match="gives no whole answer"):
        DebugClient(server.url).get("/", accept="*/*")


def test_an_answer_without_an_end_is_cut(monkeypatch):
    """By its bytes, or by its time."""
    endless = b"HTTP/1.1 200 OK\r\n\r\n"
    monkeypatch.setattr(debug_client, "ANSWER_BYTES_MAX", 1_000_000)
    with Server(endless, more=b"x" * 65_536) as server:
        with pytest.raises(NoAnswerError, match="exceeds 1000000 bytes"):
            DebugClient(server.url).get("/", accept="*/*")
        passing = iter(range(0, 1_000, 2))
        slow = DebugClient(server.url, clock=lambda: float(next(passing)))
        with pytest.raises(NoAnswerError, match="more than 5 s"):
            slow.get("/", accept="*/*")


@pytest.mark.parametrize(
    "url",
    ["", "localhost:9090", "ftp://a", "http://", "http://a:b", "http://a/path", "http://u:p@a"],
)
def test_what_is_no_address_of_a_picker_is_refused(url):
    """Before anything is sent."""
    with pytest.raises(NoAnswerError, match="is not http://host:port or https"):
        DebugClient(url)


def test_a_token_is_one_word(tmp_path):
    """Without its line break; none without a file."""
    assert read_token("") == ""
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    assert read_token(str(file)) == "s3cret"
    for bad in ("", "two words", "a\nb", "caf\u00e9"):
        file.write_text(bad)
        with pytest.raises(NoAnswerError, match="--token-file"):
            read_token(str(file))
    with pytest.raises(NoAnswerError, match="cannot be read"):
        read_token(str(tmp_path / "none"))


def test_the_environment_can_say_the_token_or_where_it_is(tmp_path):
    """What is typed counts first, then the file, which is what the pod of the chart has."""
    file, other = tmp_path / "token", tmp_path / "other"
    file.write_text("of-the-file\n")
    other.write_text("typed\n")
    said = {"HOMING_DEBUG_TOKEN": "said"}
    named = {"HOMING_DEBUG_TOKEN_FILE": str(file)}
    assert read_token("", {}) == ""
    assert read_token("", said) == "said"
    assert read_token("", said | named) == "of-the-file"
    assert read_token(str(other), said | named) == "typed"
    for bad in ("two words", "a\nb", "caf\u00e9"):
        with pytest.raises(NoAnswerError, match="HOMING_DEBUG_TOKEN has no valid token"):
            read_token("", {"HOMING_DEBUG_TOKEN": bad})
    with pytest.raises(NoAnswerError, match="HOMING_DEBUG_TOKEN_FILE=/none cannot be read"):
        read_token("", {"HOMING_DEBUG_TOKEN_FILE": "/none"})
