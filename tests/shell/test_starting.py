import errno
import socket

import grpc.aio
import pytest

from epp.shell.starting import StartError, cannot_listen, first_read, listen
from epp.shell.watch import FileWatcher


async def test_a_port_that_is_taken_is_told_by_its_flag():
    """In the words of the system; a free one is listened on."""
    server = grpc.aio.server()
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^--grpc-port {port} cannot be .*already in use$"):
            listen(server, "--grpc-port", port)
    listen(server, "--grpc-port", port)
    await server.stop(None)


def test_what_gives_no_reason_of_the_system_is_told_as_it_is():
    """gRPC raises without one."""
    assert str(cannot_listen("--a", 1, RuntimeError("no"))) == "--a 1 cannot be listened on: no"
    refused = PermissionError(errno.EACCES, "x")
    assert str(cannot_listen("--a", 1, refused)).endswith("Permission denied")


def test_a_file_that_must_be_there_is_told_by_its_flag(tmp_path):
    """Once it is there its content counts."""
    path = tmp_path / "config.yaml"
    watcher = FileWatcher(path, lambda content: None, lambda sentence: None)
    with pytest.raises(StartError, match=r"^--config-file x cannot be read: No such file"):
        first_read(watcher, "--config-file x")
    path.write_text("a")
    assert first_read(watcher, "--config-file x") == b"a"
