"""A real kube-apiserver with its etcd, on loopback, in a folder, and the users it accepts."""

import csv
import json
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.apiserver.binaries import NAMES, Binaries
from tests.envoy.rig import dying_with_us, free_ports

ADMIN_TOKEN: Final = "the-administrator-of-these-tests"
START_MAX_S: Final = 60.0
REQUEST_MAX_S: Final = 10.0
DRAIN_S: Final = 2.0
APPLY: Final = "application/apply-patch+yaml"
AUDIT: Final = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}


class ApiServer:
    """A server with this life: `start`, any number of `kill` and `start`, then `stop`."""

    def __init__(self, binaries: Binaries, folder: Path, flags: Sequence[str] = ()) -> None:
        """Choose free ports; `flags` are added to those of kube-apiserver."""
        self._binaries = binaries
        self._folder = folder
        self._flags = flags
        self._etcd_port, self._peer_port, self.port = free_ports(3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.certificate = folder / "certificates/apiserver.crt"
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to serve what etcd holds; `wait` or `ready` tell when it does."""
        if self._etcd is None:
            self._write_secrets()
            self._etcd = self._run("etcd", self._etcd_command())
        assert self._server is None, "it runs already"
        self._server = self._run("kube-apiserver", self._server_command())

    @property
    def running(self) -> bool:
        return self._server is not None

    def wait(self) -> None:
        """Wait until the server is ready."""
        self._until(self.ready, "kube-apiserver to be ready")

    def ready(self) -> bool:
        """Return True if /readyz answers with success; False also if nobody answers."""
        return self._answers("/readyz")

    def kill(self) -> None:
        """End the server, not etcd, without a chance to do anything."""
        _kill(self._server)
        self._server = None

    def terminate(self) -> None:
        """Ask the server to end, and end it: while a watch is open it would wait a minute."""
        assert self._server is not None
        self._server.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(DRAIN_S)
        self.kill()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Pause the server during the block: connections stay open and nobody answers."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._server.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        _kill(self._server)
        _kill(self._etcd)

    def log_text(self) -> str:
        """Return the last 2000 characters of the log of each of the two processes."""
        logs = [self._folder / f"{name}.log" for name in NAMES]
        return "\n".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in logs)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        content_type: str = "application/json",
    ) -> Any:
        """Send a request as the administrator; return the answer, as text unless it is an object.

        Raises `urllib.error.HTTPError`.
        """
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {ADMIN_TOKEN}", "content-type": content_type},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_MAX_S, context=self._trust) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else text.decode()

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate)

    def requests_of(self, user: str) -> list[dict[str, Any]]:
        """Return the answered requests of `user` so far, as events of the audit log."""
        events = map(json.loads, (self._folder / "audit.log").read_text().splitlines())
        return [event for event in events if event["user"]["username"] == user]

    def define(self, definition: Mapping[str, Any]) -> None:
        """Apply a CustomResourceDefinition, and wait until its objects can be made."""
        name, spec = definition["metadata"]["name"], definition["spec"]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        self.request("PATCH", f"{path}?fieldManager=tests", definition, APPLY)
        self._until(lambda: self._established(path), f"{name} to be established")
        for version in spec["versions"]:
            kind = f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}"
            self._until(lambda kind=kind: self._answers(kind), f"{kind} to be served")

    def _established(self, path: str) -> bool:
        conditions = self.request("GET", path)["status"]["conditions"] or ()
        told = {condition["type"]: condition["status"] for condition in conditions}
        return told.get("Established") == "True"

    def _answers(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + START_MAX_S
        while not condition():
            for process in (self._etcd, self._server):
                assert process is not None
                assert process.poll() is None, self.log_text()
            assert time.monotonic() < deadline_s, f"waited in vain for {what}\n{self.log_text()}"
            time.sleep(0.05)

    def kubeconfig(self, path: Path, token: str = ADMIN_TOKEN) -> Path:
        """Write a kubeconfig with `token` to `path`, and return `path`."""
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        context = {"cluster": "test", "user": "test"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def _write_secrets(self) -> None:
        """Write the administrator's token, the key of ServiceAccount tokens, the audit policy."""
        (self._folder / "audit.yaml").write_text(yaml.safe_dump(AUDIT))
        with (self._folder / "tokens.csv").open("w", newline="") as file:
            csv.writer(file).writerow([ADMIN_TOKEN, "admin", "admin", "system:masters"])
        key = ec.generate_private_key(ec.SECP256R1())
        encoded = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        (self._folder / "accounts.key").write_bytes(encoded)

    def _etcd_command(self) -> list[str | Path]:
        clients, peers = (f"http://127.0.0.1:{p}" for p in (self._etcd_port, self._peer_port))
        return [
            self._binaries.etcd,
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        ]

    def _server_command(self) -> list[str | Path]:
        return [
            self._binaries.kube_apiserver,
            *self._flags,
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            # It signs its own certificate there, and finds it again.
            f"--cert-dir={self.certificate.parent}",
            f"--audit-policy-file={self._folder / 'audit.yaml'}",
            f"--audit-log-path={self._folder / 'audit.log'}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._folder / 'accounts.key'}",
            f"--service-account-signing-key-file={self._folder / 'accounts.key'}",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--authorization-mode=RBAC",
            # No controller makes the ServiceAccounts and tokens that it asks for.
            "--disable-admission-plugins=ServiceAccount",
        ]

    def _run(self, name: str, command: Sequence[str | Path]) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                dying_with_us(*command), stdout=log, stderr=log, cwd=self._folder
            )


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None:
        process.kill()
        process.wait()
