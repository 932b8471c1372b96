"""Command-line flags that describe a simulation run, shared by `sim replay`, `compare`, `sweep` and
others, and the conversion of flags to run settings.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from epp.core.peers.exchange import OUTGOING_INTERVAL_S
from sim.caches.behaviour import CacheBehaviour
from sim.caches.names import NAMES, CacheNameError, cache_named, cache_spelt, check_cache
from sim.cluster.assignment import Assignment
from sim.cluster.kv_events import KVEventSettings
from sim.cluster.links import KVTransferSettings
from sim.cluster.peering import PeerSettings
from sim.cluster.policies import PolicyNameError, PolicySource, policy_source
from sim.cluster.settings import ClientSettings, ClusterSettings, ClusterSettingsError
from sim.cluster.simulated_pod import PodKind
from sim.cluster.tokenizing import TokenizeSettings
from sim.engine.features import (
    FeatureError,
    add_feature_flag,
    feature_spelt,
    features_named,
)
from sim.engine.links import DEFAULT_LINK, LINKS, Link, LinkError, link_named
from sim.engine.profiles import DEFAULT_PROFILE, find_profile, profile_named
from sim.experiments.kv_transfer import MODELLED, modelled_roles, roles_spelt, with_role
from sim.experiments.pickers import (
    PICKERS_MAX,
    PeerPartition,
    PickerRestart,
    PickersPlan,
    SlowPicker,
    pickers_plan,
)
from sim.experiments.run import RunSettings, jitter_in_effect_s
from sim.experiments.scenario_file import PODS_MAX, Scenario, scenario_in
from sim.measurement.evidence import EVIDENCE, features_used
from sim.measurement.measures import WARM_UP_FROM_S, WARM_UP_S_MAX, Targets
from sim.sentences import warned
from sim.traces.formats import open_trace
from sim.traces.kept import kept_folder
from sim.traces.plausibility import warnings_of
from sim.traces.reading import ReadOptions
from sim.traces.reading_flags import add_reading_flags, read_options

PODS: Final = 8
RUNS_MAX: Final = 1_000
"""Maximum number of seeds, of request rates of a sweep, and of concurrent processes (each)."""
POLICY_HELP: Final = "an EndpointPickerConfig in a file, or a name that sim strategies lists"


def add_run_options(
    parser: argparse.ArgumentParser, *, several_replicas: bool = False, trace_required: bool = True
) -> None:
    """Add the flags that describe a run, in groups: trace, traffic, pods, pickers, delays,
    failures, figures.

    With `several_replicas`, --replicas takes a list of numbers to compare. If `trace_required` is
    False, the argument TRACE may be omitted and is None then.
    """
    parser.add_argument("trace", metavar="TRACE", nargs=None if trace_required else "?",
        help="a trace file; the format is found by its content")  # fmt: skip
    _add_traffic_options(parser)
    add_reading_flags(parser, "--trace-format")
    _add_pod_options(parser)
    _add_picker_options(parser, several_replicas=several_replicas)
    _add_delay_options(parser)
    _add_failure_options(parser)
    _add_figure_options(parser)


def _add_traffic_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that determine which requests of the trace are sent, and when."""
    add = parser.add_argument_group("Traffic").add_argument
    add(
        "--requests", type=_count, metavar="N", help="replay only the first N requests of the trace"
    )
    add("--speed", type=_positive, default=1.0, metavar="X",
        help="send requests X times as fast as in the trace (default: 1)")  # fmt: skip
    add("--jitter", type=_seconds, metavar="S",
        help="delay each arrival that waits for no answer by a random time of up to S seconds "
        "(default: the resolution of the trace's clock if that is 0.5 s or more and most requests "
        "share their arrival time, otherwise 0)")  # fmt: skip
    add("--through", choices=("hashes", "bytes"), default="hashes",
        help="form in which pickers get prompts: hashes from the trace, or the bytes of a body that the "
        "production parser reads (default: hashes)")  # fmt: skip
    add("--no-cache", action="store_true", help="read the trace's own file even if it is large "
        "(default: cache its parsed form in homing/traces in $XDG_CACHE_HOME or ~/.cache)")  # fmt: skip


