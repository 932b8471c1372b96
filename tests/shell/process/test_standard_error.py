"""What Python and libraries would print on standard error, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epp.shell.process.standard_error import LINES_PER_SECOND_MAX

ROOT = Path(__file__).parents[3]
SECRET = "canary-91bc"

SET_UP = f"""\
import asyncio, gc, logging, sys, threading, warnings
from epp.shell.operators.logs.set_up import configure_logging
from epp.shell.process.standard_error import StandardError
SECRET = {SECRET!r}
configure_logging(sys.argv[1], "info")
standard_error = StandardError()
standard_error.take_over()
def fail(*given):
    local = SECRET
    raise ValueError(f"failed with {{local}}")
def on_loop(main):
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(standard_error.task_failed)
        runner.run(main())
"""

CASES = {
    "a library's record": (
        "logging.getLogger('aiohttp.server').error('Error of %s', SECRET)",
        {"event": "library reported a problem", "library": "aiohttp.server", "text": "Error of %s"},
    ),
    "a record that was put together before": (
        "logging.getLogger('asyncio').error(f'Task {SECRET}')",
        {"event": "library reported a problem", "library": "asyncio", "text": ""},
    ),
    "a record with an exception": (
        "try: fail()\nexcept ValueError: logging.getLogger('grpc').exception('it failed')",
        {"event": "library reported a problem", "level": "error", "text": "it failed"},
    ),
    "a warning": (
        "warnings.warn(f'odd: {SECRET}')",
        {"event": "Python warning", "level": "warning", "kind": "UserWarning"},
    ),
    "a callback": (
        """\
async def main():
    asyncio.get_running_loop().call_soon(fail, SECRET)
    await asyncio.sleep(0)
on_loop(main)
""",
        {"event": "task or callback failed"},
    ),
    "a task that nobody awaited": (
        """\
async def failing():
    fail()
async def main():
    task = asyncio.create_task(failing(), name='scrape a')
    await asyncio.wait({task})
on_loop(main)
gc.collect()
""",
        {"event": "task or callback failed", "task": "scrape a"},
    ),
    "a thread": (
        "at = threading.Thread(target=fail, args=(SECRET,)); at.start(); at.join()",
        {"event": "thread failed", "level": "error"},
    ),
    "a finalizer": (
        "class Bad:\n    def __del__(self): fail()\nBad(); gc.collect()",
        {"event": "finalizer failed", "level": "error"},
    ),
    "the end of the process": (
        "fail()",
        {"event": "process ended by an exception", "level": "critical"},
    ),
}


def run(code, log_format):
    return subprocess.run(
        [sys.executable, "-c", SET_UP + code, log_format],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(("code", "said"), CASES.values(), ids=CASES)
def test_it_is_one_line_that_gives_nothing_away(code, said):
    """In JSON: where it comes from and nothing of what it quotes."""
    done = run(code, "json")
    assert done.stderr == ""
    (line,) = map(json.loads, done.stdout.splitlines())
    assert said.items() <= line.items()
    assert SECRET not in done.stdout
    assert done.returncode == (1 if code == "fail()" else 0)


def test_console_lines_give_nothing_away_either():
    """All at once."""
    together = [code for code, _ in CASES.values()]
    done = run("\n".join(together), "console")
    assert done.stderr == ""
    assert SECRET not in done.stdout
    for _, said in CASES.values():
        assert said["event"] in done.stdout


def test_a_flood_is_told_in_a_few_lines():
    """So many a second; the next one counts the rest."""
    done = run("for _ in range(5_000): logging.getLogger('x').error('again')", "json")
    lines = done.stdout.splitlines()
    assert LINES_PER_SECOND_MAX <= len(lines) < 500
    assert done.stderr == ""


def test_what_libraries_say_below_a_warning_is_not_logged():
    """Some write whole answers at debug."""
    done = run("logging.getLogger('kubernetes').info('body %s', SECRET)", "json")
    assert done.stdout == done.stderr == ""
