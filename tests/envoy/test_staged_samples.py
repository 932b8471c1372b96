"""Every configuration of the field's samples and guides serves simulated pods with sidecars.

Real Envoy, `epp serve` with the file, real HTTP. Each request is prefilled, decoded and encoded by
pods of the roles that its configuration says.
"""

import contextlib

import pytest

from epp.plugins.filters import ROLE_LABEL
from epp.shell.gateway.bootstrap import BootstrapOptions
from tests.configuration.staged_samples import NAMES, path_of, supported
from tests.envoy.process import EppProcess, write_endpoints
from tests.envoy.rig import http_client, running_envoy, until
from tests.envoy.test_replicas import metric
from tests.sim.pods.role_pods import MODEL, running_roles

pytestmark = pytest.mark.envoy

STARTS_IN_S = 60.0
TEXT = {"type": "text", "text": "What is this? " + "word " * 200}
IMAGE = {"type": "image_url", "image_url": {"url": "http://images.test/1.png"}}
PD = ("prefill", "prefill", "decode", "decode")
EPD = ("encode", *PD)
ALONE = ("decode",)
APART = ("prefill", "decode")
WITH_IMAGE = ("encode", "prefill", "decode")
ROLES_AND_STAGES = {
    "data-parallel": (("decode", "decode"), ALONE, ALONE),
    "prefill-decode": (PD, APART, APART),
    "prefill-decode-topology": (PD, APART, APART),
    "prefill-decode-simulated": (PD, APART, APART),
    "encode-prefill-decode": (EPD, APART, WITH_IMAGE),
    "encode-decode": (
        ("encode", "prefill-decode", "prefill-decode"),
        ("prefill-decode",),
        ("encode", "prefill-decode"),
    ),
    "media-cache": (("decode", "decode"), ALONE, ALONE),
    "guide-prefill-decode": (PD, APART, APART),
    "guide-wide-expert-parallel": (PD, APART, APART),
    "guide-encode-prefill-decode": (EPD, APART, WITH_IMAGE),
    "guide-context-length": (PD, APART, APART),
    "guide-context-length-near": (PD, APART, APART),
    "guide-coordinated-phases": (EPD, ALONE, ALONE),
}
"""By sample: roles of the pods, and the stages of a text and of an image, in order."""
PAIRED = {
    "prefill-decode-topology",
    "guide-wide-expert-parallel",
    "guide-context-length",
    "guide-context-length-near",
}
"""Samples that serve a request by pods of one node, or of one revision and slice."""


def labels_of(name, role):
    """Labels of a pod; those with the same number share node, revision and slice."""
    number = name.rsplit("-", 1)[1]
    return {
        ROLE_LABEL: role,
        "kubernetes.io/hostname": f"node-{number}",
        "example.com/nvlink-domain": f"rack-{number}",
        "disaggregatedset.x-k8s.io/name": "my-set",
        "disaggregatedset.x-k8s.io/role": role,
        "disaggregatedset.x-k8s.io/revision": f"revision-{number}",
        "disaggregatedset.x-k8s.io/slice": f"slice-{number}",
        "llm-d.ai/context-length-range": "0-8192",
    }


def stages_of(ports):
    """The roles of the engines at these ports."""
    return tuple(port.rsplit("-", 1)[0] for port in ports)


@contextlib.asynccontextmanager
async def serving(name, roles, folder):
    """Yield the pods, the picker with the configuration `name` and a client of Envoy. The picker has
    no configuration if `name` is "".
    """
    async with running_roles(*roles) as pods:
        for pod in pods.pods:
            pod.labels = labels_of(pod.name, pod.role)
        picker = EppProcess(
            folder / "epp.log",
            *(f"--endpoints-file={write_endpoints(folder, pods.pods)}",),
            *((f"--config-file={write_config(name, pods.pods[0], folder)}",) if name else ()),
            *("--secure-serving=false", "--drain-grace=0s", "--drain-timeout=1s"),
        )
        await picker.launch()
        try:
            await until(picker.is_ready, "epp serve to be ready", STARTS_IN_S)

            async def all_ready():
                return await metric(picker, "homing_ready_endpoints") == len(roles)

            await until(all_ready, "all pods to be ready")
            options = BootstrapOptions(picker_address=picker.address, plaintext=True)
            async with running_envoy(options, folder) as envoy, http_client(envoy) as client:
                yield pods, picker, client
        finally:
            if picker.alive:
                await picker.kill()
            print(f"--- end of the log of epp serve\n{picker.log_text()[-4000:]}")


def write_config(name, first, folder):
    """Write the configuration `name` with the address of the pod `first`; return its file."""
    text = path_of(name).read_text()
    values = {
        "http://localhost:8000": f"http://{first.address}",
        "hf-repo/model-name": MODEL,
        "primaryPort: 8000": f"primaryPort: {first.port}",
    }
    for written, value in values.items():
        text = text.replace(written, value)
    file = folder / "config.yaml"
    file.write_text(text)
    return file


def test_every_sample_is_served():
    assert sorted(ROLES_AND_STAGES) == NAMES


@pytest.mark.parametrize("name", supported())
async def test_a_sample_serves_texts_and_images_by_role(name, tmp_path):
    roles, of_text, of_image = ROLES_AND_STAGES[name]
    async with serving(name, roles, tmp_path) as (pods, picker, client):
        for content, stages in (([TEXT], of_text), ([IMAGE, TEXT], of_image)):
            pods.seen.clear()
            question = {"type": "text", "text": f"Question {len(stages)} about {len(content)}"}
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": [question, *content]}],
                "max_tokens": 4,
            }
            async with client.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                assert (await response.json())["usage"]["completion_tokens"] > 0
            engines = [port for port in pods.ports() if port.endswith("engine")]
            assert stages_of(engines) == stages
            if name in PAIRED:
                assert len({engine.split()[0].rsplit("-", 1)[1] for engine in engines}) == 1
        if of_text is not ALONE:
            assert await metric(picker, "homing_routes_total") == 2
        assert await metric(picker, "homing_request_error_total") == 0


async def test_a_coordinator_names_the_stage_of_each_request(tmp_path):
    """Each of its requests is served by one pod of that role."""
    name = "guide-coordinated-phases"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [IMAGE, TEXT]}],
        "max_tokens": 1,
    }
    async with serving(name, EPD, tmp_path) as (pods, _, client):
        for stage in WITH_IMAGE:
            pods.seen.clear()
            headers = {"EPP-Profile": stage}
            async with client.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
            engines = [port for port in pods.ports() if port.endswith("engine")]
            assert stages_of(engines) == (stage,)


@pytest.mark.parametrize("roles", [("encode", "decode"), ("encode", "prefill", "decode")])
async def test_without_a_configuration_images_are_encoded_by_role(roles, tmp_path):
    """When the encode pod is gone, the decode pod encodes."""

    async def stages_for(content):
        pods.seen.clear()
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
        }
        async with client.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return ()
        return stages_of(port for port in pods.ports() if port.endswith("engine"))

    async with serving("", roles, tmp_path) as (pods, picker, client):
        assert await stages_for([TEXT]) == ALONE
        assert await stages_for([IMAGE, TEXT]) == ("encode", "decode")
        assert await metric(picker, 'homing_routes_total{route="encode-decode"}') == 1
        await pods["encode-0"].stop()

        async def falls_back():
            return await stages_for([IMAGE, TEXT]) == ALONE

        await until(falls_back, "the fallback to serve")
        assert await metric(picker, 'homing_routes_total{route="aggregated-fallback"}') >= 1
