"""The contract is one that can be broken: each thing that it says is noticed when it is not so."""

import subprocess
import sys
from collections import OrderedDict
from itertools import count
from typing import ClassVar

import numpy as np
import pytest

from epp.core.abilities import Abilities
from epp.plugins.contract import Affinity, Parameters
from epp.plugins.cost import scores_of_cost
from epp.testing import ContractError, check_plugin


class Fair(Parameters, frozen=True):
    """A scorer that is as it must be."""

    type_name = "fair-scorer"

    def score(self, request, candidates, /):
        return 1.0 / (1.0 + candidates.inflight_requests)


def broken(base=Fair, **members):
    """A class like `base` but for `members`."""
    return type("Broken", (base,), {"__module__": __name__, **members}, frozen=True)


def able(**abilities):
    return broken(abilities=Abilities(**abilities))


def naming(type_name, name):
    """It reads the default prefix index, and names this one."""

    def score(self, request, candidates, /):
        return 1.0 / (1.0 + candidates.uncached_tokens)

    return broken(
        abilities=Abilities(reads_index=True), producer_type=type_name, producer=name, score=score
    )


def scoring(function):
    return broken(score=lambda self, request, candidates, /: function(request, candidates))


def test_a_plugin_that_is_as_it_must_be_passes():
    """With any seed."""
    check_plugin(Fair)
    check_plugin(able(reads=("inflight_requests",)), seed=7, cases=20)


class Counting(Parameters, frozen=True):
    """A scorer with a memory of its own."""

    type_name = "counting-scorer"
    calls: ClassVar[list[int]] = []

    def score(self, request, candidates, /):
        self.calls.append(1)
        return np.full(len(candidates), (len(self.calls) % 7) / 7)


def spoil(request, candidates):
    candidates._columns.waiting_requests[:] = 0.5
    return np.ones(len(candidates))


def rename(request, candidates):
    request.headers["x-model"] = "other"
    return np.ones(len(candidates))


def fail(request, candidates):
    raise KeyError(request.headers)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (scoring(lambda _, some: np.full(len(some), 1.5)), "expected 0 to 1"),
        (scoring(lambda _, some: np.ones(len(some) + 1)), "score returned float64"),
        (scoring(lambda _, some: np.ones(len(some), dtype=np.float32)), "float32"),
        (scoring(lambda _, some: [1.0] * len(some)), "score returned list"),
        (scoring(fail), "score raised KeyError"),
        (scoring(spoil), "changed the candidates"),
        (scoring(rename), "changed the request"),
        (scoring(lambda _, some: np.linspace(0, 1, len(some))), "in another order"),
        (Counting, "two equal calls return different results"),
        (able(reads=("kv_cache_usage",)), "it reads inflight_requests, not in the `reads` of its"),
        (able(reads=("queue",)), "it reads .'queue',., expected a tuple of names among waiting_r"),
        (broken(reads=()), "it has a class variable reads, which belongs in its abilities"),
        (
            broken(session_of=fail),
            "it has session_of but does not declare goes_by_sessions=True in its abi",
        ),
        (able(tells_cost=True), "it declares tells_cost but has no cost_unit, cost_parts"),
        (broken(type_name=""), "expected a type_name"),
        (naming("nothing", "nothing"), "no index of type nothing"),
        (naming("approx-prefix-cache-producer", None), "uncached_tokens, but its producer is None"),
    ],
)
def test_a_scorer_that_breaks_it_is_told(kind, said):
    """In a sentence that names it."""
    with pytest.raises(ContractError, match=said) as told:
        check_plugin(kind)
    assert kind.__name__ in str(told.value)


class Costly(Parameters, frozen=True):
    """A scorer of a cost that it tells."""

    type_name = "costly-scorer"
    abilities = Abilities(tells_cost=True)
    cost_unit: ClassVar[str] = "s"

    def score(self, request, candidates, /):
        return scores_of_cost(candidates.inflight_requests.astype(np.float64))

    def cost_parts(self, request, candidates, /):
        half = candidates.inflight_requests / 2.0
        return {"first": half, "second": half.copy()}