def _add_pod_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the simulated pods."""
    group = parser.add_argument_group("Pods")
    add = group.add_argument
    add("--profile", action="append", type=profile_named, metavar="NAME|FILE.toml",
        help="profile of the pods (model and GPU); if repeated, pods alternate between the profiles "
        f"(default: {DEFAULT_PROFILE})")  # fmt: skip
    add("--pods", type=_pods, metavar="N", help=f"number of pods (default: {PODS})")
    add("--roles", type=_roles, metavar="ROLE=N,...", help="number of pods of each role, instead of "
        f"--pods: {', '.join(MODELLED)} (default: pods that serve whole requests)")  # fmt: skip
    add("--kv-link", type=_link, metavar="NAME|GB/S:S", help="network between pods with roles: "
        f"{', '.join(LINKS)}, or the bandwidth of one NIC in GB/s and the set-up time of a transfer in "
        f"seconds (default: {DEFAULT_LINK})")  # fmt: skip
    add("--kv-nics", type=_nics, metavar="N",
        help="NICs of each pod with a role, which share its KV transfers (default: 1)")  # fmt: skip
    add("--max-loras", type=_whole, default=0, metavar="N",
        help="number of LoRA adapter slots of each pod (default: 0, no adapters)")  # fmt: skip
    add("--cache", type=_cache, metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"prompt cache of the pods: {', '.join(NAMES)} (default: {NAMES[0]})")  # fmt: skip
    add_feature_flag(group)


def _add_delay_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for delays: of scrapes, of the network, of discovery, of the renderer and of
    KV-cache events.
    """
    add = parser.add_argument_group("Delays").add_argument
    add("--scrape-interval", type=_positive, metavar="S",
        help="seconds between two scrapes of a pod (default: derived from the number of pods, as epp "
        "serve does)")  # fmt: skip
    add("--scrape-delay", type=_seconds, default=0.001, metavar="S",
        help="age of a metrics page when the picker reads it, in seconds (default: 0.001)")  # fmt: skip
    add("--network-delay", type=_seconds, default=0.0005, metavar="S",
        help="network latency one way, in seconds (default: 0.0005)")  # fmt: skip
    add("--discovery-delay", type=_seconds, default=1.0, metavar="S",
        help="seconds until pickers learn that pods were added or removed (default: 1)")  # fmt: skip
    add("--tokenize", type=_positive, metavar="US", help="let each request wait until a "
        "renderer has tokenised its prompt, in US microseconds for each token (default: no wait)")  # fmt: skip
    add("--tokenize-timeout", type=_positive, default=0.02, metavar="S",
        help="maximum time that a request waits for the renderer, in seconds (default: 0.02)")  # fmt: skip
    add("--kv-events", type=_kv_events, metavar="DELAY[:LOSS]", help="engines report their cached "
        "blocks to pickers DELAY seconds late; a share LOSS of the frames is lost (default: they "
        "report nothing)")  # fmt: skip
    add("--response-chunks", action="store_true",
        help="pass answers through the pickers, which then observe first tokens")  # fmt: skip


def _add_failure_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for aborting clients, random faults and the scenario file."""
    add = parser.add_argument_group("Failures").add_argument
    add("--abort-share", type=_share, default=0.0, metavar="P",
        help="share of the requests that clients abort if the answer takes too long (default: 0)")  # fmt: skip
    add("--abort-after", type=_positive, default=10.0, metavar="S",
        help="mean time after which clients abort requests of --abort-share, in seconds (default: 10)")  # fmt: skip
    add("--faults-per-hour", type=_seconds, default=0.0, metavar="N",
        help="random faults an hour: pods that fail, join or slow down, and others (default: 0)")  # fmt: skip
    add("--scenario", type=Path, metavar="FILE.toml",
        help="file with pods, events at given times, and changes of the request rate")  # fmt: skip


def _add_figure_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the measurements: latency targets, warm-up and checks."""
    add = parser.add_argument_group("Figures").add_argument
    add("--target-ttft", type=_positive, default=2.0, metavar="S",
        help="maximum TTFT of a request that counts for goodput, in seconds (default: 2)")  # fmt: skip
    add("--target-tpot", type=_positive, default=0.05, metavar="S",
        help="maximum TPOT of a request that counts for goodput, in seconds (default: 0.05)")  # fmt: skip
    add("--warm-up", type=_seconds, metavar="S",
        help="exclude requests that arrive in the first S seconds from latencies, tokens and rates, because caches "
        f"start empty (default: a tenth of the trace's duration, at most {WARM_UP_S_MAX:g} s, if it is "
        f"{WARM_UP_FROM_S:g} s or longer, else 0; sim size determines what caches need)")  # fmt: skip
    add(
        "--check", action="store_true", help="check all invariants after every event, which is slow"
    )


