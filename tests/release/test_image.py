"""The image without a container engine: its steps, and what it runs as Kubernetes runs it."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from epp import __version__
from tests.release import dockerfile, roots
from tests.release.dockerfile import Instruction, instructions, stages_of
from tests.release.roots import Root
from tests.release.serving import serve_and_drain
from tests.release.test_distributions import sources

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"


@pytest.fixture
def rooms(tmp_path):
    """A folder for roots, where the machine lets us have them."""
    try:
        roots.check(tmp_path)
    except roots.RootError as error:
        pytest.skip(str(error))
    return tmp_path


@pytest.fixture
def installed(rooms):
    """A root with the wheels, and beside it, read-only, what they depend on.

    The rivals' too: `make` installs them from the tree, which the root has not, and their entry
    points are in what is beside it.
    """
    packages = Path(sysconfig.get_path("purelib")).resolve()
    if packages.is_relative_to("/tmp"):
        pytest.skip(f"{packages} is in /tmp, which the root has for itself")
    root = Root(rooms / "root", also=[packages])
    environment = Root.environment()
    wheels = [
        Path(wheel).name
        for project in (ROOT, ROOT / "rivals")
        for wheel in WheelBuilder(str(project)).build(directory=str(root.at("/dist")))
    ]
    root.run(["python3", "-m", "venv", "--without-pip", "/opt/homing"], environment=environment)
    python = "/opt/homing/bin/python"
    found = root.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        environment=environment,
    )
    root.at(f"{found.stdout.strip()}/dependencies.pth").write_text(f"{packages}\n")
    root.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-index",
            "--ignore-installed",
            *(f"/dist/{wheel}" for wheel in wheels),
        ],
        environment=environment,
    )
    return root, environment | {"PATH": f"/opt/homing/bin:{environment['PATH']}"}


@pytest.mark.timeout(180)
async def test_the_wheel_serves_by_nobody_in_a_read_only_root(installed, tmp_path):
    """Installed and not from the tree: started, probed, asked for a decision, drained."""
    root, environment = installed
    lines = await serve_and_drain(root, ["epp"], environment, tmp_path / "log")
    assert [
        line["event"]
        for line in lines
        if line["event"] in {"picker serving", "drain started", "picker stopped"}
    ] == ["picker serving", "drain started", "picker stopped"]
    assert lines[-1]["decisions"] == 1
    assert not [line for line in lines if line["level"] in {"error", "critical"}]
    assert list(root.at("/tmp").rglob("*")) == [], "it needs not even /tmp"


@pytest.mark.parametrize("user", [0, 1000], ids=["by root", "by anybody"])
def test_only_tmp_can_be_written(rooms, user, monkeypatch):
    """So that what the test above shows is shown."""
    monkeypatch.setattr(roots.os, "geteuid", lambda: user)
    try:
        roots.check(rooms / "again")
    except roots.RootError as error:
        pytest.skip(str(error))
    root = Root(rooms / "root")
    root.at("/opt/homing").mkdir(parents=True)
    places = ["/x", "/opt/homing/x", "/usr/x", "/etc/x", "/tmp/x"]
    tried = "; ".join(f"(: > {place}) && echo {place}" for place in places)
    environment = Root.environment()
    script = ["sh", "-c", f"exec 2> /dev/null; {tried}; id -u"]
    done = root.run(script, environment=environment, contained=True)
    assert done.stdout.split() == ["/tmp/x", str(roots.USER)]
    assert root.at("/tmp/x").exists()


def test_instructions_are_read_as_a_container_engine_reads_them():
    """Continued lines are one, comments none, also within."""
    text = "# c\nFROM a AS b\nENV X=1 \\\n    Y=$X\nRUN one \\\n# c\n    && two\n"
    assert list(instructions(text)) == [
        Instruction("FROM", "a AS b"),
        Instruction("ENV", "X=1 Y=$X"),
        Instruction("RUN", "one && two"),
    ]


def test_a_stage_has_the_instructions_of_the_stage_that_it_starts_from():
    """After its own `FROM`, and before its own instructions."""
    text = "ARG A\nFROM a AS one\nUSER 1\nFROM one AS two\nENV X=1\nFROM two AS three\nUSER 2\n"
    assert stages_of(text)["three"] == [
        Instruction("FROM", "two AS three"),
        Instruction("USER", "1"),
        Instruction("ENV", "X=1"),
        Instruction("USER", "2"),
    ]


def test_what_is_not_known_is_no_step_that_works(rooms):
    (rooms / "Dockerfile").write_text("FROM a\nVOLUME /x\n")
    with pytest.raises(AssertionError, match="VOLUME is not known"):
        dockerfile.build(rooms / "Dockerfile", rooms, rooms / "roots", {})


def test_a_step_that_fails_fails_the_build(rooms):
    (rooms / "Dockerfile").write_text("FROM a\nRUN true\nRUN echo so && exit 3\nRUN true\n")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        dockerfile.build(rooms / "Dockerfile", rooms, rooms / "roots", Root.environment())
    assert (raised.value.returncode, raised.value.stdout) == (3, "so\n")


@pytest.mark.parametrize("command", ["epp", "sim"])
def test_each_image_says_how_it_runs(command):
    """By a number, which Kubernetes can check is not root; the program itself is process 1."""
    said = stages_of(DOCKERFILE.read_text())[command]
    assert Instruction("USER", "65532:65532") in said
    assert Instruction("ENTRYPOINT", f'["{command}"]') in said
    assert Instruction("STOPSIGNAL", "SIGTERM") in said
    assert "RUN" not in {each.name for each in said}


def test_only_what_is_asked_for_is_built(rooms):
    """And the last stage where nothing is."""
    (rooms / "Dockerfile").write_text(
        "FROM a AS one\nRUN mkdir /kept && touch /kept/one\nFROM a AS two\nRUN exit 3\n"
        "FROM a AS three\nCOPY --from=two / /\nFROM a AS four\nCOPY --from=one /kept /kept\n"
    )
    for number, target in enumerate(("four", "")):
        roots_of_it = rooms / str(number)
        image = dockerfile.build(
            rooms / "Dockerfile", rooms, roots_of_it, Root.environment(), target=target
        )
        assert image.root.at("/kept/one").exists()
        assert {path.name for path in roots_of_it.iterdir()} == {"one", "four"}


@pytest.mark.long
@pytest.mark.timeout(1_800)
async def test_the_steps_of_the_dockerfile_make_a_picker_that_serves(rooms):
    """With what is locked; it runs as its instructions say, and has no more than it needs."""
    image = built(rooms, "epp")
    entrypoint = json.loads(image.said["ENTRYPOINT"])
    lines = await serve_and_drain(image.root, entrypoint, image.environment, rooms / "log")
    assert lines[-1]["event"] == "picker stopped"
    assert __version__ in asked(image, [*entrypoint, "--version"])
    asked(image, ["python", "-c", "import opentelemetry.sdk, rich, valkey"])
    absent = ("envoy", "hatchling", "homing_rivals", "mypy", "optuna", "pip", "pyarrow", "pytest")
    for module in absent:
        with pytest.raises(subprocess.CalledProcessError):
            asked(image, ["python", "-c", f"import {module}"])
    assert bytes_of(image) <= PICKER_BYTES_MAX
    assert asked(image, ["python", "-c", WITHOUT_BYTE_CODE]).split() == []


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_the_steps_of_the_dockerfile_make_a_simulator(rooms):
    """That has what `sim` alone needs, and simulates with it."""
    image = built(rooms, "sim")
    entrypoint = json.loads(image.said["ENTRYPOINT"])
    asked(image, ["python", "-c", "import homing_rivals, optuna, pyarrow.parquet, rich"])
    trace = ["trace", "generate", "chatbot", "--requests", "50", "--out", "/tmp/trace.jsonl"]
    assert asked(image, [*entrypoint, *trace])
    replay = ["replay", "/tmp/trace.jsonl", "--pods", "2", "--out", "/tmp/out"]
    assert asked(image, [*entrypoint, *replay])
    assert image.root.at("/tmp/out/requests.parquet").exists()


WITHOUT_BYTE_CODE = """\
import os, sys
import epp.commands.serve, epp.commands.check_config, epp.shell.gateway.bootstrap
import epp.shell.kubernetes.cluster, epp.shell.operators.traces.otlp, epp.commands.top
import valkey.asyncio
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None) or ""
    if file.startswith("/opt/homing") and file.endswith(".py"):
        if not os.path.exists(module.__cached__):
            print(file)
"""
"""Names what would be compiled at each start, because nothing can be written there."""
PICKER_BYTES_MAX = 225_000_000
"""What deploy/README.md says of it, and a tenth besides for other versions of what is locked."""


def built(rooms, target):
    image = dockerfile.build(
        DOCKERFILE, sources(rooms / "context"), rooms / "roots", Root.environment(), target=target
    )
    assert image.said["USER"] == f"{roots.USER}:{roots.USER}"
    return image


def asked(image, command):
    """What a command prints there, run as Kubernetes runs it."""
    return image.root.run(command, environment=image.environment, contained=True).stdout


def bytes_of(image):
    """Of files; the base image is not counted."""
    paths = image.root.at("/opt/homing").rglob("*")
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_symlink())
