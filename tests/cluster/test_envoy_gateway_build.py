"""`make cluster-gateway`: what it builds, and what it says where it cannot; nothing is built here."""

import json

import pytest

from tests.cluster import envoy_gateway
from tests.go_program import GoProgramError


def environment(tmp_path):
    """One whose `go` installs a file and has downloaded a module of the chart alone."""
    module = tmp_path / "module"
    chart = module / "charts/gateway-helm"
    (chart / "templates").mkdir(parents=True)
    (chart / "templates/deployment.yaml").write_text("kind: Deployment\n")
    (chart / "values.tmpl.yaml").write_text(
        "image: ${GatewayImage}\npullPolicy: ${GatewayImagePullPolicy}\n"
    )
    for path in (*chart.rglob("*"), chart):
        path.chmod(0o555)
    go = tmp_path / "go"
    told = json.dumps({"Dir": str(module)})
    go.write_text(
        f"#!/bin/sh\n"
        f'echo "$CGO_ENABLED $GOFLAGS $*" >> {tmp_path}/asked\n'
        f"case $1 in\n"
        f'install) mkdir -p "$GOBIN" && touch "$GOBIN/envoy-gateway" && chmod +x "$GOBIN/envoy-gateway";;\n'
        f"mod) echo '{told}';;\n"
        f"esac\n"
    )
    go.chmod(0o755)
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_program_and_chart_are_kept_beside_each_other(tmp_path):
    """Both of one version, for a cluster that has no registry: the chart names the image."""
    there = environment(tmp_path)
    assert not envoy_gateway.is_built(there)
    envoy_gateway.build(there)
    assert envoy_gateway.is_built(there)
    chart = envoy_gateway.chart(there)
    assert (chart / "templates/deployment.yaml").exists()
    assert (chart / "values.yaml").read_text() == (
        f"image: {envoy_gateway.IMAGE}\npullPolicy: IfNotPresent\n"
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2
    assert all(line.startswith("0 -trimpath") for line in asked), "static, for an empty image"
    assert all(f"@{envoy_gateway.PROGRAM.version}" in line for line in asked)


def test_what_was_built_is_not_built_again(tmp_path):
    there = environment(tmp_path)
    envoy_gateway.build(there)
    (tmp_path / "asked").unlink()
    envoy_gateway.build(there)
    assert not (tmp_path / "asked").exists()


def test_without_go_one_sentence_says_how_to_have_it(tmp_path):
    """By the name of a variable that a shell can set, and of the target that builds it."""
    with pytest.raises(GoProgramError, match="no go on PATH: install it, or set ENVOY_GATEWAY"):
        envoy_gateway.build({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})
    with pytest.raises(GoProgramError, match="set ENVOY_GATEWAY or run `make cluster-gateway`"):
        envoy_gateway.PROGRAM.find({"XDG_CACHE_HOME": str(tmp_path)})
