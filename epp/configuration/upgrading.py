"""Rewriting of configuration documents with renamed, moved or removed parts into the form that
llm-d-router loads today.

The text is edited in place, so that comments, order and layout stay. One change is made at a time.
The document is parsed again before the next one, because a change moves positions.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml
from msgspec import Struct

from epp.configuration.compatibility import (
    API_VERSION,
    API_VERSION_DEPRECATED,
    DEPRECATED,
    MOVED_TO_INDEX,
)
from epp.configuration.disaggregation import (
    PD_DECIDER,
    STAGE_HANDLER,
    STAGE_HANDLERS,
    STAGE_HEADERS,
    STAGE_PARAMETERS,
    nested_stages,
)
from epp.configuration.document import ConfigError, as_one_line, read_mapping

CHANGES_MAX: Final = 64
"""Number of changes from which on a document is rejected, because it is parsed again after each of
them.
"""
_PREFIX_INDEX: Final = "approx-prefix-cache-producer"
_PRECISE_INDEX: Final = "precise-prefix-cache-producer"
_PRECISE_SCORER: Final = "precise-prefix-cache-scorer"
_PREFIX_SCORER: Final = "prefix-cache-scorer"
_DETECTOR: Final = "utilization-detector"
_SELECTOR: Final = "label-selector-filter"
_CHARACTERS_PER_TOKEN: Final = 4
_BLOCK_TOKENS: Final = dict.fromkeys(("blockSize", "hashBlockSize"), "blockSizeTokens")

_RENAMED: Final[Mapping[str, str]] = {
    **DEPRECATED,
    "by-label-selector": _SELECTOR,
}
"""Current plugin type for each old type that has the same parameters."""
_RENAMED_PARAMETERS: Final[Mapping[tuple[str, str], str]] = {
    (_PREFIX_INDEX, "blockSize"): "blockSizeTokens",
    ("mm-embeddings-cache-producer", "cacheSizeInMB"): "cacheSizeInMBPerServer",
}
_REMOVED_PARAMETERS: Final[Mapping[tuple[str, str], str]] = {
    ("active-request-scorer", "requestTimeout"): "requests in flight are counted by their ends",
    (
        "predicted-latency-producer",
        "samplingMean",
    ): "predictions during a stream are no longer made",
    ("predicted-latency-producer", "maxDecodeTokenSamplesForPrediction"): (
        "predictions during a stream are no longer made"
    ),
}
"""Reason why llm-d-router ignores a parameter today, by plugin type and parameter name."""
_REMOVED_GATES: Final = ("dataLayer", "prepareDataPlugins")
"""Feature gates that llm-d-router no longer knows, because their features are always on."""
_ATTRIBUTE_MEMBERS: Final[Mapping[str, str]] = {
    "endpoint-attribute-filter": "attribute",
    "endpoint-attribute-scorer": "attributeKey",
}


class Change(Struct, frozen=True):
    """One rewritten part of a configuration document."""

    line: int
    """Line of the rewritten part in the original document, from 1."""
    what: str
    """Description of the change: one sentence without a final period."""


class Upgraded(Struct, frozen=True):
    """A configuration document in today's form, and the changes that led to it."""

    text: str
    changes: tuple[Change, ...]
    """Changes in the order of their lines in the original document."""


