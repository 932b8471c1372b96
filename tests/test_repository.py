"""What holds for the repository as a whole."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import epp
from tests.conftest import LONGEST, TOGETHER

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RIVALS = tomllib.loads((ROOT / "rivals/pyproject.toml").read_text())
PACKAGES = ("epp", "sim", "homing_rivals")
MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("epp", "sim", "rivals/homing_rivals")
    for path in (ROOT / folder).rglob("*.py")
)

COVERED_ELSEWHERE = {
    "epp/shell/operators/logs/set_up.py": (
        "tests/shell/operators/logs/test_decision_log.py",
        "its lines are read there",
    ),
    "epp/app/readiness.py": ("tests/app/test_wiring.py", "a whole picker becomes ready there"),
    "epp/app/reloading.py": ("tests/app/test_wiring.py", "a whole picker is reconfigured there"),
    "epp/app/sources.py": ("tests/app/test_wiring.py", "files break and are mended there"),
    "epp/commands/serve.py": ("tests/app/test_wiring.py", "signals are sent to it"),
    "epp/shell/process/event_loop.py": ("tests/app/test_wiring.py", "which loop it is"),
    "epp/flags/reading.py": ("tests/flags/test_command_lines.py", "command lines are read by it"),
    "epp/flags/reference_picker.py": (
        "tests/flags/test_command_lines.py",
        "its flags are given there",
    ),
    "epp/flags/serve.py": ("tests/flags/test_command_lines.py", "its command line is read there"),
    "epp/flags/subcommands.py": ("tests/flags/test_command_lines.py", "the other tables"),
    "epp/flags/values.py": ("tests/flags/test_command_lines.py", "what flags take"),
    "epp/commands/envoy_config.py": (
        "tests/commands/test_check_config.py",
        "both commands are run there",
    ),
    "epp/shell/gateway/calls.py": ("tests/shell/gateway/test_ext_proc.py", "what transports carry"),
    "epp/shell/gateway/sessions.py": ("tests/app/test_wiring.py", "streams are opened through it"),
    "epp/testing/builders.py": (
        "tests/core/knowledge/test_candidates.py",
        "most tests are made of its values",
    ),
    "epp/testing/churn.py": ("tests/rivals/test_families.py", "every strategy goes through it"),
    "epp/configuration/live.py": (
        "tests/app/test_wiring.py",
        "configurations are changed live there",
    ),
    "epp/shell/peers/carrier.py": ("tests/shell/peers/test_pump.py", "a protocol and its nouns"),
    "epp/shell/peers/state.py": ("tests/shell/peers/test_service.py", "nouns and totals"),
    "epp/core/parameters.py": ("tests/plugins/test_contract.py", "what every plugin is made of"),
    "epp/shell/kubernetes/state.py": ("tests/shell/operators/metrics/test_telemetry.py", "nouns"),
    "sim/demo/__main__.py": ("tests/sim/demo/test_command.py", "the demo is run by it"),
    "epp/configuration/compatibility.py": (
        "tests/configuration/test_config.py",
        "its types are read from configurations",
    ),
    "epp/core/protocol/messages.py": ("tests/core/protocol/test_session.py", "nouns"),
    "epp/core/decision/plugin.py": (
        "tests/plugins/test_contract.py",
        "protocols, held by every plugin",
    ),
    "epp/core/moment.py": ("tests/plugins/test_agreement.py", "what scorers read of it"),
    "epp/core/decision/inputs.py": ("tests/test_golden.py", "transcripts are made of them"),
    "epp/core/decision/settings.py": ("tests/configuration/test_build.py", "what is built there"),
    "epp/core/decision/scheduler.py": ("tests/test_golden.py", "it decides what is written there"),
    "epp/core/types.py": ("tests/core/knowledge/test_pool.py", "nouns"),
    "epp/configuration/document.py": (
        "tests/configuration/test_config.py",
        "the reading of configurations",
    ),
    "epp/shell/operators/metrics/metric_table.py": (
        "tests/shell/operators/metrics/test_telemetry.py",
        "the table is compared there",
    ),
    "epp/shell/operators/decisions/decision_record.py": (
        "tests/shell/operators/decisions/test_recent_decisions.py",
        "what is kept is read back there",
    ),
    "epp/shell/operators/decisions/decision_rows.py": (
        "tests/shell/operators/decisions/test_recent_decisions.py",
        "what is told of what is kept",
    ),
    "epp/shell/operators/pages/endpoint_rows.py": (
        "tests/shell/operators/pages/test_debug_pages.py",
        "pages are made of them",
    ),
    "sim/drive/report.py": (
        "tests/sim/drive/test_command.py",
        "what a drive prints and writes",
    ),
    "sim/drive/streaming.py": (
        "tests/sim/demo/test_client.py",
        "answers that go wrong are read there",
    ),
    "sim/demo/arm.py": ("tests/sim/demo/test_command.py", "a run of the demo goes through it"),
    "sim/pods/exposition.py": (
        "tests/sim/truth/test_truth.py",
        "compared with a page of a real engine",
    ),
    "sim/pods/openai.py": ("tests/sim/pods/test_pods.py", "what the pods speak"),
    "sim/pods/command.py": ("tests/sim/test_main.py", "its command lines are given to it"),
    "sim/pods/serving.py": ("tests/sim/test_main.py", "what it refuses and how it ends"),
    "sim/pods/server.py": ("tests/sim/pods/test_pods.py", "the pods are asked over HTTP"),
    "sim/cluster/check.py": (
        "tests/sim/cluster/test_faults.py",
        "runs after every event of a hundred faulty runs",
    ),
    "sim/commands.py": ("tests/sim/test_main.py", "command lines are given to it"),
    "sim/experiments/compare.py": (
        "tests/sim/experiments/test_replay.py",
        "the three commands are run there",
    ),
    "sim/reports/compare_report.py": (
        "tests/sim/experiments/test_replay.py",
        "its page is opened there",
    ),
    "sim/reports/page_foot.py": (
        "tests/sim/measurement/test_assumptions.py",
        "every page is looked into for it",
    ),
    "sim/interrupts.py": (
        "tests/sim/experiments/test_replay.py",
        "Ctrl-C is sent to every command",
    ),
    "sim/experiments/jobs.py": (
        "tests/sim/experiments/test_replay.py",
        "comparisons and sweeps run through it",
    ),
    "sim/engine/least_squares.py": (
        "tests/sim/truth/test_validate.py",
        "fits the few unknowns of a recording",
    ),
    "sim/measurement/measures.py": ("tests/sim/cluster/test_cluster.py", "what runs are judged by"),
    "sim/output.py": ("tests/sim/experiments/test_replay.py", "the folders are looked into"),
    "sim/reports/report.py": (
        "tests/sim/experiments/test_replay.py",
        "what a replay prints and writes",
    ),
    "sim/experiments/run.py": ("tests/sim/experiments/test_facts.py", "one run"),
    "sim/experiments/run_options.py": (
        "tests/sim/experiments/test_replay.py",
        "flags that make no sense are refused there",
    ),
    "sim/sentences.py": ("tests/sim/experiments/test_replay.py", "what is refused is told by it"),
    "sim/cluster/simulated_pod.py": (
        "tests/sim/cluster/test_cluster.py",
        "the pods of every cluster",
    ),
    "sim/experiments/proposals.py": (
        "tests/sim/experiments/test_search.py",
        "searches ask it and tell it",
    ),
    "sim/experiments/measured_runs.py": (
        "tests/sim/experiments/test_tune.py",
        "which requests its runs are of, and that none is done twice",
    ),
    "sim/experiments/sweep.py": (
        "tests/sim/experiments/test_replay.py",
        "the three commands are run there",
    ),
    "sim/reports/sweep_report.py": (
        "tests/sim/experiments/test_replay.py",
        "the page of the sweep that is run there",
    ),
    "sim/measurement/timeline.py": (
        "tests/sim/experiments/test_replay.py",
        "part of the page of a replay",
    ),
    "sim/truth/judgement.py": ("tests/sim/truth/test_validate.py", "what every kind returns"),
    "sim/truth/ladder.py": ("tests/sim/truth/test_validate.py", "one of the kinds"),
    "sim/truth/latency.py": ("tests/sim/truth/test_validate.py", "one of the kinds"),
    "sim/truth/prefix_cache.py": ("tests/sim/truth/test_validate.py", "one of the kinds"),
    "sim/traces/arrival.py": (
        "tests/sim/traces/test_reading.py",
        "the noun that every reader makes",
    ),
    "sim/traces/blocks.py": ("tests/sim/traces/test_prompts.py", "ids become hashes there"),
    "sim/traces/caches.py": (
        "tests/sim/traces/test_inspection.py",
        "what the hit ceilings are counted with",
    ),
    "sim/traces/formats.py": (
        "tests/sim/traces/test_reading.py",
        "each format is read by its name and by its content",
    ),
    "sim/traces/inference_perf.py": (
        "tests/sim/traces/test_workloads.py",
        "its workloads are generated there",
    ),
    "sim/traces/lengths.py": (
        "tests/sim/traces/test_workloads.py",
        "lengths are drawn for workloads",
    ),
    "sim/traces/litellm.py": ("tests/sim/traces/test_reading.py", "one of the formats"),
    "sim/traces/mooncake.py": ("tests/sim/traces/test_reading.py", "one of the formats"),
    "sim/traces/openai_requests.py": (
        "tests/sim/traces/test_formats_with_prompts.py",
        "one of the formats",
    ),
    "sim/traces/published.py": ("tests/sim/traces/test_reading.py", "several formats"),
    "sim/traces/sessions.py": ("tests/sim/traces/test_workloads.py", "closed loops of workloads"),
    "sim/traces/standard.py": (
        "tests/sim/traces/test_workloads.py",
        "every standard workload is generated",
    ),
}
"""Module -> where it is tested, and why there."""

BUCKETS = {"util", "utils", "helper", "helpers", "common", "base", "manager", "constants", "misc"}
NOT_FOR_SERVING = (
    "rich",
    "pyarrow",
    "matplotlib",
    "optuna",
    "sim",
    "envoy_data_plane",
    "kubernetes",
    "valkey",
    "opentelemetry",
)


def mirror(module):
    """`epp/core/knowledge/prefix.py` -> `tests/core/test_prefix.py`, `sim/pods/pods.py` -> `tests/sim/...`."""
    package, *folders = module.parent.parts
    if package == "rivals":
        folders = ["rivals", *folders[1:]]
    elif package != "epp":
        folders = [package, *folders]
    return Path("tests", *folders, f"test_{module.stem.strip('_')}.py")


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


CLUSTERS = frozenset({"dask", "ray"})
"""Extras whose version is that of somebody's cluster: no lock file can know it."""