def _add_picker_options(parser: argparse.ArgumentParser, *, several_replicas: bool) -> None:
    """Add the flags for the pickers: their number, the assignment of requests, and messages between
    them.
    """
    add = parser.add_argument_group("Pickers").add_argument
    if several_replicas:
        add(
            "--replicas",
            type=_counts,
            metavar="N,N,...",
            help="numbers of pickers to compare (default: 1)",
        )
    else:
        add("--replicas", type=_pickers, metavar="N", help="number of pickers (default: 1)")
    add("--assignment", type=Assignment, choices=tuple(Assignment), metavar="|".join(Assignment),
        help="rule that assigns requests to pickers; sticky: all requests of a session to the same "
        "picker (default: random)")  # fmt: skip
    add("--fallback-endpoints-max", type=_fallbacks, metavar="N",
        help="endpoints that a picker names in addition to the first, as in epp serve (default: 0)")  # fmt: skip
    add("--picker-away", type=_restart, action="append", metavar="N:FROM:TO",
        help="picker N (from 0) fails at FROM seconds, and a new one replaces it at TO seconds; with "
        "FROM 0 it joins late")  # fmt: skip
    add("--peer-delay", type=_seconds, metavar="S", help="pickers send each other their decisions, "
        "which arrive S seconds later (default: they share nothing)")  # fmt: skip
    add("--peer-loss", type=_share, metavar="P",
        help="share of the messages between pickers that is lost (default: 0)")  # fmt: skip
    add("--peer-interval", type=_positive, metavar="S",
        help="seconds for which a picker collects decisions into one message to other pickers "
        f"(default: {OUTGOING_INTERVAL_S:g})")  # fmt: skip
    add("--peer-partition", type=_partition, action="append", metavar="FROM:TO:N,N,...",
        help="no message passes between pickers N,N,... and the other pickers from FROM to TO seconds")  # fmt: skip
    add("--peer-slow", type=_slow_peer, action="append", metavar="N:S",
        help="messages to and from picker N take S seconds longer than others")  # fmt: skip
    add("--peer-snapshot", action=argparse.BooleanOptionalAction, default=None,
        help="let a starting picker request the state of another picker (default: yes)")  # fmt: skip


