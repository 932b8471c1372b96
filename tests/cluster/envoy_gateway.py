"""Envoy Gateway: its program and its chart, both out of one module of the Go module proxy.

`make cluster-gateway` begins with this module, which builds what is missing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Final

from tests.apiserver.binaries import NICENESS
from tests.cluster.place import REGISTRY
from tests.go_program import GoProgram, GoProgramError

PROGRAM: Final = GoProgram(
    name="envoy-gateway",
    package="github.com/envoyproxy/gateway/cmd/envoy-gateway",
    version="v1.8.3",
    target="cluster-gateway",
)
MODULE: Final = "github.com/envoyproxy/gateway"
IMAGE: Final = f"{REGISTRY}/envoy-gateway:{PROGRAM.version}"
_FLAGS: Final = "-trimpath -p=2 -ldflags=-s"
"""Flags of Go.

Two compilers run at a time, as each may take a gigabyte; a program of 200 MB has no symbols.
"""


def is_built(environment: Mapping[str, str]) -> bool:
    return PROGRAM.place(environment).exists() and chart(environment).exists()


def chart(environment: Mapping[str, str]) -> Path:
    """Return the folder of its chart, with its CRDs and those of the Gateway API."""
    return PROGRAM.place(environment).with_name("gateway-helm")


def build(environment: Mapping[str, str]) -> None:
    """Build the program and fetch the chart, each if it is missing.

    Raises `GoProgramError`, `subprocess.CalledProcessError`.
    """
    flags = f"{environment.get('GOFLAGS', '')} {_FLAGS}".strip()
    static = {**environment, "CGO_ENABLED": "0", "GOFLAGS": flags}
    PROGRAM.build(static)
    kept = chart(environment)
    if kept.exists():
        return
    command = ["go", "mod", "download", "-json", f"{MODULE}@{PROGRAM.version}"]
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        # Outside of any module: that of its own says what else it wants.
        told = subprocess.run(
            command, cwd=scratch, env=static, check=True, capture_output=True, text=True
        )
        beside = Path(scratch, "gateway-helm")
        # The files of modules may be read only.
        shutil.copytree(
            Path(json.loads(told.stdout)["Dir"], "charts/gateway-helm"),
            beside,
            copy_function=shutil.copyfile,
        )
        for folder in (beside, *(path for path in beside.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        _fill(beside)
        os.rename(beside, kept)


def _fill(folder: Path) -> None:
    """Name the image in the chart, as its release does."""
    template = Template((folder / "values.tmpl.yaml").read_text(encoding="utf-8"))
    filled = template.substitute(GatewayImage=IMAGE, GatewayImagePullPolicy="IfNotPresent")
    (folder / "values.yaml").write_text(filled, encoding="utf-8")


def main() -> int:
    """Build what is missing; return 0, or 1 if it could not be built."""
    os.nice(NICENESS)
    if not is_built(os.environ):
        print("building Envoy Gateway with Go: a quarter of an hour, once", file=sys.stderr)
    try:
        build(os.environ)
    except (GoProgramError, subprocess.CalledProcessError) as error:
        print(f"{PROGRAM.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
