"""Translation of a configuration document into the scheduler's settings, shared by server, `epp
check-config` and simulator.
"""

import math
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import msgspec

from epp.configuration.compatibility import ACCEPTED
from epp.configuration.config import (
    DEFAULT_CONFIG,
    DEFAULT_SOURCE,
    ConfigError,
    PickerConfig,
    PluginTables,
    load_config,
)
from epp.configuration.needed_indexes import block_tokens_of, is_prefix, joined_names
from epp.core.decision.plugin import Picker, declaration_fault
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.settings import SchedulerSettings
from epp.core.duration import Duration
from epp.core.failures import Interrupted
from epp.core.flow.agent_admission import AgentAdmission
from epp.core.flow.ceilings import StaticCeiling
from epp.core.flow.detectors import MaxSaturation, Utilization
from epp.core.flow.settings import Fairness, FlowSettings, Ordering
from epp.core.knowledge.affinity import NoHitLruSettings, SessionIndexSettings
from epp.core.knowledge.agent_sessions import AgentSessionSettings
from epp.core.knowledge.exact import ExactIndexSettings
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.knowledge.prefill_speed import PREFILL_TOKENS_PER_S
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.types import Seconds, Stage
from epp.plugins import DEPRECATED, FILTERS, PICKERS, SCORERS
from epp.plugins.burst import BurstSettings
from epp.plugins.encoder_cache import EncoderCacheSettings

ENTRY_POINTS: Final = "homing.plugins"
"""Entry point group in which other distributions offer their plugins, one class per entry point
(D13).
"""

INDEXES: Final[Mapping[str, type[AffinityIndexSettings]]] = {
    "approx-prefix-cache-producer": PrefixIndexSettings,
    "precise-prefix-cache-producer": ExactIndexSettings,
    "session-id-producer": SessionIndexSettings,
    "no-hit-lru-producer": NoHitLruSettings,
    "agent-session-producer": AgentSessionSettings,
    "burst-prefix-cache-producer": BurstSettings,
    "mm-embeddings-cache-producer": EncoderCacheSettings,
}

REFRESH_INTERVAL_S: Final = 0.2
"""Default time in seconds between two scrapes of an endpoint in a pool of up to 400 endpoints. In a
larger pool the time is longer.
"""
METRICS_STALENESS_S: Final = 2.0
_SATURATION_STALENESS_MIN_S: Final = 1.0
_SATURATION_STALENESS_INTERVALS: Final = 5
STREAM_IDLE_S: Final = 300.0
"""Default `stream_idle_timeout` of Envoy in seconds, which ends a waiting request in every mode."""
CIRCUIT_BREAKER_REQUESTS: Final = 1_024
"""Default `max_requests` of Envoy's circuit breaker for the cluster of the picker."""
_TURNS_MIN: Final = 2
"""Smallest number of scrapes of an endpoint that must fail or be late before its metrics are stale.
"""


def plugin_tables() -> PluginTables:
    """Return the plugins of this distribution and those that installed distributions offer.

    Raises `ConfigError` if an installed plugin cannot be imported, is not a plugin, or uses a taken
    name.
    """
    tables: dict[str, dict[str, Any]] = {
        "keep": dict(FILTERS),
        "score": dict(SCORERS),
        "pick": dict(PICKERS),
        "open": dict(INDEXES),
    }
    problems: list[str] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        problem = _add(entry, tables)
        if problem:
            problems.append(f"entry point {entry.name} ({entry.value}) {problem}")
    if problems:
        raise ConfigError(problems)
    return PluginTables(
        filters=tables["keep"],
        scorers=tables["score"],
        pickers=tables["pick"],
        indexes=tables["open"],
        deprecated=DEPRECATED,
    )


def _add(entry: EntryPoint, tables: Mapping[str, dict[str, Any]]) -> str | None:
    """Add the class behind `entry` to the table of its main method.

    Return a phrase about what prevents it, or None if the class was added.
    """
    try:
        kind = entry.load()
    except (ImportError, AttributeError) as error:
        return f"cannot be imported: {error}"
    except Interrupted:
        raise
    except BaseException as error:  # noqa: BLE001  runs code of other distributions
        return f"cannot be imported: it raised {type(error).__name__}: {error}"
    type_name = getattr(kind, "type_name", None)
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct) and type_name):
        return "is not a plugin; expected a msgspec.Struct with a type_name"
    verbs = [verb for verb in tables if callable(getattr(kind, verb, None))]
    if len(verbs) != 1:
        return f"has {len(verbs)} of the methods {', '.join(tables)}; expected one"
    if fault := declaration_fault(kind):
        return fault
    taken = type_name in ACCEPTED or any(type_name in table for table in tables.values())
    if not taken:
        tables[verbs[0]][type_name] = kind
    return f"has type {type_name}, which is already in use" if taken else None


def default_config(plugins: PluginTables) -> PickerConfig:
    """Return the configuration that applies without a configuration document: `DEFAULT_CONFIG`."""
    return load_config(DEFAULT_CONFIG, DEFAULT_SOURCE, plugins)


