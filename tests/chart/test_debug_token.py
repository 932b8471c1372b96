"""The token of the debug pages that the chart makes: who has it, and that an upgrade keeps it."""

import base64
import shutil

import pytest

from epp.flags import command_lines
from tests.chart.rendering import CHART, helm, objects, one, picker
from tests.chart.test_peers import BASE, KUBECONFIG, cluster_with, mounted

NAME = "inference-homing-debug"


@pytest.fixture
def token_chart(tmp_path):
    """Of the chart what makes the Secret, and nothing that asks more of a cluster."""
    chart = tmp_path / "homing"
    shutil.copytree(CHART, chart)
    for template in (chart / "templates").iterdir():
        if template.name not in {"_helpers.tpl", "debugtoken.yaml"}:
            shutil.rmtree(template) if template.is_dir() else template.unlink()
    return chart


def documents_of(binary, chart, *more):
    done = helm(binary, "template", "inference", chart, "--namespace", "models", *BASE, *more)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def test_without_a_word_the_pages_ask_for_a_token_that_is_drawn(any_helm):
    """Each installation its own, in the file that the picker and `epp top` in its pod read."""
    drawn = set()
    for _ in range(2):
        documents = documents_of(any_helm, CHART)
        secret = one(documents, "Secret")
        assert secret["metadata"]["name"] == NAME
        ((key, data),) = secret["data"].items()
        token = base64.b64decode(data, validate=True).decode()
        assert token.isalnum()
        assert len(token) == 48
        drawn.add(token)
        path, volume = mounted(documents, "debug-token")
        assert volume["secret"]["secretName"] == NAME
        container = picker(documents)
        told = command_lines.parse_serve(
            container["args"][1:], {"NAMESPACE": "models", "POD_NAME": "a"}
        )
        assert told.debug_token_file == f"{path}/{key}"
        (named,) = (at for at in container["env"] if at["name"] == "HOMING_DEBUG_TOKEN_FILE")
        assert named["value"] == told.debug_token_file
    assert len(drawn) == 2


@pytest.mark.parametrize("more", ["debugToken.enabled=false", "debugToken.secretName=mine"])
def test_none_is_made_where_none_is_asked_for_or_another_is_named(any_helm, more):
    documents = documents_of(any_helm, CHART, "--set", more)
    assert "Secret" not in {document["kind"] for document in documents}
    asks = "--debug-token-file" in str(picker(documents)["args"])
    assert asks == ("secretName" in more)


@pytest.mark.parametrize("key", ["token", "other"])
def test_an_upgrade_keeps_the_token_of_the_cluster(any_helm, token_chart, tmp_path, key):
    """Who has it keeps it. A missing key is drawn."""
    kept = base64.b64encode(b"t" * 40).decode()
    with cluster_with({"token": kept}, NAME) as port:
        kubeconfig = tmp_path / "kubeconfig.yaml"
        kubeconfig.write_text(KUBECONFIG.format(port=port), encoding="utf-8")
        server = ("--dry-run=server", "--disable-openapi-validation", "--kubeconfig", kubeconfig)
        documents = documents_of(any_helm, token_chart, "--set", f"debugToken.key={key}", *server)
    ((found, data),) = one(documents, "Secret")["data"].items()
    assert found == key
    assert (data == kept) == (key == "token")
