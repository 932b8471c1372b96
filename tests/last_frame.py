"""The number of the last frame of KV events that an engine told, by its own word."""

import asyncio

from epp.core.kv_events.zmtp import SocketType, ZmtpConnection, ask_replay, read_replayed


class LastFrame:
    """Asks at the engine's replay port for what came behind the last known frame. `number`: -1, none."""

    def __init__(self, replay_port, *, host="127.0.0.1"):
        self.number = -1
        self._place = (host, replay_port)

    async def ask(self):
        """Its number now."""
        reader, writer = await asyncio.open_connection(*self._place)
        zmtp = ZmtpConnection(SocketType.DEALER)
        asked = False
        try:
            while True:
                if zmtp.ready and not asked:
                    zmtp.send(ask_replay(self.number + 1))
                    asked = True
                writer.write(zmtp.to_send())
                data = await reader.read(65_536)
                assert data, "the engine closed the connection before it had answered"
                for message in zmtp.feed(data):
                    found = read_replayed(message)
                    if found is True:
                        return self.number
                    assert isinstance(found, tuple), "an engine answers with frames"
                    self.number = found[0]
        finally:
            writer.close()
