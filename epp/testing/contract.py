"""The check `check_plugin` of the contract that every plugin must meet, for any state of the pool.

The plugin is a filter, a scorer, a picker or the settings of an affinity index, as its main method
shows.

- It is a frozen struct with a `type_name`, and refuses unknown parameters.
- Its results have the type, the length and the range of its contract.
- It is a pure function: it changes nothing, and repeated calls and other instances give the same
  result.
- Candidates in another order get the same results in that order.
- Its abilities declare what it does, and it reads only what it declares to read.
- An index stays within its bounds, and forgets an endpoint completely. Its memory stays within its
  own limits.
- It survives churn in the real scheduler. It never fails, every request is answered and ended, and
  the same seed gives the same result. An endpoint that replaces another inherits nothing from it.

Cases are drawn from a seed. The check does not use hypothesis.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import ConfigError, PluginTables, load_config
from epp.configuration.document import decode
from epp.core.abilities import Abilities
from epp.core.decision.plugin import PREFIX_READS, TellsCost, declaration_fault
from epp.core.decision.settings import SchedulerSettings
from epp.core.failures import (
    BOOLS,
    FLOATS,
    array_fault,
    positions_fault,
)
from epp.core.knowledge.candidates import Affinity, Candidates
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.knowledge.index import VERBS, AffinityIndex, missing_verbs
from epp.core.knowledge.indexes import affinity_fault
from epp.core.prompt.request import InferenceRequest
from epp.core.session_tokens import SessionTokens
from epp.core.types import AdapterReport
from epp.testing import builders
from epp.testing.churn import churn, inherited_column, prompt
from epp.testing.reads import ReadsObserved

Given = Mapping[str, str]

_VERBS: Final = {"keep": "filters", "score": "scorers", "pick": "pickers", "open": "indexes"}
_ADAPTERS: Final = ("my-model", "a", "b", "c")
_ROLES: Final = ("decode", "prefill", "encode", "both", "other")
_TOKENS: Final = SessionTokens((b"of this test",))
_HEADERS: Final[tuple[Given, ...]] = ({}, {"x-session-token": _TOKENS.of(builders.endpoint(1))})
_SLOTS: Final = 6
_REQUESTS: Final = 1_000
"""Number of recorded requests after which an index must have reached its largest size, with the
given limits.
"""
_GROWTH_MAX: Final = 1.25
_GROWTH_BYTES_MAX: Final = 64 * 1024
"""Number of bytes by which an index may grow in addition to the factor `_GROWTH_MAX`, because
dictionaries grow by doubling.
"""
_ENOUGH: Final = 1e-12
_COST_TOLERANCE: Final = 1e-6
"""Tolerance when scores are compared with the reported cost, whose parts may be added up in another
order.
"""


class ContractError(AssertionError):
    """The error of a plugin that breaks its contract.

    Its message is one sentence. If a random case failed, it contains the numbers of the case and of
    the seed, which repeat it.
    """


class _Subject(Struct, frozen=True, kw_only=True):
    """The plugin class under test, and its author's statements about it."""

    kind: type[Any]
    verb: str
    parameters: Mapping[str, object]
    tables: PluginTables
    labels: Sequence[Given]
    headers: Sequence[Given]
    selects: bool
    by_order: bool
    cases: int
    seed: int

    @property
    def abilities(self) -> Abilities:
        """Return the abilities that the plugin class declares."""
        declared: Abilities = self.kind.abilities
        return declared

    def made(self) -> Any:
        """Return a new instance of the plugin class with the given parameters."""
        return msgspec.convert(dict(self.parameters), self.kind, dec_hook=decode)

    def expect(self, fulfilled: bool, sentence: str, case: int | None = None) -> None:
        """Raise `ContractError` with `sentence`, and the number of the `case`, unless
        `fulfilled`.
        """
        if not fulfilled:
            told = f"{self.kind.__name__}({dict(self.parameters)}): {sentence}"
            raise ContractError(
                told if case is None else f"{told} (case {case} of seed {self.seed})"
            )