def test_a_cost_that_is_what_is_scored_by_passes():
    """By as much for each unit."""
    check_plugin(Costly)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"cost_unit": ""}, "cost_unit must be a str"),
        ({"cost_parts": lambda *_: {}}, "returned no part"),
        ({"cost_parts": lambda *_: {"all": [1.0]}}, "cost_parts returned list"),
        (
            {"cost_parts": lambda _, __, some: {"all": -1.0 * some.inflight_requests}},
            "do not fall linearly with the cost",
        ),
        (
            {"cost_parts": lambda _, __, some: {"all": some.inflight_requests**2.0}},
            "do not fall linearly with the cost",
        ),
    ],
)
def test_a_cost_that_is_another_is_told(members, said):
    """What is shown in seconds must be what decided."""
    with pytest.raises(ContractError, match=said):
        check_plugin(broken(Costly, **members))


def test_who_goes_by_the_order_of_candidates_may_say_so():
    """As round robin does; the rest of the contract holds for it too."""
    by_place = scoring(lambda _, some: np.linspace(0, 1, len(some)))
    check_plugin(by_place, by_order=True)
    with pytest.raises(ContractError, match="expected 0 to 1"):
        check_plugin(scoring(lambda _, some: np.linspace(0, 2, len(some))), by_order=True)


def test_a_case_can_be_repeated():
    """The sentence has its number; the same seed says the same again."""
    sentences = set()
    for _ in range(2):
        with pytest.raises(ContractError, match=r"\(case \d+ of seed 3\)") as told:
            check_plugin(scoring(lambda _, some: some.inflight_requests / 8.0), seed=3)
        sentences.add(str(told.value))
    assert len(sentences) == 1


def test_parameters_that_are_refused_are_told():
    """As a configuration would be."""
    with pytest.raises(ContractError, match=r"these parameters are refused.*unknown field"):
        check_plugin(Fair, {"typo": 1})


@pytest.mark.parametrize("kind", [int, Parameters, type("Both", (Fair,), {"keep": Fair.score})])
def test_what_is_no_plugin_is_told(kind):
    """A struct with one of the verbs, not none and not two."""
    with pytest.raises(ContractError, match="is not a plugin"):
        check_plugin(kind)


class Zone(Parameters, frozen=True):
    """A filter that may leave nobody."""

    type_name = "zone-filter"
    abilities: ClassVar[Abilities] = Abilities()

    def keep(self, request, candidates, /):
        zone = request.headers.get("x-zone", "a")
        return np.array([labels.get("zone", "a") == zone for labels in candidates.labels])


def test_a_filter_that_leaves_nobody_has_to_say_so():
    """And is given labels and headers that matter to it."""
    given = {"labels": [{"zone": "a"}, {"zone": "b"}], "headers": [{"x-zone": "b"}]}
    with pytest.raises(ContractError, match="drops every candidate"):
        check_plugin(Zone, **given)
    check_plugin(Zone, **given, selects=True)
    with pytest.raises(ContractError, match="keep returned float64"):
        check_plugin(broken(Zone, keep=lambda self, request, some, /: np.ones(len(some))))


def test_a_picker_that_reads_what_it_does_not_declare_is_told():
    """As a scorer is."""

    class Idle(Parameters, frozen=True):
        type_name = "idle-picker"
        abilities = Abilities(reads=("slot",))

        def pick(self, scores, candidates, random, rotation, /):
            return np.array([candidates.inflight_requests.argmin()])

    with pytest.raises(ContractError, match="it reads inflight_requests, not in the `reads`"):
        check_plugin(Idle)


TURNS = count()


class First(Parameters, frozen=True):
    """A picker."""

    type_name = "first-picker"

    def pick(self, scores, candidates, random, rotation, /):
        return np.array([int(np.argmax(scores))])


