"""A request costs so many function calls, and no more (design D34)."""

import sys

import pytest

from bench.calls import SIZES, calls_of_chat, calls_of_decision

BUDGETS = {
    ("2 KB", False): (117.0, 210.4),
    ("2 KB", True): (147.2, 256.2),
    ("8 KB", False): (117.1, 242.8),
    ("8 KB", True): (148.2, 289.8),
    ("450 KB", False): (324.2, 2941.8),
    ("450 KB", True): (350.1, 2981.3),
}
"""(Size, telemetry) -> calls of Python and of C functions that one chat may take: what was measured with
Python 3.11, and half a call. If a change needs fewer, lower them: `python -m bench calls`."""
SLACK = 1.0
"""Calls by which a budget may be too high: as many as one that is added on every request."""
OFF = (
    *("/core/peers/", "/core/flow/", "/core/kv_events/", "/core/knowledge/exact"),
    *("/core/knowledge/latency", "/engines/tokens/", "/rank"),
)
"""Parts of paths of what a picker does not use unless it is configured."""


@pytest.mark.parametrize(("size", "telemetry"), BUDGETS)
def test_a_chat_takes_no_more_calls_than_its_budget(size, telemetry):
    """One more call on the path of a request fails it. So do features that are off and are asked."""
    calls = calls_of_chat(size, telemetry=telemetry)
    python_max, c_max = BUDGETS[size, telemetry]
    counted = f"{calls.python:.2f} calls of Python functions, {calls.c:.2f} of C functions"
    assert calls.python <= python_max, f"{counted}, expected at most {python_max} and {c_max}"
    assert calls.c <= c_max, f"{counted}, expected at most {python_max} and {c_max}"
    # Later Pythons run comprehensions without a call.
    if sys.version_info[:2] == (3, 11):
        assert calls.python > python_max - SLACK, f"{counted}: lower the budget of {python_max}"
        assert calls.c > c_max - SLACK, f"{counted}: lower the budget of {c_max}"
    off = {file for file in calls.files for part in OFF if part in file}
    assert not off, f"features that are off are called: {', '.join(sorted(off))}"


def test_two_stages_take_less_than_twice_the_calls_of_one():
    one, two = calls_of_decision("decode"), calls_of_decision("decode", "prefill")
    assert one < two < 2 * one


def test_every_size_has_a_budget():
    assert {size for size, _ in BUDGETS} == SIZES.keys()


@pytest.mark.parametrize("competing", [True, False])
@pytest.mark.parametrize("idle", [True, False])
def test_a_queue_takes_three_percent_more_calls_at_most_while_any_endpoint_has_room(
    idle, competing
):
    off = calls_of_chat("2 KB", telemetry=False, idle=idle)
    on = calls_of_chat("2 KB", telemetry=False, idle=idle, queue=True, competing=competing)
    assert on.python + on.c <= 1.03 * (off.python + off.c)
