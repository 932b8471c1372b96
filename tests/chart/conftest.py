"""Tools that these tests need, each skipped with its reason where it cannot be had."""

import shutil
from pathlib import Path

import pytest

from tests.chart import tools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout, because the first test waits for the downloads."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(240))


def _folder(package: tools.Package) -> Path:
    try:
        return tools.tools_of(package)
    except tools.ToolsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def helm_3() -> Path:
    return _folder(tools.HELM_3) / "helm"


@pytest.fixture(scope="session")
def helm_4() -> Path:
    return _folder(tools.HELM_4) / "helm"


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return _folder(tools.HELM_4) / "kubectl"


@pytest.fixture(scope="session", params=["helm_3", "helm_4"])
def any_helm(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if not found:
        pytest.skip("there is no promtool on PATH; the Debian package prometheus has it")
    return found
