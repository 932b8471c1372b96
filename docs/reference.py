"""Write the generated parts of the documentation: `python -m docs.reference`.

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of a page is
written by hand. `tests/test_docs.py` fails if a part differs from the code.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
from msgspec.inspect import (
    BoolType,
    CustomType,
    DictType,
    EnumType,
    Field,
    FloatType,
    IntType,
    ListType,
    NoneType,
    StrType,
    StructType,
    UnionType,
    VarTupleType,
    type_info,
)

from docs import (
    caches,
    disaggregation_figures,
    estimate_tables,
    estimates,
    exact,
    flow_figures,
    frontier,
    inventory,
    ladders,
    leaderboard,
    live,
    stage_rule,
)
from epp.configuration.build import INDEXES
from epp.configuration.compatibility import (
    ACCEPTED,
    DEPRECATED,
    FEATURE_GATES,
    IGNORED_SECTIONS,
    REFUSED,
    REFUSED_SECTIONS,
)
from epp.configuration.explaining import what_it_reads
from epp.configuration.token_producer import EndpointDiscovery, LocalTokenizers, VllmRenderer
from epp.core.duration import Duration, duration_text
from epp.flags.reading import help_text
from epp.flags.reference_picker import FOREIGN, REMOVED
from epp.flags.serve import ServeFlags
from epp.flags.subcommands import (
    ChangesFlags,
    CheckFlags,
    DecisionsFlags,
    EnvoyFlags,
    ExplainFlags,
    TopFlags,
)
from epp.plugins import DEPRECATED as DEPRECATED_PLUGINS
from epp.plugins import FILTERS, PICKERS, SCORERS
from epp.shell.operators.metrics.field_metrics import GIE, LLM_D
from epp.shell.operators.metrics.metric_table import METRICS, MetricSpec
from homing_rivals import FAMILIES
from sim.caches.names import BEHAVIOURS
from sim.cluster.built_in import strategies

FOLDER: Final = Path(__file__).parent

TYPES: Final[Mapping[str, str]] = {
    "approx-prefix-cache-producer": "The approximate prefix index: an estimate of the prefixes that each endpoint has cached, from the picker's own decisions.",
    "precise-prefix-cache-producer": (
        "The exact prefix index: the prefixes that each endpoint has cached, as engines report them by [KV events](kv-events.md)."
    ),
    "endpoint-notification-source": "`endpoint-notification-source` has no effect, because the picker always receives changes of endpoints.",
    "k8s-notification-source": "`k8s-notification-source` has no effect, because the picker always receives changes of endpoints.",
    "session-id-producer": "An index of the endpoint to which each session was last routed.",
    "no-hit-lru-producer": "An index of the order in which endpoints last received a prompt that none had cached.",
    "dcgm-extractor": "`dcgm-extractor` reads the pages of `dcgm-data-source`, and has no effect without this source.",
    "models-data-extractor": "`models-data-extractor` reads the pages of `models-data-source`, and has no effect without this source.",
    "single-profile-handler": "`single-profile-handler` has no effect, because Homing has only one acting profile.",
    "local-syncer": "`local-syncer` has no effect, because flags configure sharing between replicas.",
    "openai-parser": (
        "`openai-parser` reads requests whose paths end in `chat/completions`, `completions`, `embeddings` or `responses`; "
        "of `conversations` and `images/generations` it reads only the model."
    ),
    "anthropic-parser": "`anthropic-parser` reads requests whose paths end in `v1/messages`.",
    "vllmhttp-parser": "`vllmhttp-parser` reads requests whose paths end in `inference/v1/generate`; their prompts are token ids.",
    "passthrough-parser": "`passthrough-parser` forwards the requests that no other parser reads without reading them; they are routed by load.",
}
"""Descriptions of configuration types whose class has a docstring for programmers, or one that is
too short.
"""

PARAMETERS: Final[Mapping[str, str]] = {
    "defaultEngine": "Engine of an endpoint that has no label and whose page does not show it.",
    "engineConfigs": "Names of metrics by engine; an entry with a built-in name replaces the built-in one.",
    "engineLabelKey": "Label of an endpoint that names its engine.",
    "estimate": "The default. Its members have no effect, because a token is 4 bytes.",
    "hf": "Refused.",
    "local": "[Tokenizers of files](tokens.md#tokenizers-of-files).",
    "lruSize": "Maximum number of remembered endpoints.",
    "matchExpressions": "Conditions that must all be true; operators `In`, `NotIn`, `Exists`, `DoesNotExist`.",
    "matchLabels": "Required labels and their values.",
    "maxNumOfEndpoints": "See above.",
    "metricsStalenessThreshold": (
        "Age from which an endpoint counts as full. The default is the greater of 1s and five scrape intervals."
    ),
    "tokenizeTimeout": "Maximum time that a request waits for its tokens.",
    "outputRatio": "No effect.",
    "path": "Path of the page.",
    "prefixMatchInfoProducerName": "Name of the prefix index to use; the default is the first one.",
    "prefixPluginName": "No effect.",
    "scheme": "Scheme of the page.",
    "strategy": "See above.",
    "threshold": "Number of waiting requests from which on the score is 0.",
    "tieredOffloadingSpecs": "Not read.",
    "ttftSource": "Only `prefillThroughput` is supported.",
    "udsTokenizerConfig": "Refused.",
    "addEstimatedOutputTokens": "No effect.",
    "syncCrossReplicaState": "No effect, because replicas that share also share their load.",
    "allowsNoLabel": "Whether the filter keeps an endpoint without the label.",
    "vllm": "[The renderer](tokens.md#the-renderer).",
}
"""Meanings of configuration parameters that neither their class nor a docstring below the field
explains.
"""
_PART: Final = re.compile(
    r"(<!-- begin (?P<name>[\w-]+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL
)


def main() -> int:
    """Write every page whose generated parts changed, and print its name. Return the exit code."""
    for page in (FOLDER.parent / "README.md", *sorted(FOLDER.glob("*.md"))):
        before = page.read_text(encoding="utf-8")
        after = refreshed(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{page.name} written\n")
    return 0


def refreshed(page: str) -> str:
    """Return the text of a page with its generated parts updated."""
    parts: dict[str, Callable[[], str]] = {
        "cluster-rows": _cluster_rows,
        "filters": lambda: _plugins(FILTERS, what_it_reads),
        "scorers": lambda: _plugins(SCORERS, what_it_reads),
        "pickers": lambda: _plugins(PICKERS, what_it_reads),
        "indexes": lambda: _plugins(INDEXES),
        "accepted": lambda: _plugins(ACCEPTED),
        "renderer-parameters": lambda: _parameters(VllmRenderer),
        "discovery-parameters": lambda: _parameters(EndpointDiscovery),
        "tokenizer-parameters": lambda: _parameters(LocalTokenizers),
        "refused": _refused,
        "refused-members": _refused_members,
        "ignored-members": _ignored_members,
        "feature-gates": _feature_gates,
        "metrics": _metrics,
        "field-metrics": _field_metrics,
        "serve-flags": lambda: _flags(ServeFlags),
        "check-flags": lambda: _flags(CheckFlags),
        "envoy-flags": lambda: _flags(EnvoyFlags),
        "explain-flags": lambda: _flags(ExplainFlags),
        "decisions-flags": lambda: _flags(DecisionsFlags),
        "changes-flags": lambda: _flags(ChangesFlags),
        "top-flags": lambda: _flags(TopFlags),
        "foreign-flags": _foreign_flags,
        "strategies": _strategies,
        "families": _families,
        "cache-behaviours": lambda: _plugins(BEHAVIOURS),
        "cache-statements": caches.statement_table,
        "cache-hit-rates": caches.hit_rate_table,
        "cache-salvage": caches.salvage_table,
        "cache-slots": caches.agent_table,
        "cache-system-prompt": caches.spc_table,
        "cache-disk": caches.mlx_table,
        "evidence": lambda: inventory.table(inventory.read().evidence),
        "exact-known": lambda: exact.known_table(exact.read()),
        "exact-adapters": lambda: exact.adapter_table(exact.read()),
        "exact-learnt": lambda: exact.learnt_table(exact.read()),
        "exact-delays": lambda: exact.delay_table(exact.read()),
        "board-short": lambda: leaderboard.short_ranking(leaderboard.read().small),
        "board-ranking": lambda: leaderboard.ranking(leaderboard.read().small),
        "board-behind": lambda: leaderboard.body(leaderboard.read().small.behind),
        "board-cases": lambda: leaderboard.cases(leaderboard.read().small),
        "board-strategies": lambda: leaderboard.strategy_table(leaderboard.read().small),
        "board-full-ranking": lambda: leaderboard.ranking(leaderboard.read().full),
        "board-full-behind": lambda: leaderboard.body(leaderboard.read().full.behind),
        "estimate-errors": lambda: estimate_tables.error_table(estimates.read()),
        "estimate-left": lambda: estimate_tables.left_table(estimates.read()),
        "estimate-built-in": lambda: estimate_tables.built_in_table(estimates.read()),
        "estimate-caches": lambda: estimate_tables.cache_table(estimates.read()),
        "estimate-judged": lambda: estimate_tables.judged_table(estimates.read()),
        "estimate-gpus": lambda: estimate_tables.gpu_table(estimates.read()),
        "estimate-efficiencies": lambda: estimate_tables.efficiency_table(estimates.read()),
        "disaggregation-signs": lambda: disaggregation_figures.sign_table(
            disaggregation_figures.read()
        ),
        "disaggregation-guide": lambda: disaggregation_figures.guide_table(
            disaggregation_figures.read()
        ),
        "disaggregation-links": lambda: disaggregation_figures.link_table(
            disaggregation_figures.read()
        ),
        "disaggregation-parts": lambda: disaggregation_figures.part_table(
            disaggregation_figures.read()
        ),
        "stage-rule-summary": lambda: stage_rule.summary_table(stage_rule.read()),
        "stage-rule-links": lambda: stage_rule.links_table(stage_rule.read()),
        "stage-rule-hold-out": lambda: stage_rule.hold_out_table(stage_rule.read()),
        "stage-rule-mixed": lambda: stage_rule.mixed_table(stage_rule.read()),
        "stage-rule-pickers": lambda: stage_rule.picker_table(stage_rule.read()),
        "stage-rule-choice": lambda: stage_rule.choice_table(stage_rule.read()),
        "flow-targets": lambda: flow_figures.target_table(flow_figures.read()),
        "flow-tenants": lambda: flow_figures.table(flow_figures.read(), "tenants"),
        "flow-batch": lambda: flow_figures.table(flow_figures.read(), "batch"),
        "flow-burst": lambda: flow_figures.table(flow_figures.read(), "burst"),
        "frontier-chosen": lambda: frontier.table("chosen"),
        "frontier-confirmed": lambda: frontier.table("confirmed"),
        "frontier-further": lambda: frontier.table("further"),
        "live-first-token": live.table,
        "ladders-means": lambda: ladders.mean_table(ladders.read()),
        "ladders-order": lambda: ladders.order_table(ladders.read()),
        "ladders-steps": lambda: ladders.step_table(ladders.read()),
        "ladders-peaks": lambda: ladders.peak_table(ladders.read()),
    }
    return _PART.sub(lambda found: f"{found[1]}\n{parts[found['name']]()}\n\n{found[3]}", page)


# --- plugins --------------------------------------------------------------------------------------


def _plugins(
    table: Mapping[str, type[Any]], reads: Callable[[type[Any]], str] = lambda _: ""
) -> str:
    return "\n\n".join(_plugin(name, kind, reads(kind)) for name, kind in table.items())


def _strategies() -> str:
    rows = (
        (f"`{name}`", strategy.idea, strategy.omissions) for name, strategy in strategies().items()
    )
    return _table(("strategy", "idea", "leaves out"), rows)


def _families() -> str:
    return "\n\n".join(_family(family) for family in FAMILIES)


def _family(family: ModuleType) -> str:
    """Return the documentation of a family of strategies: its module's docstring, and its plug-ins."""
    head, _, rest = _unwrapped(inspect.cleandoc(family.__doc__ or "")).partition("\n\n")
    names = ", ".join(f"`{strategy.name}`" for strategy in family.STRATEGIES)
    parts = [f"## {family.__name__.rpartition('.')[2].replace('_', ' ').capitalize()}", head]
    parts += [f"Strategies of this family: {names}."] if names else []
    parts += [rest] if rest else []
    for kinds in ("FILTERS", "SCORERS", "PICKERS", "INDEXES"):
        parts += [
            _plugin(kind.type_name, kind, what_it_reads(kind))
            for kind in getattr(family, kinds, ())
        ]
    return "\n\n".join(parts)