def check_plugin(  # noqa: PLR0913  one argument per option
    kind: type[Any],
    parameters: Mapping[str, object] | None = None,
    *,
    beside: Sequence[type[Any]] = (),
    labels: Sequence[Given] = (),
    headers: Sequence[Given] = (),
    selects: bool = False,
    by_order: bool = False,
    cases: int = 100,
    seed: int = 1,
) -> None:
    """Raise `ContractError` at the first violation of the contract by the plugin class `kind`.

    The check takes about a second. `parameters` are spelt as in a configuration.

    - `beside`: other plugin classes that it needs, such as the index that a scorer names. Installed
      plugins are known.
    - `labels` and `headers`: additional labels of endpoints and headers of requests that the plugin
      uses.
    - `selects`: True for a filter that may drop every candidate.
    - `by_order`: True if the plugin ranks candidates that are equal for it in their order.

    An index needs parameters with small limits: after `_REQUESTS` recorded requests it must not
    grow any more.
    """
    verbs = [verb for verb in _VERBS if callable(getattr(kind, verb, None))]
    if not (issubclass(kind, Struct) and len(verbs) == 1):
        raise ContractError(
            f"{kind.__name__} is not a plugin: expected a msgspec.Struct with exactly one of "
            f"the methods {', '.join(_VERBS)}"
        )
    subject = _Subject(
        kind=kind,
        verb=verbs[0],
        parameters=parameters or {},
        tables=_with(plugin_tables(), (kind, *beside)),
        labels=labels,
        headers=headers,
        selects=selects,
        by_order=by_order,
        cases=cases,
        seed=seed,
    )
    _check_class(subject)
    match subject.verb:
        case "pick":
            _check_picker(subject)
        case "open":
            _check_index(subject)
        case _:
            _check_opinions(subject)
    _check_churn(subject)


def _check_class(subject: _Subject) -> None:
    kind = subject.kind
    name = getattr(kind, "type_name", None)
    subject.expect(isinstance(name, str) and bool(name), "expected a type_name of type str")
    subject.expect(
        bool(kind.__struct_config__.frozen) and bool(kind.__struct_config__.forbid_unknown_fields),
        "expected a struct that is frozen and forbids unknown fields, like subclasses of "
        "Parameters",
    )
    fault = declaration_fault(kind)
    subject.expect(not fault, f"it {fault}")
    try:
        subject.made()
    except (msgspec.ValidationError, ValueError) as problem:
        subject.expect(False, f"these parameters are refused: {problem}")


# Filters and scorers.


def _check_opinions(subject: _Subject) -> None:
    plugin = subject.made()
    for case in range(subject.cases):
        random = _random(subject, case)
        asked = _request(subject, random)
        pool = _pool(subject, plugin, asked, random)
        before, asked_before = _contents(pool), _said(asked)
        found = _answered(subject, plugin, asked, pool, case)
        again = _answered(subject, plugin, asked, pool, case)
        another = _answered(subject, subject.made(), asked, pool, case)
        subject.expect(_same(found, again), "two equal calls return different results", case)
        subject.expect(_same(found, another), "another instance returns a different result", case)
        subject.expect(_unchanged(before, _contents(pool)), "it changed the candidates", case)
        subject.expect(asked_before == _said(asked), "it changed the request", case)
        if not subject.by_order:
            order = np.array(random.sample(range(len(pool)), len(pool)))
            shuffled = _answered(subject, plugin, asked, pool.take(order), case)
            subject.expect(
                _alike(found[order], shuffled),
                "candidates in another order get other results; if that is intended, pass "
                "`by_order=True`",
                case,
            )
        if subject.abilities.tells_cost:
            _check_cost(subject, plugin, asked, pool, found, case)
        reads = ReadsObserved()
        getattr(plugin, subject.verb)(reads.request(asked), reads.candidates(pool))
        _check_reads(subject, reads, case)


def _check_reads(subject: _Subject, reads: ReadsObserved, case: int) -> None:
    """Raise `ContractError` if the plugin read a value that it does not declare.

    Data for an undeclared read could be missing, or scores could be cached although it changes.
    """
    declared = subject.abilities.reads
    if declared is not None:
        undeclared = ", ".join(sorted(reads.names - {*declared}))
        subject.expect(
            not undeclared, f"it reads {undeclared}, not in the `reads` of its abilities", case
        )
    elif subject.abilities.reads_index and subject.made().producer is None:
        undeclared = ", ".join(sorted(reads.names & {*PREFIX_READS}))
        subject.expect(not undeclared, f"it reads {undeclared}, but its producer is None", case)


