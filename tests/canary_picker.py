"""`epp`, in which the boundary that a file names fails, and quotes all that it has in its hands.

$CANARY_ARMED is that file, $CANARY_FIRED gets a line for each time that one failed, and
$CANARY_SECRET is quoted whatever else is.
"""

import inspect
import os
import sys
from pathlib import Path

import epp.core.protocol.session
import epp.shell.gateway.ext_proc
import epp.shell.operators.decisions.recent_decisions
import epp.shell.operators.pages.debug_pages
from epp import __main__ as command
from epp.configuration.live import LiveConfiguration
from epp.core.decision.pool_state import PoolState
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.scheduler import Scheduler
from epp.core.knowledge.inflight import InflightLedger
from epp.core.knowledge.pool import EndpointPool
from epp.core.knowledge.prefix import PrefixIndex
from epp.core.protocol.session import Session
from epp.core.protocol.usage import UsageReader
from epp.plugins import PICKERS, SCORERS
from epp.shell.engines.exposition import PageReader
from epp.shell.gateway import http2
from epp.shell.gateway.grpcio import GrpcioServer
from epp.shell.gateway.sessions import Sessions
from epp.shell.gateway.wire import Decoder
from epp.shell.kubernetes.list_watch import ListWatch
from epp.shell.operators.decisions.recent_decisions import RecentDecisions
from epp.shell.operators.journal import DecisionsFolder
from epp.shell.operators.live.live_view import LiveView
from epp.shell.operators.logs.decision_log import DecisionLog
from epp.shell.operators.metrics.telemetry import PoolCollector, Telemetry
from epp.shell.operators.traces.tracing import Tracer

STREAM = {
    "decode": (Decoder, "decode"),
    "encode": (epp.shell.gateway.ext_proc, "encode"),
    "open": (Sessions, "open"),
    "receive": (Session, "receive"),
    "half-closed": (Session, "half_closed"),
    "closed": (Session, "closed"),
    "parse": (epp.core.protocol.session, "parse_request"),
    "schedule": (Scheduler, "schedule"),
    "complete": (InflightLedger, "close"),
    "first-output": (InflightLedger, "first_output"),
    "match": (PrefixIndex, "match"),
    "record": (PrefixIndex, "record"),
    "filter": (SchedulingProfile, "filter"),
    "score": (SchedulingProfile, "score"),
    "pick": (SchedulingProfile, "pick"),
    "scorer": (SCORERS["prefix-cache-scorer"], "score"),
    "picker": (PICKERS["max-score-picker"], "pick"),
    "usage": (UsageReader, "feed"),
    "telemetry-decided": (Telemetry, "decided"),
    "telemetry-refused": (Telemetry, "refused"),
    "telemetry-completed": (Telemetry, "completed"),
    "telemetry-closed": (Telemetry, "stream_closed"),
    "log-decided": (DecisionLog, "decided"),
    "log-refused": (DecisionLog, "refused"),
    "trace-begin": (Tracer, "begin"),
    "trace-end": (Tracer, "end"),
    "recent-decided": (RecentDecisions, "decided"),
    "recent-refused": (RecentDecisions, "refused"),
    "recent-completed": (RecentDecisions, "completed"),
    "recent-kept": (epp.shell.operators.decisions.recent_decisions, "Decided"),
    "client-headers": (epp.core.protocol.session, "explaining_headers"),
    "client-headers-noted": (epp.core.protocol.session, "explained"),
}
"""Fail while a request is served."""
PAGES = {
    "metrics-page": (PoolCollector, "collect"),
    "endpoints-page": (epp.shell.operators.pages.debug_pages, "endpoint_rows"),
    "decisions-page": (RecentDecisions, "rows"),
    "explain-page": (epp.shell.operators.pages.debug_pages, "explanation"),
    "live-page": (LiveView, "look"),
    "history-tell": (DecisionsFolder, "tell"),
    "config-page": (epp.shell.operators.pages.debug_pages, "explain"),
}
"""Fail when a page is asked for."""
OTHERS = {
    "scrape": (PageReader, "read"),
    "reload": (LiveConfiguration, "read"),
    "configure": (PoolState, "configure"),
    "replace": (EndpointPool, "replace"),
    "watch": (ListWatch, "line"),
}
"""Fail beside requests."""
LAST = {"tick": (InflightLedger, "close_due")}
"""Ends the process."""


class DefectError(Exception):
    pass


def quoted(held):
    """All that can be reached in two steps."""
    parts = []
    for at in held:
        parts.append(repr(at))
        names = [*getattr(at, "__dict__", ()), *getattr(at, "__slots__", ())]
        parts += [repr(getattr(at, name, None)) for name in names]
    return " ".join([os.environ["CANARY_SECRET"], *parts])


def fail(boundary, held):
    if Path(os.environ["CANARY_ARMED"]).read_text() == boundary:
        with Path(os.environ["CANARY_FIRED"]).open("a") as fired:
            fired.write(f"{boundary}\n")
        text = quoted(held)
        problem = DefectError(text)
        problem.add_note(text)
        raise problem from KeyError(text)


def breakable(boundary, owner, name):
    kept = inspect.getattr_static(owner, name)
    wrapped = getattr(owner, name)

    def wrapper(*held, **more):
        fail(boundary, (*held, *more.values()))
        return wrapped(*held, **more)

    setattr(owner, name, staticmethod(wrapper) if isinstance(kept, staticmethod) else wrapper)


class Context:
    """A gRPC context whose writes fail."""

    def __init__(self, context):
        self._context = context

    def __getattr__(self, name):
        return getattr(self._context, name)

    async def write(self, message):
        fail("write", (message,))
        await self._context.write(message)


def main():
    for boundary, (owner, name) in (STREAM | PAGES | OTHERS | LAST).items():
        breakable(boundary, owner, name)
    breakable("write", http2._Connection, "write")
    serve = GrpcioServer._serve

    async def serving(server, opener, context):
        await serve(server, opener, Context(context))

    GrpcioServer._serve = serving
    return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
