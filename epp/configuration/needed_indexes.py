"""The affinity indexes of a configuration: those that it declares, and those that its
plugins need.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from epp.configuration.compatibility import InflightLoadProducer, refusal_of
from epp.configuration.declared_plugins import (
    BLOCK_TOKENS_MIN,
    PREFIX_INDEX,
    ConfiguredPlugin,
    DeclaredPlugins,
    Role,
    counts_blocks,
)
from epp.configuration.document import nearest, sentence_of
from epp.configuration.findings import raised
from epp.configuration.token_producer import Backend, TokenProducer
from epp.core.abilities import Origin
from epp.core.decision.plugin import may_read_prefix
from epp.core.decision.profile import SchedulingProfile
from epp.core.knowledge.index import AffinityIndexSettings
from epp.core.parameters import Plugin


class _NeededIndex(Struct, frozen=True):
    """The name, type and parameters of an affinity index that a filter or scorer needs."""

    name: str
    type_name: str
    parameters: dict[str, Any]


class NeededIndexes:
    """The reader of the affinity indexes of a configuration: those that it declares and those that
    its plugins need, by the name under which plugins look them up.
    """

    def __init__(self, declared: DeclaredPlugins) -> None:
        self.declared = declared
        self.findings = declared.findings
        self._parameters_set: dict[str, set[str]] = {}
        """Names of the parameters of each index that the document, or a plugin that needs the index,
        has set so far, by the name of the index.
        """

    def of(
        self, profiles: Sequence[SchedulingProfile], decider: ConfiguredPlugin | None = None
    ) -> tuple[dict[str, AffinityIndexSettings], str]:
        """Return the settings of the declared indexes and of those that `profiles` need, by lookup
        name, and the name of the default prefix index.

        The name is "" if there is no prefix index. Problems are recorded.

        `decider` is a plugin that needs a prefix index without being in a profile, or None.
        """
        indexes: dict[str, AffinityIndexSettings] = {}
        named: dict[str, str] = {}
        wanted: list[tuple[str, _NeededIndex]] = []
        for member in (
            member for profile in profiles for member in (*profile.members, *profile.responders)
        ):
            where = self.declared.where_of(member.name)
            needed = self._needed(where, member.plugin)
            if needed is not None:
                wanted.append((where, needed))
        asked = {needed.name for _, needed in wanted}
        for plugin in self.declared.plugins.values():
            if plugin.role is Role.INDEX:
                # A plugin that names an index by its type means the first index of that type.
                lookup = plugin.name
                by_type = not counts_blocks(plugin.plugin) and plugin.type_name not in named
                if by_type and plugin.name not in asked:
                    lookup = plugin.type_name
                named.setdefault(plugin.type_name, lookup)
                indexes[lookup] = plugin.plugin
                self._parameters_set[lookup] = set(plugin.given)
        for where, needed in wanted:
            self._need_index(where, needed, indexes, named)
        if not self.findings.problems and not any(is_prefix(index) for index in indexes.values()):
            reader = next(filter(None, map(_prefix_reader, profiles)), None)
            if reader is None and decider is not None:
                reader = decider.name
                self.findings.warn(
                    f"{decider.where}: {PREFIX_INDEX} is added, because it counts cached tokens"
                )
            if reader is not None:
                default = _NeededIndex("", PREFIX_INDEX, {})
                self._need_index(self.declared.where_of(reader), default, indexes, named)
        if self.declared.for_index and PREFIX_INDEX in {
            p.type_name for p in self.declared.plugins.values()
        }:
            self.findings.warn(
                f"{', '.join(self.declared.for_index)} of prefix-cache-scorer have no effect, because "
                f"{PREFIX_INDEX} is declared"
            )
        self._add_index_of_decisions(indexes, named)
        # The matches of other indexes are converted to this index's blocks, because it counts
        # tokens, not bytes.
        prefix = next((name for name, index in indexes.items() if is_told(index)), "")
        prefix = prefix or next((name for name, index in indexes.items() if is_prefix(index)), "")
        return indexes, prefix

    def _add_index_of_decisions(
        self, indexes: dict[str, AffinityIndexSettings], named: dict[str, str]
    ) -> None:
        """Add a prefix index of routing decisions for endpoints without KV-cache events, if another
        index receives such events and there is no index of decisions yet.

        Warn if no token ids are available for prompts that arrive as text. Do nothing if the
        document has problems.
        """
        told = next((name for name, index in indexes.items() if is_told(index)), None)
        if told is None or self.findings.problems:
            return
        if not any(_is_decided(index) for index in indexes.values()):
            needed = _NeededIndex("", PREFIX_INDEX, {})
            self._need_index(self.declared.where_of(told), needed, indexes, named)
        producers = [
            p.plugin for p in self.declared.plugins.values() if isinstance(p.plugin, TokenProducer)
        ]
        if all(producer.backend is Backend.ESTIMATE for producer in producers):
            self.findings.warn(
                f"{self.declared.where_of(told)}: only prompts that arrive as token ids are looked up, "
                "because there is no token-producer with `vllm` or `local` for the others"
            )

    def _needed(self, where: str, reader: Plugin) -> _NeededIndex | None:
        """Return the index that the plugin `reader` needs, or None if it needs none or its
        declaration is invalid; a problem is recorded then.
        """
        if not reader.abilities.reads_index:
            return None
        index: Any = reader
        try:
            if index.producer is None:
                return None
            given = index.producer_parameters if reader.abilities.configures_index else {}
            return msgspec.convert(
                {
                    "name": index.producer,
                    "type_name": index.producer_type,
                    "parameters": dict(given),
                },
                _NeededIndex,
            )
        except msgspec.ValidationError as error:
            self.findings.problem(sentence_of(f"{where}: producer", error, _NeededIndex))
        except BaseException as error:  # noqa: BLE001  the boundary of a plugin
            self.findings.problem(raised(where, "producer", error))
        return None

    def _need_index(
        self,
        where: str,
        needed: _NeededIndex,
        indexes: dict[str, AffinityIndexSettings],
        named: dict[str, str],
    ) -> None:
        wanted, type_name = needed.name, needed.type_name
        known = wanted if wanted in indexes else named.get(type_name) if not wanted else None
        if known is not None:
            self._adjust(where, known, needed.parameters, indexes)
            return
        if wanted and wanted != type_name:
            if why := refusal_of(wanted):
                self.findings.problem(f"{where}: producer {wanted} is not supported: {why}")
            else:
                hint = nearest(wanted, indexes)
                self.findings.problem(f"{where}: producer {wanted} names no declared plugin{hint}")
            return
        kind = self.declared.tables.indexes.get(type_name)
        if kind is None:
            self.findings.problem(
                f"{where}: it needs an index of type {type_name}, which does not exist"
            )
            return
        parameters = needed.parameters
        if type_name == PREFIX_INDEX:
            parameters.update(self.declared.for_index)
        settings = self.findings.convert(parameters, kind, f"{where}: parameters")
        if settings is not None and self.declared.has_blocks(where, settings):
            self.declared.warn_of_parameters(where, settings, parameters)
            indexes[type_name] = settings
            named[type_name] = type_name
            self._parameters_set[type_name] = set(parameters)

    def _adjust(
        self,
        where: str,
        lookup: str,
        parameters: Mapping[str, Any],
        indexes: dict[str, AffinityIndexSettings],
    ) -> None:
        """Set the parameters that a plugin wants for the existing index `lookup`.

        A parameter that the document or an earlier plugin sets differently stays, with a warning.
        """
        index: Any = indexes[lookup]
        told = self.findings.convert(
            dict(parameters), type(index), f"{where}: parameters of {lookup}"
        )
        if told is None or not parameters:
            return
        fields = dict(zip(index.__struct_encode_fields__, index.__struct_fields__, strict=True))
        wanted = msgspec.structs.asdict(told)
        settled = self._parameters_set.setdefault(lookup, set())
        for parameter, name in fields.items():
            if parameter not in parameters:
                continue
            if parameter not in settled:
                index = msgspec.structs.replace(index, **{name: wanted[name]})
            elif msgspec.structs.asdict(index)[name] != wanted[name]:
                self.findings.warn(
                    f"{where}: its {parameter} has no effect, because {lookup} already has "
                    "another value"
                )
        settled |= parameters.keys()
        indexes[lookup] = index

    def check_uncached_by(self, indexes: Mapping[str, AffinityIndexSettings], prefix: str) -> None:
        for plugin in self.declared.plugins.values():
            if isinstance(plugin.plugin, InflightLoadProducer):
                name = plugin.plugin.prefix_match_info_producer_name
                if name and name not in indexes and name != PREFIX_INDEX:
                    self.findings.problem(
                        f"{plugin.where}: prefixMatchInfoProducerName {name} names no declared "
                        f"plugin{nearest(name, indexes)}"
                    )
                elif name in indexes and name != prefix:
                    self.findings.warn(
                        f"{plugin.where}: prefixMatchInfoProducerName {name} has no effect, "
                        f"because uncached tokens are estimated by {prefix or 'no index'}"
                    )


def _prefix_reader(profile: SchedulingProfile) -> str | None:
    """Return the name of the first plugin of `profile` that may read the default prefix index, or
    None if no plugin does.
    """
    readers = (
        *((member.name, member.plugin.abilities) for member in profile.members),
        (profile.picker_name, profile.picker.abilities),
    )
    return next((name for name, abilities in readers if may_read_prefix(abilities)), None)


def is_prefix(index: AffinityIndexSettings) -> bool:
    """Return True if the index with these settings counts the blocks of a prompt that each endpoint
    has cached, reported or estimated, for `matched_blocks`.
    """
    return index.abilities.origin is not None


def is_told(index: AffinityIndexSettings) -> bool:
    """Return True if the index with these settings receives KV-cache events from engines."""
    return index.abilities.hears_engines


def _is_decided(index: AffinityIndexSettings) -> bool:
    return index.abilities.origin is Origin.DECIDED


def joined_names(indexes: Mapping[str, AffinityIndexSettings], prefix: str) -> tuple[str, ...]:
    """Return the names of the prefix indexes whose matches are combined: `prefix`, and the first
    index of each other origin with the same block length.

    If `prefix` receives KV-cache events, other block lengths are accepted too, because it counts
    tokens and the matches of the others are converted.
    """
    named: dict[Origin | None, str] = {}
    tokens = block_tokens_of(indexes, prefix)
    for name in (prefix, *indexes):
        if (
            name in indexes
            and is_prefix(indexes[name])
            and (block_tokens_of(indexes, name) == tokens or is_told(indexes[prefix]))
        ):
            named.setdefault(indexes[name].abilities.origin, name)
    return tuple(named.values())


def block_tokens_of(indexes: Mapping[str, AffinityIndexSettings], prefix: str) -> int:
    """Return the number of tokens in a block of the index `prefix`, or `BLOCK_TOKENS_MIN` if there
    is no such index.
    """
    index: Any = indexes.get(prefix)
    return index.block_tokens if index else BLOCK_TOKENS_MIN
