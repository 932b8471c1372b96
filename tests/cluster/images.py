"""Images without a container engine: layers are folders, an image is an archive for containerd.

Each image is kept by what it is made of, and made again when that has changed.
"""

import hashlib
import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.chart.rendering import ROOT
from tests.cluster import envoy_gateway
from tests.cluster.place import REGISTRY, ClusterError, Place
from tests.release import dockerfile
from tests.release.roots import Root

SUITE: Final = "bookworm"
PACKAGES: Final = ("python3", "python3-venv", "python-is-python3", "ca-certificates")
"""Packages of the base image. Its Python is older than that of the image that users have."""
DOCKERFILE: Final = ROOT / "deploy/Dockerfile"
PAUSE: Final = f"{REGISTRY}/pause:1"
HOMING: Final = f"{REGISTRY}/homing:test"
SIMULATOR: Final = f"{REGISTRY}/homing-sim:test"
EARLIER: Final = f"{REGISTRY}/homing:earlier"
EARLIER_COMMIT: Final = "9e21239e24794fe862a44b62a2d6aac744c91f7f"
"""Commit that stands for the version before: nothing is released yet."""
ENVOY: Final = "docker.io/envoyproxy/envoy:distroless-v1.40.0"
"""Image of Envoy that the chart names."""
NOBODY: Final = "65532:65532"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSTALLED: Final = "/opt/homing"

Tell = Callable[[str], None]


class Images:
    """Maker of the images that are missing."""

    def __init__(self, place: Place, environment: Mapping[str, str], tell: Tell) -> None:
        self._place = place
        self._environment = environment
        self._tell = tell
        self._used: set[Path] = set()

    def archives(self) -> dict[str, Path]:
        """Return name of the image -> its archive, and delete archives of earlier trees.

        Raises `ClusterError`.
        """
        self._place.existing(self._place.images)
        self._used.clear()
        base = self._base()
        envoy = {"User": NOBODY, "Entrypoint": ["/usr/local/bin/envoy"], "StopSignal": "SIGTERM"}
        found = {
            PAUSE: self._archive(
                PAUSE, {"Entrypoint": ["/pause"], "User": NOBODY}, [self._pause()]
            ),
            ENVOY: self._archive(ENVOY, envoy, [base, self._envoy()]),
            HOMING: self._archive(HOMING, _said("epp"), [base, self._stage(base, "epp")]),
            SIMULATOR: self._archive(SIMULATOR, _said("sim"), [base, self._stage(base, "sim")]),
        }
        if has_earlier():
            layers = [base, self._earlier(base)]
            found[EARLIER] = self._archive(EARLIER, _said("epp"), layers)
        if envoy_gateway.is_built(self._environment):
            alone = {"User": NOBODY, "Entrypoint": ["/usr/local/bin/envoy-gateway"]}
            name = envoy_gateway.IMAGE
            found[name] = self._archive(name, alone, [self._envoy_gateway()])
        for file in self._place.images.glob("*.tar"):
            if file not in self._used:
                file.unlink()
        return found

    # Layers.

    def _pause(self) -> Path:
        source = Path(__file__).with_name("pause")
        return self._layer("pause", [source / "main.go"], lambda into: self._go(source, into))

    def _go(self, source: Path, into: Path) -> None:
        command = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", str(into / "pause"), "."]
        _run(command, cwd=source, env={**self._environment, "CGO_ENABLED": "0"})

    def _envoy(self) -> Path:
        # What is on PATH is a program in Python that starts it.
        envoy = Path(str(importlib.util.find_spec("envoy").origin)).parent / "_bin/envoy"

        def lay(into: Path) -> None:
            place = into / "usr/local/bin"
            place.mkdir(parents=True)
            shutil.copy(envoy, place / "envoy")

        return self._layer("envoy", [envoy], lay)

    def _envoy_gateway(self) -> Path:
        """Return the layer of Envoy Gateway.

        A static program needs nothing but the folders that it writes to.
        """
        program = envoy_gateway.PROGRAM

        def lay(into: Path) -> None:
            place = _made(into / "usr/local/bin")
            shutil.copy(program.place(self._environment), place / program.name)
            for name in ("tmp", "var/lib/eg"):
                _made(into / name).chmod(0o1777)

        return self._layer(program.name, [], lay, program.version)

    def _base(self) -> Path:
        """Return the layer that stands for python:3.x-slim. Raises `ClusterError`."""
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

    def _stage(self, base: Path, target: str) -> Path:
        """Return the layer that the stage `target` of deploy/Dockerfile puts over its base."""
        wanted = [DOCKERFILE, *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))]
        wanted += [path for name in ("lock", "epp", "sim") for path in _files(ROOT / name)]

        return self._layer(
            target, wanted, lambda into: self._install(ROOT, target, base, into), base.name
        )

    def _earlier(self, base: Path) -> Path:
        """Return the layer of the stage of the picker in the version before."""

        def lay(into: Path) -> None:
            with tempfile.TemporaryDirectory(dir=self._place.images) as scratch:
                unpack_earlier(Path(scratch))
                self._install(Path(scratch), "epp", base, into)

        return self._layer("earlier", [], lay, base.name, EARLIER_COMMIT)

    def _install(self, tree: Path, target: str, base: Path, into: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._place.images) as scratch:
            built = dockerfile.build(
                *(tree / "deploy/Dockerfile", tree, Path(scratch)),
                Root.environment() | {"PATH": _PATH},
                target=target,
                based=lambda path: _BaseRoot(path, base),
            )
            _made(into / "opt")
            shutil.move(built.root.at(_INSTALLED), into / "opt")

    def _layer(
        self, name: str, sources: Sequence[Path], lay: Callable[[Path], None], *besides: str
    ) -> Path:
        """Return an archive of what `lay` puts into a folder, kept by the content of `sources`."""
        digest = hashlib.sha256(repr((name, besides)).encode())
        for path in sources:
            digest.update(path.read_bytes())
        file = self._place.images / f"{name}-{digest.hexdigest()[:16]}.tar"
        self._used.add(file)
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
        """Return the archive of the image `name`, made of `layers`, lowest first."""
        key = hashlib.sha256(repr((name, config, [one.name for one in layers])).encode())
        short = name.rpartition("/")[2].partition(":")[0]
        file = self._place.images / f"image-{short}-{key.hexdigest()[:16]}.tar"
        self._used.add(file)
        if not file.exists():
            self._tell(f"writing the image {short}")
            beside = file.with_suffix(".new")
            _write_image(beside, name, config, layers)
            beside.rename(file)
        return file


