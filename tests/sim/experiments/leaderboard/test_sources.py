"""Other code is another hash; what cannot decide is not in it."""

from pathlib import Path

from msgspec.structs import replace

from homing_rivals.least_work import LeastPendingWork
from sim.cluster.policies import policy_source
from sim.experiments.leaderboard import sources

ROOT = Path(__file__).parents[4]


def files_of(name):
    policy = policy_source(name)
    config = policy.load()
    plugins = [*config.profile.filters, *config.profile.scorers]
    modules = sorted({type(one.plugin).__module__ for one in plugins})
    return {file.name for file in sources._reached_from(modules)}


def test_a_strategy_is_hashed_with_the_modules_that_it_rests_on():
    """Those of its family and what they import, not those of others: a new one reruns nothing."""
    assert files_of("lpwl") == {"least_work.py", "lexicographic.py"}
    built_in = policy_source("weighted-scores")
    for name in ("default", "homing", "weighted-scores"):
        assert files_of(name) == set(), "built-in plugins are hashed with every run"
    assert sources.plugins_hash(policy_source("lpwl")) != sources.plugins_hash(built_in)
    assert sources.plugins_hash(policy_source("random")) == ""


def test_a_plugin_of_others_is_hashed_by_its_module(tmp_path, monkeypatch):
    """And by the modules of its own package that it imports."""
    package = tmp_path / "outside"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "near.py").write_text("import os\nfrom outside import far\n")
    (package / "far.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import outside.near  # noqa: F401, PLC0415

    names = {file.name for file in sources._reached_from(["outside.near", "epp.plugins.scorers"])}
    assert names == {"near.py", "far.py", "__init__.py"}


def test_the_plugins_of_all_stages_are_hashed():
    """Not only those of the profile that chooses the decode endpoint."""
    text = (ROOT / "docs/examples/prefill-decode.yaml").read_text()
    built_in = replace(policy_source("default"), text=text)
    profile = "- name: prefill\n  plugins:\n"
    declared = "- type: active-request-scorer\n"
    scorer = LeastPendingWork.type_name
    text = text.replace(declared, f"{declared}- type: {scorer}\n")
    text = text.replace(profile, f"{profile}  - pluginRef: {scorer}\n")
    assert sources.plugins_hash(replace(built_in, text=text)) != sources.plugins_hash(built_in)


def test_the_hash_changes_with_any_file_that_decides(tmp_path):
    """With its content and its name."""
    file = tmp_path / "one.py"
    file.write_text("a = 1\n")
    before = sources._hash_of([file]).hexdigest()
    file.write_text("a = 2\n")
    assert sources._hash_of([file]).hexdigest() != before
    other = tmp_path / "two.py"
    other.write_text("a = 2\n")
    assert sources._hash_of([other]).hexdigest() != sources._hash_of([file]).hexdigest()


def test_what_every_run_goes_through_exists_and_reports_are_not_among_it():
    """A wing that moves takes its row along."""
    names = set()
    roots = {"epp": sources.Path(sources.epp.__file__).parent.parent}
    for name in sources._DECIDES:
        found = sources._files(roots["epp"] / name)
        assert found, name
        names |= {file.name for file in found}
    assert {"scheduler.py", "engine.py", "profiles.toml", "cell.py", "run.py"} <= names
    assert not names & {"charts.py", "leaderboard_report.py", "standings.py"}
    assert sources.code_hash() == sources.code_hash()


def test_another_name_for_one_configuration_is_no_other_code():
    """Only plugins count."""
    policy = policy_source("default")
    assert sources.plugins_hash(policy) == sources.plugins_hash(replace(policy, name="mine"))
