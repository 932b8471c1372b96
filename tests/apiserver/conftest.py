"""One API server for most of these tests, and a namespace for each."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml

from tests.apiserver import binaries
from tests.apiserver.cluster import Namespace
from tests.apiserver.server import ApiServer
from tests.chart import tools

_numbers = count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout: the first test waits for the API server and for the download of helm."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(240))


ServerWith: TypeAlias = Callable[..., AbstractContextManager[ApiServer]]


@pytest.fixture(scope="session")
def api_with(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> ServerWith:
    """Return a function that runs an API server with the given flags.

    The server knows the kinds of objects that inference gateways use."""
    try:
        found = binaries.find(os.environ)
    except binaries.BinariesError as error:
        if any(os.environ.get(variable) for variable in binaries.VARIABLES):
            pytest.fail(str(error))
        pytest.skip(str(error))
    definitions = sorted((shared_data / "crds").glob("*.yaml"))
    if not definitions:
        pytest.skip(f"{shared_data}/crds has no definitions of InferencePool and its like")

    @contextmanager
    def serving(*flags: str) -> Iterator[ApiServer]:
        server = ApiServer(found, tmp_path_factory.mktemp("api-server"), flags)
        try:
            server.start()
            server.wait()
            for path in definitions:
                server.define(yaml.safe_load(path.read_text(encoding="utf-8")))
            yield server
        finally:
            server.stop()
            print(server.log_text())

    return serving


@pytest.fixture(scope="session")
def api(api_with: ServerWith) -> Iterator[ApiServer]:
    with api_with() as server:
        yield server


@pytest.fixture
def namespace(api: ApiServer) -> Namespace:
    if not api.running:
        # A test failed while the API server was away.
        api.start()
        api.wait()
    return Namespace.made(api, f"models-{next(_numbers)}")


def _tool(name: str) -> Path:
    try:
        return tools.tools_of(tools.HELM_4) / name
    except tools.ToolsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def helm() -> Path:
    return _tool("helm")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return _tool("kubectl")
