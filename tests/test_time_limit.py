"""Time limit of the tests, with the options by which `make test` shares them among processes."""

import re
import shutil
import subprocess
import sys

from tests.chart.rendering import ROOT

HANGING = """\
import threading

def test_hangs():
    threading.Event().wait()

def test_beside_it():
    pass
"""
QUICK = "def test_is_quick():\n    pass\n"


def test_a_run_names_the_test_that_hangs_and_ends(tmp_path):
    """The process of that test dies; no other one runs it again or waits for it."""
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests/conftest.py", tests)
    (tests / "test_hanging.py").write_text(HANGING)
    (tests / "test_quick.py").write_text(QUICK)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntimeout_method = thread\nasyncio_default_fixture_loop_scope = function\n"
    )
    (shared,) = re.findall(r"^SHARED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = shared.replace("$(WORKERS)", "2").split()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=importlib", "--timeout=2", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )
    assert done.returncode == 1
    assert "FAILED tests/test_hanging.py::test_hangs" in done.stdout
    assert done.stdout.count("node down") == 1
