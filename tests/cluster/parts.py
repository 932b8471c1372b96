"""Parts that a node runs: the command of each, and the files that they read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from tests.cluster import certificates
from tests.cluster.images import PAUSE
from tests.cluster.place import (
    DOMAIN,
    NODE,
    NODE_ADDRESS,
    POD_NETWORK,
    SERVICE_NETWORK,
    Place,
)

STORE: Final = "http://127.0.0.1:2379"
_STORE_PEER: Final = "http://127.0.0.1:2380"
PODS_MAX: Final = 110


def commands(place: Place, binaries: Path, coredns: Path) -> Mapping[str, list[str]]:
    """Return name -> command, in the order in which they start."""
    signed = place.certificates

    def known(name: str) -> list[str]:
        file = str(place.run / f"{name}.yaml")
        return [
            *(f"--kubeconfig={file}", f"--authentication-kubeconfig={file}"),
            *(f"--authorization-kubeconfig={file}", "--leader-elect=false"),
        ]

    authority = signed / f"{certificates.AUTHORITY}.crt"
    signer = signed / certificates.SIGNER
    return {
        "etcd": [
            *(str(binaries / "etcd"), "--name=one", f"--data-dir={place.run / 'etcd'}"),
            # A cluster of tests is made anew, not saved.
            "--unsafe-no-fsync",
            *(f"--listen-client-urls={STORE}", f"--advertise-client-urls={STORE}"),
            *(f"--listen-peer-urls={_STORE_PEER}", f"--initial-cluster=one={_STORE_PEER}"),
            f"--initial-advertise-peer-urls={_STORE_PEER}",
        ],
        "kube-apiserver": [
            *(str(binaries / "kube-apiserver"), f"--etcd-servers={STORE}"),
            *(
                "--bind-address=0.0.0.0",
                "--secure-port=6443",
                f"--advertise-address={NODE_ADDRESS}",
            ),
            *(f"--service-cluster-ip-range={SERVICE_NETWORK}", "--authorization-mode=Node,RBAC"),
            *("--enable-admission-plugins=NodeRestriction", "--allow-privileged=true"),
            # Else `kubectl logs` asks DNS for the name of the node.
            "--kubelet-preferred-address-types=InternalIP",
            f"--client-ca-file={authority}",
            f"--tls-cert-file={signed / certificates.SERVER}.crt",
            f"--tls-private-key-file={signed / certificates.SERVER}.key",
            f"--kubelet-client-certificate={signed / 'admin'}.crt",
            f"--kubelet-client-key={signed / 'admin'}.key",
            f"--requestheader-client-ca-file={authority}",
            f"--requestheader-allowed-names={certificates.FRONT}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={signed / certificates.FRONT}.crt",
            f"--proxy-client-key-file={signed / certificates.FRONT}.key",
            f"--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}",
            f"--service-account-key-file={signer}.pub",
            f"--service-account-signing-key-file={signer}.key",
        ],
        "kube-controller-manager": [
            *(str(binaries / "kube-controller-manager"), *known("kube-controller-manager")),
            *("--use-service-account-credentials", f"--root-ca-file={authority}"),
            f"--service-account-private-key-file={signer}.key",
            f"--cluster-signing-cert-file={authority}",
            f"--cluster-signing-key-file={signed / certificates.AUTHORITY}.key",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
        ],
        "kube-scheduler": [str(binaries / "kube-scheduler"), *known("kube-scheduler")],
        "containerd": ["containerd", f"--config={place.run / 'containerd.toml'}"],
        "kubelet": [
            *(str(binaries / "kubelet"), f"--config={place.run / 'kubelet-settings.yaml'}"),
            *(f"--kubeconfig={place.run / 'kubelet.yaml'}", f"--hostname-override={NODE}"),
            *(f"--node-ip={NODE_ADDRESS}", f"--root-dir={place.run / 'kubelet'}"),
            f"--cert-dir={signed}",
        ],
        "kube-proxy": [
            str(binaries / "kube-proxy"),
            f"--config={place.run / 'kube-proxy-settings.yaml'}",
        ],
        "coredns": [str(coredns), f"-conf={place.run / 'Corefile'}"],
    }


def write_files(place: Place) -> None:
    """Write certificates, kubeconfigs and settings."""
    folders = [place.run / name for name in ("cni", "kubelet", "manifests")]
    place.existing(place.logs, place.certificates, *folders, place.containerd_socket.parent)
    certificates.write(place.certificates)
    for who in certificates.WHO:
        certificates.write_kubeconfig(place.run / f"{who}.yaml", place.certificates, who)
    # Names of the cluster alone: there is no other DNS.
    (place.run / "resolv.conf").write_text("")
    (place.run / "cni/10-pods.conflist").write_text(json.dumps(_pod_network(place)))
    (place.run / "containerd.toml").write_text(_CONTAINERD.format(place=place, pause=PAUSE))
    (place.run / "kubelet-settings.yaml").write_text(yaml.safe_dump(_kubelet(place)))
    (place.run / "kube-proxy-settings.yaml").write_text(yaml.safe_dump(_proxy(place)))
    (place.run / "Corefile").write_text(
        _COREFILE.format(place=place, node=NODE_ADDRESS, domain=DOMAIN)
    )


def _pod_network(place: Place) -> dict[str, object]:
    """Return the settings of a network with a link for each pod.

    It has no bridge, which would need a module of the kernel.
    """
    addresses = {
        "type": "host-local",
        "dataDir": str(place.run / "ipam"),
        "ranges": [[{"subnet": POD_NETWORK}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {"type": "ptp", "ipMasq": False, "mtu": 1500, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _kubelet(place: Place) -> dict[str, object]:
    signed = place.certificates
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_ADDRESS,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(signed / f"{certificates.AUTHORITY}.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(signed / "kubelet.crt"),
        "tlsPrivateKeyFile": str(signed / "kubelet.key"),
        "cgroupDriver": "cgroupfs",
        # Some machines have version 1 of cgroups only.
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": DOMAIN,
        "containerRuntimeEndpoint": f"unix://{place.containerd_socket}",
        "resolvConf": str(place.run / "resolv.conf"),
        "evictionHard": {
            "memory.available": "200Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "maxPods": PODS_MAX,
        "seccompDefault": True,
        # Needs CAP_SYS_RESOURCE where it is another.
        "oomScoreAdj": 0,
    }


def _proxy(place: Place) -> dict[str, object]:
    # Its settings of conntrack can be written in the first namespace only.
    untouched = {
        "maxPerCore": 0,
        "min": 0,
        "tcpEstablishedTimeout": "0s",
        "tcpCloseWaitTimeout": "0s",
    }
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clusterCIDR": POD_NETWORK,
        "hostnameOverride": NODE,
        "clientConnection": {"kubeconfig": str(place.run / "kube-proxy.yaml")},
        "conntrack": untouched,
        "nodePortAddresses": ["primary"],
        "oomScoreAdj": 0,
    }


_CONTAINERD: Final = """\
version = 2
root = "{place.root}/containerd"
state = "{place.containerd_socket.parent}/state"
[grpc]
  address = "{place.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Without CAP_SYS_RESOURCE runc ends without a word where it should lower oom_score_adj.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{place.run}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""

_COREFILE: Final = """\
.:53 {{
  errors
  ready {node}:8181
  kubernetes {domain} in-addr.arpa {{
    kubeconfig {place.run}/admin.yaml
    ttl 5
  }}
  cache 5
}}
"""