def upgrade(text: bytes | str, source: str) -> Upgraded:
    """Return the configuration document `text` in the form that llm-d-router loads today.

    Raises `ConfigError` if it is not a mapping in UTF-8, or has `CHANGES_MAX` or more parts to
    rewrite.
    """
    read_mapping(text, source)
    try:
        return _upgraded(_Document(text if isinstance(text, str) else text.decode()), source)
    except UnicodeDecodeError:
        # YAML may also be UTF-16.
        raise ConfigError([f"{source}: is not UTF-8; only UTF-8 can be rewritten"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{source}: cannot be rewritten: {error}"]) from error


def _upgraded(document: "_Document", source: str) -> Upgraded:
    for _ in range(CHANGES_MAX):
        if not any(rule(document) for rule in _RULES):
            changes = sorted(document.changes, key=lambda change: change.line)
            return Upgraded(document.text, tuple(changes))
        read_mapping(document.text, source)
        document.compose()
    raise ConfigError([f"{source}: has {CHANGES_MAX} or more parts to rewrite"])


# --- the text ---------------------------------------------------------------------------------------


class _Entry(Struct, frozen=True):
    """The YAML nodes of a key of a mapping and of its value."""

    key: Any
    value: Any


def _entries(node: Any) -> dict[str, _Entry]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: _Entry(key, value) for key, value in node.value if _is_text(key)}


def _items(node: Any) -> list[Any]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _is_text(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode)


def _text_of(entry: _Entry | None) -> str:
    return entry.value.value if entry is not None and _is_text(entry.value) else ""


def _end_of(node: Any) -> int:
    """Return the index in the text after the last character of `node`.

    For a block, the end that YAML reports is the beginning of the next node.
    """
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end_of(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


class _Document:
    """The text of a configuration document while it is rewritten, and the positions of its parts in
    the text.
    """

    def __init__(self, text: str) -> None:
        # Marks count characters, and must not count a byte order mark or carriage returns.
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        if not self.text.endswith("\n"):
            self.text += "\n"
        self._lines = list(range(1, self.text.count("\n") + 2))
        """Number of the line in the original document, for each line of the current text."""
        self.changes: list[Change] = []
        self.compose()

    def compose(self) -> None:
        """Parse the rewritten text again to find the positions of its parts.

        Raises `yaml.YAMLError`.
        """
        # The loader in Python is used, because marks of the one in C count bytes.
        self.root = yaml.compose(self.text, Loader=yaml.SafeLoader)

    @property
    def members(self) -> dict[str, _Entry]:
        return _entries(self.root)

    def plugins(self) -> Iterator[tuple[Any, str]]:
        """Yield the YAML node and the type of each plugin that the document declares."""
        found = self.members.get("plugins")
        for item in _items(found.value if found else None):
            yield item, _text_of(_entries(item).get("type"))

    @property
    def names(self) -> list[str]:
        """Return the name of each plugin that the document declares, or its type if it has no name."""
        return [_text_of(_entries(one).get("name")) or kind for one, kind in self.plugins()]

    def tell(self, node: Any, what: str) -> None:
        """Record the description `what` of a change of `node`.

        It must be called before the text changes.
        """
        line = self.text.count("\n", 0, node.start_mark.index)
        self.changes.append(Change(self._lines[line], as_one_line(what)))

    def replace(self, start: int, end: int, by: str) -> None:
        """Replace the characters of the text from index `start` to `end` by `by`.

        Several replacements of one change must be made from the end of the text on, because each
        moves the later positions.
        """
        first, last = self.text.count("\n", 0, start), self.text.count("\n", 0, end)
        self._lines[first : last + 1] = [self._lines[first]] * (by.count("\n") + 1)
        self.text = self.text[:start] + by + self.text[end:]

    def rewrite(self, node: Any, value: str) -> None:
        """Replace the value of the scalar `node` by `value`, in the same style of quotes."""
        start, end = node.start_mark.index, node.end_mark.index
        # A block of text includes its last line break.
        ending = "\n" if self.text[:end].endswith("\n") else ""
        self.replace(start, end, _spelt(value, node.style) + ending)

    def remove(self, parent: Any, name: str) -> None:
        """Remove the member `name` of the YAML mapping `parent`, which becomes `{}` if it was the
        only one.
        """
        entries = [(key, value) for key, value in parent.value]
        at = next(index for index, (key, _) in enumerate(entries) if key.value == name)
        key, value = entries[at]
        start, end = key.start_mark.index, _end_of(value)
        if len(entries) == 1:
            self.replace(parent.start_mark.index, _end_of(parent), "{}")
            return
        before = self.text.rfind("\n", 0, start) + 1
        if parent.flow_style or self.text[before:start].strip():
            # Remove up to the next member, or from the previous one on, if the member is within a
            # line.
            if at + 1 < len(entries):
                end = entries[at + 1][0].start_mark.index
            else:
                start = _end_of(entries[at - 1][1])
            self.replace(start, end, "")
            return
        self.replace(before, self._line_after(end), "")

    def remove_item(self, parent: Any, at: int) -> None:
        """Remove the item at index `at` of the YAML list `parent`, which must have other items."""
        item = parent.value[at]
        start, end = item.start_mark.index, _end_of(item)
        if parent.flow_style:
            if at + 1 < len(parent.value):
                end = parent.value[at + 1].start_mark.index
            else:
                start = _end_of(parent.value[at - 1])
            self.replace(start, end, "")
            return
        self.replace(self.text.rfind("\n", 0, start) + 1, self._line_after(end), "")

    def append(self, parent: Any, value: Any) -> None:
        """Append an item to the YAML list `parent`, or members to the YAML mapping `parent`."""
        end = _end_of(parent)
        if parent.flow_style:
            written = _on_one_line(value)
            written = written[1:-1] if isinstance(parent, yaml.MappingNode) else written
            inside = self.text.rfind("}" if isinstance(parent, yaml.MappingNode) else "]", 0, end)
            self.replace(inside, inside, f", {written}" if parent.value else written)
            return
        column = parent.start_mark.column
        items = value if isinstance(parent, yaml.MappingNode) else [value]
        written = yaml.safe_dump(
            items, sort_keys=False, default_flow_style=False, allow_unicode=True, width=math.inf
        )
        lines = written.splitlines()
        after = self._line_after(end)
        self.replace(after, after, "".join(f"{' ' * column}{line}\n" for line in lines))

    def _line_after(self, end: int) -> int:
        """Return the index of the start of the line after the node that ends at `end`.

        A block of text ends after its last line break, so `end` is that index already.
        """
        if self.text[:end].endswith("\n"):
            return end
        at = self.text.find("\n", end)
        return len(self.text) if at < 0 else at + 1


def _spelt(value: str, style: str | None) -> str:
    if style == "'":
        return "'" + value.replace("'", "''") + "'"
    return json.dumps(value) if style == '"' else value


def _on_one_line(value: Any) -> str:
    """Return `value` as JSON on one line. JSON is also YAML, and a JSON document stays JSON. If JSON
    does not allow a key of `value`, return YAML on one line.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except TypeError:  # a key that JSON does not allow
        return yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip()


def _plain(node: Any) -> Any:
    """Return the value of a YAML node as plain Python values."""
    constructor = yaml.constructor.SafeConstructor()
    return constructor.construct_document(node)


# --- the rules: each makes one change, or returns False -------------------------------------------


def _api_version(document: _Document) -> bool:
    entry = document.members.get("apiVersion")
    if entry is None or _text_of(entry) != API_VERSION_DEPRECATED:
        return False
    document.tell(entry.key, f"apiVersion {API_VERSION_DEPRECATED} is now {API_VERSION}")
    document.rewrite(entry.value, API_VERSION)
    return True


def _types(document: _Document) -> bool:
    for plugin, type_name in document.plugins():
        if type_name in _RENAMED:
            newer = _RENAMED[type_name]
            document.tell(plugin, f"type {type_name} is now {newer}")
            for node in reversed(_places(document, plugin, type_name, newer)):
                document.rewrite(node, newer)
            return True
    return False


def _places(document: _Document, plugin: Any, type_name: str, newer: str) -> list[Any]:
    """Return the scalar nodes that must change if the type of `plugin` changes: the type and, if it
    serves as the name, all references.

    The nodes are in the order of the document. If `newer` is the name of another plugin, this
    plugin gets the old type as its name.
    """
    type_node = _entries(plugin)["type"].value
    if "name" in _entries(plugin):
        return [type_node]
    if newer in document.names:
        document.append(plugin, {"name": type_name})
        return [type_node]
    named = [node for node in _references(document.root) if node.value == type_name]
    return sorted([type_node, *named], key=lambda node: int(node.start_mark.index))


def _references(node: Any) -> Iterator[Any]:
    """Yield the scalar nodes below `node` that refer to a plugin by its name."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _references(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if _is_text(value):
                if str(key.value).endswith(("luginRef", "ProducerName", "PluginName")):
                    yield value
            else:
                yield from _references(value)


def _labels(document: _Document) -> bool:
    """Replace a plugin of type `by-label` by a label selector, if that plugin requires one of given
    values of the label. Return False if there is no such plugin.
    """
    for plugin, type_name in document.plugins():
        entries = _entries(plugin)
        parameters = entries.get("parameters")
        if type_name != "by-label" or parameters is None:
            continue
        told = _plain(parameters.value)
        if not isinstance(told, dict) or told.get("allowsNoLabel") or not told.get("validValues"):
            continue
        document.tell(plugin, f"type {type_name} is now {_SELECTOR}, with matchExpressions")
        selector = {
            "matchExpressions": [
                {"key": told.get("label"), "operator": "In", "values": told["validValues"]}
            ]
        }
        edits = [
            (node.start_mark.index, node.end_mark.index, _SELECTOR)
            for node in _places(document, plugin, type_name, _SELECTOR)
        ]
        # The value follows the key directly; a block below it moves to the key's line.
        value_at = document.text.find(":", parameters.key.end_mark.index) + 1
        edits.append((value_at, _end_of(parameters.value), f" {_on_one_line(selector)}"))
        for start, end, by in sorted(edits, reverse=True):
            document.replace(start, end, by)
        return True
    return False


def _parameters(document: _Document) -> bool:
    for plugin, type_name in document.plugins():
        parameters = _entries(plugin).get("parameters")
        if parameters is None:
            continue
        entries = _entries(parameters.value)
        for name, entry in entries.items():
            newer = _RENAMED_PARAMETERS.get((type_name, name))
            why = _REMOVED_PARAMETERS.get((type_name, name))
            if newer in entries:
                newer, why = None, f"{newer} is present and takes precedence"
            if newer is not None:
                document.tell(entry.key, f"{name} of {type_name} is now {newer}")
                document.rewrite(entry.key, newer)
                return True
            if why is not None:
                document.tell(entry.key, f"{name} of {type_name} is removed, because {why}")
                _drop(document, plugin, name)
                return True
        if any(rule(document, type_name, plugin) for rule in _PARAMETER_RULES):
            return True
    return False


def _drop(document: _Document, plugin: Any, name: str) -> None:
    """Remove the parameter `name` of `plugin`, and the member `parameters` if that was the only
    one.
    """
    parameters = _parameters_of(plugin)
    if len(parameters.value) == 1:
        document.remove(plugin, "parameters")
    else:
        document.remove(parameters, name)


def _parameters_of(plugin: Any) -> Any:
    entry = _entries(plugin).get("parameters")
    return entry.value if entry else None


def _stage_handler(document: _Document) -> bool:
    """Write the deprecated parameters of a handler of stages as `profiles` and `deciders`, and its
    deprecated type as today's. Return False if there are none, or if `profiles` or `deciders` is
    present already.
    """
    for plugin, type_name in document.plugins():
        entries = _entries(plugin)
        parameters = entries.get("parameters")
        told = _plain(parameters.value) if parameters is not None else {}
        if type_name not in STAGE_HANDLERS or not isinstance(told, dict):
            continue
        flat = [name for name in STAGE_PARAMETERS if name in told]
        if type_name == STAGE_HANDLER and not flat:
            continue
        if "profiles" in told or "deciders" in told:
            continue
        what = f"{', '.join(flat)} of {STAGE_HANDLER} are now profiles and deciders"
        if type_name != STAGE_HANDLER:
            what = f"type {type_name} is now {STAGE_HANDLER}, with profiles and deciders"
            told.setdefault("deciderPluginName", PD_DECIDER)
        document.tell(plugin, what)
        nested = nested_stages(told)
        node = entries["type"].value
        if parameters is None:
            document.append(plugin, {"parameters": nested})
            document.rewrite(node, STAGE_HANDLER)
            return True
        value_at = document.text.find(":", parameters.key.end_mark.index) + 1
        edits = [(value_at, _end_of(parameters.value), f" {_on_one_line(nested)}")]
        if type_name != STAGE_HANDLER:
            edits.append(
                (node.start_mark.index, node.end_mark.index, _spelt(STAGE_HANDLER, node.style))
            )
        for start, end, by in sorted(edits, reverse=True):
            document.replace(start, end, by)
        return True
    return False


def _stage_headers(document: _Document) -> bool:
    """Remove a plugin that sets the headers that name the endpoints of stages, because these
    headers are always set. Return False if there is no such plugin, or if it is the only plugin.
    """
    found = document.members.get("plugins")
    items = _items(found.value if found else None)
    for at, (plugin, type_name) in enumerate(document.plugins()):
        if type_name in STAGE_HEADERS and found is not None and len(items) > 1:
            document.tell(plugin, f"{type_name} is removed, because these headers are always set")
            document.remove_item(found.value, at)
            return True
    return False


def _blocks_to_match(document: _Document, type_name: str, plugin: Any) -> bool:
    """Remove `maxPrefixBlocksToMatch` of a prefix index, which has no effect beside a limit in
    tokens unless that limit is 0.
    """
    entries = _entries(_parameters_of(plugin))
    old, newer = entries.get("maxPrefixBlocksToMatch"), entries.get("maxPrefixTokensToMatch")
    if type_name != _PREFIX_INDEX or old is None or (newer and _plain(newer.value) == 0):
        return False
    why = "is present" if newer else "is 131072 by default"
    document.tell(
        old.key,
        f"maxPrefixBlocksToMatch is removed, because maxPrefixTokensToMatch {why} and takes "
        "precedence",
    )
    _drop(document, plugin, "maxPrefixBlocksToMatch")
    return True


def _token_blocks(document: _Document, type_name: str, plugin: Any) -> bool:
    """Rename `blockSize` within the parameter `tokenProcessorConfig` to `blockSizeTokens`, or
    remove it if both are set.
    """
    processor = _entries(_parameters_of(plugin)).get("tokenProcessorConfig")
    inner = _entries(processor.value) if processor else {}
    old = inner.get("blockSize")
    if processor is None or old is None:
        return False
    if "blockSizeTokens" in inner:
        document.tell(
            old.key, "blockSize is removed, because blockSizeTokens is present and takes precedence"
        )
        document.remove(processor.value, "blockSize")
    else:
        document.tell(old.key, f"blockSize of {type_name} is now blockSizeTokens")
        document.rewrite(old.key, "blockSizeTokens")
    return True


def _attribute(document: _Document, type_name: str, plugin: Any) -> bool:
    """Split the name of an attribute and of its producer, which used to be one text, into two
    parameters.
    """
    parameters = _parameters_of(plugin)
    entries = _entries(parameters)
    entry = entries.get(_ATTRIBUTE_MEMBERS.get(type_name, ""))
    name, slash, producer = _text_of(entry).rpartition("/")
    if entry is None or not slash or "producer" in entries:
        return False
    document.tell(entry.key, f"{_text_of(entry)} is now {name} with producer {producer}")
    document.append(parameters, {"producer": producer})
    document.rewrite(entry.value, name)
    return True


def _session_header(document: _Document, type_name: str, plugin: Any) -> bool:
    entries = _entries(_parameters_of(plugin))
    entry = entries.get("headerName")
    if not type_name.startswith("session-affinity-") or entry is None:
        return False
    if "encodedEndpointHeaderConfig" in entries:
        return False
    document.tell(entry.key, f"headerName of {type_name} is now encodedEndpointHeaderConfig.header")
    header = _on_one_line({"header": _text_of(entry)})
    document.replace(
        entry.key.start_mark.index, _end_of(entry.value), f"encodedEndpointHeaderConfig: {header}"
    )
    return True


_PARAMETER_RULES: Final = (_blocks_to_match, _token_blocks, _attribute, _session_header)


def _index_parameters(document: _Document) -> bool:
    """Move the parameters of the prefix index from `prefix-cache-scorer` to a plugin of their own,
    or remove them if an `approx-prefix-cache-producer` is declared. Return False if there are none.
    """
    for plugin, type_name in document.plugins():
        told = _entries(_parameters_of(plugin)) if type_name == _PREFIX_SCORER else {}
        moved = {name: entry for name, entry in told.items() if name in MOVED_TO_INDEX}
        if not moved:
            continue
        declared = _PREFIX_INDEX in [kind for _, kind in document.plugins()]
        for name, entry in moved.items():
            if declared:
                what = f"is removed, because {_PREFIX_INDEX} is declared and takes precedence"
            else:
                what = f"is now {_BLOCK_TOKENS.get(name, name)} of {_PREFIX_INDEX}"
            document.tell(entry.key, f"{name} of {_PREFIX_SCORER} {what}")
        if not declared:
            values = {name: _plain(entry.value) for name, entry in moved.items()}
            made = {"type": _PREFIX_INDEX, "parameters": _of_index(values)}
            document.append(document.members["plugins"].value, made)
        for name in moved:
            # The edits have moved positions.
            document.compose()
            _drop(document, _scorer_with(document, name), name)
        return True
    return False


def _of_index(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the index parameters that a `prefix-cache-scorer` has, with the index's names and one
    block size in tokens.
    """
    found = {name: value for name, value in values.items() if name not in _BLOCK_TOKENS}
    characters = values.get("hashBlockSize")
    if isinstance(characters, int):
        found.setdefault("blockSizeTokens", max(1, characters // _CHARACTERS_PER_TOKEN))
    if "blockSize" in values:
        found.setdefault("blockSizeTokens", values["blockSize"])
    return found


def _scorer_with(document: _Document, name: str) -> Any:
    """Return the node of the first `prefix-cache-scorer` in the document that has a parameter
    `name`; there must be one.
    """
    return next(
        one
        for one, kind in document.plugins()
        if kind == _PREFIX_SCORER and name in _entries(_parameters_of(one))
    )


def _precise_scorer(document: _Document) -> bool:
    """Split a plugin of the deprecated type `precise-prefix-cache-scorer` into the prefix index and
    the scorer that reads it. Return False if there is no such plugin, or if such an index is
    declared.
    """
    kinds = [kind for _, kind in document.plugins()]
    for plugin, type_name in document.plugins():
        if type_name != _PRECISE_SCORER or _PRECISE_INDEX in kinds:
            continue
        entries = _entries(plugin)
        name = _text_of(entries.get("name")) or _PRECISE_SCORER
        document.tell(
            plugin,
            f"type {_PRECISE_SCORER} is now {_PRECISE_INDEX} with these parameters and "
            f"{_PREFIX_SCORER} with prefixMatchInfoProducerName",
        )
        scorer = {
            "type": _PREFIX_SCORER,
            "name": name,
            "parameters": {"prefixMatchInfoProducerName": _PRECISE_INDEX},
        }
        document.append(document.members["plugins"].value, scorer)
        nodes = [(entries["type"].value, _PRECISE_INDEX)]
        if "name" in entries:
            nodes.append((entries["name"].value, _PRECISE_INDEX))
        for node, by in sorted(nodes, key=lambda one: one[0].start_mark.index, reverse=True):
            document.rewrite(node, by)
        return True
    return False


def _detector(document: _Document) -> bool:
    """Move the section `saturationDetector` of the document into `flowControl`, or remove it if
    `flowControl` names a detector. Return False if the section is missing or cannot be moved.
    """
    old = document.members.get("saturationDetector")
    told = _plain(old.value) if old else None
    flow = document.members.get("flowControl")
    if old is None or not isinstance(told, dict):
        return False
    if flow is not None and not isinstance(flow.value, yaml.MappingNode):
        return False
    if flow is not None and "saturationDetector" in _entries(flow.value):
        document.tell(
            old.key,
            "saturationDetector is removed, because that of flowControl is present and takes "
            "precedence",
        )
        document.remove(document.root, "saturationDetector")
        return True
    reference = told.get("pluginRef")
    if (reference and len(told) > 1) or (not reference and not _has_room(document)):
        return False
    document.tell(old.key, "saturationDetector is now flowControl.saturationDetector")
    document.remove(document.root, "saturationDetector")
    if not reference:
        reference = _DETECTOR
        made = {"type": _DETECTOR, **({"parameters": told} if told else {})}
        document.compose()
        plugins = document.members.get("plugins")
        if plugins is None:
            document.append(document.root, {"plugins": [made]})
        else:
            document.append(plugins.value, made)
    document.compose()
    flow = document.members.get("flowControl")
    wanted = {"saturationDetector": {"pluginRef": reference}}
    if flow is None:
        document.append(document.root, {"flowControl": wanted})
    else:
        document.append(flow.value, wanted)
    return True


def _has_room(document: _Document) -> bool:
    """Return True if a saturation detector can be declared: there is none, and its name is free."""
    plugins = document.members.get("plugins")
    if plugins is not None and not isinstance(plugins.value, yaml.SequenceNode):
        return False
    taken = {*document.names, *(kind for _, kind in document.plugins())}
    return _DETECTOR not in taken


def _parser(document: _Document) -> bool:
    """Move the section `parser` of the document to `requestHandler.parsers`, or remove it if
    `requestHandler.parsers` has entries. Return False if the section is missing or cannot be moved.
    """
    old = document.members.get("parser")
    told = _plain(old.value) if old else None
    handler = document.members.get("requestHandler")
    if old is None or not isinstance(told, dict):
        return False
    if handler is None:
        document.tell(old.key, "parser is now requestHandler.parsers")
        document.remove(document.root, "parser")
        document.compose()
        document.append(document.root, {"requestHandler": {"parsers": [told]}})
        return True
    parsers = _entries(handler.value).get("parsers")
    if parsers is None or not _items(parsers.value):
        return False
    document.tell(
        old.key, "parser is removed, because requestHandler.parsers is present and takes precedence"
    )
    document.remove(document.root, "parser")
    return True


def _gates(document: _Document) -> bool:
    """Remove a feature gate that llm-d-router no longer knows. Return False if there is none."""
    gates = document.members.get("featureGates")
    items: Sequence[Any] = _items(gates.value) if gates else ()
    for at, item in enumerate(items):
        name = str(item.value).partition("=")[0] if _is_text(item) else ""
        if gates is None or name not in _REMOVED_GATES:
            continue
        document.tell(item, f"feature gate {name} is removed, because its feature is always on")
        if len(items) == 1:
            document.remove(document.root, "featureGates")
        else:
            document.remove_item(gates.value, at)
        return True
    return False


_RULES: Final[Sequence[Callable[[_Document], bool]]] = (
    _api_version,
    _labels,
    _stage_handler,
    _stage_headers,
    _types,
    _precise_scorer,
    _index_parameters,
    _parameters,
    _detector,
    _parser,
    _gates,
)