EXTRAS = set(PROJECT["project"]["optional-dependencies"])
OF_THE_PICKER = frozenset({"otel", "top", "valkey"})


def dependencies(*, extras=frozenset(EXTRAS), without=frozenset()):
    """Names of what the distribution needs with `extras`, `without` what is made here too."""
    project = PROJECT["project"]
    wanted = [*project["dependencies"]]
    for name, extra in project["optional-dependencies"].items():
        wanted += extra if name in extras else ()
    return [name for name in names_of(wanted) if name not in without]


def names_of(requirements):
    """Of distributions, without versions and conditions."""
    return [re.split(r"[<>=!~;\[ ]", each, maxsplit=1)[0] for each in requirements]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_every_module_has_its_tests(module):
    """Beside it in the mirror, or where the table says; a package's own module only holds names."""
    if module.name == "__init__.py":
        return
    told = COVERED_ELSEWHERE.get(module.as_posix())
    own = (ROOT / mirror(module)).exists()
    if told is None:
        assert own, f"{mirror(module)} is missing"
        return
    where, reason = told
    assert reason
    assert (ROOT / where).exists()
    assert not own, f"{mirror(module)} exists: the table need not name {module}"


def test_the_table_of_exceptions_names_modules_that_exist():
    """What was moved or removed leaves it."""
    assert {ROOT / name for name in COVERED_ELSEWHERE} <= {ROOT / module for module in MODULES}


