"""A replica in a process of its own, which sends every frame back in reverse: `echo PORT`."""

import asyncio
import sys

from tests.shell.peers.rig import Picker


async def main(port):
    async with Picker(port=port) as picker:
        picker.exchange.receive = lambda frame, now: frame[::-1]
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
