"""What the ServiceAccount of the release may do: what it needs, and of all else nothing."""

from tests.cluster.release import BY_LABEL, NAME, namespace

ALLOWED = [
    ("list", "pods"),
    ("watch", "endpointslices.discovery.k8s.io"),
    ("get", f"configmaps/{NAME}-config"),
]
DENIED = [
    ("get", "configmaps"),
    ("list", "configmaps"),
    ("update", f"configmaps/{NAME}-config"),
    ("get", "secrets"),
    ("get", f"secrets/{NAME}-peers"),
    ("create", "pods"),
    ("delete", "pods"),
    ("create", "pods", "--subresource=exec"),
    ("get", "pods", "--subresource=log"),
    ("patch", f"deployments.apps/{NAME}"),
    ("create", "events"),
    ("get", f"leases.coordination.k8s.io/{NAME}"),
    ("create", "serviceaccounts", "--subresource=token"),
    ("escalate", "roles.rbac.authorization.k8s.io"),
]
"""Also what a pool or a leader would need: there is neither."""
ELSEWHERE = [("list", "pods"), ("get", f"configmaps/{NAME}-config"), ("get", "secrets")]


def test_what_it_may_do_is_what_it_does(node, tmp_path):
    with namespace(node, "rights") as space:
        space.install({**BY_LABEL, "replicas": 2}, tmp_path)
        who = f"--as=system:serviceaccount:{space.name}:{NAME}"

        def may(*what):
            return space.kubectl("auth", "can-i", *what, who, check=False).strip()

        assert {one: may(*one) for one in ALLOWED} == dict.fromkeys(ALLOWED, "yes")
        assert {one: may(*one) for one in DENIED} == dict.fromkeys(DENIED, "no")
        answers = {one: may(*one, "--namespace=kube-system") for one in ELSEWHERE}
        assert answers == dict.fromkeys(ELSEWHERE, "no")
        assert may("list", "nodes") == "no"
        # It did all that it does, and was refused nothing.
        for picker in space.pickers():
            assert not [event for event in space.logs(picker) if event["level"] != "info"]
