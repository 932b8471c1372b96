"""Export spans through a bounded queue and one thread.

The exporters of OpenTelemetry wait for the network, and encoding a span takes as long as a
decision. Therefore the exporters run in a thread. The export never delays a request: the event loop
only appends to the queue. If the queue is full because the collector is unavailable or slow, the
span is dropped and counted.
"""

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, Self

import structlog
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

QUEUE_SPANS_MAX: Final = 2_048
BATCH_SPANS_MAX: Final = 512
DELAY_S: Final = 5.0
"""Maximum delay in seconds of a span before its batch is exported, unless an export takes longer.
This and the limits beside it are the defaults of the OpenTelemetry specification for `OTEL_BSP_*`
variables.
"""
CLOSE_S: Final = 2.0
"""Maximum time in seconds to export the queued spans at shutdown."""
SWITCH_INTERVAL_S: Final = 0.000_5
"""Interval in seconds after which the exporting thread yields the interpreter to the event loop.

Python's default of 5 ms would delay every turn of the loop while a batch is written.
"""
EXPORTERS_LOG: Final = "opentelemetry.exporter"

_log: Final = structlog.get_logger(__name__)


class SpanExport(SpanProcessor):
    """An async context manager that exports spans to a collector while entered.

    Only the thread of the event loop may call `on_end`.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        queue_spans_max: int = QUEUE_SPANS_MAX,
        batch_spans_max: int = BATCH_SPANS_MAX,
        delay_s: float = DELAY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """Create the export of spans. A batch of spans is exported when it is complete, and after
        `delay_s` seconds at the latest.
        """
        assert 1 <= batch_spans_max <= queue_spans_max, "a batch must fit in the queue"
        self._exporter = exporter
        self._queue: deque[ReadableSpan] = deque()
        self._queue_spans_max = queue_spans_max
        self._batch_spans_max = batch_spans_max
        self._delay_s = delay_s
        self._close_s = close_s
        self._wake = threading.Event()
        self._closing = False
        self._abandoned = False
        """True if the shutdown no longer waits for the exporting thread."""
        self._emptied = asyncio.Event()
        self._ended: Callable[[], object] = lambda: None
        self._problem = _LastProblem()
        self._switch_interval_s = sys.getswitchinterval()
        self._reported = 0, 0
        self._failing = False
        self.exported = 0
        self.failed = 0
        """Number of spans whose export to the collector failed."""
        self.dropped = 0
        """Number of spans that were not exported because the export queue was full, or because the
        shutdown ended before their export.
        """

    async def __aenter__(self) -> Self:
        logger = logging.getLogger(EXPORTERS_LOG)
        # The exporters log every failure, but `report` logs only the first one.
        logger.addHandler(self._problem)
        logger.propagate = False
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop = asyncio.get_running_loop()
        self._ended = lambda: loop.call_soon_threadsafe(self._emptied.set)
        # The thread is a daemon, because the end of the process must not wait for a collector.
        threading.Thread(target=self._run, name="span export", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Export the queued spans within `close_s` seconds, then stop. Spans that are left count as
        dropped.
        """
        self._closing = True
        self._wake.set()
        try:
            async with asyncio.timeout(self._close_s):
                await self._emptied.wait()
        except TimeoutError:
            self._ended = lambda: None
            self._abandoned = True
            self.dropped += len(self._queue)
        self._exporter.shutdown()
        sys.setswitchinterval(self._switch_interval_s)
        logger = logging.getLogger(EXPORTERS_LOG)
        logger.removeHandler(self._problem)
        logger.propagate = True
        self.report()

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._queue_spans_max

    def drop(self) -> None:
        """Count a span that is not exported because the export queue is full."""
        self.dropped += 1

    def on_end(self, span: ReadableSpan) -> None:
        if self.full:
            self.drop()
            return
        self._queue.append(span)
        if len(self._queue) >= self._batch_spans_max:
            self._wake.set()

    def totals(self) -> dict[str, int]:
        """Return the number of spans by result of their export."""
        return {"exported": self.exported, "failed": self.failed, "dropped": self.dropped}

    def report(self) -> None:
        """Log when spans start to be lost or are no longer lost. Call it periodically."""
        before, self._reported = self._reported, (self.exported, self.failed + self.dropped)
        exported, lost = (now - then for now, then in zip(self._reported, before, strict=True))
        if lost and not self._failing:
            self._failing = True
            _log.warning(
                "spans are being lost; homing_spans_total counts them",
                **self.totals(),
                last=self._problem.text,
            )
        elif exported and not lost and self._failing:
            self._failing = False
            _log.info("spans are exported again", **self.totals())

    # The methods below run in the thread.

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._empty()
        self._empty()
        self._ended()

    def _empty(self) -> None:
        while self._queue and not self._abandoned:
            # Only this thread takes spans from the queue.
            spans = min(len(self._queue), self._batch_spans_max)
            batch = [self._queue.popleft() for _ in range(spans)]
            if self._taken(batch):
                self.exported += len(batch)
            else:
                self.failed += len(batch)

    def _taken(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001  the boundary of a thread
            self._problem.text = type(error).__name__
            return False


class _LastProblem(logging.Handler):
    """A log handler that keeps the last message of an exporter, without text from the collector or
    addresses.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        told = record.args if isinstance(record.args, tuple) else ()
        shown = tuple(
            each.name if isinstance(each, Enum) else each if isinstance(each, int | float) else "…"
            for each in told
        )
        # A message that was formatted before it was logged has no arguments and may quote data.
        if isinstance(record.msg, str) and shown:
            self.text = record.msg % shown