def build_settings(
    config: PickerConfig,
    *,
    metrics_staleness_s: Seconds = METRICS_STALENESS_S,
    refresh_interval_s: Seconds = REFRESH_INTERVAL_S,
    fallback_endpoints_max: int = 0,
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S,
) -> SchedulerSettings:
    """Return the settings of the scheduler for `config`.

    `refresh_interval_s` is the time between two scrapes of one endpoint, unless the configuration
    sets a longer one. The saturation detector's threshold is max(1 s, 5 of these intervals) unless
    the configuration sets it (design section 4).

    Metrics are stale after `metrics_staleness_s`, or after two intervals if that is longer.
    Otherwise all requests would go to the endpoint that was scraped last.

    `fallback_endpoints_max` is the maximum number of endpoints that the picker plugins choose in
    addition to the first, except for the prefill and the encode stage. `prefill_tokens_per_s` is the speed
    of an endpoint for which the configuration sets none.
    """
    stages = config.stages
    changed: dict[str, SchedulingProfile] = {
        name: msgspec.structs.replace(
            profile,
            picker=_picking(
                profile.picker, 1 if name == Stage.PREFILL else 1 + fallback_endpoints_max
            ),
        )
        for name, profile in stages.profiles()
        # The encode stage uses as many endpoints as its picker chooses.
        if name in {Stage.DECODE, Stage.PREFILL, "fallback"}
    }
    named = {
        name: changed[Stage.DECODE]
        if profile is stages.decode
        else msgspec.structs.replace(
            profile, picker=_picking(profile.picker, 1 + fallback_endpoints_max)
        )
        for name, profile in stages.named.items()
    }
    refresh_interval_s = max(refresh_interval_s, config.metrics.source.interval_s)
    saturation = config.saturation
    if not config.staleness_given:
        threshold_s = saturation_staleness_s(refresh_interval_s)
        saturation = msgspec.structs.replace(
            saturation,
            metrics_staleness_threshold=type(saturation.metrics_staleness_threshold)(threshold_s),
        )
    readers: list[Any] = [
        config.inflight,
        *(
            each.plugin
            for _, profile in stages.profiles()
            for each in profile.filters
            if each.plugin.abilities.tells_prefill_speed
        ),
    ]
    speeds = (plugin.peak_prefill_throughput for plugin in readers)
    return SchedulerSettings(
        stages=msgspec.structs.replace(stages, named=named, **changed),
        indexes=config.indexes,
        prefix=config.prefix,
        joined=joined_names(config.indexes, config.prefix),
        block_tokens=block_tokens_of(config.indexes, config.prefix),
        beliefs=tuple(name for name, index in config.indexes.items() if is_prefix(index)),
        ejection=config.ejection,
        admitter=config.admitter,
        latency=config.latency,
        saturation=saturation,
        flow=_flow_of(config.flow, saturation_staleness_s(refresh_interval_s)),
        metrics_staleness_s=max(metrics_staleness_s, _TURNS_MIN * refresh_interval_s),
        prefill_tokens_per_s=next((speed for speed in speeds if speed), prefill_tokens_per_s),
        labelled_speeds=config.inflight.peak_prefill_throughputs,
        topology=config.topology,
        primary_port=config.primary_port,
        fallback_endpoints_max=fallback_endpoints_max,
        shadow=config.shadow
        and msgspec.structs.replace(config.shadow, picker=_picking(config.shadow.picker, 1)),
        shadow_share=config.shadow_share,
    )


def _flow_of(flow: FlowSettings | None, staleness_s: Seconds) -> FlowSettings | None:
    """Return the settings of the queue with the allowed age of metrics in every detector for which
    the configuration sets none.
    """
    if flow is None:
        return None
    replace = msgspec.structs.replace

    def aged(detector: Any) -> Any:
        match detector:
            case MaxSaturation(detectors=children):
                return replace(detector, detectors=tuple(map(aged, children)))
            case Utilization(detector=thresholds, staleness_given=False):
                changed = replace(thresholds, metrics_staleness_threshold=Duration(staleness_s))
                return replace(detector, detector=changed)
            case _:
                return detector

    return replace(flow, detector=aged(flow.detector))


def saturation_staleness_s(refresh_interval_s: Seconds) -> Seconds:
    """Return the age in seconds above which the saturation detector does not rely on the metrics of
    an endpoint, unless the configuration sets it. Without flow control, the endpoint then counts as
    full; with it, only its requests in flight count.
    """
    return max(_SATURATION_STALENESS_MIN_S, _SATURATION_STALENESS_INTERVALS * refresh_interval_s)


def oldest_metrics_s(settings: SchedulerSettings) -> Seconds:
    """Return the age of metrics in seconds above which at least one part of the decision does not
    rely on them: the smallest such limit.
    """
    readers: list[Any] = [
        settings.saturation,
        *(
            each.plugin
            for _, profile in settings.stages.profiles()
            for each in profile.filters
            if each.plugin.abilities.limits_metrics_age
        ),
    ]
    limits_s: list[Seconds] = [plugin.metrics_age_max_s for plugin in readers]
    return min(settings.metrics_staleness_s, *limits_s)