def has_earlier() -> bool:
    """Return whether this clone goes back to the version before."""
    command = ["git", "cat-file", "-e", EARLIER_COMMIT]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def unpack_earlier(into: Path) -> None:
    """Unpack the tree of the version before into the folder `into`."""
    archive = into / "tree.tar"
    _run(["git", "archive", "--output", str(archive), EARLIER_COMMIT], cwd=ROOT)
    _run(["tar", "-C", str(into), "-xf", str(archive)])
    archive.unlink()


def _write_image(file: Path, name: str, config: Mapping[str, Any], layers: Sequence[Path]) -> None:
    """Write an archive like those of `docker save`."""
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


class _BaseRoot:
    """Root of its own that begins as the base image."""

    def __init__(self, path: Path, base: Path) -> None:
        self.path = path
        _run(["tar", "-C", str(_made(path)), "-xf", str(base)])
        # What reaches registries as this machine does.
        for name in ("etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt"):
            shutil.copy(Path("/", name), path / name)

    def at(self, path: str | Path) -> Path:
        return self.path / str(path).lstrip("/")

    def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: str = "/"
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` in this root; its output is dropped. Raises `ClusterError` if it fails."""
        variables = [f"{name}={value}" for name, value in environment.items()]
        inside = ["chroot", str(self.path), "env", "-i", f"--chdir={folder}", *variables, *command]
        _run(inside)
        return subprocess.CompletedProcess(command, 0, "")


def _said(target: str) -> dict[str, Any]:
    """Return the settings of the image that the stage `target` of the Dockerfile becomes.

    Its base has `_PATH`.
    """
    variables = {"PATH": _PATH}
    said: dict[str, Any] = {}
    for name, text in dockerfile.stages_of(DOCKERFILE.read_text(encoding="utf-8"))[target]:
        if name == "ENV":
            for pair in shlex.split(text):
                variable, _, value = pair.partition("=")
                variables[variable] = value.replace("$PATH", variables["PATH"])
        elif name in {"ENTRYPOINT", "CMD"}:
            said[name.capitalize()] = json.loads(text)
        elif name in {"USER", "STOPSIGNAL"}:
            said["User" if name == "USER" else "StopSignal"] = text
    return {**said, "Env": [f"{name}={value}" for name, value in variables.items()]}


def _run(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Return what `command` prints. Raises `ClusterError` with its last words."""
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
