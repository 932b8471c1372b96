import errno

from epp.flags.values import IpAddress
from epp.shell.starting import cannot_listen


def test_what_gives_no_reason_of_the_system_is_told_as_it_is():
    """gRPC raises without one."""
    assert str(cannot_listen("--a", 1, RuntimeError("no"))) == "--a 1 cannot be listened on: no"
    refused = PermissionError(errno.EACCES, "x")
    assert str(cannot_listen("--a", 1, refused)).endswith("Permission denied")
    at = str(cannot_listen("--a", 1, refused, IpAddress("::1")))
    assert at == "--a 1 at ::1 cannot be listened on: Permission denied"
