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
from tests.first_words import Text, beginning_with, docstrings, sentences

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RIVALS = tomllib.loads((ROOT / "rivals/pyproject.toml").read_text())
PACKAGES = ("epp", "sim", "homing_rivals")
MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("epp", "sim", "rivals/homing_rivals")
    for path in (ROOT / folder).rglob("*.py")
)

DOCUMENTED = [
    *MODULES,
    *(
        path.relative_to(ROOT)
        for folder in ("bench", "docs", "deploy", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.startswith("test_")
    ),
]
"""Python files whose docstrings newcomers read: all but test modules."""
PROSE = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in (
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "bench/README.md",
            "charts/homing/README.md",
            "deploy/README.md",
            "rivals/README.md",
        )
    ),
]
ENTRY_CHARACTERS_MAX = 280

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
OF_THE_PICKER = frozenset({"brotli", "otel", "top", "valkey"})


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


def dotted(module):
    """`sim/pods/pods.py` -> `sim.pods.pods`; of what is run as a package, the package."""
    parts = module.with_suffix("").parts
    return ".".join(parts[parts[0] == "rivals" :]).removesuffix(".__main__")


FROM = re.compile(
    r"^ *from ((?:epp|sim|homing_rivals)[\w.]*) import (\([\w\s,]+|[\w ,]+)", re.MULTILINE
)


def named_in(path):
    """Dotted names of what a file imports or runs."""
    text = path.read_text()
    names = set(re.findall(r"\b(?:epp|sim|homing_rivals)(?:\.\w+)+", text))
    for of, those in FROM.findall(text):
        names |= {f"{of}.{name}" for name in re.findall(r"\w+", those)}
    return names


def test_every_module_has_its_tests():
    """In the mirror under its name, or who tests it, or a module that uses it, names it."""
    by_tests = set().union(*map(named_in, (ROOT / "tests").rglob("*.py")))
    tested = {
        module: (ROOT / mirror(module)).exists() or dotted(module) in by_tests for module in MODULES
    }
    by_tested = set().union(*(named_in(ROOT / module) for module in MODULES if tested[module]))
    untested = [
        module.as_posix()
        for module in MODULES
        if module.name != "__init__.py" and not tested[module] and dotted(module) not in by_tested
    ]
    assert untested == []


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


REQUIRED_BESIDES = {"h2", "hpack"}
"""Distributions of the dev group that a library of the picker requires as well: httpcore2 requires
`h2`, and `h2` requires `hpack`."""


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


def test_a_change_is_one_line_of_the_changelog():
    """An operator reads hundreds of them: details belong to the page that an entry links to."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = [line for line in text.splitlines() if line.startswith(("-", "*", " "))]
    assert [line for line in entries if not line.startswith("- ")] == []
    assert [line for line in entries if len(line) > ENTRY_CHARACTERS_MAX] == []


@pytest.mark.parametrize("kind", ["docstrings", "sentences"])
def test_texts_begin_with_their_subject(kind):
    """Few docstrings, and few sentences of README and docs, begin with a word that hides the subject.

    At most 0.1 % of docstrings, and 0.2 % of sentences, may begin with one of these words:
    What Whatever Who Whoever Whose Whom Which That Those Whether Of In At By From With Without On
    For To As Under Over Above Below Between Among Beside Besides Behind Before After Since Until
    During Within Through Into Out Up Against Near Beyond Instead.

    At most 0.2 % of docstrings may begin with one of those or of these words:
    Where Wherever When Whenever How Why If While Once Because So Also Only Not None Nothing Nobody
    Everybody Again Then Else Otherwise And Or But Same Such Though Rather Still Even Ever Never.
    """
    lists = re.findall(
        r"words:\n(.*?)\.\n", str(test_texts_begin_with_their_subject.__doc__), re.DOTALL
    )
    narrow, more = (frozenset(words.split()) for words in lists)
    if kind == "docstrings":
        texts = [text for path in DOCUMENTED for text in docstrings(ROOT / path)]
        limits = ((narrow, 0.001), (narrow | more, 0.002))
    else:
        texts = [text for path in PROSE for text in sentences(path)]
        limits = ((narrow, 0.002),)
    for words, share_max in limits:
        found = beginning_with(texts, words)
        shown = "\n".join(f"{text.place}: {text.begin}" for text in found)
        assert len(found) <= share_max * len(texts), f"{len(found)} of {len(texts)}:\n{shown}"


def test_first_words_are_found(tmp_path):
    """The first words of all docstrings and of whole sentences are found; headings and tables are left out."""
    code = tmp_path / "code.py"
    code.write_text(
        '"""Of a module."""\nx = 1\n"""Of an attribute."""\nx\n"""No docstring."""\n'
        'class A:\n    """A class.\n\n    More.\n    """\n    def f(self):\n        """Return it."""\n'
        'for _ in ():\n    """No docstring."""\n'
    )
    begin = [text.begin for text in docstrings(code)]
    assert sorted(begin) == ["A class.", "Of a module.", "Of an attribute.", "Return it."]
    page = tmp_path / "page.md"
    page.write_text(
        "# Of a heading only\n\nOne goes here. With **two** it goes there.\n\n| Of a table | row |\n\n"
        "- In a list it goes too.\n\n```sh\nOf a block of code\n```\n\n    Of indented code too\n\n"
        "[In a link](a.md) it goes. `As code` it goes. Not so.\n"
    )
    found = list(sentences(page))
    assert [text.word for text in found] == ["One", "With", "In", "", ""]
    assert [text.place for text in found] == [f"{page}:{line}" for line in (3, 3, 7, 15, 15)]
    assert beginning_with(found, frozenset({"With", "In"})) == found[1:3]
    assert found[0] == Text(f"{page}:3", "One goes here.")


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
