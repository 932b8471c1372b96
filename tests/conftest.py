"""What every test may need: the shared measurements, and one hypothesis profile."""

import os
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
