"""Description of a configuration as plain values, for its hash and for the comparison of two
configurations.
"""

import hashlib
from typing import Any, Final

import msgspec

from epp.configuration.config import PickerConfig, Role
from epp.configuration.token_producer import Backend, TokenProducer
from epp.core.decision.profile import SchedulingProfile
from epp.core.decision.stages import Stages
from epp.core.duration import Duration, duration_text
from epp.core.flow.settings import FlowSettings
from epp.core.knowledge.ejection import OutlierEjection
from epp.core.knowledge.topology import DEFAULT_TOPOLOGY

_SHADOW: Final = "shadow "
"""Prefix of those lines of a comparison of two configurations that are about the shadow profile."""


def describe(config: PickerConfig) -> dict[str, dict[str, Any]]:
    """Return the canonical form of a configuration: plain values by part and parameter, with all
    defaults.

    Configurations with equal forms have the same effect. The names of plugins are a part of the
    form.
    """
    lines: dict[str, dict[str, Any]] = {}
    if config.stages.alone:
        lines |= _describe_profile(config.profile, "")
    else:
        lines["stages"] = _describe_stages(config.stages)
        for name, profile in config.stages.profiles():
            lines |= _describe_profile(profile, f"{name} ")
    if config.shadow is not None:
        lines |= _describe_profile(config.shadow, _SHADOW)
        lines[f"{_SHADOW}profile"]["share"] = _whole(config.shadow_share)
    for name, index in config.indexes.items():
        lines[f"index {name}"] = _plain(index)
    lines["saturation"] = _plain(config.saturation)
    if not config.staleness_given:
        lines["saturation"]["metricsStalenessThreshold"] = "by refresh interval"
    if config.flow is not None:
        lines |= _describe_flow(config.flow)
    if config.inflight.peak_prefill_throughput or config.inflight.peak_prefill_throughputs:
        given = plain_parameters(config.inflight)
        lines["load in flight"] = {name: given[name] for name in given if name.startswith("peak")}
    if config.ejection != OutlierEjection():
        lines["outlier ejection"] = plain_parameters(config.ejection)
    if config.primary_port:
        lines["data-parallel ranks"] = {"primaryPort": config.primary_port}
    if config.topology != DEFAULT_TOPOLOGY:
        lines["topology"] = plain_parameters(config.topology)
    if config.admitter is not None:
        lines["admitter"] = plain_parameters(config.admitter)
    if config.latency is not None:
        lines["latency prediction"] = {
            **_plain(config.latency.estimator),
            "refuses": config.latency.refuses,
        }
    if config.tokens.backend is not Backend.ESTIMATE:
        lines["tokens"] = _describe_tokens(config.tokens)
    lines["requestHandler"] = {"parsers": list(config.parsers)}
    lines["metrics"] = {
        "type": "",
        **plain_parameters(config.metrics.source),
        **plain_parameters(config.metrics.extractor),
    }
    for page, source in config.metrics.pages.items():
        lines[f"page {page}"] = plain_parameters(source)
    return lines


def _describe_stages(stages: Stages) -> dict[str, Any]:
    lines: dict[str, Any] = {"order": stages.order.value, "prefillEnd": stages.prefill_end.value}
    lines["prefillDeadlineS"] = _whole(stages.prefill_deadline_s)
    if stages.named:
        lines["header"] = stages.header
        lines["default"] = stages.decode.name
        lines["profiles"] = list(stages.named)
    for stage, rule in (("prefill", stages.prefill_if), ("encode", stages.encode_if)):
        parameters = msgspec.to_builtins(rule)
        lines[f"{stage}If"] = type(rule).__name__.lower()
        lines |= {f"{stage}If.{name}": value for name, value in parameters.items()}
    return lines