def run_settings(
    options: argparse.Namespace,
    policy: PolicySource,
    seed: int,
    repetition: int = 0,
    *,
    replicas: int | None = None,
) -> RunSettings:
    """Return the settings of the run that the command line describes. A `repetition` above 0
    replays similar traffic instead of the trace itself.

    `replicas`, if not None, replaces the number of pickers in --replicas. Raises
    `ClusterSettingsError` and `ScenarioError`.
    """
    profiles = options.profile or [find_profile(DEFAULT_PROFILE)]
    for profile in profiles:
        try:
            check_cache(options.cache, profile)
        except CacheNameError as problem:
            raise ClusterSettingsError(f"--cache: {problem}") from problem
    try:
        features = features_named(options.engine)
    except FeatureError as problem:
        raise ClusterSettingsError(f"--engine: {problem}") from problem
    kinds = [
        PodKind.of(profile, max_loras=options.max_loras, cache=options.cache, features=features)
        for profile in profiles
    ]
    faults_per_hour = options.faults_per_hour
    scenario = _scenario(options, policy, kinds[0])
    plan = _plan(options, scenario, replicas)
    pods, kv_transfer = _pods_of_flags(options, kinds)
    if scenario is not None:
        pods = scenario.pods or pods
        kv_transfer = scenario.kv_transfer or kv_transfer
        try:
            scenario.check(kinds=pods, pickers=plan.pickers.count)
        except ClusterSettingsError as problem:
            raise ClusterSettingsError(f"{options.scenario}: {problem}") from problem
    cluster = ClusterSettings(
        pods=pods,
        replicas=plan.pickers.count,
        assignment=plan.pickers.assignment,
        peers=plan.peers,
        absences=plan.absences,
        fallback_endpoints_max=plan.pickers.fallback_endpoints_max,
        reschedules=() if scenario is None else scenario.reschedules,
        scrape_interval_s=options.scrape_interval,
        scrape_delay_s=options.scrape_delay,
        scrape_troubles=() if scenario is None else scenario.scrape_troubles,
        network_delay_s=options.network_delay,
        discovery_delay_s=options.discovery_delay,
        response_chunks=options.response_chunks,
        abort_share=options.abort_share,
        abort_after_s=options.abort_after,
        clients=ClientSettings() if scenario is None else scenario.clients,
        tokenize=None
        if options.tokenize is None
        else TokenizeSettings(
            seconds_per_token=options.tokenize / 1e6, timeout_s=options.tokenize_timeout
        ),
        kv_events=options.kv_events,
        kv_transfer=kv_transfer,
    )
    return RunSettings(
        trace=options.trace,
        policy=cluster.policy_of(policy),
        cluster=cluster,
        seed=seed,
        repetition=repetition,
        read=read_options(options, seed, "" if options.no_cache else kept_folder()),
        requests_max=options.requests,
        jitter_s=options.jitter,
        speed=options.speed,
        through_bytes=options.through == "bytes",
        fault_gap_s=3600 / faults_per_hour if faults_per_hour else None,
        scenario=scenario,
        targets=Targets(ttft_s=options.target_ttft, tpot_s=options.target_tpot),
        warm_up_s=options.warm_up,
        check=options.check,
    )


def _pods_of_flags(
    options: argparse.Namespace, kinds: Sequence[PodKind]
) -> tuple[tuple[PodKind, ...], KVTransferSettings | None]:
    """Return the pods that flags describe, and the network of pods with roles, or None without
    roles. `kinds` are the pods of each `--profile`. Raises `ClusterSettingsError`.
    """
    if options.roles is None:
        for name in ("kv_link", "kv_nics"):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ClusterSettingsError(f"{flag} needs --roles: only pods with roles use it")
        pods = tuple(kinds[number % len(kinds)] for number in range(options.pods or PODS))
        return pods, None
    if options.pods is not None:
        raise ClusterSettingsError("--roles gives the number of pods: leave out --pods")
    pods = tuple(
        with_role(kinds[number % len(kinds)], role, nics=options.kv_nics or 1)
        for number, role in enumerate(options.roles)
    )
    return pods, KVTransferSettings(link=options.kv_link or LINKS[DEFAULT_LINK])


def _scenario(options: argparse.Namespace, policy: PolicySource, usual: PodKind) -> Scenario | None:
    """Return the scenario of `--scenario`, or None without that flag. Raises `ScenarioError` for an
    invalid file, and `ClusterSettingsError` if other flags contradict the scenario.
    """
    if options.scenario is None:
        return None
    scenario = scenario_in(options.scenario, usual)
    if scenario.pods:
        for flag in ("pods", "roles"):
            if getattr(options, flag) is not None:
                raise ClusterSettingsError(
                    f"{options.scenario} defines the pods: leave out --{flag}"
                )
    if (scenario.joins or scenario.autoscalers) and options.faults_per_hour:
        raise ClusterSettingsError(
            f"{options.scenario} defines which pods join, and faults would add others: leave out "
            "--faults-per-hour"
        )
    if scenario.configures and not policy.text:
        raise ClusterSettingsError(
            f"{options.scenario} configures pickers, and {policy.name} has no configuration"
        )
    if scenario.reschedules and not policy.text:
        raise ClusterSettingsError(
            f"{options.scenario} lets a gateway try the second endpoint, and {policy.name} names only "
            "one"
        )
    return scenario