def _check_cost(
    subject: _Subject,
    plugin: TellsCost,
    asked: InferenceRequest,
    pool: Candidates,
    scores: Any,
    case: int,
) -> None:
    """Raise `ContractError` if the plugin's cost report is malformed or changes the candidates, or
    if its scores do not fall linearly with the cost (all scores may be equal).
    """
    unit: object = plugin.cost_unit
    subject.expect(
        isinstance(unit, str) and bool(unit), 'cost_unit must be a str such as "s"', case
    )
    before = _contents(pool)
    parts = plugin.cost_parts(asked, pool)
    subject.expect(_unchanged(before, _contents(pool)), "cost_parts changed the candidates", case)
    subject.expect(bool(parts), "cost_parts returned no part, expected at least one", case)
    for name, part in parts.items():
        fault = array_fault(part, FLOATS, len(pool))
        subject.expect(not fault, f"cost_parts returned {fault} for {name!r}", case)
    cost = np.sum(list(parts.values()), axis=0)
    known = np.isfinite(cost) & np.isfinite(scores)
    cost, scores = cost[known], scores[known]
    if len(cost) < 2 or not np.ptp(cost) > _ENOUGH:
        return
    least, most = int(cost.argmin()), int(cost.argmax())
    slope = (scores[most] - scores[least]) / (cost[most] - cost[least])
    expected = scores[least] + (cost - cost[least]) * slope
    subject.expect(
        bool(slope <= 0.0 and np.allclose(scores, expected, atol=_COST_TOLERANCE)),
        f"scores {scores.tolist()} of costs {cost.tolist()} do not fall linearly with the cost",
        case,
    )


def _answered(
    subject: _Subject, plugin: Any, asked: InferenceRequest, pool: Candidates, case: int
) -> Any:
    """Return the result of `keep` or `score` after checks of its type, length and range, with NaN
    for None.
    """
    n = len(pool)
    try:
        found = getattr(plugin, subject.verb)(asked, pool)
    except Exception as problem:
        raise ContractError(
            f"{subject.kind.__name__}: {subject.verb} raised {type(problem).__name__} "
            f"(case {case} of seed {subject.seed})"
        ) from problem
    if subject.verb == "keep":
        fault = array_fault(found, BOOLS, n)
        subject.expect(not fault, f"keep returned {fault}", case)
        subject.expect(
            subject.selects or bool(found.any()),
            "it drops every candidate; pass `selects=True` if it may",
            case,
        )
        return found.copy()
    if found is None:
        return np.full(n, math.nan)
    fault = array_fault(found, FLOATS, n)
    subject.expect(not fault, f"score returned {fault}", case)
    inside = np.isnan(found) | ((found >= 0.0) & (found <= 1.0))
    subject.expect(bool(inside.all()), f"score returned {found.tolist()}, expected 0 to 1", case)
    return found.copy()


# Pickers.


def _check_picker(subject: _Subject) -> None:
    for case in range(subject.cases):
        random = _random(subject, case)
        n = random.randint(1, 8)
        sums = np.array([random.choice([0.0, 1.0, random.uniform(0, 10)]) for _ in range(n)])
        rotation, seed = random.randrange(2**40), random.randrange(100)
        found = []
        for _ in range(2):
            pool = builders.candidates(n)
            before = _contents(pool)
            # A picker may use its copy as scratch space.
            given = sums.copy()
            reads = ReadsObserved()
            watched = reads.candidates(pool)
            chosen = subject.made().pick(given, watched, Random(seed), rotation)  # noqa: S311  not for security
            _check_reads(subject, reads, case)
            fault = positions_fault(chosen, n)
            subject.expect(not fault, f"pick returned {fault}", case)
            subject.expect(_unchanged(before, _contents(pool)), "it changed the candidates", case)
            found.append(chosen.tolist())
        subject.expect(
            found[0] == found[1], "two calls with the same random generator pick differently", case
        )


