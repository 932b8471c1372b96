"""The workflows of continuous integration and of releases, as far as they can be judged unrun."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.go_program import GoProgramError
from tests.release.actionlint import ACTIONLINT
from tests.release.dockerfile import stages_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
JOBS = [
    (path.stem, name, job)
    for path in WORKFLOWS
    for name, job in yaml.safe_load(path.read_text())["jobs"].items()
]
each = pytest.mark.parametrize(
    ("workflow", "name", "job"), JOBS, ids=[f"{workflow}-{name}" for workflow, name, _ in JOBS]
)


def scripts(job):
    return "\n".join(step["run"] for step in job["steps"] if "run" in step)


def actions(job):
    return [step["uses"] for step in job["steps"] if "uses" in step]


def job_of(workflow, name):
    (found,) = [job for *where, job in JOBS if where == [workflow, name]]
    return found


def test_actionlint_finds_nothing():
    """Syntax, expressions, types of contexts, and needs of jobs."""
    try:
        command = ACTIONLINT.find(os.environ)
    except GoProgramError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [command, "-no-color", *WORKFLOWS], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_actionlint_that_is_not_there_is_a_sentence(tmp_path):
    """Which says how to have it."""
    with pytest.raises(GoProgramError, match="run `make actionlint`"):
        ACTIONLINT.find({"XDG_CACHE_HOME": str(tmp_path)})
    with pytest.raises(GoProgramError, match="is no program"):
        ACTIONLINT.find({"ACTIONLINT": str(tmp_path / "nothing")})
    with pytest.raises(GoProgramError, match="no go on PATH"):
        ACTIONLINT.build({"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)})


def test_every_action_is_pinned_by_its_commit():
    """In full, with the version beside it; and the same action everywhere the same."""
    pinned = {}
    for path in WORKFLOWS:
        for line in path.read_text().splitlines():
            if "uses:" not in line:
                continue
            found = re.fullmatch(
                r" +(?:- )?uses: ([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line
            )
            assert found, f"{path.name}: {line.strip()}"
            assert pinned.setdefault(found[1], found.groups()[1:]) == found.groups()[1:]
    assert len(pinned) >= 8


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_workflow_has_rights_that_its_jobs_do_not_ask_for(path):
    """Nothing, or to read; what writes is a job's."""
    document = yaml.safe_load(path.read_text())
    assert document["permissions"] in ({}, {"contents": "read"})
    assert "pull_request_target" not in path.read_text(), "strangers' code with our rights"


@each
def test_a_job_is_bounded_and_keeps_no_credentials(workflow, name, job):
    """A machine that hangs is given back, and steps cannot push as the checkout did."""
    assert job["timeout-minutes"] <= 90
    assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
    for step in job["steps"]:
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    if workflow == "release":
        assert "permissions" in job


@each
def test_no_script_is_put_together_from_what_others_name(workflow, name, job):
    """A branch called `$(rm -rf .)` is a word: contexts come in as variables of the environment."""
    assert "${{" not in scripts(job)


@each
def test_a_job_makes_targets_that_exist(workflow, name, job):
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    found = re.findall(r"^ *make ((?:[a-z-]+ ?)+)$", scripts(job), re.MULTILINE)
    assert {target for line in found for target in line.split()} <= targets


def test_a_change_goes_through_what_a_person_runs():
    """Both Python versions at the ends of what is supported, checks and tests."""
    job = job_of("ci", "test")
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert {"make check", "make test"} <= set(scripts(job).splitlines())


def test_nothing_is_released_that_was_not_verified():
    """Everything waits for the checks, and what is public at once waits for everything."""
    needs = {name: job.get("needs", []) for workflow, name, job in JOBS if workflow == "release"}

    def before(name):
        direct = [needs[name]] if isinstance(needs[name], str) else needs[name]
        return {*direct, *(earlier for each_ in direct for earlier in before(each_))}

    for name in set(needs) - {"verify"}:
        assert "verify" in before(name), name
    assert before("publish") == set(needs) - {"publish"}
    verified = scripts(job_of("release", "verify"))
    for command in ("docs.release_notes", "make check", "make test", "make audit"):
        assert command in verified


@pytest.mark.parametrize("name", ["distributions", "image", "chart"])
def test_what_is_released_is_signed_and_has_its_provenance(name):
    """Keyless: by the identity of this workflow, which only a job that may ask for it has."""
    job = job_of("release", name)
    assert re.search(r"cosign sign(-blob)? --yes", scripts(job))
    assert any(action.startswith("actions/attest-build-provenance@") for action in actions(job))
    assert {"id-token": "write", "attestations": "write"}.items() <= job["permissions"].items()
    assert "COSIGN_KEY" not in str(job)


def test_each_image_is_for_both_architectures_and_knows_its_base():
    """By the Dockerfile that is tested, on a base of one digest, with its own SBOM and name."""
    job = job_of("release", "image")
    (build,) = [
        step["with"]
        for step in job["steps"]
        if step.get("uses", "").startswith("docker/build-push-action@")
    ]
    named = {each["target"]: each["suffix"] for each in job["strategy"]["matrix"]["include"]}
    assert named == {"epp": "", "sim": "-sim"}
    assert set(named) <= set(stages_of((ROOT / "deploy/Dockerfile").read_text()))
    assert build["target"] == "${{ matrix.target }}"
    assert job["env"]["IMAGE"].endswith("${{ matrix.suffix }}")
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["file"], build["provenance"], build["sbom"]) == (
        "deploy/Dockerfile",
        "mode=max",
        True,
    )
    assert build["build-args"].startswith("PYTHON_IMAGE=")
    base = (ROOT / "deploy/Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=\S+$", base, re.MULTILINE)


def test_only_the_last_job_may_write_to_the_repository():
    writers = [
        name
        for workflow, name, job in JOBS
        if job.get("permissions", {}).get("contents") == "write"
    ]
    assert writers == ["publish"]
