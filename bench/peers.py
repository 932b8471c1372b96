"""Cost of sharing state between replicas: sending a decision, learning one, and taking over a
peer's whole state.

Prompts (except those of the takeover) have 112 blocks, of which 94 are one of 150 preambles, over
100 endpoints, with 40 decisions every 20 ms: the published B2B workload at 2,000 requests a second.
Times are those of the best period of 20 ms, as in `bench/timing.py`, and of the whole for the
takeover. Transport is not included.
"""

import time
from collections.abc import Iterator
from random import Random

from bench.decision import Pool
from epp.core.decision.inputs import RequestEnded
from epp.core.decision.scheduler import Decision
from epp.core.knowledge.inflight import Outcome
from epp.core.peers.exchange import OUTGOING_INTERVAL_S, PeerExchange
from epp.core.prompt.request import InferenceRequest

ENDPOINTS = 100
PREAMBLES = 150
PREAMBLE_BLOCKS = 94
PROMPT_BLOCKS = 112
BLOCK_BYTES = 256
PER_TURN = 40
TURNS = 250
WARM_TURNS = 50
KNOWN_PROMPTS = 20_000
KNOWN_PREAMBLES = 2_000


def _requests() -> Iterator[InferenceRequest]:
    random = Random("bench:peers")
    preambles = [random.randbytes(8 * PREAMBLE_BLOCKS) for _ in range(PREAMBLES)]
    while True:
        chain = random.choice(preambles) + random.randbytes(8 * (PROMPT_BLOCKS - PREAMBLE_BLOCKS))
        yield InferenceRequest(
            request_id="", prompt_tokens=64 * PROMPT_BLOCKS, chains={BLOCK_BYTES: (chain,)}
        )


def _exchange(pool: Pool, number: int) -> PeerExchange:
    return PeerExchange(pool.scheduler, origin=bytes([number]) * 8, now=pool.now, replicas=2)


def _live() -> list[tuple[str, str]]:
    pools = Pool(ENDPOINTS), Pool(ENDPOINTS)
    sender, receiver = _exchange(pools[0], 1), _exchange(pools[1], 2)
    alone = Pool(ENDPOINTS)
    (index,) = (alone.scheduler.indexes[name] for name in alone.scheduler.indexes.shared)
    requests = _requests()
    spent_s: dict[str, list[float]] = {"tell": [], "learn": [], "record": []}
    sent_bytes = decisions = 0
    now = pools[0].now
    for turn in range(TURNS):
        now += OUTGOING_INTERVAL_S
        decided: list[Decision] = []
        for request in (next(requests) for _ in range(PER_TURN)):
            decision = pools[0].scheduler.schedule(request, now)
            assert isinstance(decision, Decision)
            decided.append(decision)
        started_s = time.thread_time()
        frames = sender.outgoing(now)
        told_s = time.thread_time()
        for frame in frames:
            receiver.receive(frame, now, sender.origin)
        while receiver.pending():
            receiver.apply(now)
        learnt_s = time.thread_time()
        for decision in decided:
            index.record(decision.lease.request, decision.lease.slot, now)
        recorded_s = time.thread_time()
        for frame in receiver.outgoing(now):
            sender.receive(frame, now, receiver.origin)
        for decision in decided:
            pools[0].scheduler.take(RequestEnded(decision.lease, Outcome()), now)
        if turn >= WARM_TURNS:
            spent_s["tell"].append(told_s - started_s)
            spent_s["learn"].append(learnt_s - told_s)
            spent_s["record"].append(recorded_s - learnt_s)
            sent_bytes += sum(map(len, frames))
            decisions += PER_TURN
    each = {name: 1e6 * min(spent) / PER_TURN for name, spent in spent_s.items()}
    return [
        ("record a decision of one's own in the prefix index", f"{each['record']:.1f} µs"),
        ("tell peers a decision", f"{each['tell']:.1f} µs, {sent_bytes / decisions:.0f} bytes"),
        (
            "learn a decision of a peer",
            f"{each['learn']:.1f} µs, {each['learn'] / each['record']:.1f} times its record",
        ),
        ("2,000 decisions of peers a second", f"{each['learn'] * 2000 / 1e4:.1f}% of a core"),
    ]


def _snapshot() -> list[tuple[str, str]]:
    old, new = Pool(ENDPOINTS), Pool(ENDPOINTS)
    giver, taker = _exchange(old, 1), _exchange(new, 2)
    (index,) = (old.scheduler.indexes[name] for name in old.scheduler.indexes.shared)
    random = Random("bench:snapshot")
    preambles = [random.randbytes(8 * 64) for _ in range(KNOWN_PREAMBLES)]
    for number in range(KNOWN_PROMPTS):
        chain = random.choice(preambles) + random.randbytes(8 * 35)
        request = InferenceRequest(request_id="", chains={BLOCK_BYTES: (chain,)})
        index.record(request, random.randrange(ENDPOINTS), old.now + number / 100)
    now = old.now + KNOWN_PROMPTS / 100
    frames: list[bytes] = []
    longest_s = 0.0
    began_s = started_s = time.thread_time()
    for frame in giver.snapshot(now):
        frames.append(frame)
        longest_s = max(longest_s, time.thread_time() - started_s)
        started_s = time.thread_time()
    given_s = time.thread_time() - began_s
    began_s = time.thread_time()
    for frame in frames:
        taker.receive_snapshot_frame(frame, now, 0.0)
        while taker.pending():
            taker.apply(now)
    taken_s = time.thread_time() - began_s
    return [
        (
            f"give a snapshot of {KNOWN_PROMPTS:,} prompts",
            (
                f"{given_s:.2f} s, {sum(map(len, frames)) / 1e6:.1f} MB in {len(frames)} frames, "
                f"the longest {longest_s * 1e3:.1f} ms"
            ),
        ),
        (f"take it, {taker.restored.applied:,} records", f"{taken_s:.2f} s"),
    ]


def run() -> Iterator[tuple[str, str]]:
    """Yield rows (what, how much) with the cost of sharing state."""
    yield from _live()
    yield from _snapshot()