# Indexes.


def _check_index(subject: _Subject) -> None:
    settings = subject.made()
    abilities = subject.abilities
    index: Any = settings.open()
    missing = missing_verbs(abilities, index)
    subject.expect(not missing, f"it does not have what it declares: {', '.join(missing)}")
    declared = asdict(abilities)
    for ability, verbs in VERBS.items():
        has_all = all(callable(getattr(index, verb, None)) for verb in verbs)
        subject.expect(
            not ability or declared[ability] or not has_all,
            f"it has {', '.join(verbs)} but does not declare {ability}",
        )
    subject.expect(isinstance(settings.adopt(index), bool), "adopt did not return a bool")
    subject.expect(
        settings.adopt(object()) is False, "adopt accepted an index of another type, expected False"
    )
    random = _random(subject, 0)
    now = builders.NOW_S
    for step in range(_REQUESTS):
        now = _record_request(subject, index, random, step, now)
    asked = [_request(subject, random) for _ in range(20)]
    # No request was ever sent to this slot.
    stranger = _SLOTS
    for slot in range(_SLOTS):
        index.forget(slot)
        for one in asked:
            known = _matched(subject, index, one, now, _SLOTS + 1)
            for name, column in {"matched": known.matched, **known.columns}.items():
                subject.expect(
                    _same(column[slot : slot + 1], column[stranger:]),
                    f"{name} of a forgotten endpoint is {column[slot]}, but "
                    f"{column[stranger]} of an endpoint that never existed",
                )
    for step in range(_REQUESTS):
        now = _record_request(subject, index, random, step, now)
    before = _held_bytes(index)
    for step in range(3 * _REQUESTS):
        now = _record_request(subject, index, random, step, now)
    after = _held_bytes(index)
    subject.expect(
        after <= _GROWTH_MAX * before + _GROWTH_BYTES_MAX,
        f"{_REQUESTS:,} requests make it {before:,} bytes large, three times as many more make it "
        f"{after:,} bytes; it needs a limit, or smaller parameters",
    )


def _record_request(subject: _Subject, index: Any, random: Random, step: int, now: float) -> float:
    """Match and record one random request in `index`, and sometimes retract it. Sometimes also pass
    entries of a peer, a correction, a cache size or the time to the index, as far as it supports
    them.

    Return the time after it, in seconds.
    """
    asked = _request(subject, random, own=f"{step} {random.random()}")
    slot = random.randrange(_SLOTS)
    _matched(subject, index, asked, now, _SLOTS)
    recorded = index.record(asked, slot, now)
    if random.random() < 0.1:
        index.retract(asked, slot, recorded, now)
    if subject.abilities.shares and random.random() < 0.1:
        # A peer may send any keys.
        index.learn([b"", bytes(200), random.randbytes(16)], slot, now - 1.0, now)
        index.learn(list(index.share(asked)), slot, now, now)
    if subject.abilities.corrected and random.random() < 0.05:
        # An engine may report any count.
        error, size = random.uniform(-1.0, 1.0), random.uniform(1.0, 16.0)
        index.correct(Correction(slot=slot, error=error, bytes_per_token=size))
    if random.random() < 0.05:
        index.resize(slot, random.choice([1, 100, 10_000]), 16)
    if random.random() < 0.02:
        index.expire(now)
    return now + 0.01


def _matched(
    subject: _Subject, index: AffinityIndex, asked: InferenceRequest, now: float, slots: int
) -> Affinity:
    """Return the result of `index.match`, after checks that it is valid and that a second call
    returns the same.
    """
    found, again = (index.match(asked, slots, now) for _ in range(2))
    fault = affinity_fault(found, slots)
    subject.expect(not fault, f"match returned {fault}")
    inside = (found.matched >= 0) & (found.matched <= found.total)
    subject.expect(
        bool(inside.all()),
        f"match returned {found.matched.tolist()}, expected 0 to its total {found.total}",
    )
    same = _same(found.matched, again.matched) and found.total == again.total
    same = same and _unchanged(found.columns, again.columns)
    subject.expect(
        same, "two equal calls of match return different results: it must change nothing"
    )
    return found


