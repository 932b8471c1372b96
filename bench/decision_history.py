"""Memory, disk and CPU of recorded decisions: `python -m bench decision_history`.

A hundred requests per second, with ids, prompts and times of their own, are placed among ten endpoints
whose load changes, and end two seconds later. Memory is that of `--decision-records-max-bytes`, files
are those of `--decisions-dir`. The time is CPU time of the thread that writes the files, over all
records of a decision.
"""

import math
import tempfile
import time
from collections import deque
from pathlib import Path
from random import Random
from typing import Final
from uuid import UUID

from bench.decision import BLOCK_BYTES, Pool
from epp.core.decision.inputs import RequestEnded
from epp.core.decision.scheduler import Decision
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.request import InferenceRequest
from epp.core.protocol.session import Exchange
from epp.core.types import ApiKind
from epp.shell.operators.decisions.recent_decisions import BYTES_MAX, RecentDecisions
from epp.shell.operators.journal import DecisionsFolder, Journal, decisions_limits

ENDPOINTS: Final = 10
DECISIONS: Final = 60_000
RATE_PER_S: Final = 100
BATCH: Final = 1_000
"""Number of decisions after which the thread's records are written and its time is read."""
PROMPT_BLOCKS_MAX: Final = 60
ANSWER_S: Final = 2
_SERVED: Final = Outcome(status=200)
SCRAPE_REQUESTS: Final = 20
"""Number of requests between two scrapes, which are 0.2 s apart."""


def run() -> list[tuple[str, str]]:
    """Return rows (what, how much): how many decisions fit into memory, and the bytes and the time of
    a decision in files.
    """
    random = Random("bench:decision_history")
    pool = Pool(ENDPOINTS)
    now_s = 1_767_225_600.0
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal("bench", clock=lambda: now_s, monotonic=lambda: now_s)
        limits = decisions_limits(2**30, math.inf)
        history = DecisionsFolder(journal, folder, limits)
        recent = RecentDecisions(
            pool.scheduler.pool, keep_s=math.inf, clock=lambda: now_s, history=history
        )
        recent.configured(1, pool.scheduler.settings)
        thread_s = 0.0
        running: deque[Decision] = deque()
        for number in range(DECISIONS):
            now_s += 1 / RATE_PER_S
            if number % SCRAPE_REQUESTS == 0:
                pool.scrape()
            prompt_blocks = random.randrange(1, PROMPT_BLOCKS_MAX)
            request = InferenceRequest(
                request_id=str(UUID(int=random.getrandbits(128), version=4)),
                api=ApiKind.CHAT,
                model="llama",
                prompts=(random.randbytes(prompt_blocks * BLOCK_BYTES),),
                prompt_tokens=prompt_blocks * 64,
            )
            decision = pool.scheduler.schedule(request, pool.now)
            assert isinstance(decision, Decision)
            recent.decided(decision)
            running.append(decision)
            if len(running) > ANSWER_S * RATE_PER_S:
                ended = running.popleft()
                pool.scheduler.take(RequestEnded(ended.lease, _SERVED), pool.now)
                exchange = Exchange(now_s - ANSWER_S)
                exchange.decision = ended
                exchange.response_started_at_s = now_s - ANSWER_S + random.random()
                exchange.first_output_at_s = exchange.response_started_at_s
                recent.completed(exchange, _SERVED, now_s)
            if number % BATCH == BATCH - 1:
                recent.fold()
                started_s = time.thread_time()
                journal.write_queued()
                thread_s += time.thread_time() - started_s
        kept = len(recent)
        journal.end()
        written_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    what = f"decision among {ENDPOINTS} endpoints, and its end"
    return [
        (f"decisions among {ENDPOINTS} endpoints that {BYTES_MAX // 2**20} MiB hold", f"{kept:,}"),
        (f"{what}, in files", f"{written_bytes / DECISIONS:.0f} bytes"),
        (f"{what}, on the thread that writes them", f"{thread_s / DECISIONS * 1e6:.1f} µs"),
    ]
