"""A broken replica that floods another one until it is killed: `python -m bench.peer_flood PORT
SECRET_FILE`.

It has the shared secret and opens twenty connections to the replica at 127.0.0.1:PORT, each with an
origin of its own. It sends frames on all of them as fast as they are accepted, and reads nothing.
"""

import socket
import sys
import time
from pathlib import Path
from typing import Final

from epp.core.peers.frames import Frame, Kind, encode
from epp.shell.peers.carrier import Kind as Message
from epp.shell.peers.connection import Connection
from epp.shell.peers.secret import Identity, identity_of

CONNECTIONS: Final = 20
FRAME_BYTES: Final = 20_000
PAUSE_S: Final = 0.001


def _connected(port: int, identity: Identity) -> Connection:
    plain = socket.socket()
    plain.setblocking(False)
    plain.connect_ex(("127.0.0.1", port))
    return Connection(plain, identity, serving=False, now=time.monotonic())


def main(port: int, secret_file: Path) -> None:
    """Flood the replica at the port with frames until this process is killed."""
    identities = [identity_of(secret_file.read_bytes().strip()) for _ in range(CONNECTIONS)]
    connections = [_connected(port, identity) for identity in identities]
    number = 0
    while True:
        number += 1
        for at, identity in enumerate(identities):
            connection = connections[at]
            connection.advance()
            if connection.problem is not None:
                connection.close()
                connections[at] = _connected(port, identity)
                time.sleep(PAUSE_S)
                continue
            frame = Frame(identity.origin, number, Kind.LIVE, 0.0, records=bytes(FRAME_BYTES))
            connection.flush()
            connection.send(Message.FRAME, encode(frame))
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
