import json
from pathlib import Path

import pytest

from epp.configuration.build import default_config, plugin_tables
from epp.configuration.config import load_config
from epp.configuration.explaining import explain, what_it_reads
from epp.core.parameters import Parameters
from epp.plugins import FILTERS, SCORERS
from tests.configuration.test_config import NEEDED

SAMPLES = Path(__file__).parent / "config_samples"
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def explained(plugins):
    return explain(load_config(f"{HEAD}{plugins}", "a.yaml", plugin_tables()))


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sample_is_explained(path):
    """Each filter and scorer is in it; nothing is assigned nothing."""
    config = load_config(path.read_bytes(), path.name, plugin_tables())
    text = explain(config)
    for member in (*config.profile.filters, *config.profile.scorers):
        assert f" {member.name}" in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", [*FILTERS, *SCORERS])
def test_who_is_said_to_read_the_prefix_index_has_one(name):
    """Alone in a configuration; and nobody else has one made."""
    parameters = json.dumps(NEEDED.get(name, {}))
    text = explained(f"plugins:\n- type: {name}\n  parameters: {parameters}\n")
    reads = f"      reads {what_it_reads({**FILTERS, **SCORERS}[name])}\n"
    assert reads in text
    made = "  index     approx-prefix-cache-producer: default prefix index\n" in text
    assert made == ("prefix index" in reads)


def test_the_prefill_speed_is_explained():
    """Of every endpoint, or of those with labels first."""
    said = "prefill speed, at which prompt tokens in flight drain\n"
    assert f"{said}  15,928 tokens/s for every endpoint\n" in explain(
        default_config(plugin_tables())
    )
    assert (
        f"{said}  60,000 tokens/s with labels gpu=h200, tp=2\n  30,000 tokens/s for all others\n"
    ) in explained(
        "plugins: [{type: token-load-scorer}, {type: inflight-load-producer, parameters: "
        "{peakPrefillThroughput: 30000, peakPrefillThroughputs: "
        "[{matchLabels: {gpu: h200, tp: '2'}, peakPrefillThroughput: 60000}]}}]\n"
    )


@pytest.mark.parametrize("kind", [*FILTERS.values(), *SCORERS.values()])
def test_what_each_filter_and_scorer_reads_is_told(kind):
    """In words, each once."""
    told = what_it_reads(kind).split(", ")
    assert told != [""]
    assert len(set(told)) == len(told)
    assert "_" not in "".join(told)


def test_an_index_that_is_read_is_told_by_its_type():
    """But for the default prefix index."""
    assert (
        what_it_reads(SCORERS["no-hit-lru-scorer"]) == "index of no-hit-lru-producer, prefix index"
    )
    assert what_it_reads(SCORERS["token-load-scorer"]) == ("prefix index, prompt tokens in flight")
    assert what_it_reads(Parameters) == ""
