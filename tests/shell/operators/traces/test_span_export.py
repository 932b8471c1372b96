"""The queue of spans: bounded, and never in the way, whatever the collector does."""

import asyncio
import logging
import sys
import threading

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from epp.shell.operators.traces.span_export import EXPORTERS_LOG, SWITCH_INTERVAL_S, SpanExport
from tests.envoy.rig import until


class Exporter(SpanExporter):
    """Keeps what it gets, once it may go on; says what it is told to say."""

    def __init__(self):
        self.names = []
        self.batches = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.result = SpanExportResult.SUCCESS
        self.stopped = False

    def export(self, spans):
        self.batches.append(len(spans))
        self.may_go_on.wait(30)
        if isinstance(self.result, Exception):
            raise self.result
        self.names += [span.name for span in spans]
        return self.result

    def shutdown(self):
        self.stopped = True


@pytest.fixture
def lines():
    with structlog.testing.capture_logs() as found:
        yield found


def ending(export):
    """Ends a span of that name."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export)
    tracer = provider.get_tracer("test")
    return lambda name: tracer.start_span(str(name)).end()


async def test_spans_go_out_in_batches_and_in_order():
    """A whole batch at once, and the rest when it has waited."""
    exporter = Exporter()
    export = SpanExport(exporter, queue_spans_max=100, batch_spans_max=4, delay_s=0.01)
    end = ending(export)
    for name in range(10):
        end(name)
    async with export:
        await until(lambda: export.exported == 10, "the spans")
    assert exporter.names == [str(name) for name in range(10)]
    assert exporter.batches == [4, 4, 2]
    assert export.totals() == {"exported": 10, "failed": 0, "dropped": 0}


async def test_a_collector_that_hangs_costs_spans_and_nothing_else(lines):
    """What finds the queue full is dropped and counted; once it goes on so do we."""
    exporter = Exporter()
    exporter.may_go_on.clear()
    export = SpanExport(exporter, queue_spans_max=8, batch_spans_max=4, delay_s=0.01)
    end = ending(export)
    async with export:
        for name in range(4):
            end(name)
        await until(lambda: exporter.batches, "the first batch")
        for name in range(4, 20):
            end(name)
        assert export.full
        assert export.totals() == {"exported": 0, "failed": 0, "dropped": 8}
        for _ in range(3):
            export.report()
        assert [line["event"] for line in lines] == [
            "spans are being lost; homing_spans_total counts them"
        ]
        exporter.may_go_on.set()
        await until(lambda: export.exported == 12, "what was queued")
        export.report()
    assert lines[1]["event"] == "spans are exported again"
    assert exporter.names == [str(name) for name in range(12)]


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, RuntimeError("secret")], ids=str)
async def test_what_is_not_taken_is_counted_and_told_once(result, lines):
    """An exporter with a defect is one that does not take them; its text is not shown."""
    exporter = Exporter()
    exporter.result = result
    export = SpanExport(exporter, queue_spans_max=8, batch_spans_max=1, delay_s=0.01)
    end = ending(export)
    async with export:
        for count in range(1, 4):
            end("lost")
            await until(lambda so_far=count: export.failed == so_far, "the failure")
            export.report()
    assert len(lines) == 1
    assert "secret" not in str(lines)
    assert export.totals() == {"exported": 0, "failed": 3, "dropped": 0}


async def test_the_end_waits_for_what_is_queued():
    """Spans of the last requests are the ones of an incident."""
    exporter = Exporter()
    export = SpanExport(exporter, delay_s=60)
    async with export:
        for name in range(5):
            ending(export)(name)
    assert len(exporter.names) == 5
    assert exporter.stopped


async def test_the_end_does_not_wait_for_a_collector_that_hangs(lines):
    """What is left is dropped, and said; nothing of the process stays changed."""
    before = sys.getswitchinterval()
    exporter = Exporter()
    exporter.may_go_on.clear()
    export = SpanExport(exporter, batch_spans_max=2, delay_s=0.01, close_s=0.05)
    end = ending(export)
    async with export:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        assert not logging.getLogger(EXPORTERS_LOG).propagate
        for name in range(5):
            end(name)
        await until(lambda: exporter.batches, "the first batch")
    assert export.dropped == 3
    assert lines[-1]["dropped"] == 3
    assert exporter.stopped
    assert sys.getswitchinterval() == pytest.approx(before)
    assert logging.getLogger(EXPORTERS_LOG).propagate
    exporter.may_go_on.set()
    await asyncio.to_thread(
        lambda: [
            at.join() for at in threading.enumerate() if at.daemon and at.name == "span export"
        ]
    )
    assert len(exporter.batches) == 1, "it was told to stop"


async def test_of_what_exporters_log_no_text_of_others_is_shown(lines):
    """An address may hold a credential, and a collector says what it likes."""
    exporter = Exporter()
    exporter.result = SpanExportResult.FAILURE
    export = SpanExport(exporter, delay_s=0.01)
    async with export:
        ending(export)("lost")
        logger = logging.getLogger(f"{EXPORTERS_LOG}.otlp")
        logger.error("Failed to export %s, code %s: %d", "http://user:pass@host", b"said", 503)
        logger.error("put together with user:pass")
        await until(lambda: export.failed, "the failure")
        export.report()
    (line,) = lines
    assert line["last"] == "Failed to export …, code …: 503"
