"""What engines publish in simulated time, beside what they publish over sockets."""

import struct

import numpy as np

from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.exact_parameters import TokenProcessorConfig
from epp.core.kv_events.payload import read_payload
from epp.core.kv_events.stream import StreamState
from sim.cluster import event_log as module
from sim.cluster.event_log import EventLog
from sim.engine.engine import Engine
from sim.engine.request import EngineRequest
from sim.pods.kv_events import KVEvents, TokenChain
from sim.traces.prompts import PromptHashes, prompt_text, request_of
from tests.builders import request
from tests.sim.made import BLOCK_TOKENS, arrivals, kind

SIZE = 16


def index_of():
    processor = TokenProcessorConfig(block_size_tokens=BLOCK_TOKENS)
    index = ExactIndexSettings(token_processor_config=processor).open()
    index.set_stream(0, StreamState.LIVE, complete=True)
    return index


class Engines:
    """Two alike: one tells with tokens, one with keys."""

    def __init__(self, blocks_total):
        self.kind = kind(blocks_total=blocks_total)
        self.engines = [Engine(self.kind.engine, self.kind.profile) for _ in range(2)]
        self.indexes = [index_of(), index_of()]
        self.events = self.engines[0].pool.watcher = KVEvents(SIZE)
        self.events.send = self.hear
        self.log = self.engines[1].pool.watcher = EventLog(SIZE)
        self.heard = 0
        self.now = 0.0

    def hear(self, _, payload):
        self.indexes[0].hear(0, read_payload(payload).events, 0.0)

    def hear_log(self):
        for number in range(self.heard, self.log.next):
            changes = self.log.changes_of(self.log.frame(number), BLOCK_TOKENS)
            self.indexes[1].change(0, changes, SIZE)
        self.heard = self.log.next

    def serve(self, *given):
        for one in given:
            hashes = PromptHashes(one)
            keys, ends = hashes.engine_pieces(SIZE)
            answer = struct.pack(f"<{one.output_tokens}I", *range(one.output_tokens))
            tokens = prompt_text(one).encode() + answer
            chain = TokenChain(tokens, block_size_tokens=SIZE, adapter="", cache_salt="")
            for engine, chains in zip(
                self.engines, ({"chain": chain}, {"chain": keys, "chain_ends": ends}), strict=True
            ):
                engine.submit(
                    EngineRequest(
                        str(one.index),
                        prompt_tokens=one.prompt_tokens,
                        output_tokens=one.output_tokens,
                        **chains,
                    ),
                    self.now,
                )
        while (step := self.engines[0].step(self.now)) is not None:
            assert self.engines[1].step(self.now).ends_at == step.ends_at
            self.now = step.ends_at
            self.events.end_step(self.now)
            self.log.end_step(self.now)
            self.hear_log()

    def known(self, one):
        ids = prompt_text(one).encode()
        told = request(token_ids=(ids,), prompt_tokens=one.prompt_tokens)
        hashed = request_of(one, (), told_block_tokens=(BLOCK_TOKENS,))
        return [
            index.match(given, 1, 0.0).matched.item(0)
            for index, given in zip(self.indexes, (told, hashed), strict=True)
        ]


def test_pickers_know_the_same_by_keys_and_by_tokens():
    """Frame by frame, under pressure and with copies."""
    engines = Engines(blocks_total=120)
    given = list(arrivals(120, output=(1, 2)))
    found = []
    for one, other in zip(given[::2], given[1::2], strict=True):
        known = engines.known(one)
        assert known[0] == known[1]
        found.append(known[0])
        engines.serve(one, other, *([one] if one.index % 3 == 0 else []))
    assert np.count_nonzero(found) > 10
    assert engines.indexes[0].statistics.evicted_told > 100
    assert engines.indexes[0].entries == engines.indexes[1].entries


def stored(log, *numbers, at=0.0):
    for number in numbers:
        log.stored([number], [1], 0, 1)
    log.end_step(at)


def test_of_copies_the_first_and_the_last_are_told():
    log = EventLog(SIZE)
    stored(log, 7, 7)
    log.forgotten([7], [1], 0, 1)
    log.end_step(1.0)
    log.forgotten([7], [1], 0, 1)
    log.end_step(2.0)
    told = [log.changes_of(log.frame(number), SIZE) for number in range(log.next)]
    assert [[(one.held, len(one.keys)) for one in frame] for frame in told] == [
        [(True, 1)], [(False, 1)],
    ]  # fmt: skip
    assert log.frame(1).sent_at_s == 2.0


def test_the_last_frames_are_kept(monkeypatch):
    """As many as an engine keeps; it may be that more are still there."""
    monkeypatch.setattr(module, "FRAMES_KEPT_MAX", 3)
    log = EventLog(SIZE)
    for number in range(20):
        stored(log, number, at=float(number))
    assert 20 - 6 < log.first <= 17
    assert log.frame(log.first - 1) is None
    assert [frame.number for frame in log.retained(0, 20)] == [17, 18, 19]
    assert [frame.number for frame in log.retained(18, 20)] == [18, 19]
    assert [frame.number for frame in log.retained(20, 20)] == []
    assert log.next_at(17.5) == 18
    assert log.next_at(30.0) == 20


def test_what_a_process_did_not_send_is_not_sent():
    log = EventLog(SIZE)
    log.stored([7], [1], 0, 1)
    log.end(3.0)
    log.end_step(4.0)
    assert (log.next, log.ended_at_s) == (0, 3.0)