def _plan(
    options: argparse.Namespace, scenario: Scenario | None, replicas: int | None
) -> PickersPlan:
    """Return the settings of the pickers from the flags or the scenario. Raises
    `ClusterSettingsError` if they contradict each other, or if a single picker is to exchange
    messages.
    """
    flags = {
        "count": options.replicas,
        "assignment": options.assignment,
        "fallback_endpoints_max": options.fallback_endpoints_max,
        "peer_delay_s": options.peer_delay,
        "peer_loss": options.peer_loss,
        "peer_interval_s": options.peer_interval,
        "peer_snapshot": options.peer_snapshot,
        "peer_slow": _whole_tuple(options.peer_slow),
        "restarts": _whole_tuple(options.picker_away),
        "partitions": _whole_tuple(options.peer_partition),
    }
    if replicas is not None:
        flags["count"] = replicas
    told = None if scenario is None else scenario.pickers
    plan = pickers_plan(flags, told, str(options.scenario))
    # Some of several numbers of pickers may be 1.
    counts = options.replicas if isinstance(options.replicas, tuple) else (plan.pickers.count,)
    if plan.peers is not None and max(counts) == 1:
        raise ClusterSettingsError(
            "--peer-delay (peer_delay_s) needs at least two pickers, by --replicas (count): a single "
            "picker has no peers"
        )
    return plan


def _whole_tuple(given: list[Any] | None) -> tuple[Any, ...] | None:
    """Return the values of a repeatable flag as a tuple, or None if it was not given."""
    return None if given is None else tuple(given)


def _tokenize_conditions(tokenize: TokenizeSettings | None) -> dict[str, float]:
    if tokenize is None:
        return {}
    return {
        "tokenize_us_per_token": tokenize.seconds_per_token * 1e6,
        "tokenize_timeout_s": tokenize.timeout_s,
    }


def _kv_event_conditions(told: KVEventSettings | None) -> dict[str, float]:
    return {} if told is None else {"kv_events_delay_s": told.delay_s, "kv_events_loss": told.loss}


def print_trace_warnings(settings: RunSettings) -> None:
    """Print a warning on stderr for each likely mistake in the trace, such as a wrong time unit.

    Raises the errors that opening the trace raises.
    """
    for warning in warnings_of(open_trace(Path(settings.trace), settings.read)):
        warned(warning)


def _reading_conditions(read: ReadOptions) -> dict[str, Any]:
    """Return the flags that tell how to read the trace (columns, time unit, tokenizer), for
    reports. Flags that were not given are left out.
    """
    told = {
        "columns": dict(read.columns),
        "time_unit": read.time_unit,
        "tokenizer": Path(read.tokenizer).name,
    }
    return {name: value for name, value in told.items() if value}


