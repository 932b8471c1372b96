from pathlib import Path

import msgspec
import numpy as np
import pytest

from epp.configuration import build
from epp.configuration.build import (
    INDEXES,
    build_settings,
    default_config,
    oldest_metrics_s,
    plugin_tables,
    settings_warnings,
)
from epp.configuration.config import ConfigError, load_config
from epp.configuration.describing import config_hash, diff_configs
from epp.core.decision.inputs import PoolReplaced, Reconfigured
from epp.core.decision.scheduler import Scheduler
from epp.core.decision.settings import SchedulerSettings
from epp.core.knowledge.candidates import Candidates
from epp.core.prompt.request import InferenceRequest
from epp.core.types import Endpoint
from epp.plugins import FILTERS, PICKERS, SCORERS
from homing_rivals import PLUGINS
from tests.builders import endpoint

SAMPLES = Path(__file__).parent / "config_samples"
TABLES = plugin_tables()

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
SCORER = f"{HEAD}plugins:\n- type: token-load-scorer\n"


def sample(name):
    return load_config((SAMPLES / f"{name}.yaml").read_bytes(), f"{name}.yaml", TABLES)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_scheduler_runs_on_every_sample(path):
    """What loads also decides: two requests, two endpoints, and the picked one is recorded."""
    scheduler = Scheduler(build_settings(sample(path.stem)), seed=1)
    scheduler.take(
        PoolReplaced(
            [
                Endpoint(
                    endpoint_id=name,
                    name=name,
                    address=f"10.0.0.{number}:8000",
                    labels={"accelerator": "h100"},
                )
                for number, name in enumerate(("a", "b"))
            ]
        ),
        0.0,
    )
    for number in range(2):
        request = InferenceRequest(
            request_id=str(number), model="m", prompts=(b"x" * 1024,), prompt_tokens=256
        )
        decision = scheduler.schedule(request, 0.1)
        assert decision.endpoint.name in {"a", "b"}


def test_the_default_settings_are_those_of_the_design():
    """Block size, prefill speed, staleness and saturation when nothing is said."""
    settings = build_settings(default_config(TABLES))
    assert isinstance(settings, SchedulerSettings)
    assert settings.prefix == "approx-prefix-cache-producer"
    assert settings.block_tokens == 64
    assert settings.metrics_staleness_s == 2.0
    assert settings.prefill_tokens_per_s == 15_928.0
    assert settings.saturation.metrics_staleness_threshold == 1.0
    assert settings.fallback_endpoints_max == 0


def test_the_block_size_is_that_of_the_default_prefix_index():
    """Scorers turn blocks into tokens with it."""
    text = f"""{HEAD}plugins:
- type: approx-prefix-cache-producer
  parameters: {{blockSizeTokens: 128}}
- type: prefix-cache-scorer
"""
    assert build_settings(load_config(text, "c", TABLES)).block_tokens == 128


def test_the_detectors_threshold_follows_the_refresh_interval_unless_given():
    """max(1 s, 5 intervals); what the document says stays, and warns if it is smaller."""
    default = default_config(TABLES)
    settings = build_settings(default, refresh_interval_s=0.5)
    assert settings.saturation.metrics_staleness_threshold == 2.5
    assert settings_warnings(default, refresh_interval_s=0.5) == []
    given = sample("first-generation")
    assert build_settings(given).saturation.metrics_staleness_threshold == pytest.approx(0.2)
    (warning,) = settings_warnings(given)
    assert warning.startswith(
        "first-generation.yaml: metricsStalenessThreshold 0.2s of the saturation detector is less"
    )


def test_metrics_that_age_faster_than_they_are_read_warn():
    """Below two intervals every endpoint would be stale half of the time."""
    (warning,) = settings_warnings(
        default_config(TABLES), metrics_staleness_s=0.3, refresh_interval_s=0.2
    )
    assert warning.startswith("--metrics-staleness-threshold 0.3s is less than two refresh")


@pytest.mark.parametrize(("interval_s", "stale_s"), [(0.2, 2.0), (1.0, 2.0), (10.0, 20.0)])
def test_endpoints_that_wait_for_their_turn_are_not_stale(interval_s, stale_s):
    """Else all requests would go to whoever was scraped last."""
    settings = build_settings(default_config(TABLES), refresh_interval_s=interval_s)
    assert settings.metrics_staleness_s == stale_s


def test_the_prefill_speed_is_that_of_the_affinity_filter():
    """One number for what drains the ledger and what the filter expects."""
    settings = build_settings(sample("sticky-until-busy"), prefill_tokens_per_s=9_000.0)
    assert settings.prefill_tokens_per_s == 21_000.0


