"""The inventory of evidence: complete here, and kept true in a repository that changes."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from docs.evidence import main
from docs.inventory import INVENTORY, ROOT, as_toml, entry_named, problems, read, stale, steps
from sim import __main__ as sim_command
from tests.test_docs import ParsedError

MAKEFILE = """\
night: tools ## docs/night.md anew
\t@echo night
tools:
\t@echo tools
"""
PLAY = """\
import subprocess, sys
from pathlib import Path

match sys.argv[1]:
    case "write":
        Path("docs/night.md").write_text("# Night\\n\\n## Lost\\n\\n4 of 100\\n")
    case "print":
        print("5 of 100")
        with Path("printed").open("a") as file:
            file.write("once\\n")
    case "order":
        with Path("order").open("a") as file:
            file.write(sys.argv[2])
    case "fail":
        sys.exit("no figures")
    case "resume":
        part = Path("evidence/night/part")
        if not part.exists():
            part.touch()
            sys.exit("half of it")
    case "hang":
        with Path("begun").open("w") as pipe:
            subprocess.run(["sh", "-c", "echo begun; exec sleep 600"], stdout=pipe)
"""
HEAD = """\
# A comment that stays.

unmeasured = ["README.md", "docs/evidence.md"]
"""


def entry(name="night", **values):
    told = {
        "name": f'"{name}"',
        "shows": '"Requests lost"',
        "pages": '["docs/night.md#lost"]',
        "command": '"python -m play write"',
        "duration_s": "30",
        "sources": '["engine", "play.py"]',
        "commit": '"0123456789ab"',
        "date": "2026-01-01",
        **values,
    }
    return "\n".join(["[[evidence]]", *(f"{key} = {value}" for key, value in told.items())]) + "\n"


class Repository:
    """A working tree with an inventory."""

    def __init__(self, root):
        self.root = root
        for folder in ("docs", "engine"):
            (root / folder).mkdir(parents=True)
        marks = "<!-- begin evidence -->\n<!-- end evidence -->\n"
        self.write("README.md", "# Read me\n")
        self.write("docs/evidence.md", f"# Evidence\n\n{marks}")
        self.write("docs/night.md", "# Night\n\n## Lost\n\n3 of 100\n")
        self.write("engine/speed.py", "SPEED = 1\n")
        self.write("play.py", PLAY)
        self.write("Makefile", MAKEFILE)
        self.write(".gitignore", "/evidence/\n/begun\n/order\n/printed\n")
        self.list(entry(), entry("made", command='"make night"', duration_s="40"))
        self.git("init", "--quiet")
        self.commit()

    def write(self, path, text):
        (self.root / path).write_text(text)

    def list(self, *entries):
        self.write(INVENTORY, "\n".join([HEAD, *entries]))

    def git(self, *words):
        identity = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
        subprocess.run(["git", *identity, *words], cwd=self.root, check=True, capture_output=True)

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=Change")

    def head(self):
        told = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=self.root, text=True)
        return told.strip()

    def run(self, *words):
        return main(words, self.root)

    def entry(self, name="night"):
        return entry_named(self.root, name)

    def stale(self):
        return set(stale(self.root, read(self.root).evidence, date(2026, 1, 2))[0])


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "tree")


def test_the_inventory_of_this_repository_is_complete():
    assert list(problems(ROOT, read())) == []


def test_a_command_of_make_that_makes_figures_is_in_the_inventory():
    made = {
        word
        for one in read().evidence
        for words in steps(one.command)
        if words[0] == "make"
        for word in words[1:]
    }
    expected = """attack bench chaos cluster-many demo h2spec night peers real soak test-cluster validate
        walkthrough walkthrough-cluster"""
    assert set(expected.split()) <= made


def test_commands_of_the_simulator_in_the_inventory_can_be_typed(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, arguments=None, namespace=None):
        parse(self, arguments, namespace)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    typed = [words for one in read().evidence for words in steps(one.command)]
    simulated = [words[3:] for words in typed if words[:3] == ["python", "-m", "sim"]]
    assert simulated
    for words in simulated:
        with pytest.raises(ParsedError):
            sim_command.main(words)


def test_what_is_written_is_what_was_read():
    """A measurement changes the lines of its entry and no other."""
    text = (ROOT / INVENTORY).read_text(encoding="utf-8")
    head, _, _ = text.partition("[[evidence]]")
    assert head + "\n".join(map(as_toml, read().evidence)) == text


def test_a_tree_that_agrees_passes(repository):
    assert repository.run("check") == 0


@pytest.mark.parametrize("page", ["docs/day.md", "docs/pictures/day.svg", "deploy/README.md"])
def test_a_page_that_is_listed_nowhere_fails(repository, page, capsys):
    (repository.root / page).parent.mkdir(exist_ok=True)
    repository.write(page, "9 of 10\n")
    assert repository.run("check") == 1
    assert f"{page} is in no entry" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sources": '["engine", "motor"]'}, "source motor does not exist"),
        ({"pages": '["docs/day.md"]'}, "page docs/day.md does not exist"),
        ({"pages": '["docs/night.md#won"]'}, "page docs/night.md has no heading #won"),
        ({"command": '"make day"'}, "there is no make target day"),
        ({"command": '"python -m ploy"'}, "there is no module ploy"),
        ({"command": '"python play.py"'}, "`command` cannot be parsed"),
        ({"command": '"make \'night"'}, "`command` cannot be parsed"),
        ({"sources": '["docs"]'}, "source docs contains the page docs/night.md"),
        ({"sources": "[]"}, "it has neither `sources` nor `stale_after_days`"),
        ({"needs": '["gpu"]'}, "need gpu is none of"),
    ],
)
def test_an_entry_that_does_not_fit_the_tree_fails(repository, values, problem, capsys):
    repository.list(entry("made", command='"make night"'), entry(**values))
    assert repository.run("check") == 1
    assert f"entry night: {problem}" in capsys.readouterr().err


def test_a_target_that_writes_figures_and_has_no_entry_fails(repository, capsys):
    repository.list(entry())
    assert repository.run("check") == 1
    assert "make night writes figures to a page" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["unmeasured = [", "unmeasured = []", "evidence = 1"])
def test_a_file_that_cannot_be_read_fails_with_a_sentence(repository, text, capsys):
    repository.write(INVENTORY, text)
    assert repository.run("check") == 1
    assert capsys.readouterr().err.startswith(f"{INVENTORY}: ")


def test_an_entry_is_stale_once_a_commit_changes_a_source(repository, capsys):
    assert repository.run("measure") == 0
    repository.commit()
    assert repository.stale() == set()
    repository.write("README.md", "# Read me first\n")
    repository.commit()
    assert repository.stale() == set()
    repository.write("engine/speed.py", "SPEED = 2\n")
    repository.commit()
    capsys.readouterr()
    assert repository.run("check") == 0
    told = capsys.readouterr().out
    assert "stale evidence: night, changed since: engine\n" in told
    assert "2 entries of evidence, 2 stale" in told


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ('"""Say how fast."""\n\nSPEED = 1  # in tokens\n"""The speed."""\n', set()),
        ('"""Say how fast."""\n\nSPEED = 2\n', {"night"}),
        ('"""Say how fast."""\n\nSPEED = "1"\n', {"night"}),
        ("SPEED = \n", {"night"}),
    ],
)
def test_docstrings_and_comments_make_no_entry_stale(repository, text, stale):
    assert repository.run("measure", "--only", "night") == 0
    repository.commit()
    repository.write("engine/speed.py", text)
    repository.commit()
    assert repository.stale() - {"made"} == stale


def test_a_shallow_clone_knows_what_is_stale(repository, tmp_path, capsys):
    repository.run("measure", "--only", "night")
    repository.commit()
    shallow = tmp_path / "shallow"
    clone = ["git", "clone", "--quiet", "--depth=1", repository.root.as_uri(), str(shallow)]
    subprocess.run(clone, check=True)
    capsys.readouterr()
    assert main(["check"], shallow) == 0
    told = capsys.readouterr().out
    assert "night" not in told
    assert "stale evidence: made, changed since: its sources\n" in told


def test_a_tree_without_git_is_checked_all_the_same(repository, capsys):
    shutil.rmtree(repository.root / ".git")
    assert repository.run("check") == 0
    assert (
        "2 entries of evidence, 0 stale; which sources changed is unknown"
        in capsys.readouterr().out
    )
    assert repository.run("measure") == 1
    assert "no git repository" in capsys.readouterr().err


def test_a_reading_is_stale_from_an_age_on(repository):
    repository.list(entry(sources="[]", command='""', stale_after_days="30", digest='""'))
    entries = read(repository.root).evidence
    assert stale(repository.root, entries, date(2026, 1, 31))[0] == {}
    assert stale(repository.root, entries, date(2026, 2, 1))[0] == {
        "night": "31 days old, more than 30"
    }


def test_measuring_updates_file_and_page(repository):
    before = repository.entry()
    head = repository.head()
    assert repository.run("measure", "--only", "night") == 0
    after = repository.entry()
    assert head.startswith(after.commit)
    assert len(after.commit) == 12
    assert after.date == datetime.now(UTC).date()
    assert after.duration_s < before.duration_s
    unchanged = {"commit": before.commit, "date": before.date, "digest": before.digest}
    assert replace(after, duration_s=before.duration_s, **unchanged) == before
    assert (repository.root / INVENTORY).read_text().startswith(HEAD)
    assert "4 of 100" in (repository.root / "docs/night.md").read_text()
    page = (repository.root / "docs/evidence.md").read_text()
    assert f"| `{after.commit[:9]}` | {after.date} |" in page
    assert (repository.root / "evidence/night.log").exists()
    assert repository.stale() == {"made"}


def test_fresh_entries_are_measured_only_by_force(repository, capsys):
    repository.run("measure")
    capsys.readouterr()
    assert repository.run("measure") == 0
    assert capsys.readouterr().out == ""
    assert repository.run("measure", "--force", "--only", "night") == 0
    assert "night: python -m play write" in capsys.readouterr().out


def test_the_shortest_is_measured_first_and_a_failure_keeps_the_old_date(repository, capsys):
    repository.list(
        entry("long", command='"python -m play order 3"', duration_s="300"),
        entry("failing", command='"python -m play fail"', duration_s="20"),
        entry("short", command='"python -m play order 1"', duration_s="10"),
    )
    before = repository.entry("failing")
    assert repository.run("measure") == 1
    assert (repository.root / "order").read_text() == "13"
    assert repository.entry("failing") == before
    assert "not measured: failing\n" in capsys.readouterr().out
    assert "no figures" in (repository.root / "evidence/failing.log").read_text()
    assert repository.stale() == {"failing"}


def test_a_command_finds_its_files_again_until_it_has_succeeded(repository):
    """Or until its sources change: what it wrote before would be of another tree."""
    repository.list(entry(command='"python -m play resume"'))
    assert repository.run("measure") == 1
    assert repository.run("measure") == 0
    assert repository.run("measure", "--force") == 1
    repository.write("engine/speed.py", "SPEED = 4\n")
    repository.commit()
    assert repository.run("measure") == 1


def test_uncommitted_sources_are_refused(repository, capsys):
    repository.write("engine/speed.py", "SPEED = 3\n")
    before = repository.entry()
    assert repository.run("measure", "--only", "night") == 1
    assert repository.entry() == before
    assert "source engine/speed.py has uncommitted changes" in capsys.readouterr().out
    assert "3 of 100" in (repository.root / "docs/night.md").read_text()
    assert repository.run("record", "night") == 1


def test_figures_that_a_person_copies_wait_for_it(repository, capsys):
    repository.list(entry(command='"python -m play print"', by_hand="true"))
    before = repository.entry()
    head = repository.head()
    for _ in range(2):
        assert repository.run("measure") == 0
        assert "python -m docs.evidence record night" in capsys.readouterr().out
    assert (repository.root / "printed").read_text() == "once\n"
    assert repository.entry() == before
    assert (repository.root / "evidence/night.log").read_text() == "5 of 100\n"
    repository.write("README.md", "# A commit between measuring and recording\n")
    repository.commit()
    assert repository.run("record", "night") == 0
    assert head.startswith(repository.entry().commit)
    assert repository.stale() == set()


def test_an_entry_without_a_command_is_only_recorded(repository, capsys):
    repository.list(entry(command='""'))
    assert repository.run("measure") == 0
    assert "night: skipped, it has no command" in capsys.readouterr().out
    assert repository.run("record", "night") == 0
    assert repository.stale() == set()


def test_what_this_machine_lacks_is_named(repository, capsys):
    repository.list(entry(command='"python -m play write ../shared/traces.csv"'))
    assert repository.run("measure") == 0
    assert "night: skipped, this machine lacks ../shared/traces.csv" in capsys.readouterr().out
    assert repository.stale() == {"night"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--minutes=0.6"], "made: skipped, it would end after 0.6 minutes"),
        (["--dry-run"], "made: 40 s, make night"),
        (["--dry-run", "--minutes=1"], "made: skipped, it would end after 1 minutes"),
    ],
)
def test_a_plan_can_be_bounded_and_looked_at(repository, options, told, capsys):
    assert repository.run("measure", *options) == 0
    assert told in capsys.readouterr().out
    assert "made" in repository.stale()


def test_a_list_has_every_entry_and_measures_nothing(repository, capsys):
    repository.run("measure", "--only", "night")
    capsys.readouterr()
    assert repository.run("measure", "--list") == 0
    states = dict(re.findall(r"^(\w+) +(\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert states == {"night": "fresh", "made": "stale"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_command_and_keeps_the_file(repository, number):
    """The entry before stays measured, the one that ran keeps its date, no process is left."""
    repository.list(entry(), entry("hanging", command='"python -m play hang"', duration_s="50"))
    os.mkfifo(repository.root / "begun")
    before = repository.entry("hanging")
    code = "import sys; from pathlib import Path; from docs.evidence import main; "
    code += "sys.exit(main(['measure'], Path(sys.argv[1])))"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    started = subprocess.Popen(
        [sys.executable, "-c", code, str(repository.root)],
        env=os.environ | path,
        stderr=subprocess.PIPE,
        text=True,
    )
    with Path(repository.root / "begun").open() as pipe:
        assert pipe.readline() == "begun\n"
        started.send_signal(number)
        assert pipe.read() == ""  # the end: nothing of its process group holds the pipe any more
    _, told = started.communicate()
    assert started.returncode == 130
    assert "interrupted; finished measurements are in docs/evidence.toml" in told
    assert repository.entry("hanging") == before
    assert repository.stale() == {"hanging"}
    assert repository.run("check") == 1  # only because no entry here has `make night`
