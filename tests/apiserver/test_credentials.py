"""As in a pod: the API server by environment, who we are by two mounted files."""

import pytest

from epp.shell.kubernetes.api_errors import ApiError, ApiFailure
from epp.shell.kubernetes.client import Credentials, KubeClient
from tests.apiserver.cluster import Release
from tests.chart.rendering import ROOT


async def test_the_files_of_a_pod_are_enough_and_read_again_when_refused(helm, namespace, tmp_path):
    """Its certificate is verified; what is refused in words is told in them."""
    api = namespace.api
    release = Release(helm, namespace, ROOT / "tests/chart/values/existing-pool.yaml", tmp_path)
    token = tmp_path / "token"
    token.write_text("a token of yesterday")
    environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(api.port),
    }
    credentials = Credentials(environment, token_file=token, ca_file=api.certificate)
    async with KubeClient(credentials) as client:
        pods = namespace.path("pods")
        token.write_text(release.token())
        with pytest.raises(ApiError) as error:
            await client.request("GET", pods)
        assert error.value.kind is ApiFailure.UNAUTHORIZED
        assert b'"kind":"PodList"' in await client.request("GET", pods)

        with pytest.raises(ApiError, match="secrets is forbidden") as error:
            await client.request("GET", f"/api/v1/namespaces/{namespace.name}/secrets")
        assert error.value.kind is ApiFailure.FORBIDDEN
        with pytest.raises(ApiError) as error:
            await client.request("GET", namespace.path("pods").replace("pods", "nothing"))
        assert error.value.kind in {ApiFailure.ABSENT, ApiFailure.FORBIDDEN}
