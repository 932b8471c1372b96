"""Sizes of what the images install, in MiB by purpose: `python -m tests.release.image_sizes`.

The steps are those of deploy/Dockerfile: each lock file is installed into an empty environment without
pip, unused files are removed, and the rest is compiled. `epp`, `sim` and `homing_rivals` are those of
the checkout. Sizes are blocks on the disk, as `du` counts them.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
IMAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "epp": ("epp", "sim"),
    "sim": ("epp", "sim", "rivals/homing_rivals"),
}
"""Packages of the checkout in each image. The picker's wheel contains `sim` too."""
LOCKS: Final = {"epp": "lock/runtime.txt", "sim": "lock/sim.txt"}
UNUSED: Final = (
    "*/kubernetes/*client/*/[a-z]*.py",
    "*/tests/test_*",
    "*.pyi",
    "*.pyx",
    "*.pxd",
    "*.[ch]",
)
"""Files that the Dockerfile removes, as patterns of `find -path`."""
PURPOSES: Final[Mapping[str, tuple[str, ...]]] = {
    "numpy": ("numpy", "numpy.libs"),
    "envoy-data-plane, pydantic and what they need": (
        *("envoy_data_plane", "betterproto2", "pydantic", "pydantic_core", "annotated_types"),
        *("typing_inspection", "dateutil", "python_dateutil", "grpclib", "h2", "hpack"),
        "hyperframe",
    ),
    "grpcio, protobuf": (
        *("grpc", "grpcio", "grpc_health", "grpcio_health_checking", "google", "protobuf"),
        "googleapis_common_protos",
    ),
    "cryptography, cffi": ("cryptography", "cffi", "pycparser", "_cffi_backend"),
    "uvloop": ("uvloop",),
    "aiohttp and what it needs": (
        *("aiohttp", "yarl", "multidict", "frozenlist", "propcache", "aiosignal"),
        *("aiohappyeyeballs", "attr", "attrs", "idna"),
    ),
    "epp and sim": ("epp", "sim", "homing_rivals"),
    "rich, pygments": ("rich", "pygments", "markdown_it", "markdown_it_py", "mdurl"),
    "opentelemetry": ("opentelemetry",),
    "kubernetes": ("kubernetes", "kubernetes_asyncio"),
    "tokenizers, tiktoken and what they need": (
        *("tokenizers", "tiktoken", "tiktoken_ext", "regex", "huggingface_hub", "hf_xet"),
        *("filelock", "fsspec", "httpx2", "httpcore2", "h11", "anyio", "click"),
        *("truststore", "jinja2", "markupsafe"),
    ),
    "valkey, libvalkey": ("valkey", "libvalkey"),
    "pyarrow": ("pyarrow", "pyarrow.libs"),
    "optuna, sqlalchemy, alembic": ("optuna", "sqlalchemy", "alembic", "mako", "greenlet"),
}
"""Names in site-packages, without suffixes and versions, by the rows of the table."""
REST: Final = "the rest"


def purpose(entry: str) -> str:
    """Return the row of the table to which the `entry` of site-packages belongs."""
    name = entry.partition(".cpython")[0].lower()
    if name.endswith(".dist-info"):
        name = name.rpartition("-")[0].rpartition("-")[0].replace("-", "_")
    for row, names in PURPOSES.items():
        if name in names or (row == "opentelemetry" and name.startswith("opentelemetry")):
            return row
    return REST


def installed(image: str, folder: Path) -> Path:
    """Install what `image` contains in the empty `folder`, and return its site-packages."""
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "install"]
    locked = ["--require-hashes", "--only-binary=:all:", "-r", str(ROOT / LOCKS[image])]
    subprocess.run([*pip, "--no-compile", *locked], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in IMAGES[image]:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, packages / Path(name).name, ignore=ignored)
    for pattern in UNUSED:
        subprocess.run(
            ["find", folder / "lib", "-type", "f", "-path", pattern, "-delete"], check=True
        )
    skipped = "/pygments/(lexers|styles)/[a-z]"
    subprocess.run([python, "-m", "compileall", "-q", "-x", skipped, folder / "lib"], check=True)
    return packages


def sizes_kib(packages: Path) -> Counter[str]:
    """Return the KiB on disk of each purpose in the site-packages `packages`."""
    entries = sorted(packages.iterdir())
    told = subprocess.run(["du", "-sk", *entries], check=True, capture_output=True, text=True)
    found: Counter[str] = Counter()
    for line in told.stdout.splitlines():
        size, _, path = line.partition("\t")
        found[purpose(Path(path).name)] += int(size)
    return found


def table(images: Mapping[str, Mapping[str, int]]) -> str:
    """Return a Markdown table of the sizes in KiB `images`, by image and purpose, in MiB."""
    rows = [
        ["MiB", *images],
        ["---"] * (1 + len(images)),
        *(
            [name, *(_mib(sizes.get(name, 0)) for sizes in images.values())]
            for name in (*PURPOSES, REST)
        ),
        ["together", *(_mib(sum(sizes.values())) for sizes in images.values())],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _mib(size_kib: int) -> str:
    return f"{size_kib / 1024:.0f}" if size_kib else ""


def _first_number(line: str) -> int:
    return int(line.split(maxsplit=1)[0])


def _short(line: str) -> str:
    size, _, path = line.partition("\t")
    return f"{Path(path).name} {size}"


def main() -> int:
    images: dict[str, Counter[str]] = {}
    for image in IMAGES:
        with tempfile.TemporaryDirectory() as folder:
            packages = installed(image, Path(folder))
            images[image] = sizes_kib(packages)
            rest = [entry for entry in packages.iterdir() if purpose(entry.name) == REST]
            told = subprocess.run(["du", "-sm", *sorted(rest)], capture_output=True, check=True)
            largest = sorted(told.stdout.decode().splitlines(), key=_first_number)[-8:]
            print(f"the largest of {REST} of {image}:", *map(_short, largest), file=sys.stderr)
    print(table(images))
    return 0


if __name__ == "__main__":
    sys.exit(main())