def _plugin(name: str, kind: type[Any], reads: str) -> str:
    lines = [f"### {name}", ""]
    newer = DEPRECATED_PLUGINS.get(name) or DEPRECATED.get(name)
    if newer:
        lines += [f"`{name}` is deprecated: use `{newer}`.", ""]
    if newer and newer in {**FILTERS, **ACCEPTED} and _class(newer) is kind:
        return "\n".join([*lines, f"`{name}` is an old name of the type `{newer}`."])
    lines.append(TYPES.get(name) or _prose(kind))
    if reads:
        lines += ["", f"`{name}` reads these data: {reads}."]
    fields = _fields(kind)
    if fields:
        head = ("parameter", "type", "default", "meaning")
        lines += ["", _table(head, _rows(kind, fields))]
    return "\n".join(lines)


def _parameters(kind: type[Any]) -> str:
    """Return the table of the members of a nested parameter, whose type is the struct `kind`."""
    return _table(("parameter", "type", "default", "meaning"), _rows(kind, _fields(kind)))


def _class(name: str) -> type[Any]:
    return FILTERS.get(name) or ACCEPTED[name]


def _rows(kind: type[Any], fields: Sequence[Field]) -> Iterable[tuple[str, ...]]:
    sentences = _sentences(kind)  # type: ignore[arg-type]  # a class is hashable
    prose = _prose(kind)
    for field in fields:
        name = f"`{field.encode_name}`"
        above = "See above." if name in prose else ""
        told = _spelt(sentences.get(field.name, ""), fields)
        meaning = told or PARAMETERS.get(field.encode_name) or above
        yield name, _type(field.type), _default(field), meaning


