"""The search space of `sim tune`: the weights, parameters and types of plug-ins that vary.

By default, for every filter and scorer of the profile:

- The weight of each scorer varies from 0.1 to 10 on a logarithmic scale, or is off. The weight of a
  single scorer has no effect and is fixed.
- Each number whose type has bounds varies: between them if there are two, else from a tenth of the
  present value to ten times it, within the bound, on a logarithmic scale. A number whose value is None is fixed. So is
  a number with only one bound whose value is 0, negative or infinite.

Rules for refusing requests, measured speeds of engines and memory limits of indexes are not a
matter of tuning. They vary only if the file of `--space` names them.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec import Struct, inspect

from epp.configuration.build import plugin_tables
from epp.configuration.compatibility import ACCEPTED
from epp.configuration.config import PickerConfig
from epp.configuration.describing import plain_parameters
from epp.configuration.document import nearest, read_mapping
from epp.core.expectation import misfit
from epp.plugins.agreement import Agreement
from sim.cluster.policies import PolicySource
from sim.sentences import unread

WEIGHT_MIN: Final = 0.1
WEIGHT_MAX: Final = 10.0
DRAWN_WEIGHT_MIN: Final = 0.05
"""Lower end of the default range of proposed weights. A proposal below `WEIGHT_MIN`, about one in
eight at random, means that the scorer is off.
"""
SPAN_FACTOR: Final = 10.0
"""A parameter whose type has only one bound varies from its present value divided by this factor to
its present value times this factor, as far as the bound allows; integers vary from 1 on.
"""
FILE_BYTES_MAX: Final = 1_000_000
DIMENSIONS_MAX: Final = 100
OFF: Final = "none"
"""Type that `--space` may list to try the configuration without a plug-in."""

_MEASURED: Final = frozenset({"peakPrefillThroughput", "lruSize"})
"""Names of parameters that do not vary by default: measured engine speeds, and memory limits."""
_WITH_SEVERAL_PICKERS: Final = frozenset({"agreementBelow", "agreementKeyTokens"})
"""Names of parameters that have no effect with a single picker, unless the plug-in's `agreement` is
set to rendezvous.
"""

Value = float | int | str
Values = Mapping[str, Value]
"""Value of each dimension, by name of the dimension; for a choice, the label of the chosen
value.
"""


class SpaceError(ValueError):
    """A configuration has nothing or too much to vary, or the file of `--space` is invalid; the
    message is one sentence.
    """


class DimensionKind(StrEnum):
    """The kind of a dimension: whether a plug-in's weight, parameter or type varies."""

    WEIGHT = "weight"
    PARAMETER = "parameter"
    PLUGIN = "plugin"


class Range(Struct, frozen=True, kw_only=True):
    """The range of numbers from `low` to `high` within which a dimension of the search space
    varies.
    """

    low: float
    high: float
    logarithmic: bool = False
    integer: bool = False
    off_below: float = 0.0
    """Proposed numbers below this limit are written as 0, which switches a scorer off."""

    def __str__(self) -> str:
        low = max(self.low, self.off_below)
        return f"{low:g} to {self.high:g}{' or off' if self.off_below else ''}"

    def rounded(self, drawn: float) -> float | int:
        """Return the number that is written to the configuration for the proposed number `drawn`.

        A number below `off_below` becomes 0. Otherwise the result is the nearest whole number if
        `integer`, which may lie up to one half outside the range. Else it has two significant digits
        if `off_below` is set, and three if not; a result outside the range becomes the end of the
        range.
        """
        if drawn < self.off_below:
            return 0
        if self.integer:
            return round(drawn)
        short = float(f"{drawn:.{2 if self.off_below else 3}g}")
        inside = min(max(short, self.low), self.high)
        return int(inside) if inside.is_integer() else inside


class Choice(Struct, frozen=True, kw_only=True):
    """A choice of values for a dimension of the search space, each with a label."""

    values: Mapping[str, Any]
    """Values of the choice by label; the chosen value is written to the configuration."""

    def __str__(self) -> str:
        return ", ".join(self.values)


class Dimension(Struct, frozen=True, kw_only=True):
    """A dimension of the search space: one weight, parameter or type of a plug-in that varies."""

    plugin: str
    """Name of the plug-in in the configuration document."""
    what: DimensionKind
    span: Range | Choice
    parameter: str = ""
    present: Value | None = None
    """Value of the dimension in the present configuration, or None if it is unknown or outside the
    range or the choices. The lower end of the range stands for a weight of 0.
    """

    @property
    def name(self) -> str:
        """Name of the dimension, unique in the search space, such as "weight of queue-scorer"."""
        if self.what is DimensionKind.PARAMETER:
            return f"{self.parameter} of {self.plugin}"
        return (
            f"weight of {self.plugin}"
            if self.what is DimensionKind.WEIGHT
            else f"type of {self.plugin}"
        )

    def written(self, value: Value) -> Any:
        """Return the proposed `value` in the form in which the configuration document has it."""
        if isinstance(self.span, Choice):
            return self.span.values[str(value)]
        assert not isinstance(value, str)
        return value if value == self.present else self.span.rounded(value)