def conditions(settings: RunSettings, *others: RunSettings) -> dict[str, Any]:
    """Return the conditions of one or more runs (flags, pods, configuration hashes) by name, for
    reports.

    The entries `config_hashes`, `replicas` and `estimated` cover all runs, the others only the
    first one. `report.condition_rows` formats the result. Raises what reading the trace raises.
    """
    cluster, read = settings.cluster, settings.read
    profiles = [kind.profile.name for kind in cluster.pods]
    replicas = list(dict.fromkeys(run.cluster.replicas for run in (settings, *others)))
    return {
        "trace": Path(settings.trace).name,
        "trace_format": read.format or None,
        "block_tokens": read.block_tokens,
        "rate_per_s": read.rate_per_s or 1.0,
        **_reading_conditions(read),
        "skip_bad": read.skip_bad,
        "requests_max": settings.requests_max,
        "jitter_s": jitter_in_effect_s(settings),
        "speed": settings.speed,
        "through": "bytes" if settings.through_bytes else "hashes",
        "config_hashes": {run.policy.name: run.policy.hash for run in (settings, *others)},
        "pods": len(cluster.pods),
        "profiles": {name: profiles.count(name) for name in dict.fromkeys(profiles)},
        **_estimate_conditions(kind for run in (settings, *others) for kind in run.cluster.pods),
        "max_loras": cluster.pods[0].engine.max_loras,
        **_cache_conditions(cluster.pods),
        **_feature_conditions(cluster.pods),
        **_role_conditions(cluster),
        "replicas": replicas[0] if len(replicas) == 1 else replicas,
        "assignment": str(cluster.assignment),
        **_peer_conditions(cluster.peers),
        "pickers_away": msgspec.to_builtins(cluster.absences),
        "fallback_endpoints_max": cluster.fallback_endpoints_max,
        "scrape_interval_s": cluster.refresh_interval_s,
        "scrape_delay_s": cluster.scrape_delay_s,
        "network_delay_s": cluster.network_delay_s,
        "discovery_delay_s": cluster.discovery_delay_s,
        **_tokenize_conditions(cluster.tokenize),
        **_kv_event_conditions(cluster.kv_events),
        "response_chunks": cluster.response_chunks,
        "abort_share": cluster.abort_share,
        "abort_after_s": cluster.abort_after_s,
        "faults_per_hour": 3600 / settings.fault_gap_s if settings.fault_gap_s else 0,
        "scenario": settings.scenario.file if settings.scenario else None,
        "autoscaler": _autoscaler_condition(settings.scenario),
        "warm_up_s": settings.warm_up_s,
        "check": settings.check,
    }


def _estimate_conditions(pods: Iterable[PodKind]) -> dict[str, Any]:
    """Return the entry `estimated` of a run's conditions, with the possible errors of estimated
    profiles. Empty if no pod has an estimated profile.
    """
    told = {
        kind.profile.name: kind.profile.estimated.said for kind in pods if kind.profile.estimated
    }
    return {"estimated": told} if told else {}


def _cache_conditions(pods: Sequence[PodKind]) -> dict[str, Any]:
    """Return the entry `caches` of a run's conditions, with the number of pods by cache behaviour.
    Empty if all pods have vLLM's prompt cache.
    """
    if not any(kind.cache for kind in pods):
        return {}
    names = [cache_spelt(kind.cache) for kind in pods]
    return {"caches": {name: names.count(name) for name in dict.fromkeys(names)}}


def _feature_conditions(pods: Sequence[PodKind]) -> dict[str, Any]:
    """Return the entries of a run's conditions about engine features that pods use, with the
    evidence for each feature. Empty if pods use none.
    """
    used = dict.fromkeys(name for kind in pods for name in features_used(kind))
    spelt = [", ".join(map(feature_spelt, kind.features)) or "none" for kind in pods]
    told: dict[str, Any] = {}
    if any(kind.features for kind in pods):
        told["engines"] = {name: spelt.count(name) for name in dict.fromkeys(spelt)}
    if used:
        told["engine_evidence"] = [f"{name}: {EVIDENCE[name]}" for name in used]
    return told


