"""Envoy Gateway in the cluster, and the class of gateways that it makes of the node's own Envoy."""

from typing import Any, Final

import yaml

from tests.cluster import envoy_gateway
from tests.cluster.images import ENVOY
from tests.cluster.node import Node
from tests.cluster.release import Namespace

SYSTEM: Final = "envoy-gateway-system"
CLASS: Final = "envoy"
"""Class of gateways that the overlays name."""
_RELEASE: Final = "envoy-gateway"
_REQUESTS: Final = '{"cpu":"20m","memory":"64Mi"}'


def install(node: Node) -> None:
    """Install or upgrade Envoy Gateway, until it runs. Raises `ClusterError`."""
    space = Namespace(node, SYSTEM)
    space.helm(
        *("upgrade", "--install", _RELEASE, str(envoy_gateway.chart(node.environment))),
        *("--create-namespace", "--wait", "--timeout=120s"),
        f"--set-json=deployment.envoyGateway.resources.requests={_REQUESTS}",
        # It looks at each pod of the cluster that is bound to a node.
        "--set=topologyInjector.enabled=false",
    )
    space.apply(yaml.safe_dump_all(_class_and_parameters()))
    space.kubectl("wait", "--for=condition=Accepted", f"gatewayclass/{CLASS}", "--timeout=60s")


def _class_and_parameters() -> list[dict[str, Any]]:
    requests = {"cpu": "50m", "memory": "64Mi"}
    kubernetes = {
        # Nobody here gives addresses to a LoadBalancer.
        "envoyService": {"type": "ClusterIP"},
        "envoyDeployment": {"container": {"image": ENVOY, "resources": {"requests": requests}}},
    }
    return [
        {
            "apiVersion": "gateway.envoyproxy.io/v1alpha1",
            "kind": "EnvoyProxy",
            "metadata": {"name": CLASS, "namespace": SYSTEM},
            "spec": {"provider": {"type": "Kubernetes", "kubernetes": kubernetes}},
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "GatewayClass",
            "metadata": {"name": CLASS},
            "spec": {
                "controllerName": "gateway.envoyproxy.io/gatewayclass-controller",
                "parametersRef": {
                    "group": "gateway.envoyproxy.io",
                    "kind": "EnvoyProxy",
                    "name": CLASS,
                    "namespace": SYSTEM,
                },
            },
        },
    ]