class Space:
    """The search space of a tuning: a configuration with the dimensions in which it may vary."""

    def __init__(self, policy: PolicySource, *, pickers: int = 1, file: Path | None = None) -> None:
        """Determine the dimensions of `policy` by default and from `file`, the argument of
        `--space`. Raises `SpaceError` for a baseline, an invalid `file`, or if there are no
        dimensions or more than `DIMENSIONS_MAX`.
        """
        if not policy.text:
            raise SpaceError(
                f"{policy.name} has no configuration: expected an EndpointPickerConfig in --config"
            )
        self.policy = policy
        config = policy.load()
        self._document = _spelt_out(policy, config)
        rows = _File() if file is None else _read(file)
        found: dict[str, Dimension] = {}
        if rows.defaults:
            found = {one.name: one for one in _usual(config, pickers)}
        if file is not None:
            for one in _RowConverter(str(file), self._document, config).dimensions(rows):
                found[one.name] = one
        if not found:
            raise SpaceError(
                f"{policy.source} has nothing to vary: name weights, parameters or plugins in the "
                "file of --space"
            )
        if len(found) > DIMENSIONS_MAX:
            raise SpaceError(
                f"{policy.source} has {len(found)} things to vary, expected at most "
                f"{DIMENSIONS_MAX}: name fewer in --space, with defaults = false"
            )
        self.dimensions = tuple(found.values())

    def source(self, values: Values, name: str) -> PolicySource:
        """Return the configuration with `values` for its dimensions, under the given name. Loading
        this configuration may still fail.
        """
        document = deepcopy(self._document)
        (profile,) = document["schedulingProfiles"]
        names = _place_plugins(document, profile, self.dimensions, values)
        for one in self.dimensions:
            placed = names.get(one.plugin, one.plugin)
            if one.what is DimensionKind.PLUGIN or not placed or values[one.name] == one.present:
                continue  # an unchanged value keeps all its digits
            value = one.written(values[one.name])
            if one.what is DimensionKind.WEIGHT:
                # The weight belongs to the position in the profile, whichever plug-in is there.
                _named(profile["plugins"], "pluginRef", placed)["weight"] = value
            elif placed == one.plugin:
                entry = _declared(document, one.plugin)
                entry["parameters"] = {**(entry.get("parameters") or {}), one.parameter: value}
        return PolicySource(name=name, text=written(document), source=name)


def written(document: Mapping[str, Any]) -> str:
    """Return a configuration document as YAML text."""
    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=100)
    return text


# --- applying values ------------------------------------------------------------------------------


def _spelt_out(policy: PolicySource, config: PickerConfig) -> dict[str, Any]:
    """Return the configuration as a document with an explicit scheduling profile that names all
    plug-ins, including the picker.
    """
    document = read_mapping(policy.text, policy.source)
    profile = config.profile
    document["plugins"] = list(document.get("plugins") or [])
    if not document.get("schedulingProfiles"):
        members: list[dict[str, Any]] = [{"pluginRef": named.name} for named in profile.filters]
        members += [{"pluginRef": one.name, "weight": one.weight} for one in profile.scorers]
        document["schedulingProfiles"] = [{"name": profile.name, "plugins": members}]
    (only,) = document["schedulingProfiles"]
    if not any(_name_of(entry) == profile.picker_name for entry in document["plugins"]):
        document["plugins"].append({"type": profile.picker_name})
    only["plugins"] = list(only.get("plugins") or [])
    if not any(entry["pluginRef"] == profile.picker_name for entry in only["plugins"]):
        only["plugins"].append({"pluginRef": profile.picker_name})
    return document


def _place_plugins(
    document: dict[str, Any],
    profile: dict[str, Any],
    dimensions: Sequence[Dimension],
    values: Values,
) -> dict[str, str]:
    """Insert the chosen plug-in types into the document. Return the new name of each changed
    plug-in by its old name; the new name is "" if the plug-in was removed.
    """
    names: dict[str, str] = {}
    for one in dimensions:
        if one.what is not DimensionKind.PLUGIN or values[one.name] == one.present:
            continue
        chosen = str(values[one.name])
        place = document["plugins"].index(_declared(document, one.plugin))
        if chosen == OFF:
            names[one.plugin] = ""
            del document["plugins"][place]
            continue
        names[one.plugin] = chosen
        document["plugins"][place] = {"type": chosen}
    if names:
        for entry in profile["plugins"]:
            entry["pluginRef"] = names.get(entry["pluginRef"], entry["pluginRef"])
        profile["plugins"] = [entry for entry in profile["plugins"] if entry["pluginRef"]]
    return names


