"""Images without a container engine: layers are folders, an image is an archive that containerd reads.

Each image is kept by what it is made of, and made again when that has changed.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sim.demo.arm import find_envoy
from tests.chart.rendering import ROOT
from tests.cluster.place import REGISTRY, ClusterError, Place

SUITE: Final = "bookworm"
PYTHON: Final = "3.11"
"""That of the suite; the image that users have is of a newer one."""
PACKAGES: Final = ("python3", "python3-venv", "ca-certificates")
PAUSE: Final = f"{REGISTRY}/pause:1"
HOMING: Final = f"{REGISTRY}/homing:test"
ENVOY: Final = "docker.io/envoyproxy/envoy:distroless-v1.40.0"
"""What the chart names."""
NOBODY: Final = "65532:65532"
_PATH: Final = "PATH=/opt/homing/bin:/usr/local/bin:/usr/bin:/bin"
_LAST: Final = ("opentelemetry-proto",)
"""Wheels of `deploy/Dockerfile` that are laid over those of others."""
_FOUND: Final = "/opt/homing"

Tell = Callable[[str], None]


class Images:
    """Makes what is missing of them."""

    def __init__(self, place: Place, environment: Mapping[str, str], tell: Tell) -> None:
        self._place = place
        self._environment = environment
        self._tell = tell

    def archives(self) -> dict[str, Path]:
        """Name of the image -> its archive. Raises `ClusterError`."""
        self._place.existing(self._place.images)
        base = self._base()
        return {
            PAUSE: self._archive(
                PAUSE, {"Entrypoint": ["/pause"], "User": NOBODY}, [self._pause()]
            ),
            ENVOY: self._archive(
                ENVOY,
                {
                    "Env": [_PATH],
                    "User": NOBODY,
                    "Entrypoint": ["/usr/local/bin/envoy"],
                    "StopSignal": "SIGTERM",
                },
                [base, self._envoy()],
            ),
            HOMING: self._archive(
                HOMING,
                {
                    "Env": [
                        *(_PATH, "HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1"),
                        *("PYTHONFAULTHANDLER=1", "PYTHONUNBUFFERED=1"),
                    ],
                    "User": NOBODY,
                    "Entrypoint": ["epp"],
                    "Cmd": ["serve", "--help"],
                    "StopSignal": "SIGTERM",
                },
                [base, *self._homing()],
            ),
        }

    # Layers.

    def _pause(self) -> Path:
        source = Path(__file__).with_name("pause")
        return self._layer("pause", [source / "main.go"], lambda into: self._go(source, into))

    def _go(self, source: Path, into: Path) -> None:
        command = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(into / "pause"), "."]
        _run(command, cwd=source, env={**self._environment, "CGO_ENABLED": "0"})

    def _envoy(self) -> Path:
        envoy = find_envoy()

        def lay(into: Path) -> None:
            place = into / "usr/local/bin"
            place.mkdir(parents=True)
            shutil.copy(envoy, place / "envoy")

        return self._layer("envoy", [envoy], lay)

    def _base(self) -> Path:
        """What python:3.x-slim stands for."""
        mirror = _run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
        ).split()
        if not mirror:
            raise ClusterError("apt names no mirror to make the base image from")
        (first, *_) = [one for one in mirror if "security" not in one]

        def lay(into: Path) -> None:
            _run(
                [
                    *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
                    *(SUITE, str(into), first),
                ],
                env={**self._environment, "PATH": f"/usr/sbin:/sbin:{os.environ['PATH']}"},
            )
            for rest in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
                shutil.rmtree(into / rest, ignore_errors=True)

        return self._layer("base", [], lay, SUITE, *PACKAGES)

    def _homing(self) -> list[Path]:
        """The steps of deploy/Dockerfile: what it needs, and the product over it."""
        lock = ROOT / "lock/runtime.txt"
        needed = self._layer("needed", [lock], lambda into: self._install(lock, into))
        sources = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
        sources += [path for name in ("epp", "sim") for path in _files(ROOT / name)]
        return [needed, self._layer("product", sources, self._install_product)]

    def _install(self, lock: Path, into: Path) -> None:
        wanted = [*("--require-hashes", "--only-binary=:all:", "--python-version", PYTHON)]
        with tempfile.TemporaryDirectory(dir=self._place.images) as scratch:
            root = Path(scratch, "root")
            wheels = root / "wheels"
            _run(["tar", "-C", str(_made(root)), "-xf", str(self._base())])
            wheels.mkdir()
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
            _run([*pip, *wanted, "-r", str(lock)])
            shutil.copy(lock, root / "lock.txt")
            install = f"{_FOUND}/bin/pip install --quiet --no-index --find-links /wheels"
            last = " ".join(_LAST)
            _inside(root, f"python3 -m venv {_FOUND}")
            _inside(root, f"{install} --require-hashes -r /lock.txt")
            _inside(root, f"{install} --no-deps --force-reinstall {last}")
            _inside(root, f"{_FOUND}/bin/python -m compileall -q {_FOUND}/lib")
            _made(into / "opt")
            shutil.move(root / "opt/homing", into / "opt/homing")

    def _install_product(self, into: Path) -> None:
        packages = _made(into / f"opt/homing/lib/python{PYTHON}/site-packages")
        with tempfile.TemporaryDirectory() as scratch:
            pip = [sys.executable, "-m", "pip"]
            _run(
                [
                    *(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
                    *("--wheel-dir", scratch, str(ROOT)),
                ]
            )
            (wheel,) = Path(scratch).glob("*.whl")
            _run(
                [
                    *(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile"),
                    *("--target", str(packages), str(wheel)),
                ]
            )
        commands = _made(into / "opt/homing/bin")
        for command in (packages / "bin").iterdir():
            lines = command.read_text().splitlines(keepends=True)
            lines[0] = f"#!{_FOUND}/bin/python3\n"
            (commands / command.name).write_text("".join(lines))
            (commands / command.name).chmod(0o755)
        shutil.rmtree(packages / "bin")

    def _layer(
        self, name: str, sources: Sequence[Path], lay: Callable[[Path], None], *besides: str
    ) -> Path:
        """An archive of what `lay` puts into a folder; kept by the content of `sources`."""
        digest = hashlib.sha256(repr((name, besides)).encode())
        for path in sources:
            digest.update(path.read_bytes())
        file = self._place.images / f"{name}-{digest.hexdigest()[:16]}.tar"
        if not file.exists():
            self._tell(f"making the layer {name!r}")
            with tempfile.TemporaryDirectory(dir=self._place.images) as scratch:
                folder = _made(Path(scratch, "layer"))
                # What is made for the user of an image is read by him.
                folder.chmod(0o755)
                lay(folder)
                archive = Path(scratch, "layer.tar")
                _run(
                    [
                        *("tar", "-C", str(folder), "--numeric-owner", "--owner=0", "--group=0"),
                        *("--sort=name", "--mtime=@0", "-cf", str(archive), "."),
                    ]
                )
                archive.rename(file)
        return file

    def _archive(self, name: str, config: Mapping[str, Any], layers: Sequence[Path]) -> Path:
        """The image `name` of `layers`, lowest first."""
        key = hashlib.sha256(repr((name, config, [one.name for one in layers])).encode())
        short = name.rpartition("/")[2].partition(":")[0]
        file = self._place.images / f"image-{short}-{key.hexdigest()[:16]}.tar"
        if not file.exists():
            self._tell(f"writing the image {short}")
            beside = file.with_suffix(".new")
            _write_image(beside, name, config, layers)
            beside.rename(file)
        return file


def _write_image(file: Path, name: str, config: Mapping[str, Any], layers: Sequence[Path]) -> None:
    """An archive as `docker save` writes them."""
    digests = [_digest(layer) for layer in layers]
    settings = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one}" for one in digests]},
            "history": [{"created_by": layer.name} for layer in layers],
        }
    ).encode()
    named = f"{hashlib.sha256(settings).hexdigest()}.json"
    manifest = json.dumps(
        [{"Config": named, "RepoTags": [name], "Layers": [f"{one}/layer.tar" for one in digests]}]
    ).encode()
    with tarfile.open(file, "w") as archive:
        for member, content in ((named, settings), ("manifest.json", manifest)):
            told = tarfile.TarInfo(member)
            told.size = len(content)
            archive.addfile(told, io.BytesIO(content))
        for digest, layer in zip(digests, layers, strict=True):
            archive.add(layer, f"{digest}/layer.tar")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _inside(root: Path, command: str) -> None:
    path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    _run(["chroot", str(root), "/usr/bin/env", "-i", path, "HOME=/tmp", "sh", "-euc", command])


def _run(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """What it prints. Raises `ClusterError` with its last words."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ClusterError(f"`{' '.join(command[:6])} ...` ended with {done.returncode}: {last}")
    return done.stdout