def _fields(kind: type[Any]) -> tuple[Field, ...]:
    described = type_info(kind)
    assert isinstance(described, StructType)
    return described.fields


def _prose(kind: type[Any]) -> str:
    """Return the docstring of a plug-in's class, with parameters spelt as in a configuration
    document.
    """
    text = re.sub(r"\A`[\w-]+`: ", "", inspect.cleandoc(kind.__doc__ or ""))
    return _unwrapped(_spelt(text[:1].upper() + text[1:], _fields(kind)))


def _unwrapped(text: str) -> str:
    """Return `text` with each paragraph, and each item of a list, joined to one line."""
    return re.sub(r"(?<=\S)\n(?! *[-*] |\n| {4}) *(?=\S)", " ", text)


def _spelt(text: str, fields: Sequence[Field]) -> str:
    for field in fields:
        text = text.replace(f"`{field.name}`", f"`{field.encode_name}`")
    return text


@cache
def _sentences(kind: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class, joined to one line, including fields of
    base classes.
    """
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith(("epp.", "sim.", "homing_rivals.")):
            found |= _own_sentences(one)
    return found


def _own_sentences(kind: type[Any]) -> dict[str, str]:
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    found[field.target.id] = " ".join(text.split())
    return found


def _default(field: Field) -> str:
    if field.required:
        return "required"
    value: Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value in (None, "", (), {}, []) or isinstance(value, msgspec.Struct):
        return "none"
    if isinstance(value, Duration):
        return f"`{duration_text(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    whole = isinstance(value, float) and value.is_integer()
    return f"`{int(value) if whole else value}`"


def _type(kind: Any) -> str:
    match kind:
        case BoolType():
            return "boolean"
        case IntType() | FloatType():
            return ("integer" if isinstance(kind, IntType) else "number") + _range(kind)
        case StrType():
            return "text"
        case EnumType(cls=cls):
            return ", ".join(f"`{member.value}`" for member in cls)
        case CustomType(cls=cls):
            return "duration" if cls is Duration else "metric"
        case DictType():
            return "mapping"
        case ListType(item_type=item) | VarTupleType(item_type=item):
            return f"list of {_type(item)}"
        case StructType(fields=fields):
            return "{" + ", ".join(f"`{field.encode_name}`" for field in fields) + "}"
        case UnionType(types=types):
            return " or ".join(_type(one) for one in types if not isinstance(one, NoneType))
        case _:
            return "any"


def _range(kind: IntType | FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f", {kind.ge:g} to {kind.le:g}"
    if kind.ge is not None:
        return f", at least {kind.ge:g}"
    return "" if kind.gt is None else f", above {kind.gt:g}"


def _refused() -> str:
    by_reason = ((f"`{name}`", reason) for name, reason in sorted(REFUSED.items()))
    multicluster = ("`multicluster-*`", "one picker serves one pool: remove it")
    return _table(("type", "reason, and replacement"), (*by_reason, multicluster))


def _refused_members() -> str:
    return _table(
        ("member", "reason"), ((f"`{name}`", reason) for name, reason in REFUSED_SECTIONS.items())
    )


def _ignored_members() -> str:
    return _table(
        ("member", "reason why it has no effect"),
        ((f"`{name}`", reason) for name, reason in IGNORED_SECTIONS.items()),
    )


def _feature_gates() -> str:
    return _table(
        ("gate", "reason why it has no effect"),
        ((f"`{name}`", reason) for name, reason in FEATURE_GATES.items()),
    )


# --- measured elsewhere ----------------------------------------------------------------------------


def _cluster_rows() -> str:
    """Return the table of the last test run in a cluster, from docs/cluster.json."""
    rows = json.loads((FOLDER / "cluster.json").read_text(encoding="utf-8"))
    head = ("gateway", "what was done", "requests", "lost", "streams", "cut", "p99, ms")
    return _table(
        head,
        (
            (
                *(row["gateway"], row["done"], f"{row['sent']:,}", str(row["lost"])),
                *((str(row["streams"]), str(row["cut"])) if row["streams"] else ("", "")),
                f"{row['p99_s'] * 1_000:,.0f}",
            )
            for row in rows
        ),
    )


# --- metrics and flags ----------------------------------------------------------------------------


def _metrics() -> str:
    rows = ((f"`{spec.name}`", spec.kind, _labels(spec), spec.help) for spec in METRICS)
    return _table(("metric", "kind", "labels", "meaning"), rows)


def _field_metrics() -> str:
    names: dict[str, list[str]] = {}
    for name in (*GIE, *LLM_D):
        renamed = ", ".join(f"{ours} as {theirs}" for ours, theirs in name.labels)
        names.setdefault(name.of, []).append(
            f"`{name.name}`" + (f" ({renamed})" if renamed else "")
        )
    rows = ((f"`{of}`", ", ".join(found)) for of, found in names.items())
    return _table(("Homing", "other endpoint pickers"), rows)


def _labels(spec: MetricSpec) -> str:
    return ", ".join(f"`{label}`" for label in spec.labels)


def _flags(kind: type[msgspec.Struct]) -> str:
    """Return the text of a command's `--help` without its first line, as a code block."""
    text = help_text("", kind).partition("\n")[2].strip("\n")
    return f"```text\n{text}\n```"


def _foreign_flags() -> str:
    ignored = ((f"`--{name}`", flag.sentence) for name, flag in FOREIGN.items())
    removed = (
        (f"`--{name}`", f"refused: {why.removeprefix('was removed: ')}")
        for name, why in REMOVED.items()
    )
    return _table(("flag", "instead"), (*ignored, *removed))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


if __name__ == "__main__":
    sys.exit(main())