def _name_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name") or entry["type"])


def _declared(document: Mapping[str, Any], plugin: str) -> dict[str, Any]:
    return next(entry for entry in document["plugins"] if _name_of(entry) == plugin)


def _named(entries: Sequence[dict[str, Any]], key: str, name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry[key] == name)


# --- what is varied by default --------------------------------------------------------------------


def _usual(config: PickerConfig, pickers: int) -> Iterator[Dimension]:
    profile = config.profile
    if len(profile.scorers) > 1:
        for scorer in profile.scorers:
            yield _weight(scorer.name, scorer.weight, WEIGHT_MIN, WEIGHT_MAX, off=True)
    for member in profile.members:
        present = plain_parameters(member.plugin)
        agreeing = getattr(member.plugin, "agreement", None) is Agreement.RENDEZVOUS
        for name, kind in _numbers(type(member.plugin)):
            alone = name in _WITH_SEVERAL_PICKERS and pickers == 1 and not agreeing
            if alone or name in _MEASURED:
                continue
            span = _span(kind, present[name])
            if span is not None:
                yield Dimension(
                    plugin=member.name, what=DimensionKind.PARAMETER, parameter=name, span=span,
                    present=present[name],
                )  # fmt: skip


def _weight(plugin: str, present: float, low: float, high: float, *, off: bool) -> Dimension:
    span = Range(
        low=low * DRAWN_WEIGHT_MIN / WEIGHT_MIN if off else low,
        high=high,
        logarithmic=True,
        off_below=low if off else 0.0,
    )
    within = low <= present <= high or (off and not present)
    return Dimension(
        plugin=plugin, what=DimensionKind.WEIGHT, span=span,
        present=(present or span.low) if within else None,
    )  # fmt: skip


def _numbers(kind: type[Any]) -> Iterator[tuple[str, inspect.IntType | inspect.FloatType]]:
    """Yield (name in the document, type) of each parameter of the plug-in class `kind` that is or
    may be a number.
    """
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    for field in described.fields:
        kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for one in kinds:
            if isinstance(one, inspect.IntType | inspect.FloatType):
                yield field.encode_name, one


def _span(kind: inspect.IntType | inspect.FloatType, present: float | None) -> Range | None:
    """Return the default range of a parameter with the type `kind` and the value `present`. None if
    the type has no bounds, if `present` is None, or if the type has one bound and `present` is 0,
    negative or infinite.
    """
    low = kind.gt if kind.ge is None else kind.ge
    high = kind.lt if kind.le is None else kind.le
    integer = isinstance(kind, inspect.IntType)
    if (low is None and high is None) or present is None:
        return None
    if low is not None and high is not None:
        edge = (high - low) / 1000
        return Range(
            low=low if kind.gt is None else low + edge,
            high=high if kind.lt is None else high - edge,
            integer=integer,
        )
    if not 0 < present < math.inf:
        return None
    return Range(
        low=max(present / SPAN_FACTOR, low or 0.0, 1.0 if integer else 0.0),
        high=present * SPAN_FACTOR if high is None else min(present * SPAN_FACTOR, high),
        logarithmic=True,
        integer=integer,
    )


# --- what a file asks for -------------------------------------------------------------------------


class _WeightRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plugin: str
    low: float = WEIGHT_MIN
    high: float = WEIGHT_MAX
    off: bool = True


class _ParameterRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plugin: str
    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    values: list[str | int | float | bool] | None = None


class _PluginRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plugin: str
    types: list[str]


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    defaults: bool = True
    weights: list[_WeightRow] = []
    parameters: list[_ParameterRow] = []
    plugins: list[_PluginRow] = []


def _read(file: Path) -> _File:
    try:
        with file.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise SpaceError(f"{file}: expected {FILE_BYTES_MAX:,} bytes at most, got more")
        return msgspec.convert(tomllib.loads(content.decode()), _File)
    except msgspec.ValidationError as problem:
        raise SpaceError(misfit(str(file), problem, _File)) from problem
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise SpaceError(unread(file, problem, "TOML")) from problem


