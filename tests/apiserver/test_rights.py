"""The Role of the chart: what the picker does is allowed, and nothing else."""

import pytest

from tests.apiserver.cluster import POOL, Release, running_picker
from tests.apiserver.test_tuning import reweighed
from tests.chart.rendering import ROOT
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"
READ = ("get", "list", "watch")
INFERENCE = "inference.networking.k8s.io"
EXTENSIONS = ("llm-d.ai", "inference.networking.x-k8s.io")
COORDINATION = "coordination.k8s.io"
LEASE = "inference-homing"
EVERYWHERE = ""
"""A namespace: all of them."""

USED = {
    # A list that is streamed is a watch.
    ("", "pods", "watch"),
    (INFERENCE, "inferencepools", "watch"),
    ("llm-d.ai", "inferenceobjectives", "watch"),
    ("llm-d.ai", "inferencemodelrewrites", "watch"),
    ("", "configmaps", "watch"),
    ("", "events", "create"),
    *((COORDINATION, "leases", verb) for verb in ("get", "update")),
}
"""All that the picker ever does."""
POD_READER = {("", "pods", verb, "") for verb in READ}
OF_A_POOL = {
    *((INFERENCE, "inferencepools", verb, POOL) for verb in READ),
    *(
        (group, resource, verb, "")
        for group in EXTENSIONS
        for resource in ("inferenceobjectives", "inferencemodelrewrites")
        for verb in READ
    ),
    ("", "events", "create", ""),
}
OF_A_CONFIG_MAP = {("", "configmaps", verb, "inference-homing-config") for verb in READ}
OF_A_LEASE = {
    (COORDINATION, "leases", "create", ""),
    *((COORDINATION, "leases", verb, LEASE) for verb in ("get", "update")),
}
OF_PEERS = {("discovery.k8s.io", "endpointslices", verb, "") for verb in READ}
NEVER = {
    *(("", "secrets", verb, "") for verb in READ),
    *(("", "configmaps", verb, "") for verb in (*READ, "create", "update", "delete")),
    *(("", "configmaps", verb, "inference-homing-config") for verb in ("update", "patch")),
    *(("", "pods", verb, "") for verb in ("create", "update", "patch", "delete")),
    ("", "pods/exec", "create", ""),
    ("", "serviceaccounts/token", "create", ""),
    *((INFERENCE, "inferencepools", verb, "") for verb in READ),
    *((INFERENCE, "inferencepools", verb, POOL) for verb in ("update", "patch", "delete")),
    (COORDINATION, "leases", "delete", LEASE),
    (COORDINATION, "leases", "update", "another"),
    ("discovery.k8s.io", "endpointslices", "update", ""),
    ("rbac.authorization.k8s.io", "roles", "escalate", ""),
}
ALL = POD_READER | OF_A_POOL | OF_A_CONFIG_MAP | OF_A_LEASE | OF_PEERS | NEVER


def allowed(api, user, namespace, right):
    """What the API server would say to `user`."""
    group, resource, verb, name = right
    resource, _, part = resource.partition("/")
    asked = {"group": group, "resource": resource, "subresource": part, "verb": verb, "name": name}
    review = api.request(
        "POST",
        "/apis/authorization.k8s.io/v1/subjectaccessreviews",
        {"spec": {"user": user, "resourceAttributes": {"namespace": namespace, **asked}}},
    )
    return review["status"]["allowed"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("existing-pool", POD_READER | OF_A_POOL | OF_A_CONFIG_MAP),
        ("leader-election", POD_READER | OF_A_POOL | OF_A_CONFIG_MAP | OF_A_LEASE),
        ("two-replicas", POD_READER | OF_A_POOL | OF_A_CONFIG_MAP | OF_PEERS),
        ("warm-standby", POD_READER | OF_A_POOL | OF_A_CONFIG_MAP | OF_A_LEASE | OF_PEERS),
        ("valkey", POD_READER | OF_A_POOL | OF_A_CONFIG_MAP),
        ("no-config-map-watch", POD_READER | OF_A_POOL),
        ("no-rights", set()),
    ],
)
def test_the_account_may_do_what_the_picker_does_and_no_more(
    helm, namespace, tmp_path, values, expected
):
    """In its namespace; elsewhere nothing at all."""
    release = Release(helm, namespace, VALUES / f"{values}.yaml", tmp_path)
    api, user = namespace.api, release.user
    assert {right for right in ALL if allowed(api, user, namespace.name, right)} == expected
    for elsewhere in ("default", EVERYWHERE):
        assert [right for right in ALL if allowed(api, user, elsewhere, right)] == []


async def test_everything_that_is_used_is_granted(helm, namespace, tmp_path):
    """By the audit log: with every feature on, nothing is refused and nothing else is tried."""
    release = Release(helm, namespace, VALUES / "leader-election.yaml", tmp_path)
    namespace.create_pool(8000)
    async with running_picker(release, tmp_path / "picker"):

        def used():
            return {
                (at["objectRef"].get("apiGroup", ""), at["objectRef"]["resource"], at["verb"])
                for at in namespace.api.requests_of(release.user)
                if at["verb"] != "list"
            }

        text = reweighed(release.config_text(), 4)
        namespace.patch("configmaps", release.config_map(), data={"config.yaml": text})
        await until(lambda: used() == USED, f"{USED}")
    assert release.refused() == set()
