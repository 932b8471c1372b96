"""Setup for all tests: shared measurements, one hypothesis profile, and groups of test files."""

import os
import signal
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

HERE: Final = Path(__file__).parent
TOGETHER: Final = {
    "chart": "chart",  # what one has rendered the others read
    "apiserver": "API server",
    "chart/test_serving.py": "real time",
    "envoy": "real time",
    "sim/demo/test_command.py": "real time",
    "app/test_wiring.py": "real time",
    "test_docs_commands.py": "real time",
    "test_gateways.py": "real time",
    "test_short_forms.py": "real time",
    "test_reload_under_load.py": "real time",
}
"""Group by folder or file. One process runs a group, so that its tests never compete for time."""
LONGEST: Final = ("real time", "API server", "sim/experiments/test_replay.py", "chart")
"""Groups that begin first, so that the run does not end with one of them alone."""

hypothesis.settings.register_profile("homing", max_examples=60, deadline=None)
hypothesis.settings.load_profile("homing")


def pytest_configure() -> None:
    """Take Ctrl-C again if it is ignored, so that programs which tests start can be interrupted.

    A shell makes commands in its background ignore Ctrl-C, and their children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the groups in `LONGEST` first if several processes share the tests (`make test`)."""
    if getattr(config.option, "loadgroup", False):
        places = {group: place for place, group in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(_group(item.path.relative_to(HERE)), len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Return a scheduler that keeps each file, or group of `TOGETHER`, in one process.

    None means that `--dist` is not loadgroup, and that xdist uses its own scheduler.
    """
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


class Together(LoadScopeScheduling):
    """Scheduler that groups by path, because pytest 9.2 with xdist 3.8 loses marks of groups."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(Path(nodeid.partition("::")[0]).relative_to(HERE.name))


def _group(path: Path) -> str:
    nearest = (part.as_posix() for part in (path, *path.parents))
    return next((TOGETHER[part] for part in nearest if part in TOGETHER), path.as_posix())


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """Restore the handling of Ctrl-C after each test.

    A command that was interrupted ignores Ctrl-C until its process ends, and so would all processes
    that later tests start.
    """
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of shared measurements: HOMING_SHARED, or else `../shared`.

    The latter is beside the repository. The test is skipped if the folder does not exist.
    """
    folder = Path(os.environ.get("HOMING_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not a folder; HOMING_SHARED can name the shared measurements")
    return folder


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Return a function that installs a distribution which offers one class as a plugin."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(module, source, value=None):
        (tmp_path / f"{module}.py").write_text(source)
        information = tmp_path / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
        )
        (information / "entry_points.txt").write_text(
            f"[homing.plugins]\nentry = {value or module + ':Alphabetical'}\n"
        )
        monkeypatch.delitem(sys.modules, module, raising=False)
        invalidate_caches()

    return install
