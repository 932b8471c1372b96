"""A scenario file: the pods of a run, events that happen to pods and pickers, and the request rate
over time.

The file is TOML, and every table is optional: any number of `[[pods]]`, `[[events]]` with a `kind`,
`[[rates]]` and `[[autoscaler]]`, and one `[kv_transfer]`, `[pickers]` and `[clients]`. A single
autoscaler may be written `[autoscaler]`. Unknown keys are refused.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from epp.configuration.config import ConfigError
from epp.configuration.document import nearest
from epp.core.expectation import misfit
from sim.caches.names import CacheNameError, cache_named, check_cache
from sim.cluster.arrivals import Rate
from sim.cluster.autoscaler import AutoscalerSettings
from sim.cluster.built_in import configurations
from sim.cluster.incidents import (
    Configure,
    Drain,
    Freeze,
    Incident,
    Join,
    Leave,
    Restart,
    Slow,
    SlowLink,
    check_incidents,
)
from sim.cluster.links import KVTransferSettings
from sim.cluster.policies import PolicyNameError, PolicySource, policy_source
from sim.cluster.rerouting import Reschedule
from sim.cluster.scraping import ScrapeTrouble
from sim.cluster.settings import ClientSettings, ClusterSettingsError
from sim.cluster.simulated_pod import PodKind
from sim.cluster.windows import Duration, Instant
from sim.engine.features import FeatureError, features_named
from sim.engine.profiles import ProfileError, find_profile
from sim.experiments.kv_transfer import KVTransferTable, RoleError, with_role
from sim.experiments.pickers import PeerPartition, PickerRestart, Pickers, PickersPlan
from sim.sentences import sentence_of, unread

FILE_BYTES_MAX: Final = 1_000_000
EVENTS_MAX: Final = 10_000
PODS_MAX: Final = 1_000
"""Maximum number of pods in a scenario, including those that join during the run."""

Table = TypeVar("Table", bound=Struct)


class ScenarioError(ValueError):
    """A scenario file cannot be read or is invalid; the message is one sentence with the file and
    the position in it.
    """


class Pods(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[[pods]]` of a scenario file: `count` pods with the same properties."""

    count: Annotated[int, Meta(ge=1, le=PODS_MAX)] = 1
    profile: str = ""
    """Profile in the form of `--profile`, with file names relative to the scenario file; "" for the
    first profile of `--profile`.
    """
    labels: dict[str, str] = field(default_factory=dict)
    role: str = ""
    """Role of the pods, which their label `llm-d.ai/role` shows; "" for pods that serve whole
    requests. A pod with a role sends or receives KV blocks.
    """
    nics: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of NICs of each pod for KV blocks, usually one for each GPU. Needs a role."""
    speed: Annotated[float, Meta(ge=0.001, le=1_000.0)] = 1.0
    """Speed of the pod's engine, as a multiple of its profile's speed."""
    max_loras: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    """Number of LoRA adapter slots of each pod; None for the value of `--max-loras`."""
    cache: str = ""
    """Prompt cache of the pods in the form of `--cache`; "" for the value of `--cache`."""
    engine: Annotated[tuple[str, ...], Meta(max_length=8)] | None = None
    """Engine features of the pods in the form of `--engine`; None for those of `--engine`."""


class JoinEvent(Pods, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event of kind `join` in a scenario file; it is converted to `Join`."""

    at_s: Instant
    startup_s: Duration = 0.0