def test_no_module_is_a_bucket():
    """A name tells what is inside."""
    names = {part for module in MODULES for part in (*module.parts[:-1], module.stem)}
    assert not names & BUCKETS


@pytest.mark.parametrize(
    "module",
    [
        path
        for path in MODULES
        if path.parts[:2] in {("epp", "core"), ("epp", "plugins")} or path.parts[0] == "rivals"
    ],
)
def test_nothing_that_decides_depends_on_the_hash_of_a_process(module):
    """Neither by the built-in `hash`, nor by iterating over a set that was written there."""
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        assert not (called and node.func.id == "hash"), f"{module}:{node.lineno} calls hash()"
        if isinstance(node, ast.For | ast.comprehension):
            assert not isinstance(node.iter, ast.Set | ast.SetComp), f"{module}: order of a set"


LOCKED = {
    "runtime.txt": dependencies(extras=OF_THE_PICKER),
    "sim.txt": dependencies(extras={"sim"}, without={"homing-rivals"}),
    "dev.txt": dependencies(extras=EXTRAS - CLUSTERS, without={"homing-rivals"}),
    "peers.txt": names_of(PROJECT["dependency-groups"]["peers"]),
    "release.txt": names_of(PROJECT["dependency-groups"]["release"]),
}
"""Lock file -> distributions that it pins, whatever else."""


