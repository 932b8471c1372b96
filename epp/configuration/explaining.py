"""Descriptions for people of the effect of a configuration, with defaults filled in."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import structs

from epp.configuration.build import build_settings
from epp.configuration.config import PickerConfig
from epp.configuration.defaults import DEFAULT_SOURCES
from epp.configuration.describing import config_hash, plain_parameters
from epp.core.decision.plugin import PREFIX_READS
from epp.core.decision.probabilistic_admitter import ProbabilisticAdmitter
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.settings import SchedulerSettings
from epp.core.decision.stages import (
    Always,
    ByTime,
    Multimodal,
    Order,
    PrefillRule,
    PrefillWork,
    Stages,
    Uncached,
)
from epp.core.flow.eviction import EVICT_AFTER_S
from epp.core.flow.settings import BandSettings, Fairness, FlowSettings, Ordering
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.latency import ERROR_MAX, LatencyPrediction
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.core.prompt.request import InferenceRequest

_PREFIX_INDEX: Final = "prefix index"
_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(PREFIX_READS, _PREFIX_INDEX),
    "adapter_state": "LoRA adapters",
    "attribute": "an attribute of endpoints",
    "cache_hit_tokens": "tokens found in caches",
    "cache_queried_tokens": "tokens looked up in caches",
    "inflight_context_tokens": "prompt tokens in flight",
    "inflight_prefill_tokens": "prompt tokens in flight",
    "inflight_requests": "requests in flight",
    "kv_cache_usage": "KV-cache usage",
    "kv_capacity_tokens": "KV-cache size",
    **dict.fromkeys(("link_bytes_per_s", "link_unmeasured"), "measured speed of KV transfers"),
    "metrics_age_s": "age of metrics",
    "nearness": "places of endpoints",
    "output_tokens_max": "limit of the answer",
    "prefill_tokens_per_s": "prefill speed",
    "prefill_measured_tokens_per_s": "measured prefill speed",
    "peer_candidates": "the endpoint of the other stage",
    "receiving_tokens": "KV transfers to endpoints",
    "sending_tokens": "KV transfers from endpoints",
    "prompt_tokens": "length of the prompt",
    "prompts": "prompt",
    "rendezvous": "names of endpoints",
    "replicas_unheard": "replicas that do not share",
    "saturated": "refusals by engines",
    "session_id": "session",
    "session_tokens": "session token",
    "sessions_return": "return of sessions",
    "answer_tokens": "length of answers",
    "unreported_requests": "requests that engines have not reported yet",
}
"""Description of the values that a plugin may declare in `reads`, by name. A name without a
description is shown as it is.
"""

_SATURATIONS: Final = (0.5, 0.8, 0.95, 1.0)
"""Mean loads of the pool for which `epp check-config --explain` shows the ceilings of a band."""
_LOADS: Final = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
"""Mean loads of the pool for which `epp check-config --explain` shows the share of requests that
are refused at random.
"""
RESPONSES: Final = (
    "token usage is read only with both `epp serve --parse-response-usage`",
    "and a gateway whose response_body_mode is STREAMED or FULL_DUPLEX_STREAMED",
)
"""Lines about data of responses, which need a flag of the picker and a setting of the gateway, not
a configuration.
"""


def what_it_reads(kind: type[Any]) -> str:
    """Return a phrase about the data that a plugin class declares to read; "" if it
    declares none.
    """
    if kind.abilities.reads is None:
        return ""
    found: list[str] = []
    if kind.abilities.reads_index:
        is_prefix = kind.producer_type == PrefixIndexSettings.type_name
        found.append(_PREFIX_INDEX if is_prefix else f"index of {kind.producer_type}")
    found += [_WORDS.get(name, name.replace("_", " ")) for name in kind.abilities.reads]
    return ", ".join(dict.fromkeys(found))


def explain(config: PickerConfig) -> str:
    """Return a description of the effect of `config`, as text for a terminal."""
    settings = build_settings(config)
    stages = settings.stages
    lines = [
        f"configuration  {config.source}",
        f"hash           {config_hash(config)}",
        f"serves         {_mode(config)}",
        "",
    ]
    if stages.alone:
        lines += _profile(f"profile {stages.decode.name}", stages.decode)
    else:
        lines += _stages(stages, settings.prefill_tokens_per_s)
    if config.shadow is not None:
        lines += ["", *_shadow(config.shadow, config.shadow_share)]
    lines += ["", "indexes"]
    for name, index in config.indexes.items():
        default = "default prefix index" if name == config.prefix else ""
        lines += _member("index", name, index, default)
    if not config.indexes:
        lines.append("  none: the picker does not track where prompts went")
    lines += ["", *_speeds(settings)]
    lines += ["", *_ejection(settings.ejection)]
    if settings.latency is not None:
        lines += ["", *_latency(settings.latency)]
    if settings.admitter is not None:
        lines += ["", *_admitter(settings.admitter)]
    if settings.flow is None:
        lines += ["", "saturation: a request of negative priority is refused from 1.0 on"]
        lines += _member("detector", settings.saturation.type_name, settings.saturation)
    else:
        lines += ["", *_queue(settings.flow)]
    lines += ["", "parsers, in order", f"  {', '.join(config.parsers)}"]
    lines += ["", "responses", *(f"  {line}" for line in RESPONSES)]
    lines += ["", "metrics of endpoints"]
    lines += _parameters(config.metrics.source) + _parameters(config.metrics.extractor)
    for page, source in config.metrics.pages.items():
        lines += ["", f"page {page} of endpoints", *_parameters(source)]
    return "\n".join(lines) + "\n"


def _admitter(admitter: ProbabilisticAdmitter) -> list[str]:
    """Return lines about the random refusal of requests, with examples."""
    shares = (f"{admitter.refused_share(load):.0%} at {load:g}" for load in _LOADS)
    return [
        "admission: requests of negative priority are refused at random",
        f"  refused share by the mean load of the pool: {', '.join(shares)}",
        *(f"  {line}" for line in _parameters(admitter)),
    ]


def _queue(flow: FlowSettings) -> list[str]:
    """Return lines about the queue: when requests wait, for how long, and a table of its bands."""
    lines = ["queue: requests wait in the picker while no endpoint has room for them"]
    lines += _member("detector", flow.detector.type_name, flow.detector)
    lines += _member("bands", flow.selection.type_name, flow.selection)
    lines += _member("ceiling", flow.policy.type_name, flow.policy)
    for when, limit_s in (
        ("while the pool has endpoints", flow.wait_s_max),
        ("while it has none", flow.empty_pool_wait_s_max),
    ):
        lines.append(f"  longest wait {when}: {f'{limit_s:g} s' if limit_s else 'no limit'}")
    if flow.evicts:
        lines.append(
            f"  eviction: a running request of negative priority ends before its response begins, "
            f"if one of higher priority has waited {EVICT_AFTER_S:g} s or the queue is full"
        )
    requests, size = _limit(flow.requests_max), _limit(flow.bytes_max)
    lines.append(f"  all bands together: {requests} requests, {size} bytes of bodies")
    if flow.agents is not None:
        limit_s = flow.agents.head_wait_s_max
        when = f"after {limit_s:g} s even without room" if limit_s else "only with room"
        lines.append(f"  a waiting agent session is admitted {when}")
    if flow.identity_headers:
        lines.append(f"  flows without a fairness header: by {', '.join(flow.identity_headers)}")
    priorities = sorted({*flow.bands, 0}, reverse=True)
    for priority in priorities:
        lines += _band(f"band {priority}", flow, flow.band(priority))
        ceilings = (
            f"{flow.policy.ceilings(saturation, priorities)[priority]:.2f} at {saturation:g}"
            for saturation in _SATURATIONS
        )
        uses = f"may use endpoints loaded to less than {', '.join(ceilings)}"
        lines.append(f"      {uses} mean load of the pool")
    if flow.default_band != flow.band(0):
        lines += _band("bands of other priorities", flow, flow.default_band)
    if flow.default_negative_band is not None:
        lines += _band("bands of other negative priorities", flow, flow.default_negative_band)
    elif flow.default_band == flow.band(0):
        lines.append("  bands of other priorities, from InferenceObjectives: as band 0")
    return lines


def _band(name: str, flow: FlowSettings, band: BandSettings) -> list[str]:
    """Return lines about one band, or about the template of several."""
    turns = {
        Fairness.NONE: "one queue for all flows",
        Fairness.REQUESTS: "flows in turn by requests",
        Fairness.TOKENS: "flows in turn by tokens charged",
        Fairness.SESSIONS: "agent sessions, admitted ones first, others when their tokens fit",
        Fairness.DECAYING_TOKENS: f"flows by tokens charged, half-life {band.half_life_s:g} s",
    }[band.fairness]
    order = {
        Ordering.ARRIVAL: "first come, first served",
        Ordering.DEADLINE: "the earliest end of a wait first",
        Ordering.FIRST_OUTPUT: "the earliest due first token first",
    }[band.ordering]
    lines = [
        f"  {name}: {turns}; within a flow {order}",
        f"      at most {band.requests_max} requests, {band.bytes_max} bytes of bodies",
    ]
    if band.wait_s_max is not None:
        wait_s = flow.budget_s(band, empty_pool=False)
        limit = f"{wait_s:g} s" if wait_s else "no limit"
        lines.append(f"      longest wait while the pool has endpoints: {limit}")
    return lines


def _limit(most: int) -> str:
    return str(most) if most else "any number of"


def _mode(config: PickerConfig) -> str:
    """Return a phrase that says whether the configuration serves requests by role, and why."""
    stages, by_default = config.stages, config.source in DEFAULT_SOURCES
    if stages.alone:
        why = "no disagg-profile-handler is declared"
        if by_default:
            why = "no endpoint prefills or encodes without decoding"
        return f"each request at one endpoint, because {why}"
    if not by_default:
        return "requests by role, because a handler of stages is declared"
    work = {"prefill": stages.prefill, "encode": stages.encode}
    told = " and ".join(name for name, profile in work.items() if profile is not None)
    return f"requests by role, because endpoints {told} without decoding"


def _stages(stages: Stages, tokens_per_s: float) -> list[str]:
    """Return a table for each stage, with the rule by which it runs.

    `tokens_per_s` is the prefill speed of the endpoints.
    """
    if stages.named:
        return _named(stages)
    lines = [f"stages, chosen in this order: {', then '.join(_in_order(stages))}"]
    prefill_if = stages.prefill_if
    if stages.order is Order.PREFILL_FIRST and not isinstance(prefill_if, ByTime):
        prefill_if = Always()
    rules: Mapping[str, PrefillRule] = {"prefill": prefill_if, "encode": stages.encode_if}
    for name, profile in stages.profiles():
        lines += ["", *_profile(f"stage {name}: profile {profile.name}", profile)]
        if name in rules:
            lines.append(f"  runs      {_rule(rules[name])}")
            lines += [f"      {line}" for line in _examples(name, rules[name], tokens_per_s)]
        elif name == "screen":
            lines.append("  runs      before every stage, for every request")
        elif name == "fallback":
            lines.append("  runs      instead of all stages, if one that must run has no endpoint")
        else:
            lines.append("  runs      for every request")
    if stages.fallback is None:
        lines += ["", "a request is refused if a stage that must run has no endpoint"]
    return [*lines, f"prefill and encode end with the {stages.prefill_end} of the response"]


def _in_order(stages: Stages) -> list[str]:
    """Return the stages in the order in which their endpoints are chosen."""
    encode = ["encode"] if stages.encode is not None else []
    if stages.order is Order.PREFILL_FIRST:
        return ["prefill", *encode, "decode near the prefill endpoint"]
    prefill = ["prefill near the decode endpoint"] if stages.prefill is not None else []
    return ["decode", *encode, *prefill]


def _named(stages: Stages) -> list[str]:
    """Return a table for each of the profiles that a request header names."""
    lines = [f"profiles, one for each request: header {stages.header} names it"]
    if stages.screen is not None:
        lines += ["", *_profile("filters before every profile", stages.screen)]
    for name, profile in stages.named.items():
        lines += ["", *_profile(f"profile {name}", profile)]
        if profile is stages.decode:
            lines.append("  runs      also for requests without the header")
    rule = stages.prefill_if
    enough = "no block of the prompt is cached at the endpoint"
    if isinstance(rule, Uncached):
        enough = _rule(rule).removeprefix("if ").replace("the decode endpoint", "the endpoint")
    return [*lines, "", f"Prefer: if-available is refused with 412: {enough}"]


def _rule(rule: PrefillRule) -> str:
    """Return in words for which requests a stage runs."""
    match rule:
        case Always():
            return "for every request"
        case ByTime():
            return "if it saves time, for a prompt that is not cached at the decode endpoint"
        case Multimodal():
            return "for prompts with an image, audio or video"
        case Uncached(tokens, least) if tokens:
            of = f" of at least {least}" if least else ""
            return f"if {tokens} or more prompt tokens{of} are not cached at the decode endpoint"
        case _:
            return "never"


def _examples(stage: str, rule: PrefillRule, tokens_per_s: float) -> list[str]:
    """Return examples of a rule that counts tokens or compares times, for 5,120 prompt tokens.

    `tokens_per_s` is the prefill speed of the endpoints.
    """
    if isinstance(rule, ByTime):
        return [time_reason(rule, 5_120, tokens_per_s, decoding) for decoding in (0, 1, 20)]
    if not isinstance(rule, Uncached) or not rule.tokens:
        return []
    total = 5_120
    return [stage_reason(stage, rule, total, cached) for cached in (1_024, total)]


def time_reason(
    rule: ByTime, prompt_tokens: int, tokens_per_s: float, decoding_requests: int
) -> str:
    """Return which prefill of a prompt that is not cached takes less time at endpoints without
    pending tokens, for example `5120 tokens, 0 decode at D: 0.34 s at D, 0.47 s at P: no prefill`.
    """
    remote = PrefillWork(
        uncached_tokens=prompt_tokens, pending_tokens=0.0, tokens_per_s=tokens_per_s
    )
    local = structs.replace(remote, decoding_requests=decoding_requests)
    verdict = "prefill" if rule.saves_time(prompt_tokens, local, remote) else "no prefill"
    times = (
        f"{rule.prefill_s(local, prompt_tokens):.3g} s at D",
        f"{rule.remote_s(prompt_tokens, local, remote):.3g} s at P",
    )
    return f"{prompt_tokens} tokens, {decoding_requests} decode at D: {', '.join(times)}: {verdict}"


def stage_reason(stage: str, rule: PrefillRule, prompt_tokens: int, cached_tokens: int) -> str:
    """Return why a rule ran or did not run `stage` for a prompt, for example
    `5120 tokens, 1024 cached at D, 4096 >= 16: prefill`.

    A rule by time (`ByTime`) is only described, because it needs the state of two endpoints.
    """
    if isinstance(rule, ByTime):
        return _rule(rule)
    request = InferenceRequest(request_id="", prompt_tokens=prompt_tokens)
    applies = rule.applies(request, cached_tokens)
    verdict = stage if applies else f"no {stage}"
    if not isinstance(rule, Uncached):
        return f"{_rule(rule)}: {verdict}"
    told = f"{prompt_tokens} tokens, {cached_tokens} cached at D"
    if not rule.tokens:
        return f"{told}, never: {verdict}"
    if prompt_tokens < rule.prompt_tokens:
        return f"{told}, {prompt_tokens} < {rule.prompt_tokens}: {verdict}"
    uncached = prompt_tokens - cached_tokens
    return f"{told}, {uncached} {'>=' if applies else '<'} {rule.tokens}: {verdict}"


def _profile(heading: str, profile: SchedulingProfile) -> list[str]:
    lines = [heading]
    for number, named in enumerate(profile.filters, 1):
        lines += _member(f"filter {number}", named.name, named.plugin)
    if not profile.filters:
        lines.append("  no filters: every ready endpoint is a candidate")
    total = sum(scorer.weight for scorer in profile.scorers)
    for scorer in profile.scorers:
        share = f"weight {scorer.weight:g} of {total:g}, {scorer.weight / total:.0%}"
        lines += _member("scorer", scorer.name, scorer.plugin, share)
    if not profile.scorers:
        lines.append("  no scorers: all candidates are equal")
    lines += _member("picker", profile.picker_name, profile.picker)
    for responder in profile.responders:
        lines += _member("responder", responder.name, responder.plugin)
    return lines


def _shadow(profile: SchedulingProfile, share: float) -> list[str]:
    judged = "every decision" if share == 1.0 else f"{share:.4g} of the decisions, drawn at random"
    lines = [f"shadow profile {profile.name}: judges {judged}, acts on none"]
    lines += [f"  filter    {named.name}" for named in profile.filters]
    lines += [f"  scorer    {one.name}: weight {one.weight:g}" for one in profile.scorers]
    return [*lines, f"  picker    {profile.picker_name}"]


def _speeds(settings: SchedulerSettings) -> list[str]:
    """Return lines with the prefill speeds in tokens/s; for an endpoint, the first line with its
    labels applies.
    """
    labelled = [
        f"  {speed.peak_prefill_throughput:,.0f} tokens/s with labels "
        + ", ".join(f"{name}={value}" for name, value in speed.match_labels.items())
        for speed in settings.labelled_speeds
    ]
    rest = "for all others" if labelled else "for every endpoint"
    return [
        "prefill speed, at which prompt tokens in flight drain",
        *labelled,
        f"  {settings.prefill_tokens_per_s:,.0f} tokens/s {rest}",
    ]


def _ejection(ejection: OutlierEjection) -> list[str]:
    """Return lines about outlier ejection: on or off, and the parameters that differ from their
    defaults.
    """
    if not ejection.enabled:
        return ["ejection: off, slow and failing endpoints stay in service"]
    defaults = plain_parameters(OutlierEjection())
    given = [
        f"  {name} = {value}"
        for name, value in plain_parameters(ejection).items()
        if value != defaults[name]
    ]
    return [
        "ejection: slow or failing endpoints receive no requests for a while, in every profile",
        *given,
    ]


def _latency(latency: LatencyPrediction) -> list[str]:
    """Return lines about latency prediction: how it works, and what acts on it."""
    lines = [
        "latency prediction: a regression for each endpoint corrects added-time-scorer's estimate",
        f"  a prediction with a median error above {ERROR_MAX:.0%} is not used",
    ]
    if latency.refuses:
        lines.append(
            "  a request of negative priority is refused if no endpoint is predicted to meet its SLO"
        )
    return lines


def _member(kind: str, name: str, plugin: Any, note: str = "") -> list[str]:
    heading = f"  {kind:<9} {name}"
    type_name = plugin.type_name
    if type_name != name:
        heading += f" (type {type_name})"
    if note:
        heading += f": {note}"
    lines = [heading, f"      {_first_sentence(plugin)}"]
    if reads := what_it_reads(type(plugin)):
        lines.append(f"      reads {reads}")
    return lines + [f"    {line}" for line in _parameters(plugin)]


def _parameters(plugin: Any) -> list[str]:
    """Return a line for each parameter of `plugin` that is not empty."""
    return [
        f"  {name} = {value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
        for name, value in plain_parameters(plugin).items()
        if value not in (None, "", (), [], {})
    ]


def _first_sentence(plugin: Any) -> str:
    """Return the first sentence of the docstring of the plugin's class."""
    document = inspect.cleandoc(type(plugin).__doc__ or "No description.")
    paragraph = " ".join(document.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."
