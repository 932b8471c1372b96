from structlog.testing import capture_logs

from epp.core.failures import PluginFailures
from epp.shell.operators.logs.failing_plugins import FailingPluginsLog


def test_a_plugin_that_fails_is_one_line_however_often_it_does():
    """With how often since the last line, and what it did last; no line without a new failure."""
    failures = PluginFailures()
    log = FailingPluginsLog(failures)
    for _ in range(500):
        failures.add("near-scorer", "score raised KeyError at near/near.py:14")
    failures.add("odd-filter", "keep returned list, expected bool[3]")
    with capture_logs() as lines:
        log.report()
        log.report()
        failures.add("near-scorer", "score returned int64[3], expected float64[3]")
        log.report()
    told = [(line["plugin"], line["failures"], line["last"]) for line in lines]
    assert told == [
        ("near-scorer", 500, "score raised KeyError at near/near.py:14"),
        ("odd-filter", 1, "keep returned list, expected bool[3]"),
        ("near-scorer", 1, "score returned int64[3], expected float64[3]"),
    ]
    assert {line["log_level"] for line in lines} == {"error"}


def test_a_plugin_that_is_configured_again_is_told_of_again():
    """Its count began anew."""
    failures = PluginFailures()
    log = FailingPluginsLog(failures)
    for _ in range(3):
        failures.add("near-scorer", "score raised KeyError")
    with capture_logs() as lines:
        log.report()
        failures.retain(())
        failures.add("near-scorer", "score raised KeyError")
        log.report()
    assert [line["failures"] for line in lines] == [3, 1]