SPEEDS = f"""{HEAD}plugins:
- type: token-load-scorer
- type: prefix-cache-affinity-filter
- type: inflight-load-producer
  parameters:
    peakPrefillThroughput: 30000
    peakPrefillThroughputs:
    - {{matchLabels: {{gpu: h200}}, peakPrefillThroughput: 60000}}
    - {{matchLabels: {{gpu: h200, tp: "2"}}, peakPrefillThroughput: 1}}
"""


def test_each_endpoint_prefills_at_the_speed_that_its_labels_have():
    """At a reload too, and when its labels change; what is prefilled by then stays prefilled."""
    plain = build_settings(load_config(SCORER, "c", TABLES), prefill_tokens_per_s=9_000.0)
    told = build_settings(load_config(SPEEDS, "c", TABLES), prefill_tokens_per_s=9_000.0)
    scheduler = Scheduler(plain, seed=1)
    labels = [{"gpu": "h200", "tp": "2"}, {"gpu": "a100"}]
    pool = [endpoint(number, labels=each) for number, each in enumerate(labels)]
    scheduler.take(PoolReplaced(pool), 0.0)
    columns = scheduler.pool.columns
    assert columns.prefill_tokens_per_s[:2].tolist() == [9_000.0, 9_000.0]
    assert columns.prefill_alike
    tokens = 100_000
    for number in range(2):
        request = InferenceRequest(
            request_id=str(number), subset=(pool[number].address,), prompt_tokens=tokens
        )
        scheduler.schedule(request, 10.0)
    scheduler.take(Reconfigured(told), 11.0)
    assert columns.prefill_tokens_per_s[:2].tolist() == [60_000.0, 30_000.0]
    assert not columns.prefill_alike
    left = Candidates(columns, np.arange(2), 12.0, affinities={}).inflight_prefill_tokens
    assert left.tolist() == [31_000.0, 61_000.0]
    scheduler.take(PoolReplaced([pool[0], endpoint(1, labels=labels[0])]), 12.0)
    assert columns.prefill_tokens_per_s[:2].tolist() == [60_000.0, 60_000.0]
    scheduler.take(Reconfigured(plain), 12.0)
    assert columns.prefill_tokens_per_s[:2].tolist() == [9_000.0, 9_000.0]
    assert columns.prefill_alike


def test_the_speed_decides_and_so_it_is_compared():
    """In the hash and in a difference; without one the hash is as it was."""
    one, other = (
        load_config(SPEEDS.replace("30000", speed), "c", TABLES) for speed in ("30000", "31000")
    )
    assert config_hash(one) != config_hash(other)
    assert diff_configs(one, other) == ["load in flight: peakPrefillThroughput 30000 -> 31000"]
    declared = f"{SCORER}- type: inflight-load-producer\n"
    assert config_hash(load_config(SCORER, "c", TABLES)) == config_hash(
        load_config(declared, "c", TABLES)
    )


def test_a_second_ledger_is_told_of():
    """There is one."""
    twice = f"{SPEEDS}- {{type: inflight-load-producer, name: more}}\n"
    (warning,) = load_config(twice, "c", TABLES).warnings
    assert warning == (
        "c: plugins[3] (more): has no effect, because inflight-load-producer is declared before it"
    )


def test_the_picker_chooses_as_many_as_are_sent():
    """`maxNumOfEndpoints` alone sends no fallbacks, the flag alone does."""
    text = f"""{HEAD}plugins:
- type: max-score-picker
  parameters: {{maxNumOfEndpoints: 3}}
"""
    config = load_config(text, "c", TABLES)
    assert build_settings(config).profile.picker.max_num_of_endpoints == 1
    assert build_settings(config, fallback_endpoints_max=4).profile.picker.max_num_of_endpoints == 5
    (warning,) = settings_warnings(config)
    assert warning.startswith("c: maxNumOfEndpoints 3 of max-score-picker has no effect")
    assert settings_warnings(config, fallback_endpoints_max=2) == []


# --- plugins of other distributions ---

PLUGIN = '''
from typing import ClassVar
import numpy as np
from epp.plugins.contract import Parameters

class Alphabetical(Parameters, frozen=True):
    """Prefer names that come early. Nobody needs it."""

    type_name: ClassVar[str] = "{type_name}"
    first: str = "a"

    def {verb}(self, request, candidates, /):
        return np.ones(len(candidates))
'''


def test_the_tables_are_our_own_and_what_is_installed():
    """Those of the field, and those of other routers where their distribution is."""
    rivals = {one.type_name: one for one in PLUGINS}
    ours = {**FILTERS, **SCORERS, **PICKERS, **INDEXES}
    found = {**TABLES.filters, **TABLES.scorers, **TABLES.pickers, **TABLES.indexes}
    assert found == ours | rivals
    assert not ours.keys() & rivals.keys()