class _RowConverter:
    """Converter from the rows of a `--space` file to dimensions. Raises `SpaceError` if a row does
    not fit the configuration.
    """

    def __init__(self, file: str, document: Mapping[str, Any], config: PickerConfig) -> None:
        self.file = file
        self.declared = {_name_of(entry): entry for entry in document["plugins"]}
        self.config = config
        tables = plugin_tables()
        self.kinds: dict[str, type[Any]] = {
            **ACCEPTED, **tables.filters, **tables.scorers, **tables.pickers, **tables.indexes
        }  # fmt: skip

    def dimensions(self, rows: _File) -> Iterator[Dimension]:
        for at, weight in enumerate(rows.weights):
            yield self._weight(f"weights[{at}]", weight)
        for at, parameter in enumerate(rows.parameters):
            yield self._parameter(f"parameters[{at}]", parameter)
        for at, plugin in enumerate(rows.plugins):
            yield self._plugin(f"plugins[{at}]", plugin)

    def _wrong(self, place: str, sentence: str) -> SpaceError:
        return SpaceError(f"{self.file}: {place}: {sentence}")

    def _kind(self, place: str, plugin: str) -> type[Any]:
        if plugin not in self.declared:
            hint = nearest(plugin, self.declared)
            raise self._wrong(place, f"the configuration declares no plugin {plugin}{hint}")
        return self.kinds[str(self.declared[plugin]["type"])]

    def _weight(self, place: str, row: _WeightRow) -> Dimension:
        weights = {one.name: one.weight for one in self.config.profile.scorers}
        if row.plugin not in weights:
            hint = nearest(row.plugin, weights)
            raise self._wrong(place, f"{row.plugin} is not a scorer of the profile{hint}")
        if not 0 < row.low < row.high < math.inf:
            raise self._wrong(
                place,
                f"expected 0 < low < high, both finite, got low {row.low:g} and high {row.high:g}",
            )
        return _weight(row.plugin, weights[row.plugin], row.low, row.high, off=row.off)

    def _parameter(self, place: str, row: _ParameterRow) -> Dimension:
        kind = self._kind(place, row.plugin)
        names = kind.__struct_encode_fields__
        if row.name not in names:
            hint = nearest(row.name, names)
            raise self._wrong(place, f"{row.plugin} has no parameter {row.name}{hint}")
        given = (self.declared[row.plugin].get("parameters") or {}).get(row.name)
        present = self._present(kind, row) if given is None else given
        if row.values is not None:
            if row.low is not None or row.high is not None or len(row.values) < 2:
                raise self._wrong(place, "expected either low and high, or values, two or more")
            values = {str(value): value for value in row.values}
            known = next((label for label, value in values.items() if value == present), None)
            return Dimension(
                plugin=row.plugin, what=DimensionKind.PARAMETER, parameter=row.name,
                span=Choice(values=values), present=known,
            )  # fmt: skip
        low, high = row.low, row.high
        if low is None or high is None or not (-math.inf < low < high < math.inf):
            raise self._wrong(
                place, "expected values, or low and high, both finite, with low below high"
            )
        if row.log and low <= 0:
            raise self._wrong(place, f"expected low above 0 on a logarithmic scale, got {low:g}")
        numbers = dict(_numbers(kind))
        if row.name not in numbers:
            raise self._wrong(place, f"{row.name} is not a number: give values")
        integer = isinstance(numbers[row.name], inspect.IntType)
        within = isinstance(present, int | float) and low <= present <= high
        return Dimension(
            plugin=row.plugin, what=DimensionKind.PARAMETER, parameter=row.name,
            span=Range(low=low, high=high, logarithmic=row.log, integer=integer),
            present=present if within else None,
        )  # fmt: skip

    def _present(self, kind: type[Any], row: _ParameterRow) -> Any:
        """Return the default of a parameter that the configuration does not set, or None if it has
        none or it cannot be determined.
        """
        try:
            return plain_parameters(msgspec.convert({}, kind)).get(row.name)
        except msgspec.ValidationError:
            # Another parameter is required, so this one's default cannot be determined.
            return None

    def _plugin(self, place: str, row: _PluginRow) -> Dimension:
        self._kind(place, row.plugin)
        present = str(self.declared[row.plugin]["type"])
        for type_name in row.types:
            if type_name != OFF and type_name not in self.kinds:
                hint = nearest(type_name, (*self.kinds, OFF))
                raise self._wrong(place, f"type {type_name} is unknown{hint}")
        others = [type_name for type_name in dict.fromkeys(row.types) if type_name != present]
        if not others:
            raise self._wrong(place, f"expected types other than {present}, the present one")
        values = {type_name: type_name for type_name in (present, *others)}
        return Dimension(
            plugin=row.plugin,
            what=DimensionKind.PLUGIN,
            span=Choice(values=values),
            present=present,
        )
