"""What every test may need: the shared measurements, and one hypothesis profile."""

import os
import sys
from importlib import invalidate_caches
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("homing", max_examples=60, deadline=None)
hypothesis.settings.load_profile("homing")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared measurements: HOMING_SHARED, else `../shared` beside the repository."""
    folder = Path(os.environ.get("HOMING_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not a folder; HOMING_SHARED can name the shared measurements")
    return folder


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Install a distribution that offers one class; import it under a name of its own."""
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