def _held_bytes(root: object) -> int:
    """Return the size in bytes of all objects reachable from `root`, except code."""
    seen: set[int] = set()
    waiting = [root]
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(
            one, (type, ModuleType, FunctionType, BuiltinFunctionType)
        ):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total


# Churn in the scheduler.


def _check_churn(subject: _Subject) -> None:
    settings = _settings(subject)
    first, second = (
        churn(settings, seed=subject.seed, labels=subject.labels, headers=subject.headers)
        for _ in range(2)
    )
    failing = [f"{one.name}: {one.what}" for one in first.scheduler.failures]
    subject.expect(not failing, f"in churn it fails: {'; '.join(failing)}")
    subject.expect(
        subject.selects or all(first.went),
        "in churn a request was refused although endpoints were ready",
    )
    subject.expect(first.went == second.went, "in churn two runs with the same seed differ")
    subject.expect(
        first.scheduler.ledger.open_leases == 0, "in churn a request that ended is still in flight"
    )
    differing = inherited_column(first)
    subject.expect(not differing, f"after churn, new endpoints inherit {differing} from old ones")


def _settings(subject: _Subject) -> SchedulerSettings:
    """Return scheduler settings for the plugin under test: with a profile that contains it, or with
    it as an additional index.
    """
    name = subject.kind.type_name
    declared: dict[str, object] = {"type": name, "parameters": dict(subject.parameters)}
    others = {"keep": "queue-scorer", "pick": "prefix-cache-scorer", "open": "queue-scorer"}
    plugins = [declared]
    if subject.verb in others:
        plugins.append({"type": others[subject.verb]})
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins if subject.verb != "open" else plugins[1:],
    }
    try:
        config = load_config(msgspec.json.encode(document), "the check", subject.tables)
    except ConfigError as problem:
        raise ContractError(f"{subject.kind.__name__}: {problem}") from problem
    settings = build_settings(config)
    if subject.verb == "open":
        # The scheduler reports everything to an index, whether or not a plugin reads it.
        return replace(settings, indexes={**settings.indexes, name: subject.made()})
    return settings


# Random values.


def _random(subject: _Subject, case: int) -> Random:
    return Random(f"{subject.seed}:{case}")  # noqa: S311  not for security


def _request(subject: _Subject, random: Random, own: str = "") -> InferenceRequest:
    return builders.request(
        request_id=random.choice(["one", "two", "three"]),
        model=random.choice(_ADAPTERS),
        prompts=(_prompt(random, own),),
        headers=dict(random.choice([*_HEADERS, *subject.headers])),
        session_id=random.choice(["", "s1", f"s{own}"]),
        session_tokens=_TOKENS,
        cold=random.random() < 0.5,
        priority=random.choice([-1, 0, 1]),
        prompt_tokens=random.randrange(10_000),
    )


def _prompt(random: Random, own: str) -> bytes:
    """Return a random prompt with the text `own` first, so that it shares no beginning with others,
    or last.
    """
    parts = [prompt(random), own.encode()]
    return b"".join(reversed(parts) if random.random() < 0.5 else parts)


def _pool(subject: _Subject, plugin: Any, asked: InferenceRequest, random: Random) -> Candidates:
    """Return 1 to 6 candidates in random states."""
    n = random.randint(1, _SLOTS)
    total = random.randint(0, 5)

    def column(draw: Callable[[], Any]) -> list[Any]:
        return [draw() for _ in range(n)]

    def count() -> float:
        return math.nan if random.random() < 0.2 else float(random.randint(0, 20))

    def share() -> float:
        return math.nan if random.random() < 0.2 else random.choice([0.0, 1.0, random.random()])

    def labels() -> Given:
        roles = [{"llm-d.ai/role": role} for role in _ROLES]
        return random.choice([{}, *roles, *subject.labels])

    return builders.candidates(
        waiting_requests=column(count),
        running_requests=column(count),
        kv_cache_usage=column(share),
        metrics_age_s=column(lambda: random.choice([0.0, 1.5, 9.0, math.inf])),
        saturated=column(lambda: random.random() < 0.3),
        inflight_requests=column(lambda: random.randint(0, 9)),
        inflight_prefill_tokens=column(lambda: random.uniform(0, 1e6)),
        matched_blocks=column(lambda: random.randint(0, total)),
        total_blocks=total,
        adapters=column(lambda: _adapters(random)),
        labels=column(labels),
        attributes=column(lambda: _attributes(subject, plugin, random)),
        affinities=dict(_affinities(subject, plugin, asked, random, n)),
        prompt_tokens=asked.prompt_tokens,
        receiving_tokens=column(lambda: random.uniform(0, 1e6)),
        sending_tokens=column(lambda: random.uniform(0, 1e6)),
        link_bytes_per_s=column(lambda: random.choice([math.nan, 10 ** random.uniform(6, 13)])),
    )


