"""Growth of a process for each block that engines report, measured and as the index estimates it.

`python -m tests.core.knowledge.exact_growth OURS SIZE PODS SHARED` prints both in bytes per block,
for the pods after the first. It is a process of its own, whose memory was not used before.
"""

import gc
import json
import sys
from random import Random

import msgspec

from bench.index import resident_bytes
from epp.core.kv_events.payload import Stored
from tests.core.knowledge.test_exact import opened

BLOCKS = 9_600
IN_A_ROW = 64


def fill(index, slot, dice, size):
    """Report `BLOCKS` blocks in runs; each name is a new number, as decoded from a message."""
    parent = None
    for _ in range(BLOCKS // IN_A_ROW):
        names = msgspec.msgpack.encode([dice.getrandbits(64) for _ in range(IN_A_ROW)])
        hashes = msgspec.msgpack.decode(names)
        tokens = dice.randbytes(IN_A_ROW * size * 4)
        index.hear(slot, [Stored(hashes, parent, tokens, size)], 0.0)
        parent = hashes[-1]


def main(ours, size, pods, *, shared):
    index = opened(ours, live=range(pods))
    fill(index, 0, Random(0), size)
    gc.collect()
    resident, estimated = resident_bytes(), index.bytes_estimated
    for slot in range(1, pods):
        fill(index, slot, Random(0 if shared else slot), size)
    gc.collect()
    told = (pods - 1) * BLOCKS
    grown = (resident_bytes() - resident) / told
    print(json.dumps([grown, (index.bytes_estimated - estimated) / told]))


if __name__ == "__main__":
    ours, size, pods, shared = map(int, sys.argv[1:])
    main(ours, size, pods, shared=bool(shared))
