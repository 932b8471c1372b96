"""Spans on their way to a collector: a bounded queue, and one thread that empties it.

The exporters of OpenTelemetry wait for the network, and to write a span takes them as long as a
decision, so they have a thread of their own. It may never keep a request: whoever ends a span only
appends to the queue, and when that is full, because the collector is down or slow, drops the span
and counts it.
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
"""The three defaults of the specification: `OTEL_BSP_MAX_QUEUE_SIZE` and its neighbours."""
CLOSE_S: Final = 2.0
"""At the end so much is waited for what is queued; then it is dropped."""
SWITCH_INTERVAL_S: Final = 0.000_5
"""How long the thread may keep the interpreter from the event loop. With Python's 5 ms every turn
of the loop would wait so long while a batch is written."""
EXPORTERS_LOG: Final = "opentelemetry.exporter"

_log: Final = structlog.get_logger(__name__)


class SpanExport(SpanProcessor):
    """Async context manager: exports inside. `on_end` is for the thread of the event loop alone."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        queue_spans_max: int = QUEUE_SPANS_MAX,
        batch_spans_max: int = BATCH_SPANS_MAX,
        delay_s: float = DELAY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """A batch goes out when there is a whole one, and after `delay_s` in any case."""
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
        """Nobody waits for the thread any more, which may wait for a collector."""
        self._emptied = asyncio.Event()
        self._ended: Callable[[], object] = lambda: None
        self._problem = _LastProblem()
        self._switch_interval_s = sys.getswitchinterval()
        self._reported = 0, 0
        self._failing = False
        self.exported = 0
        self.failed = 0
        """Spans that the collector did not take."""
        self.dropped = 0
        """Spans that found the queue full."""

    async def __aenter__(self) -> Self:
        logger = logging.getLogger(EXPORTERS_LOG)
        # They tell of every failure; `report` does of the first.
        logger.addHandler(self._problem)
        logger.propagate = False
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        loop = asyncio.get_running_loop()
        self._ended = lambda: loop.call_soon_threadsafe(self._emptied.set)
        # It waits for a collector, for which the end of the process must not wait.
        threading.Thread(target=self._run, name="span export", daemon=True).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Export what is queued, as far as that is done in time."""
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
        """Count a span that is not even made, because the queue is full."""
        self.dropped += 1

    def on_end(self, span: ReadableSpan) -> None:
        if self.full:
            self.drop()
            return
        self._queue.append(span)
        if len(self._queue) >= self._batch_spans_max:
            self._wake.set()

    def totals(self) -> dict[str, int]:
        """Result -> spans."""
        return {"exported": self.exported, "failed": self.failed, "dropped": self.dropped}

    def report(self) -> None:
        """Log when spans begin to be lost, and when they no longer are; called now and then."""
        before, self._reported = self._reported, (self.exported, self.failed + self.dropped)
        exported, lost = (now - then for now, then in zip(self._reported, before, strict=True))
        if lost and not self._failing:
            self._failing = True
            _log.warning(
                "spans are lost; homing_spans_total counts them",
                **self.totals(),
                last=self._problem.text,
            )
        elif exported and not lost and self._failing:
            self._failing = False
            _log.info("spans are exported again", **self.totals())

    # What follows is the thread's.

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._empty()
        self._empty()
        self._ended()

    def _empty(self) -> None:
        while self._queue and not self._abandoned:
            # Nobody else takes from it.
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
    """Keeps the last thing that an exporter logged, without a text of the collector or an address."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        told = record.args if isinstance(record.args, tuple) else ()
        shown = tuple(
            each.name if isinstance(each, Enum) else each if isinstance(each, int | float) else "…"
            for each in told
        )
        # What was put together before it was logged has no arguments, and may quote.
        if isinstance(record.msg, str) and shown:
            self.text = record.msg % shown