def settings_warnings(
    config: PickerConfig,
    *,
    metrics_staleness_s: Seconds = METRICS_STALENESS_S,
    refresh_interval_s: Seconds = REFRESH_INTERVAL_S,
    fallback_endpoints_max: int = 0,
) -> list[str]:
    """Return sentences about settings in `config` and flags that contradict each other, or that
    have no effect.

    They also name settings of the queue that Envoy's default limits contradict, and a metrics
    staleness below two refresh intervals.
    """
    warnings: list[str] = []
    refresh_interval_s = max(refresh_interval_s, config.metrics.source.interval_s)
    threshold_s = float(config.saturation.metrics_staleness_threshold)
    expected_s = saturation_staleness_s(refresh_interval_s)
    if config.staleness_given and threshold_s < expected_s:
        warnings.append(
            f"{config.source}: metricsStalenessThreshold {threshold_s:g}s of the saturation "
            f"detector is less than {expected_s:g}s: endpoints scraped every "
            f"{refresh_interval_s:g}s will count as full now and then"
        )
    if metrics_staleness_s < _TURNS_MIN * refresh_interval_s:
        warnings.append(
            f"--metrics-staleness-threshold {metrics_staleness_s:g}s is less than two refresh "
            f"intervals of {refresh_interval_s:g}s, which apply instead: endpoints that wait "
            "for their next scrape are not stale"
        )
    if config.flow is not None:
        warnings += [f"{config.source}: {sentence}" for sentence in _queue_warnings(config.flow)]
    picker: Any = config.profile.picker
    picks = picker.max_num_of_endpoints if picker.abilities.picks_several else 1
    if picks > 1 + fallback_endpoints_max:
        warnings.append(
            f"{config.source}: maxNumOfEndpoints {picks} of {config.profile.picker_name} has no "
            f"effect: the number of fallbacks is set by --fallback-endpoints-max"
        )
    return warnings


def _queue_warnings(flow: FlowSettings) -> list[str]:
    """Return a sentence for each setting of the queue that the gateway's defaults contradict, or
    that has no effect.
    """
    warnings: list[str] = []
    limits_s = [flow.longest_wait_s(priority) for priority in _priorities(flow)]
    longest_s = max(limits_s)
    if longest_s >= STREAM_IDLE_S or not all(limits_s):
        what = f"up to {longest_s:g}s" if all(limits_s) else "without a limit"
        warnings.append(
            f"flowControl: requests may wait {what}, but Envoy ends a stream after "
            f"{STREAM_IDLE_S:g}s by default: set stream_idle_timeout of the gateway above that, "
            "or a shorter TTL"
        )
    if flow.agents is not None:
        warnings += _agent_warnings(flow, flow.agents)
    bands = [flow.band(priority) for priority in {*flow.bands, 0}]
    most = flow.requests_max or sum(band.requests_max for band in bands)
    if most >= CIRCUIT_BREAKER_REQUESTS:
        warnings.append(
            f"flowControl: {most} requests may wait, but Envoy allows "
            f"{CIRCUIT_BREAKER_REQUESTS} streams to a picker by default: set the circuit breaker "
            "max_requests of the picker's cluster above that, or a smaller maxRequests"
        )
    if not isinstance(flow.policy, StaticCeiling) and len({*flow.bands, 0}) == 1:
        warnings.append(
            f"flowControl: {flow.policy.type_name} has an effect only if InferenceObjectives "
            "or priorityBands give requests different priorities"
        )
    if any(band.ordering is Ordering.DEADLINE for band in bands):
        warnings.append(
            "flowControl: edf-ordering-policy differs from fcfs-ordering-policy only for "
            "requests with the header x-llm-d-inference-ttl"
        )
    return warnings


def _agent_warnings(flow: FlowSettings, agents: AgentAdmission) -> list[str]:
    """Return a sentence if requests of agent sessions are refused before their session is admitted."""
    bands = [flow.band(priority) for priority in _priorities(flow)]
    limits_s = [
        flow.budget_s(band, empty_pool=False)
        for band in bands
        if band.fairness is Fairness.SESSIONS
    ]
    least_s = min((limit_s for limit_s in limits_s if limit_s), default=math.inf)
    if not agents.head_wait_s_max or agents.head_wait_s_max < least_s:
        return []
    what = f"requests wait for {least_s:g}s at most, but headWaitStarvationMs admits agent sessions"
    return [f"flowControl: {what} after {agents.head_wait_s_max:g}s: set a longer TTL"]


def _priorities(flow: FlowSettings) -> set[int]:
    """Return the priorities that have bands of their own, 0, and one priority above and one below
    all of them, for which the default bands apply.
    """
    known = {*flow.bands, 0}
    return {*known, max(known) + 1, min(known) - 1}


def _picking(picker: Picker, count: int) -> Picker:
    """Return `picker`, set to choose `count` endpoints if it is a picker plugin that can choose
    several.
    """
    if not picker.abilities.picks_several:
        return picker
    replace: Callable[..., Any] = msgspec.structs.replace
    return replace(picker, max_num_of_endpoints=count)  # type: ignore[no-any-return]
