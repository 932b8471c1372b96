"""`epp explain`, asked of pickers that know, that do not, and that are not there."""

import json

from epp.__main__ import main
from tests.commands.test_debug_client import Server, answer

KNOWN = answer(body=b"request r-1\n  routed to pod-\x1b[2J3\n")
UNKNOWN = answer("404 Not Found", b"no request r-1 was decided or refused here\n")


def test_what_a_picker_tells_is_printed(capsys):
    """Nothing of it can steer the terminal; the id is passed as it is."""
    with Server(KNOWN) as server:
        assert main(["explain", "r 1/&", "--url", server.url]) == 0
    assert server.asked[0].startswith(b"GET /debug/explain?request_id=r%201%2F%26 HTTP")
    shown = capsys.readouterr()
    assert shown.out == "request r-1\n  routed to pod-\\x1b[2J3\n"
    assert shown.err == ""


def test_each_replica_is_asked_until_one_knows(capsys):
    """Decisions are kept where they were made."""
    with Server(UNKNOWN) as first, Server(KNOWN) as second, Server(KNOWN) as third:
        urls = ",".join(server.url for server in (first, second, third))
        assert main(["explain", "r-1", "--url", urls]) == 0
        assert third.asked == []
    shown = capsys.readouterr()
    assert shown.out.startswith("request r-1\n")
    assert shown.err == f"{first.url}: no request r-1 was decided or refused here\n"


def test_nobody_knows(capsys):
    """1 where all answered; 2 where one did not, which may have known."""
    with Server(UNKNOWN) as server:
        assert main(["explain", "r-1", f"--url={server.url}"]) == 1
        assert main(["explain", "r-1", f"--url=http://127.0.0.1:1,{server.url}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "port-forward" in shown.err


def test_a_token_that_is_missing_is_asked_for(tmp_path, capsys):
    """As the picker says it; one that cannot be read is told before anything is asked."""
    refused = answer("401 Unauthorized", b"expected the token of --debug-token-file\n")
    with Server(refused) as server:
        assert main(["explain", "r-1", "--url", server.url]) == 2
        assert "answers 401: expected the token" in capsys.readouterr().err
        (tmp_path / "token").write_text("s3cret\n")
        main(["explain", "r-1", "--url", server.url, f"--token-file={tmp_path / 'token'}"])
        assert b"Bearer s3cret" in server.asked[1]
        assert main(["explain", "r-1", "--url", server.url, "--token-file=/none"]) == 2
        assert len(server.asked) == 2


def test_json_is_passed_on(capsys):
    """For whoever reads it by program."""
    with Server(answer(body=json.dumps({"decisions": []}).encode())) as server:
        assert main(["explain", "r-1", "--json", "--url", server.url]) == 0
    assert b"accept: application/json" in server.asked[0]
    assert json.loads(capsys.readouterr().out) == {"decisions": []}


def test_a_command_line_that_makes_no_sense_is_refused(capsys):
    """One id, and addresses of pickers."""
    for arguments in (
        ["explain"],
        ["explain", "a", "b"],
        ["explain", ""],
        ["explain", "a", "--url="],
    ):
        assert main(arguments) == 2
    assert main(["explain", "a", "--url", "localhost"]) == 2
    assert "expected one REQUEST_ID" in capsys.readouterr().err