def _attributes(subject: _Subject, plugin: Any, random: Random) -> Mapping[str, float]:
    """Return a random value of the attribute that the plugin reads, by its key; empty if it reads
    none, and sometimes otherwise.
    """
    if not subject.abilities.reads_attribute or random.random() < 0.2:
        return {}
    return {plugin.attribute_key: random.choice([0.0, 1.0, random.random(), 1e15])}


def _affinities(
    subject: _Subject, plugin: Any, asked: InferenceRequest, random: Random, n: int
) -> Iterator[tuple[str, Affinity]]:
    """Yield the name and the match of the affinity index that the plugin reads, after some recorded
    requests.
    """
    if not subject.abilities.reads_index or not plugin.producer:
        return
    kind = subject.tables.indexes.get(plugin.producer_type)
    subject.expect(
        kind is not None, f"there is no index of type {plugin.producer_type}; pass it in `beside`"
    )
    assert kind is not None
    if kind.type_name == builders.PREFIX:
        yield plugin.producer, builders.affinity([random.randint(0, 5) for _ in range(n)], 5)
        return
    index = kind().open()
    for _ in range(random.randint(0, 8)):
        index.record(_request(subject, random), random.randrange(n), builders.NOW_S)
    index.record(asked, random.randrange(n), builders.NOW_S)
    yield plugin.producer, index.match(asked, n, builders.NOW_S)


def _adapters(random: Random) -> AdapterReport | None:
    def some() -> frozenset[str]:
        return frozenset(random.sample(_ADAPTERS, random.randint(0, 3)))

    slots_max = random.randint(0, 3)
    return random.choice(
        [
            None,
            builders.loaded_adapters(*sorted(some()), slots_max=slots_max),
            builders.resident_adapters(gpu=some(), cpu=some(), active=some(), slots_max=slots_max),
        ]
    )


def _with(tables: PluginTables, kinds: Sequence[type[Any]]) -> PluginTables:
    """Return `tables` with the plugin classes `kinds` added; they replace others of the
    same type.
    """
    changed: dict[str, dict[str, Any]] = {
        name: dict(getattr(tables, name)) for name in _VERBS.values()
    }
    for kind in kinds:
        for verb, name in _VERBS.items():
            if callable(getattr(kind, verb, None)):
                changed[name][getattr(kind, "type_name", "")] = kind
    return replace(tables, **changed)


# Comparisons.


def _contents(pool: Candidates) -> dict[str, Any]:
    """Return copies of all arrays behind the candidates `pool`, by name."""
    held = (vars(pool._columns) | pool._columns.attributes).items()
    arrays = {name: value.copy() for name, value in held if isinstance(value, np.ndarray)}
    known = pool._affinities.items()
    return arrays | {f"affinity {name}": one.matched.copy() for name, one in known}


def _said(asked: InferenceRequest) -> tuple[object, ...]:
    return (
        asked.model, dict(asked.headers), asked.prompts, asked.prompt_tokens, asked.session_id,
        asked.priority, asked.moment,
    )  # fmt: skip


def _same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _alike(one: Any, other: Any) -> bool:
    """Return True if two arrays are equal within a tolerance, because sums may be added up in
    another order.
    """
    one, other = one.astype(np.float64), other.astype(np.float64)
    return np.allclose(one, other, rtol=_ENOUGH, atol=_ENOUGH, equal_nan=True)


def _unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    return before.keys() == after.keys() and all(
        _same(before[name], after[name]) for name in before
    )
