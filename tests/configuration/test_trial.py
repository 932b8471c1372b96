"""What fails is refused before it decides, by the same sentence everywhere."""

import io
from asyncio import CancelledError
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from msgspec import structs

from epp.commands.check_config import check_config
from epp.configuration.build import plugin_tables
from epp.configuration.config import DEFAULT_CONFIG, ConfigError, load_config
from epp.configuration.live import LiveConfiguration
from epp.core.abilities import Abilities
from epp.core.failures import Interrupted
from epp.core.parameters import Parameters
from epp.flags.command_lines import parse_serve
from epp.flags.subcommands import CheckFlags
from epp.plugins import FILTERS, PICKERS, SCORERS
from epp.plugins.contract import Affinity
from sim.__main__ import main as sim
from tests.plugins.test_contract import VARIANTS

TABLES = plugin_tables()
HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
TRACE = '{"time_s": 0, "prompt_tokens": 100, "output_tokens": 4}\n'


class Sound(Parameters, frozen=True):
    """A plugin of every kind that keeps to its contract; the tests break it."""

    type_name: ClassVar[str] = "odd-plugin"
    abilities: ClassVar[Abilities] = Abilities()

    def keep(self, request, candidates, /):
        return np.ones(len(candidates), dtype=np.bool_)

    def score(self, request, candidates, /):
        return np.ones(len(candidates))

    def pick(self, scores, candidates, random, rotation, /):
        return np.array([0])


def documents(*types):
    return HEAD + "plugins:\n" + "".join(f"- type: {name}\n" for name in types)


def load(text, **kinds):
    """`text`, with more plugins: the table by its name, and a class."""
    tables = {name: {**getattr(TABLES, name), "odd-plugin": kind} for name, kind in kinds.items()}
    return load_config(text, "c", structs.replace(TABLES, **tables))


def refused(text, **kinds):
    with pytest.raises(ConfigError) as error:
        load(text, **kinds)
    return error.value.problems


def broken(**members):
    return type("Odd", (Sound,), members, frozen=True)


def raises(kind):
    def explode(self, *_):
        raise kind("what it says")

    return explode