@pytest.mark.parametrize("name", LOCKED)
def test_lock_files_pin_by_hash_and_name_no_place(name):
    """They work with any registry: no hosts, no paths, no links."""
    text = (ROOT / "lock" / name).read_text()
    assert not re.search(r"://|^\s*-(?!-hash=)|file:|(^|\s)\.{0,2}/\w| @ ", text, re.MULTILINE)
    pinned = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    for requirement in pinned:
        head = requirement.splitlines()[0]
        assert re.match(r"[\w.\-]+(\[[\w,]+\])?==[\w.+!]+( ;.*)? \\$", head), head
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", requirement), f"{head} has no hash"
    locked = {re.match(r"[\w.\-]+", requirement)[0].lower() for requirement in pinned}
    assert {wanted.lower() for wanted in LOCKED[name]} <= locked
    assert "ray" not in locked


def test_the_lock_of_the_picker_has_nothing_of_the_simulator_or_of_the_tests():
    """Its image is as small as it can be: not what `sim` asks for besides, nor Envoy's messages."""
    project = PROJECT["project"]["optional-dependencies"]
    others = set(names_of(project["sim"])) - set(dependencies(extras=OF_THE_PICKER))
    others |= set(names_of(PROJECT["dependency-groups"]["dev"]))
    text = (ROOT / "lock/runtime.txt").read_text().lower()
    locked = set(re.findall(r"^([\w.\-]+)", text, re.MULTILINE))
    assert others >= {"pyarrow", "optuna", "xds-protos"}
    assert locked & {name.lower() for name in others} <= REQUIRED_BESIDES


REQUIRED_BESIDES = {"hpack"}
"""Of the dev group, and asked for by a library of the picker too."""


def test_serving_needs_nothing_of_the_simulator():
    """With all of it out of reach `epp serve` is imported all the same, and asks for none of it."""
    # structlog itself takes rich where it is installed, and does without where it is not.
    loaded = run_python(
        f"import sys; sys.modules.update(dict.fromkeys({NOT_FOR_SERVING!r}[:4]));"
        "import epp.commands.serve; print(*(name for name in sys.modules if sys.modules[name]))"
    )
    assert "epp.app.wiring" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(NOT_FOR_SERVING)