def _role_conditions(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the entries of a run's conditions about roles and the network between them. Empty if
    no pod has a role.
    """
    transfer = cluster.kv_transfer
    if transfer is None:
        return {}
    return {
        "roles": roles_spelt(cluster.pods),
        "kv_link": transfer.link.name,
        "kv_nics": {kind.role: kind.nics for kind in cluster.pods if kind.transfers},
        "kv_legs": "concurrent" if transfer.concurrent else "serial",
        "kv_push": transfer.push,
        "kv_first_contact_s": transfer.first_contact_s,
    }


def _autoscaler_condition(scenario: Scenario | None) -> Any:
    """Return the settings of the scenario's autoscaler, a list of them if there are several, or
    None.
    """
    told = () if scenario is None else scenario.autoscalers
    return msgspec.to_builtins(told[0] if len(told) == 1 else told) if told else None


def _peer_conditions(peers: PeerSettings | None) -> dict[str, Any]:
    if peers is None:
        return {"peer_delay_s": None}
    return {f"peer_{name}": value for name, value in msgspec.to_builtins(peers).items()}


def named_policies(names: list[str]) -> list[PolicySource]:
    """Return the policies with the given names or files. Raises `PolicyNameError` if two have the
    same name, and what `policy_source` raises.
    """
    sources = [policy_source(name) for name in names]
    taken: dict[str, str] = {}
    for name, source in zip(names, sources, strict=True):
        if source.name in taken:
            raise PolicyNameError(
                f"--config {taken[source.name]} and --config {name} both have the name "
                f"{source.name}; omit one of them, or rename its file"
            )
        taken[source.name] = name
    return sources


def count_of_runs(text: str) -> int:
    """Parse a number of runs, seeds or processes from 1 to `RUNS_MAX`, for argparse."""
    return int(_number(text, lowest=1, highest=RUNS_MAX, integer=True))


def _cache(text: str) -> CacheBehaviour | None:
    try:
        return cache_named(text)
    except CacheNameError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _count(text: str) -> int:
    return int(_number(text, lowest=1, highest=1e9, integer=True))


def _pickers(text: str) -> int:
    return int(_number(text, lowest=1, highest=PICKERS_MAX, integer=True))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_pickers(part) for part in text.split(",")))


def _fallbacks(text: str) -> int:
    return int(_number(text, lowest=0, highest=64, integer=True))


def _restart(text: str) -> PickerRestart:
    picker, from_s, to_s = _parts(text, 3, "N:FROM:TO")
    begins_s, ends_s = _window(from_s, to_s)
    return PickerRestart(at_s=begins_s, pickers=(_whole(picker),), startup_s=ends_s - begins_s)


def _partition(text: str) -> PeerPartition:
    from_s, to_s, side = _parts(text, 3, "FROM:TO:N,N,...")
    begins_s, ends_s = _window(from_s, to_s)
    pickers = tuple(map(_whole, side.split(",")))
    return PeerPartition(from_s=begins_s, to_s=ends_s, pickers=pickers)


def _slow_peer(text: str) -> SlowPicker:
    picker, more_s = _parts(text, 2, "N:S")
    return SlowPicker(picker=_whole(picker), more_s=_seconds(more_s))


def _window(from_s: str, to_s: str) -> tuple[float, float]:
    begins_s, ends_s = _seconds(from_s), _seconds(to_s)
    if begins_s >= ends_s:
        raise argparse.ArgumentTypeError(f"expected an end after {from_s} s, got {to_s} s")
    return begins_s, ends_s


def _parts(text: str, count: int, expected: str) -> list[str]:
    parts = text.split(":")
    if len(parts) != count:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return parts


def _pods(text: str) -> int:
    return int(_number(text, lowest=1, highest=PODS_MAX, integer=True))


def _roles(text: str) -> tuple[str, ...]:
    try:
        return modelled_roles(text, pods_max=PODS_MAX)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _link(text: str) -> Link:
    try:
        return link_named(text)
    except LinkError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _nics(text: str) -> int:
    return int(_number(text, lowest=1, highest=64, integer=True))


def _kv_events(text: str) -> KVEventSettings:
    delay_s, _, loss = text.partition(":")
    return KVEventSettings(delay_s=_seconds(delay_s), loss=_share(loss or "0"))


def _whole(text: str) -> int:
    return int(_number(text, lowest=0, highest=1e9, integer=True))


def _seconds(text: str) -> float:
    return _number(text, lowest=0.0, highest=1e9)


def _share(text: str) -> float:
    return _number(text, lowest=0.0, highest=1.0)


def _positive(text: str) -> float:
    return _number(text, lowest=1e-6, highest=1e9)


def _in_digits(number: float) -> str:
    """Format a number with at most six decimals and without an exponent."""
    return f"{number:,.6f}".rstrip("0").removesuffix(".")


def _number(text: str, *, lowest: float, highest: float, integer: bool = False) -> float:
    try:
        number = int(text) if integer else float(text)
    except ValueError:
        number = lowest - 1
    if not lowest <= number <= highest:
        kind = "an integer" if integer else "a number"
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {kind} from {_in_digits(lowest)} to {_in_digits(highest)}"
        )
    return number