def _describe_flow(flow: FlowSettings) -> dict[str, dict[str, Any]]:
    bands = {f"band {priority}": flow.bands[priority] for priority in sorted(flow.bands)}
    bands["bands of other priorities"] = flow.default_band
    if flow.default_negative_band is not None:
        bands["bands of other negative priorities"] = flow.default_negative_band
    return {
        "flow control": {
            "maxRequests": flow.requests_max,
            "maxBytes": flow.bytes_max,
            "defaultRequestTTL": f"{flow.wait_s_max:g}s",
            "noEndpointRequestTTL": f"{flow.empty_pool_wait_s_max:g}s",
            "identityHeaders": list(flow.identity_headers),
            **({"enableEviction": True} if flow.evicts else {}),
        },
        **({} if flow.agents is None else {"agent sessions": plain_parameters(flow.agents)}),
        "flow control detector": _plain(flow.detector),
        "flow control band selection": _plain(flow.selection),
        "flow control usage limit": _plain(flow.policy),
        **{f"flow control {name}": plain_parameters(band) for name, band in bands.items()},
    }


def _describe_tokens(tokens: TokenProducer) -> dict[str, Any]:
    given = plain_parameters(tokens)
    backend = plain_parameters(tokens.local or tokens.renderer)
    of_all = {name: given[name] for name in ("modelName", "tokenizeTimeout")}
    return {"backend": str(tokens.backend), **of_all, **backend}


def _describe_profile(profile: SchedulingProfile, kind: str) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {
        f"{kind}profile": {"filters": [named.name for named in profile.filters]}
    }
    for named in profile.filters:
        lines[f"{kind}filter {named.name}"] = _plain(named.plugin)
    for scorer in profile.scorers:
        weight = {"weight": _whole(scorer.weight)}
        lines[f"{kind}scorer {scorer.name}"] = weight | _plain(scorer.plugin)
    lines[f"{kind}picker {profile.picker_name}"] = _plain(profile.picker)
    for responder in profile.responders:
        abilities = responder.plugin.abilities
        marks_requests = abilities.marks_requests or abilities.chooses_ranks
        role = Role.REQUEST_MARKER if marks_requests else Role.RESPONDER
        lines[f"{role} {responder.name}"] = _plain(responder.plugin)
    return lines


def _plain(plugin: Any) -> dict[str, Any]:
    return {"type": plugin.type_name, **plain_parameters(plugin)}


def plain_parameters(plugin: Any) -> dict[str, Any]:
    """Return every parameter of a plugin as a plain value, by its name in a configuration
    document.
    """
    parameters: dict[str, Any] = msgspec.to_builtins(plugin, enc_hook=_encode, str_keys=True)
    return {name: _whole(value) for name, value in parameters.items()}


def _whole(value: Any) -> Any:
    """Return `value`, or an integer if it is a float without a fraction, so that 5 and 5.0 are
    written alike.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _encode(value: Any) -> Any:
    if isinstance(value, Duration):
        return duration_text(value)
    return str(value)


def config_hash(config: PickerConfig) -> str:
    """Return a hash of the canonical form of the configuration in 12 hexadecimal digits. Documents
    that differ only in their spelling or in defaults that they set have the same hash.
    """
    encoded = msgspec.json.encode(describe(config), order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:12]


def diff_configs(old: PickerConfig, new: PickerConfig) -> list[str]:
    """Return one line per parameter or plugin that differs between `old` and `new`; empty if their
    canonical forms are equal.

    Lines about the acting profile come before those about the shadow profile.
    """
    before, after = describe(old), describe(new)
    lines: list[str] = []
    lines.extend(f"{name}: removed" for name in before if name not in after)
    for name in after:
        if name not in before:
            weight = after[name].get("weight")
            lines.append(f"{name}: added" + ("" if weight is None else f" with weight {weight:g}"))
            continue
        for member in dict.fromkeys([*before[name], *after[name]]):
            was, now = before[name].get(member), after[name].get(member)
            if was != now:
                lines.append(f"{name}: {member} {_shown(was)} -> {_shown(now)}")
    return sorted(lines, key=lambda line: line.startswith(_SHADOW))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value) or "none"
    if value is None or value == "":
        return "unset"
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