def test_a_plugin_of_rivals_that_are_not_installed_says_what_to_install(monkeypatch):
    """One sentence, and nothing else."""
    monkeypatch.setattr(build, "entry_points", lambda group: ())
    text = f"{HEAD}plugins: [{{type: least-pending-work-scorer}}]"
    with pytest.raises(ConfigError) as error:
        load_config(text, "c", plugin_tables())
    (problem,) = error.value.problems
    assert problem.startswith("c: plugins[0] (least-pending-work-scorer): type")
    assert problem.endswith("pip install 'homing-epp[rivals]'")


@pytest.mark.parametrize(
    ("verb", "table"),
    [("keep", "filters"), ("score", "scorers"), ("pick", "pickers"), ("open", "indexes")],
)
def test_an_installed_plugin_joins_the_table_of_its_verb(offer, verb, table):
    """By entry point, without a line of ours (D13)."""
    source = PLUGIN.format(type_name="alphabetical", verb=verb)
    if verb == "open":
        source = source.replace("import Parameters", "import Abilities, Parameters")
        source += "\n    abilities: ClassVar[Abilities] = Abilities()\n"
    offer(f"plugin_that_{verb}s", source)
    kind = getattr(plugin_tables(), table)["alphabetical"]
    assert issubclass(kind, msgspec.Struct)
    assert kind(first="b").first == "b"


def test_an_installed_scorer_is_configured_and_checked_like_ours(offer):
    """Parameters, unknown fields and weights."""
    offer("plugin_in_use", PLUGIN.format(type_name="alphabetical", verb="score"))
    tables = plugin_tables()
    text = f"{HEAD}plugins: [{{type: alphabetical, parameters: {{first: k}}}}]"
    (scorer,) = load_config(text, "c", tables).profile.scorers
    assert scorer.plugin.first == "k"
    with pytest.raises(ConfigError, match="parameters has unknown field `frist`, did you mean"):
        load_config(text.replace("first", "frist"), "c", tables)


@pytest.mark.parametrize(
    ("module", "source", "value", "problem"),
    [
        (
            "plugin_clash",
            PLUGIN.format(type_name="queue-scorer", verb="score"),
            None,
            "entry point entry (plugin_clash:Alphabetical) has type queue-scorer, which is already in use",
        ),
        (
            "plugin_refused_name",
            PLUGIN.format(type_name="openai-parser", verb="score"),
            None,
            "entry point entry (plugin_refused_name:Alphabetical) has type openai-parser, which is already in use",
        ),
        (
            "plugin_verbless",
            PLUGIN.format(type_name="alphabetical", verb="rank"),
            None,
            "entry point entry (plugin_verbless:Alphabetical) has 0 of the methods keep, score, pick, open; expected one",
        ),
        (
            "plugin_function",
            "def Alphabetical(): ...",
            None,
            "entry point entry (plugin_function:Alphabetical) is not a plugin; expected a msgspec.Struct with a type_name",
        ),
        (
            "plugin_missing",
            "",
            "plugin_nowhere:Scorer",
            "entry point entry (plugin_nowhere:Scorer) cannot be imported: No module named 'plugin_nowhere'",
        ),
        (
            "plugin_without_class",
            "",
            "plugin_without_class:Scorer",
            "entry point entry (plugin_without_class:Scorer) cannot be imported: module 'plugin_without_class' has no attribute 'Scorer'",
        ),
        *(
            (
                f"plugin_that_ends_by_{kind.lower()}",
                f"from asyncio import CancelledError\nraise {kind}('enough')",
                f"plugin_that_ends_by_{kind.lower()}:Scorer",
                f"entry point entry (plugin_that_ends_by_{kind.lower()}:Scorer) cannot be imported: it raised {kind}: enough",
            )
            for kind in ("CancelledError", "GeneratorExit", "KeyboardInterrupt", "SystemExit")
        ),
    ],
)  # fmt: skip
def test_an_installed_plugin_that_cannot_be_used_is_a_problem(
    offer, module, source, value, problem
):
    """Named by its entry point; nothing is silently left out."""
    offer(module, source, value)
    with pytest.raises(ConfigError) as error:
        plugin_tables()
    assert error.value.problems == (problem,)


FRESH = (
    HEAD
    + """
plugins:
- type: fresh-metrics-filter
  parameters: {maxAge: 400ms}
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: fresh-metrics-filter
  - pluginRef: max-score-picker
"""
)


def test_the_first_limit_of_all_says_how_old_metrics_may_become():
    """The staleness threshold, that of the detector, and those of filters."""
    assert oldest_metrics_s(build_settings(default_config(TABLES))) == 1.0
    built = build_settings(default_config(TABLES), metrics_staleness_s=0.5)
    assert oldest_metrics_s(built) == 0.5
    fresh = build_settings(load_config(FRESH, "test", TABLES))
    assert oldest_metrics_s(fresh) == pytest.approx(0.4)