def test_importing_starts_nothing():
    """No thread of ours, no handler of a signal, no file left open."""
    (found,) = run_python(
        "import os, signal, threading, asyncio;"
        "files = len(os.listdir('/proc/self/fd')); handled = signal.getsignal(signal.SIGTERM);"
        "import epp.commands.serve, epp.__main__, epp.commands.check_config;"
        "assert threading.active_count() == 1;"
        "assert signal.getsignal(signal.SIGTERM) == handled;"
        "assert len(os.listdir('/proc/self/fd')) <= files + 1;"
        "print('nothing')"
    )
    assert found == "nothing"


def test_the_commands_of_the_readme_exist():
    """Every `make` target and every `epp` and `sim` command that it names."""
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z0-9]+)\b", _code(readme))) <= targets
    assert {"help", "demo", "test", "check", "fmt", "bench"} <= targets
    commands = run_python(
        "from epp.__main__ import USAGE; import re; print(*re.findall(r'epp ([a-z-]+) ', USAGE))"
    )
    assert set(re.findall(r"\bepp ([a-z][a-z-]+)", _code(readme))) <= set(commands)


@pytest.mark.parametrize("given", [(), ("help",)], ids=["make", "make help"])
def test_make_says_what_it_can_do(given):
    """Every target but those of files, in a line; without a target nothing else happens."""
    done = subprocess.run(
        ["make", "--no-print-directory", *given],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=20,
        check=True,
        env={"PATH": os.environ["PATH"], "PYTHON": "/none"},
    )
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert targets == set(phony.split())
    told = dict(re.findall(r"^make ([a-z0-9-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(told) == targets
    assert len(done.stdout.splitlines()) == len(targets)


def test_what_tests_stay_together_exists():
    """A group that names nothing keeps nothing together."""
    assert all((ROOT / "tests" / name).exists() for name in TOGETHER)
    assert set(LONGEST) - set(TOGETHER.values()) == {"sim/experiments/test_replay.py"}
    assert (ROOT / "tests/sim/experiments/test_replay.py").exists()


def _code(markdown):
    """What is between backticks."""
    blocks = re.findall(r"```\w*\n(.*?)```", markdown, re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", markdown)])


def test_every_dependency_has_its_reason():
    """One sentence in the section of the changelog, and none for what is not needed."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    section = re.search(r"^### Dependencies$(.*?)(^##|\Z)", changelog, re.DOTALL | re.MULTILINE)[1]
    reasons = dict(re.findall(r"^- `([^`]+)` (.+)$", section, re.MULTILINE))
    assert set(reasons) == set(dependencies())
    assert all(reason.endswith(".") and len(reason) > 20 for reason in reasons.values())


def test_the_version_is_one():
    """What is installed says what the code says."""
    assert PROJECT["project"]["version"] == epp.__version__
    assert RIVALS["project"]["version"] == epp.__version__
    assert f"homing-epp=={epp.__version__}" in RIVALS["project"]["dependencies"]
    extras = PROJECT["project"]["optional-dependencies"]
    for name in ("rivals", "sim"):
        assert f"homing-rivals=={epp.__version__}" in extras[name]


def test_the_wheel_holds_what_the_packages_need(tmp_path):
    """Every file of `epp` and `sim`, those that are no Python too."""
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path))
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path for package in ("epp", "sim") for path in (ROOT / package).rglob("*.*")]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    needed = {str(path.relative_to(ROOT)) for path in files}
    assert "sim/engine/profiles.toml" in needed <= held


@pytest.mark.parametrize("path", sorted((ROOT / "bench").rglob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_asks_for_names_that_exist(path):
    """Types are not checked there, and what is renamed elsewhere would be found by running it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in {"bench", *PACKAGES}:
            module = import_module(node.module)
            missing = [
                name.name
                for name in node.names
                if not (hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"))
            ]
            assert missing == [], node.module


def test_the_licence_is_there():
    """Apache-2.0, as the metadata say, with its text."""
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text


def test_ci_runs_what_developers_run():
    """`make check` and `make test`, nothing that only exists there."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "make check" in script
    assert "make test" in script