explode = raises(KeyError)
AT = "raised KeyError at configuration/test_trial.py:"
ENDS = (CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a task, a generator or the process unless somebody catches it."""
SCORE = documents("odd-plugin")
NEEDS = Abilities(reads_index=True)
MAKES = Abilities(reads_index=True, configures_index=True)


@pytest.mark.parametrize("name", [*FILTERS, *SCORERS, *PICKERS])
def test_no_plugin_of_ours_fails(name):
    """With any of its parameters, beside all the others."""
    for parameters in VARIANTS.get(name, [{}]):
        given = msgspec.json.encode(parameters).decode()
        load_config(f"{HEAD}plugins: [{{type: {name}, parameters: {given}}}]", "c", TABLES)


def test_a_sound_plugin_of_any_kind_is_taken():
    """What keeps to the contract is no business of the trial."""
    for table in ("filters", "scorers", "pickers"):
        load(SCORE, **{table: Sound})


@pytest.mark.parametrize("kind", [KeyError, *ENDS])
@pytest.mark.parametrize(
    ("table", "verb"), [("filters", "keep"), ("scorers", "score"), ("pickers", "pick")]
)
def test_one_that_raises_is_named_with_what_it_did(table, verb, kind):
    """Where it stands in the document, the type of its error and the line that raised it."""
    (problem,) = refused(SCORE, **{table: broken(**{verb: raises(kind)})})
    at = AT.replace("KeyError", kind.__name__)
    assert problem.startswith(f"c: plugins[0] (odd-plugin): {verb} {at}")
    assert problem.endswith(", in a trial on test endpoints")
    assert "what it says" not in problem


@pytest.mark.parametrize(
    ("table", "verb", "found", "said"),
    [
        ("filters", "keep", [True], "keep returned list, expected bool["),
        ("scorers", "score", np.ones(2), "score returned float64[2], expected float64["),
        ("pickers", "pick", np.array([5]), "pick returned position 5, expected positions from 0"),
    ],
)
def test_one_that_returns_what_it_may_not_is_named(table, verb, found, said):
    (problem,) = refused(SCORE, **{table: broken(**{verb: lambda *_: found})})
    assert problem.startswith(f"c: plugins[0] (odd-plugin): {said}")


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        (explode, f"holds {AT}"),
        (lambda *_: 1, "holds returned int, expected bool"),
    ],
)
def test_a_filter_that_holds_requests_is_asked_whether_it_does(holds, said):
    """What it answers is held to its contract, like what it keeps."""
    kind = broken(holds=holds, abilities=Abilities(holds_requests=True))
    (problem,) = refused(SCORE, filters=kind)
    assert problem.startswith(f"c: plugins[0] (odd-plugin): {said}")


def test_every_one_that_fails_is_named_at_once():
    """Nobody mends a document twice."""
    members = {"abilities": Abilities(marks_responses=True), "response_headers": explode}
    problems = refused(SCORE, scorers=broken(score=explode, **members))
    assert len(problems) == 1
    text = documents("odd-plugin", "queue-scorer") + "- {type: odd-plugin, name: second}\n"
    problems = refused(text, scorers=broken(score=explode))
    assert [problem.partition(": score")[0] for problem in problems] == [
        "c: plugins[0] (odd-plugin)",
        "c: plugins[2] (second)",
    ]


def test_one_behind_a_filter_that_leaves_nobody_is_tried():
    """What is selected in the cluster is not known here."""
    nobody = "- {type: label-selector-filter, parameters: {matchLabels: {none: such}}}\n"
    text = f"{HEAD}plugins:\n{nobody}- type: odd-plugin\n"
    for table, verb in (("filters", "keep"), ("scorers", "score"), ("pickers", "pick")):
        (problem,) = refused(text, **{table: broken(**{verb: explode})})
        assert problem.startswith(f"c: plugins[1] (odd-plugin): {verb} {AT}")


def on(condition):
    """A score that fails on some candidates only."""

    def score(self, request, candidates, /):
        if condition(request, candidates):
            raise KeyError
        return np.ones(len(candidates))

    return broken(score=score)


@pytest.mark.parametrize(
    "condition",
    [
        lambda request, pool: len(pool) == 1,
        lambda request, pool: len(pool) > 1,
        lambda request, pool: np.isnan(pool.waiting_requests).any(),
        lambda request, pool: np.isinf(pool.metrics_age_s).any(),
        lambda request, pool: (pool.metrics_age_s > 60).any(),
        lambda request, pool: pool.saturated.any(),
        lambda request, pool: not pool.saturated.any(),
        lambda request, pool: (pool.adapter_state.generation == 1).any(),
        lambda request, pool: (pool.adapter_state.generation == 2).any(),
        lambda request, pool: pool.adapter_state.active(request.model).any(),
        lambda request, pool: (pool.inflight_requests > 0).any(),
        lambda request, pool: (pool.inflight_prefill_tokens > 0).any(),
        lambda request, pool: not all(pool.labels),
        lambda request, pool: any("zone" in key for labels in pool.labels for key in labels),
        lambda request, pool: any(one.address.startswith("[") for one in pool.endpoints),
        lambda request, pool: any(one.incarnation for one in pool.endpoints),
        lambda request, pool: not request.model,
        lambda request, pool: not request.headers,
        lambda request, pool: "x-session-id" in request.headers,
        lambda request, pool: request.session_id,
        lambda request, pool: len(request.prompts) > 1,
        lambda request, pool: request.prompts and not request.chains_of(256, 9)[0],
        lambda request, pool: request.output_tokens_max is None,
        lambda request, pool: request.priority < 0,
        lambda request, pool: request.stream,
        lambda request, pool: request.api == "opaque",
        lambda request, pool: request.subset,
    ],
)
def test_every_kind_of_endpoint_and_request_is_tried(condition):
    """Whoever fails on one of them alone is found."""
    assert len(refused(SCORE, scorers=on(condition))) == 1


def test_what_an_index_holds_is_tried():
    """A prompt that is known, and one that is not."""
    text = documents("prefix-cache-scorer", "odd-plugin")
    for known in (True, False):
        kind = on(lambda _, pool, known=known: pool.matched_blocks.any() == known)
        assert len(refused(text, scorers=kind)) == 1


class OddIndex:
    def match(self, request, slots, now):
        return Affinity(np.zeros(slots, dtype=np.int64), 1)

    def nothing(self, *_):
        """Any other verb."""

    record = retract = forget = expire = resize = nothing


class OddIndexSettings(Sound, frozen=True):
    broken: str = ""

    abilities: ClassVar = Abilities()

    def open(self):
        if self.broken == "open":
            raise KeyError
        index = OddIndex()
        if self.broken not in {"", "adopt"}:
            setattr(index, self.broken, lambda *_: explode(self))
        return index

    def adopt(self, index):
        if self.broken == "adopt":
            raise KeyError
        return True


@pytest.mark.parametrize(
    "verb", ["open", "match", "record", "retract", "forget", "expire", "resize", "adopt"]
)
def test_every_verb_of_an_index_is_tried(verb):
    """Those of a restart, a retraction, a reload and housekeeping, too."""
    text = f"{HEAD}plugins: [{{type: odd-plugin, parameters: {{broken: {verb}}}}}]"
    (problem,) = refused(text, indexes=OddIndexSettings)
    # Under its type, by which it is asked for.
    assert problem.startswith(f"c: plugins[0] (odd-plugin): {verb} {AT}")


@pytest.mark.parametrize("table", ["filters", "scorers"])
def test_the_headers_that_it_sets_are_tried(table):
    members = {"abilities": Abilities(marks_responses=True)}
    kind = broken(response_headers=lambda *_: {"x-a": 1}, **members)
    (problem,) = refused(SCORE, **{table: kind})
    assert "response_headers returned a header str: int, expected str: str" in problem


# What can be told before anything is tried.


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"sheds_load": True}, "has a class variable sheds_load, which belongs in its abilities"),
        ({"reads": ()}, "has a class variable reads, which belongs in its abilities"),
        (
            {"producer_type": "x", "producer": "x"},
            "has producer_type, producer but does not declare reads_index=True in its abilities",
        ),
        (
            {"abilities": Abilities(reads=("queue",))},
            "reads ('queue',), expected a tuple of names among waiting_requests",
        ),
        (
            {"abilities": None},
            "declares no abilities; it needs a class variable `abilities` of type Abilities",
        ),
    ],
)
def test_what_is_declared_amiss_is_refused(members, said):
    """Also where it is declared as plugins did before they had abilities; the sentence says how."""
    for table in ("filters", "scorers", "pickers"):
        (problem,) = refused(SCORE, **{table: broken(**members)})
        assert problem.startswith(f"c: plugins[0] (odd-plugin): Odd {said}")


@pytest.mark.parametrize("kind", [KeyError, *ENDS])
def test_parameters_that_cannot_be_checked_are_a_problem(kind):
    """`ValueError` is an answer, anything else is a defect of the plugin."""
    (problem,) = refused(SCORE, scorers=broken(__post_init__=raises(kind)))
    at = AT.replace("KeyError", kind.__name__)
    assert problem.startswith(f"c: plugins[0] (odd-plugin): parameters: checking them {at}")
    assert problem.endswith(", expected ValueError")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        *(
            (
                {"producer": property(raises(kind))},
                f"producer {AT.replace('KeyError', kind.__name__)}",
            )
            for kind in (KeyError, *ENDS)
        ),
        ({"producer": 5}, "producer.name: expected a text, got a whole number"),
        (
            {"producer": "x", "producer_type": None},
            "producer.type_name: expected a text, got nothing",
        ),
        (
            {"producer": "x", "producer_parameters": property(explode), "abilities": MAKES},
            f"producer {AT}",
        ),
        (
            {"producer": "x", "producer_parameters": 7, "abilities": MAKES},
            "producer raised TypeError",
        ),
    ],
)
def test_an_index_that_is_asked_for_amiss_is_a_problem(members, said):
    kind = broken(**({"producer_type": "x", "abilities": NEEDS} | members))
    (problem,) = refused(SCORE, scorers=kind)
    assert problem.startswith(f"c: plugins[0] (odd-plugin): {said}")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        *(
            (property(raises(kind)), f"block_tokens {AT.replace('KeyError', kind.__name__)}")
            for kind in (KeyError, *ENDS)
        ),
        (0, "block_tokens is 0; it must be an int of at least 1"),
    ],
)
def test_blocks_without_a_size_are_a_problem(tokens, said):
    members = {"block_tokens": tokens, "abilities": Abilities(counts_blocks=True)}
    kind = type("Odd", (OddIndexSettings,), members, frozen=True)
    (problem,) = refused(SCORE, indexes=kind)
    assert problem.startswith(f"c: plugins[0] (odd-plugin): {said}")


def test_a_signal_ends_the_trial():
    """It is no plugin's, and who waits for the check wants it to end."""
    for members in ({"score": raises(Interrupted)}, {"__post_init__": raises(Interrupted)}):
        with pytest.raises(Interrupted):
            load(SCORE, scorers=broken(**members))


# What it costs.


def test_a_trial_is_a_bounded_number_of_decisions():
    """Fewer than a hundred, whatever the document holds."""
    calls = []

    def score(self, request, candidates, /):
        calls.append(len(candidates))
        return np.ones(len(candidates))

    load(SCORE, scorers=broken(score=score))
    assert 30 <= len(calls) < 100
    assert set(calls) == {1, 5}


def test_a_document_is_tried_when_it_is_read_and_not_again():
    """Other endpoints, other intervals: the same plugins."""
    calls = []

    def score(self, request, candidates, /):
        calls.append(1)
        return np.ones(len(candidates))

    tables = structs.replace(TABLES, scorers=TABLES.scorers | {"odd-plugin": broken(score=score)})
    flags = parse_serve(["--endpoints-file=e", "--config-file=c"], {})
    live = LiveConfiguration(flags, tables, SCORE.encode())
    tried = len(calls)
    assert tried
    live.current(10)
    live.current(10_000)
    assert len(calls) == tried
    live.read(SCORE.encode(), "config.yaml", 10)
    assert len(calls) == 2 * tried


# Everywhere the same.

BROKEN = '''
from typing import ClassVar
from epp.plugins.contract import Parameters

class Alphabetical(Parameters, frozen=True):
    """Prefer names that come early."""

    type_name: ClassVar[str] = "alphabetical-scorer"

    def score(self, request, candidates, /):
        return [endpoint.name < "b" for endpoint in candidates.endpoints]
'''


def test_check_config_and_the_simulator_say_the_same(offer, tmp_path, capsys):
    """In one sentence, with exit code 1."""
    offer("plugin_that_lists", BROKEN)
    config = tmp_path / "config.yaml"
    config.write_text(documents("alphabetical-scorer"))
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    said = (
        f"{config}: plugins[0] (alphabetical-scorer): score returned list, expected float64[5], "
        "in a trial on test endpoints\n"
    )
    out, err = io.StringIO(), io.StringIO()
    assert check_config(CheckFlags(file=str(config)), out, err) == 1
    assert (out.getvalue(), err.getvalue()) == ("", said)
    assert sim(["replay", str(trace), "--config", str(config)]) == 1
    assert capsys.readouterr().err == f"sim: {said}"


def test_the_default_is_tried_like_any_other():
    assert load_config(DEFAULT_CONFIG, "c", TABLES).warnings == ()


PREFIX = "approx-prefix-cache-producer"


@pytest.mark.parametrize("name", ["matched_blocks", "total_blocks", "uncached_tokens", "cold"])
def test_whatever_reads_the_prefix_index_has_one(name):
    """A filter, a scorer or a picker."""
    for table in ("filters", "scorers", "pickers"):
        reads = ("waiting_requests", name)
        config = load(SCORE, **{table: broken(abilities=Abilities(reads=reads))})
        assert (config.prefix, list(config.indexes)) == (PREFIX, [PREFIX])


def test_what_declares_no_reads_may_read_the_prefix_index():
    """So it has one; unless it names an index, which is then all that it reads of them."""
    for table in ("filters", "scorers", "pickers"):
        assert load(SCORE, **{table: broken()}).prefix == PREFIX
        assert not load(SCORE, **{table: broken(abilities=Abilities(reads=()))}).indexes
    named = {"producer_type": PREFIX, "abilities": NEEDS}
    assert not load(SCORE, scorers=broken(producer=None, **named)).indexes
    assert load(SCORE, scorers=broken(producer="", **named)).prefix == PREFIX


def test_an_index_that_is_declared_is_the_one_that_is_read():
    """No second one is made."""
    config = load(documents("odd-plugin", PREFIX), scorers=broken())
    assert list(config.indexes) == [PREFIX]
