"""A picker that hears pods of a test: a scheduler with an exact index, and production's listener."""

import asyncio
import time

import msgspec
import pytest

from epp.configuration.build import build_settings, default_config, plugin_tables
from epp.core.decision.inputs import PageScraped, PoolReplaced, RequestEnded
from epp.core.decision.profile import NamedResponder
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.stages import Stages
from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.exact_parameters import KvEventsConfig, TokenProcessorConfig
from epp.core.knowledge.inflight import Outcome
from epp.core.kv_events.stream import StreamState
from epp.core.types import Endpoint, EndpointMetrics
from epp.plugins.data_parallel_rank import DataParallelRank
from epp.shell.engines.kv_events import KVEventListener
from tests.builders import request

INDEX = "precise-prefix-cache-producer"
DEADLINE_S = 20.0


def packed(tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def prompt(*parts):
    return [part * 100 + at for part in parts for at in range(40)]


def settings_of(*, ranks_chosen=False, **events):
    made = build_settings(default_config(plugin_tables()))
    if ranks_chosen:
        chooser = NamedResponder("chooser", DataParallelRank())
        profile = msgspec.structs.replace(made.profile, responders=(chooser,))
        made = msgspec.structs.replace(made, stages=Stages(decode=profile))
    exact = ExactIndexSettings(
        token_processor_config=TokenProcessorConfig(block_size_tokens=16),
        kv_events_config=KvEventsConfig(**events),
        speculative_indexing=False,
    )
    return msgspec.structs.replace(
        made, indexes={INDEX: exact}, prefix=INDEX, joined=(INDEX,), block_tokens=16
    )


async def eventually(condition):
    """Fail where `condition` does not come to hold."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to hold"
        await asyncio.sleep(0.005)


class Picker:
    """A scheduler and its listener, with one endpoint a pod, of which the port matters here."""

    def __init__(self, *pods, host="", **events):
        self.scheduler = Scheduler(settings_of(**events), seed=1)
        self.listener = KVEventListener(self.scheduler, seed=1)
        places = [host or getattr(pod, "host", "127.0.0.1") for pod in pods]
        self.endpoints = [
            Endpoint(
                endpoint_id=f"uid-{at}:{pod.port}",
                name=f"pod-{at}",
                address=f"{places[at]}:{pod.port}",
            )
            for at, pod in enumerate(pods)
        ]
        self.replace(*self.endpoints)

    def replace(self, *endpoints):
        self.scheduler.take(PoolReplaced(endpoints), time.monotonic())
        self.listener.replace(endpoints)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.listener.run())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task

    def scrape(self, process=1.0):
        page = EndpointMetrics(process_started_at_s=process)
        for slot, _ in self.scheduler.pool.endpoints():
            self.scheduler.take(PageScraped(slot, page), time.monotonic())

    def asked(self, tokens, **fields):
        return request(token_ids=(packed(tokens),), **fields)

    def ended(self, decision):
        """The request of `decision` was served."""
        self.scheduler.take(RequestEnded(decision.lease, Outcome()), time.monotonic())

    def believed(self, tokens, slot=0, **fields):
        asked = self.asked(tokens, **fields)
        known = self.scheduler.indexes[INDEX].match(asked, len(self.endpoints), time.monotonic())
        return int(known.matched[slot]) * 16

    def row(self, at=0):
        return self.listener.rows()[at]

    @property
    def live(self):
        return all(row.state is StreamState.LIVE for row in self.listener.rows())