@pytest.mark.parametrize(
    ("pick", "said"),
    [
        (lambda self, scores, some, random, rotation, /: np.array([len(scores)]), "position"),
        (lambda self, scores, some, random, rotation, /: 0, "pick returned int"),
        (
            lambda self, scores, some, random, rotation, /: np.array([next(TURNS) % len(some)]),
            "pick differently",
        ),
    ],
)
def test_a_picker_that_breaks_it_is_told(pick, said):
    """Positions among the candidates, the same for the same dice."""
    check_plugin(First)
    with pytest.raises(ContractError, match=said):
        check_plugin(broken(First, pick=pick))


class Sessions:
    """Which slot a session was sent to."""

    def __init__(self, limit):
        self.limit = limit
        self.slots = OrderedDict()

    def match(self, request, slots, now):
        matched = np.zeros(slots, dtype=np.int64)
        slot = self.slots.get(request.session_id, slots)
        matched[slot : slot + 1] = 1
        return Affinity(matched, 1)

    def record(self, request, slot, now):
        self.slots[request.session_id] = slot
        while len(self.slots) > self.limit:
            self.slots.popitem(last=False)

    def retract(self, request, slot, recorded, now):
        self.slots.pop(request.session_id, None)

    def forget(self, slot):
        self.slots = OrderedDict((one, at) for one, at in self.slots.items() if at != slot)

    def expire(self, now):
        """Nothing."""

    def resize(self, slot, blocks_total, block_size_tokens):
        """Nothing."""


class SessionsSettings(Parameters, frozen=True):
    """A small index."""

    type_name = "sessions-producer"
    limit: int = 50

    abilities: ClassVar = Abilities()

    def open(self):
        return Sessions(self.limit)

    def adopt(self, index):
        return isinstance(index, Sessions)


class SameSession(Parameters, frozen=True):
    """A scorer that reads it."""

    type_name = "same-session-scorer"
    abilities = Abilities(reads_index=True)
    producer_type = "sessions-producer"
    producer = "sessions-producer"

    def score(self, request, candidates, /):
        return candidates.affinity(self.producer).matched.astype(float)


def test_an_index_and_its_reader_pass():
    """The reader is given the index as it is configured beside it."""
    check_plugin(SessionsSettings)
    check_plugin(SameSession, beside=[SessionsSettings])


def opening(**members):
    """Settings that open an index like `Sessions` but for `members`."""
    kind = type("Other", (Sessions,), members)
    return broken(SessionsSettings, open=lambda self: kind(self.limit))


def remembering(self, request, slots, now):
    found = Sessions.match(self, request, slots, now)
    self.slots[request.session_id] = 0
    return found


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (opening(forget=lambda self, slot: None), "of a forgotten endpoint"),
        (opening(match=lambda self, request, slots, now: None), "match returned NoneType"),
        (
            opening(match=lambda *_: Affinity(np.full(_[2], 2, dtype=np.int64), 1)),
            "expected 0 to its total 1",
        ),
        (opening(match=remembering), "two equal calls of match return different results"),
        (broken(SessionsSettings, adopt=lambda self, index: True), "index of another type"),
        (broken(SessionsSettings, adopt=lambda self, index: None), "adopt did not return a bool"),
        (opening(measures=lambda self: None), "it has measures but does not declare meas"),
        (
            broken(SessionsSettings, abilities=Abilities(shares=True)),
            "it does not have what it declares: share, learn, shared_entries",
        ),
    ],
)
def test_an_index_that_breaks_it_is_told(kind, said):
    """By what it answers."""
    with pytest.raises(ContractError, match=said):
        check_plugin(kind)


def test_an_index_that_grows_is_told():
    """Without a limit, or with one that is too large to be reached."""
    with pytest.raises(ContractError, match="it needs a limit"):
        check_plugin(SessionsSettings, {"limit": 10**9})


def test_it_needs_no_test_framework():
    """Nor anything that only developers of Homing have."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['pytest', 'hypothesis', 'tests', 'sim']));"
        "from epp.testing import check_plugin; from epp.plugins.scorers import Queue;"
        "check_plugin(Queue, cases=5); print('passed')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "passed\n", done.stderr