class ConfigureEvent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event of kind `configure` in a scenario file; it is converted to `Configure`."""

    at_s: Instant
    config: str
    """Configuration in the form of `--config`, with file names relative to the scenario file."""


EVENTS: Final[Mapping[str, type[Struct]]] = {
    "join": JoinEvent,
    "leave": Leave,
    "drain": Drain,
    "restart": Restart,
    "slow": Slow,
    "freeze": Freeze,
    "slow-link": SlowLink,
    "scrapes": ScrapeTrouble,
    "configure": ConfigureEvent,
    "picker-restart": PickerRestart,
    "peer-partition": PeerPartition,
    "reschedule": Reschedule,
}
"""Type to which a table `[[events]]` of a scenario file is converted, by the value of its key
`kind`.
"""


class Scenario(Struct, frozen=True, kw_only=True):
    """The content of a scenario file, small enough to be sent to another process."""

    file: str
    """Name of the scenario file without its folder, so that the same scenario in another folder
    counts as the same run. A scenario that a command makes has a name of its own here.
    """
    pods: tuple[PodKind, ...] = ()
    """Pods at the start of the run; empty to use those that flags define."""
    incidents: tuple[Incident, ...] = ()
    scrape_troubles: tuple[ScrapeTrouble, ...] = ()
    rates: tuple[Rate, ...] = ()
    """Changes of the request rate, in order of time and without overlap."""
    clients: ClientSettings = ClientSettings()
    autoscalers: tuple[AutoscalerSettings, ...] = ()
    """Autoscalers of different pods, for example one for each role."""
    kv_transfer: KVTransferSettings | None = None
    """Network and connector of pods with roles, or None if no pod of the scenario has a role."""
    pickers: PickersPlan | None = None
    """Settings of the pickers, or None to use those that flags define."""
    reschedules: tuple[Reschedule, ...] = ()

    @property
    def configures(self) -> bool:
        """True if an event gives pickers a new configuration during the run."""
        return any(isinstance(incident, Configure) for incident in self.incidents)

    @property
    def joins(self) -> bool:
        """True if an event starts further pods during the run."""
        return any(isinstance(incident, Join) for incident in self.incidents)

    def check(self, *, kinds: Sequence[PodKind], pickers: int) -> None:
        """Raise `ClusterSettingsError` if the scenario refers to a pod or picker that does not
        exist, has too many pods, or has several autoscalers for one pod. The message does not name
        the file.

        `kinds` are the pods at the start of the run, and `pickers` is the number of pickers.
        """
        pods = len(kinds)
        check_incidents(self.incidents, kinds=kinds)
        for autoscaler in self.autoscalers:
            autoscaler.check(kinds)
        for pod in kinds:
            scaling = sum(one.scales(pod) for one in self.autoscalers)
            if scaling > 1:
                raise ClusterSettingsError(
                    f"[[autoscaler]]: expected at most one for each pod, got {scaling} for pods with "
                    f"the labels {pod.labels}"
                )
        joining = sum(len(one.kinds) for one in self.incidents if isinstance(one, Join))
        if pods + joining > PODS_MAX:
            raise ClusterSettingsError(
                f"expected {PODS_MAX:,} pods at most, got {pods + joining:,}"
            )
        plan = self.pickers or PickersPlan()
        named = [
            *(("scrapes", one.from_s, "pod", one.pods) for one in self.scrape_troubles),
            *(("scrapes", one.from_s, "picker", one.pickers) for one in self.scrape_troubles),
            *(("reschedule", one.from_s, "pod", one.pods) for one in self.reschedules),
            *(("picker-restart", one.at_s, "picker", one.pickers) for one in plan.restarts),
            *(("peer-partition", one.from_s, "picker", one.pickers) for one in plan.partitions),
        ]
        counts = {"pod": pods + joining, "picker": pickers}
        for kind, at_s, what, numbers in named:
            if any(number >= counts[what] for number in numbers):
                raise ClusterSettingsError(
                    f"{kind} at {at_s:g} s: expected a {what} from 0 to "
                    f"{counts[what] - 1}, got {max(numbers)}"
                )


def scenario_in(path: Path, usual: PodKind) -> Scenario:
    """Return the scenario in the file `path`. `usual` has the pod properties that the file does not
    define. Raises `ScenarioError`.

    The caller must call `Scenario.check` when the number of pods and pickers is known.
    """
    document = _document(path)
    alone = isinstance(document.get("autoscaler"), dict)
    if alone:
        document["autoscaler"] = [document["autoscaler"]]
    several = ("pods", "events", "rates", "autoscaler")
    tables = {name: _tables(path, document, name) for name in several}
    single = {name: _table(path, document, name) for name in ("kv_transfer", "pickers", "clients")}
    if document:
        name = next(iter(document))
        raise ScenarioError(f"{path}: unknown table {name}{nearest(name, (*tables, *single))}.")
    transfer = _converted(path, single, "kv_transfer", KVTransferTable) or KVTransferTable()
    made = partial(_kinds, path, usual=usual, transfer=transfer)
    kinds: list[PodKind] = []
    for number, fields in enumerate(tables["pods"], start=1):
        place = f"{path}: [[pods]] {number}"
        kinds += made(place, _convert(place, fields, Pods))
    events = [
        _event(path, f"{path}: [[events]] {number}", fields, made)
        for number, fields in enumerate(tables["events"], start=1)
    ]
    transfers = any(kind.transfers for kind in (*kinds, *_joining(events)))
    if single["kv_transfer"] is not None and not transfers:
        raise ScenarioError(
            f"{path}: [kv_transfer]: expected pods with a role in this file, got none."
        )
    rates = [
        _convert(f"{path}: [[rates]] {number}", fields, Rate)
        for number, fields in enumerate(tables["rates"], start=1)
    ]
    _check_rates(path, rates)
    autoscalers = tuple(
        _convert(
            f"{path}: {'[autoscaler]' if alone else f'[[autoscaler]] {number}'}",
            fields,
            AutoscalerSettings,
        )
        for number, fields in enumerate(tables["autoscaler"], start=1)
    )
    if autoscalers and any(isinstance(event, Join) for event in events):
        raise ScenarioError(
            f"{path}: expected events of kind join or an [autoscaler], which starts pods itself, "
            "got both."
        )
    plan = PickersPlan(
        pickers=_converted(path, single, "pickers", Pickers) or Pickers(),
        restarts=_of(PickerRestart, events),
        partitions=_of(PeerPartition, events),
    )
    says_nothing = single["pickers"] is None and plan == PickersPlan()
    return Scenario(
        file=path.name,
        pods=tuple(kinds),
        incidents=tuple(event for event in events if isinstance(event, Incident)),
        scrape_troubles=_of(ScrapeTrouble, events),
        reschedules=_of(Reschedule, events),
        rates=tuple(rates),
        clients=_converted(path, single, "clients", ClientSettings) or ClientSettings(),
        autoscalers=autoscalers,
        kv_transfer=transfer.settings() if transfers else None,
        pickers=None if says_nothing else plan,
    )


Event: TypeAlias = Incident | ScrapeTrouble | Reschedule | PickerRestart | PeerPartition


def _event(
    path: Path, place: str, fields: dict[str, Any], made: Callable[[str, Pods], list[PodKind]]
) -> Event:
    """Return the event that a table `[[events]]` with `fields` describes. `place` names the table
    in errors, and `made` returns the pods that join.
    """
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ScenarioError(f"{place}: expected a kind of {', '.join(EVENTS)}, got {kind!r}.")
    place += f", {kind}"
    told = _convert(place, fields, EVENTS[kind])
    if isinstance(told, JoinEvent):
        kinds = tuple(made(place, told))
        return Join(at_s=told.at_s, kinds=kinds, startup_s=told.startup_s)
    if isinstance(told, ConfigureEvent):
        return Configure(at_s=told.at_s, policy=_policy(path, place, told.config))
    assert isinstance(told, Event)
    return told


def _joining(events: Sequence[Event]) -> Iterator[PodKind]:
    """Yield the pods that join in `events`."""
    for event in events:
        if isinstance(event, Join):
            yield from event.kinds


def _of(kind: type[Table], events: Sequence[Event]) -> tuple[Table, ...]:
    return tuple(event for event in events if isinstance(event, kind))


def _document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ScenarioError(f"{path}: expected {FILE_BYTES_MAX:,} bytes at most, got more.")
        return tomllib.loads(content.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ScenarioError(unread(path, problem, "TOML")) from problem


def _tables(path: Path, document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Remove the tables `[[name]]` from the parsed scenario file and return them. Raises
    `ScenarioError` for another value, or for more than `EVENTS_MAX` tables.
    """
    found = document.pop(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ScenarioError(f"{path}: {name}: expected tables under [[{name}]], got another value.")
    if len(found) > EVENTS_MAX:
        raise ScenarioError(
            f"{path}: [[{name}]]: expected {EVENTS_MAX:,} at most, got {len(found):,}."
        )
    return found


def _table(path: Path, document: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Remove the table `[name]` from the parsed scenario file and return it, or None if it does not
    exist. Raises `ScenarioError` for another value.
    """
    found = document.pop(name, None)
    if found is not None and not isinstance(found, dict):
        raise ScenarioError(f"{path}: {name}: expected a table [{name}], got another value.")
    return found


def _converted(
    path: Path, tables: Mapping[str, dict[str, Any] | None], name: str, table: type[Table]
) -> Table | None:
    fields = tables[name]
    return None if fields is None else _convert(f"{path}: [{name}]", fields, table)


def _convert(place: str, fields: dict[str, Any], table: type[Table]) -> Table:
    unknown = next((key for key in fields if key not in table.__struct_fields__), None)
    if unknown is not None:
        keys = table.__struct_fields__
        told = nearest(unknown, keys) or f", expected {', '.join(keys)}"
        raise ScenarioError(f"{place}: unknown key {unknown}{told}.")
    try:
        return msgspec.convert(fields, table)
    except msgspec.ValidationError as problem:
        raise ScenarioError(f"{misfit(place, problem, table)}.") from problem


def _kinds(
    path: Path, place: str, told: Pods, *, usual: PodKind, transfer: KVTransferTable
) -> list[PodKind]:
    """Return the pods that a table `[[pods]]` or an event of kind `join` describes, one entry for
    each pod. `transfer` is the connector of pods with a role.
    """
    profile = usual.profile
    if told.profile:
        try:
            profile = find_profile(_named(path, told.profile))
        except ProfileError as problem:
            raise ScenarioError(f"{place}: profile: {problem}") from problem
    max_loras = usual.engine.max_loras if told.max_loras is None else told.max_loras
    try:
        cache = cache_named(told.cache) if told.cache else usual.cache
        check_cache(cache, profile)
    except CacheNameError as problem:
        raise ScenarioError(f"{place}: cache: {problem}") from problem
    try:
        features = usual.features if told.engine is None else features_named(told.engine)
    except FeatureError as problem:
        raise ScenarioError(f"{place}: engine: {problem}") from problem
    kind = PodKind.of(
        profile,
        max_loras=max_loras,
        labels=told.labels,
        speed=told.speed,
        cache=cache,
        features=features,
    )
    if told.role:
        try:
            kind = with_role(kind, told.role, nics=told.nics, lease_s=transfer.lease_s)
        except RoleError as problem:
            raise ScenarioError(f"{place}: role: {problem}") from problem
    elif told.nics != 1:
        raise ScenarioError(
            f"{place}: nics: expected a role too, because only pods with one use NICs."
        )
    return [kind] * told.count


def _policy(path: Path, place: str, config: str) -> PolicySource:
    try:
        policy = policy_source(_named(path, config))
    except (PolicyNameError, ConfigError, OSError) as problem:
        raise ScenarioError(f"{place}: config: {sentence_of(problem)}") from problem
    if not policy.text:
        raise ScenarioError(
            f"{place}: config: expected an EndpointPickerConfig in a file or one of "
            f"{', '.join(configurations())}, got the baseline {config!r}."
        )
    return policy


def _named(path: Path, named: str) -> str:
    """Return the path of the file `named` in the folder of the scenario file if it exists there,
    else `named` unchanged. `named` may have the form FILE.toml:NAME.
    """
    beside = path.parent / named
    file, colon, _ = named.partition(".toml:")
    there = (path.parent / f"{file}.toml").exists() if colon else beside.exists()
    return str(beside) if there else named


def _check_rates(path: Path, rates: Sequence[Rate]) -> None:
    for before, after in pairwise(rates):
        if after.from_s < before.to_s:
            raise ScenarioError(
                f"{path}: [[rates]]: expected them in order and without overlap, got one from "
                f"{after.from_s:g} s after one to {before.to_s:g} s."
            )
