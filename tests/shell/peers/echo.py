"""A replica in a process of its own, which tells every frame to all in reverse: `echo PORT PORT`, its own and that
of another.
"""

import asyncio
import sys

from epp.core.peers.exchange import Taken
from tests.shell.peers.rig import Picker


async def main(port, other):
    async with Picker(port=port) as picker:
        picker.mesh.connect({f"127.0.0.1:{other}"})
        exchange = picker.exchange

        def receive(frame, now, origin):
            exchange.told.append(frame[::-1])
            return Taken.TAKEN

        exchange.receive = receive
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
