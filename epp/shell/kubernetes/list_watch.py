"""List and watch one collection of the API server: a state machine without I/O, clock and
randomness.

A list returns every object and a resource version. A watch from that version returns later changes.
After any failure one question decides: is the resource version still valid? It is valid if the
connection broke, if the server closed it, restarted or fell silent, and after the statuses 401,
403, 429 and 5xx. The watch then continues from the last version, and nothing is lost. It is invalid
after other failures, such as a 410, an ERROR event or an unreadable line. A new list then replaces
all objects at once, and the old objects stay in force until it is complete. As a safeguard, the
list is repeated periodically. Differences from the watch that it finds are counted; there should be
none.

A list is requested as a stream of events, for which the server needs no copy of the list. It is
requested page by page from servers without this feature (Kubernetes before 1.32, unless its gate
`WatchList` is enabled), and after any failure since the last list, except a refusal (403 or 404).
Every server supports pages.

A list may come from one of several sources that are tried in order: the same kind in a newer and an
older API group. If a source is absent or forbidden, the next one is used.

`next` returns what to do. The caller reports the result to `page`, `initial`, `opened`, `line`,
`closed`, `unstreamed` or `failed`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from epp.core.types import Seconds
from epp.shell.kubernetes.api_errors import ApiError, ApiFailure, failure_of_status

T = TypeVar("T")

TOMBSTONES_MAX: Final = 4_096
"""Maximum number of remembered UIDs of deleted objects. They ensure that no late event of a watch
restores a deleted object.
"""


class Timing(Struct, frozen=True, kw_only=True):
    """Delays and durations of lists and watches in seconds, and the size of pages.

    A pair contains the bounds of a uniform random time, which spreads the requests of replicas;
    only those of `backoff_s` are limits of such bounds.
    """

    page_objects: int = 100
    """Maximum number of objects per page of a list.

    A page of pods has about 1 MB, and decoding it blocks the event loop for 5 ms.
    """
    list_interval_s_min: Seconds = 1.0
    streamed_list_s_max: Seconds = 30.0
    """Time limit in seconds of a streamed list, which an older server may never complete; 0
    disables streaming.
    """
    watch_s: tuple[Seconds, Seconds] = (240.0, 300.0)
    silence_s_max: Seconds = 90.0
    """Maximum time in seconds without data in a watch, after which it counts as broken.

    It exceeds the interval of the server's bookmarks, about a minute, some of which may be omitted.
    """
    reconnect_s: tuple[Seconds, Seconds] = (0.1, 1.0)
    relist_s: tuple[Seconds, Seconds] = (300.0, 600.0)
    backoff_s: tuple[Seconds, Seconds] = (0.5, 30.0)
    """Minimum and maximum of the back-off after a failure in seconds. It is random, up to twice the
    minimum after the first failure; this limit doubles with each further one.
    """
    healthy_s: Seconds = 60.0
    """Time in seconds without failed lists and watches after which the delay for repeated failures
    is reset.
    """
    refused_s: Seconds = 30.0
    """Maximum delay in seconds until a kind of object that is absent or forbidden is tried again,
    at least half as long; the first delays are shorter if the kind was available before.
    """
    retry_after_s_max: Seconds = 60.0


class Pause(Struct, frozen=True):
    """A step of a list or watch: wait before the next request."""

    seconds: Seconds


class ListPage(Struct, frozen=True):
    """A step of a list: request the next page of at most `objects_max` objects."""

    source: int
    continue_token: str
    objects_max: int


class StreamedList(Struct, frozen=True):
    """A step of a list: request all objects as events, until a bookmark ends them or `timeout_s`
    seconds have passed.
    """

    source: int
    timeout_s: Seconds


class Watch(Struct, frozen=True):
    """A step of a watch: request the changes since `resource_version`, with bookmarks, for at most
    `timeout_s` seconds.
    """

    source: int
    resource_version: str
    timeout_s: Seconds
    silence_s_max: Seconds


Step: TypeAlias = Pause | ListPage | StreamedList | Watch


class Statistics:
    """Totals of the lists and watches of one kind of object. They outlive a `ListWatch`, so that
    they never decrease.
    """

    __slots__ = ("errors", "lists", "repairs", "watches")

    def __init__(self) -> None:
        self.lists = 0
        """Number of lists of this kind of object that were started."""
        self.watches = 0
        self.repairs = 0
        """Number of objects for which a periodic list differed from what the watch had reported,
        without those that the list has in a version newer than the watch.
        """
        self.errors: Counter[ApiFailure] = Counter()


class _Metadata(Struct, frozen=True):
    name: str = ""
    uid: str = ""
    resource_version: str = field(default="", name="resourceVersion")


class _Identified(Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class _ListMetadata(Struct, frozen=True):
    resource_version: str = field(default="", name="resourceVersion")
    continue_token: str | None = field(default="", name="continue")


class _Page(Struct, frozen=True):
    metadata: _ListMetadata
    items: list[Raw] | None = None


class _Event(Struct, frozen=True):
    type: str
    object: Raw


class _BookmarkMetadata(Struct, frozen=True):
    annotations: dict[str, str] | None = None


class _Bookmark(Struct, frozen=True):
    metadata: _BookmarkMetadata = _BookmarkMetadata()


class _Status(Struct, frozen=True):
    code: int | None = 0
    message: str | None = ""


class _Held(Struct, Generic[T], frozen=True):
    """One object of the collection. `value` is None if the object is irrelevant or unreadable."""

    uid: str
    resource_version: str
    value: T | None


_decode_identified = msgspec.json.Decoder(_Identified).decode
_decode_page = msgspec.json.Decoder(_Page).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_bookmark = msgspec.json.Decoder(_Bookmark).decode
_decode_status = msgspec.json.Decoder(_Status).decode


class ListWatch(Generic[T]):
    """The list and watch of one collection of objects, each of which `read` converts to a `T`.

    `read` returns None for an irrelevant object and raises `ValueError` for an invalid one
    (`msgspec.ValidationError` is a subclass). `unreadable` then contains the reason.
    """

    def __init__(
        self,
        read: Callable[[bytes], T | None],
        random: Random,
        timing: Timing,
        *,
        sources: int = 1,
        statistics: Statistics | None = None,
        listed_at_s: Seconds | None = None,
    ) -> None:
        """Create the state machine. `listed_at_s` is the time of a predecessor's last list, which
        counts for the rate limit of lists, or None.
        """
        self._read = read
        self._random = random
        self._timing = timing
        self._sources = sources
        self._streamed = self._stream_next = timing.streamed_list_s_max > 0
        self.statistics: Final = statistics or Statistics()
        self._held: dict[str, _Held[T]] = {}
        self._pending: dict[str, _Held[T]] = {}
        self._tombstones: dict[str, None] = {}
        self._resource_version = ""
        self._continue_token = ""
        self._source = 0
        self._left_at = ""
        """Resource version of the watch that a periodic list interrupted, or "" if a list was
        started for another reason.
        """
        self._not_before_s: Seconds = 0.0
        self._relist_at_s: Seconds = 0.0
        self.listed_at_s = listed_at_s
        self._failures = 0
        self._refusals = 0
        self._tried_at_once: set[ApiFailure] = set()
        self._healthy_since_s: Seconds | None = None
        self._broken = True
        self.heard_at_s: Seconds | None = None
        """Time at which the API server last sent a page, event or bookmark or started a watch, or
        None if it never did.
        """
        self.synced = False
        """True once the first list is complete. Failures of later lists and watches never remove
        objects.
        """
        self.absent = False
        """True if none of the sources has this kind of object, because its CRD or the permission is
        missing.
        """
        self.unreadable: dict[str, str] = {}
        """Reason why `read` rejected an object, by the object's name; only for objects that still
        exist.
        """

    def __repr__(self) -> str:
        state = "synced" if self.synced else "not synced"
        return f"<ListWatch [{len(self._held)} objects, {state}, {self._failures} failures]>"

    @property
    def objects(self) -> dict[str, T]:
        """Current objects of the listed and watched kind by name, in order of names."""
        held = sorted(self._held.items())
        return {name: entry.value for name, entry in held if entry.value is not None}

    @property
    def in_touch(self) -> bool:
        """True if the first list is complete and the last step succeeded, so that changes are
        received.
        """
        return self.synced and not self._broken

    # The methods below determine the next step.

    def next(self, now: Seconds) -> Step:
        """Return the next step of the list or watch at `now`: a request or a pause. Each list and
        each watch that it starts is counted.
        """
        if now < self._not_before_s:
            return Pause(self._not_before_s - now)
        if self._resource_version and now >= self._relist_at_s:
            self._left_at = self._resource_version
            self._resource_version = ""
            self._source = 0
        return self._list(now) if not self._resource_version else self._watch(now)

    def _list(self, now: Seconds) -> Step:
        if not self._continue_token:
            if self.listed_at_s is not None:
                wait_s = self.listed_at_s + self._timing.list_interval_s_min - now
                if wait_s > 0:
                    return Pause(wait_s)
            self.listed_at_s = now
            self.statistics.lists += 1
            self._pending = {}
            if self._stream_next:
                return StreamedList(self._source, self._timing.streamed_list_s_max)
        return ListPage(self._source, self._continue_token, self._timing.page_objects)

    def _watch(self, now: Seconds) -> Watch:
        self.statistics.watches += 1
        timeout_s = min(self._random.uniform(*self._timing.watch_s), self._relist_at_s - now)
        return Watch(self._source, self._resource_version, timeout_s, self._timing.silence_s_max)

    # The methods below process results. `page`, `initial` and `line` return True if `objects` or
    # `synced` changed.

    def page(self, body: bytes, now: Seconds) -> bool:
        """Process one page of a list. Return True if `objects` or `synced` changed. Raises
        `ApiError` if the page is invalid.
        """
        try:
            page = _read_page(body)
            for raw in page.items or ():
                metadata = _metadata(raw)
                self._pending[metadata.name] = self._entry(metadata, raw)
        except ValueError as problem:
            raise ApiError(ApiFailure.UNREADABLE, f"invalid list: {problem}") from problem
        self._heard(now)
        self._continue_token = page.metadata.continue_token or ""
        if self._continue_token:
            return False
        return self._replace(page.metadata.resource_version, now)

    def initial(self, line: bytes, now: Seconds) -> bool | None:
        """Process a line of a streamed list.

        Return None until the list is complete, then True if `objects` or `synced` changed, else
        False. Raises `ApiError` if the line is invalid or reports an error.
        """
        event, metadata = _read_event(line)
        self._heard(now)
        if event.type in {"ADDED", "MODIFIED"}:
            self._pending[metadata.name] = self._entry(metadata, event.object)
        elif event.type == "DELETED":
            self._pending.pop(metadata.name, None)
        elif event.type == "BOOKMARK" and _ends_list(event.object):
            return self._replace(metadata.resource_version, now)
        return None

    def unstreamed(self) -> None:
        """Record that the API server does not stream lists, so that later lists are read page by
        page.
        """
        self._streamed = self._stream_next = False

    def line(self, line: bytes, now: Seconds) -> bool:
        """Process a line of a watch. Return True if `objects` changed. Raises `ApiError` if the
        list must be repeated.
        """
        event, metadata = _read_event(line)
        self._heard(now)
        if event.type in {"ADDED", "MODIFIED"}:
            changed = self._put(metadata, event.object)
        elif event.type == "DELETED":
            changed = self._delete(metadata)
        else:
            # A bookmark or an unknown type of event only updates the version.
            changed = False
        self._resource_version = metadata.resource_version
        return changed

    def opened(self, now: Seconds) -> None:
        """Record that the API server started the watch."""
        self._heard(now)

    def closed(self, now: Seconds) -> None:
        """Record that the API server ended a watch regularly. The watch continues from the last
        version after a short delay, unless a new list is due.
        """
        self._succeeded(now)
        if now < self._relist_at_s:
            self._not_before_s = now + self._random.uniform(*self._timing.reconnect_s)

    def failed(self, error: ApiError, now: Seconds) -> None:
        """Record and count that the last step failed with `error`, and determine when and with
        which request to go on. The objects stay unchanged.
        """
        kind = error.kind
        self.statistics.errors[kind] += 1
        self._broken = True
        self._healthy_since_s = None
        listing = not self._resource_version
        # The list will be late, so that objects that vanish meanwhile do not count as missed.
        self._left_at = ""
        if kind not in _RESUMABLE:
            self._resource_version = self._continue_token = ""
        if kind in _REFUSED:
            self._refuse(now, listing=listing)
            return
        self._stream_next = False
        self._failures += 1
        if kind in _AT_ONCE and kind not in self._tried_at_once:
            # Another attempt solves these failures: a stale version or token. They occur after the
            # restart of a server, for which the back-off of the outage is not needed.
            self._tried_at_once.add(kind)
            pause_s = self._random.uniform(*self._timing.reconnect_s)
        elif error.retry_after_s is not None:
            pause_s = min(error.retry_after_s, self._timing.retry_after_s_max)
            pause_s += self._random.uniform(*self._timing.reconnect_s)
        else:
            pause_s = self._backoff_s()
        self._not_before_s = now + pause_s

    # The methods below are internal.

    def _refuse(self, now: Seconds, *, listing: bool) -> None:
        if listing and self._source + 1 < self._sources:
            self._source += 1
            return
        if listing:
            self._source = 0
            self.absent = True
        pause_s = self._timing.refused_s
        if self.synced:
            # The kind was available before; a server that starts has not loaded its rules and kinds
            # yet.
            self._refusals += 1
            pause_s = min(pause_s, self._timing.backoff_s[0] * 2.0 ** min(self._refusals, 16))
        self._not_before_s = now + pause_s * self._random.uniform(0.5, 1.0)

    def _backoff_s(self) -> Seconds:
        """Return a random delay in seconds from a range whose upper end doubles with each failure,
        up to a maximum.
        """
        least_s, most_s = self._timing.backoff_s
        # The least delay times 2**16 exceeds every limit.
        span_s = least_s * 2.0 ** min(self._failures, 16)
        return self._random.uniform(least_s, max(least_s, min(most_s, span_s)))

    def _heard(self, now: Seconds) -> None:
        self.heard_at_s = now
        self._succeeded(now)

    def _succeeded(self, now: Seconds) -> None:
        self._broken = False
        if self._healthy_since_s is None:
            self._healthy_since_s = now
        if now - self._healthy_since_s >= self._timing.healthy_s:
            self._failures = self._refusals = 0
            self._tried_at_once.clear()

    def _replace(self, resource_version: str, now: Seconds) -> bool:
        """Replace all objects by those of the completed list, and count as repairs the changes that
        the watch seems to have missed. Return True if `objects` or `synced` changed.
        """
        before, after = self._held, self._pending
        told = {
            name
            for name in before.keys() | after.keys()
            if _value(before, name) != _value(after, name)
        }
        if self._left_at:
            self.statistics.repairs += sum(not self._explained(name) for name in told)
        for name, entry in before.items():
            if name not in after or after[name].uid != entry.uid:
                self._bury(entry.uid)
        for entry in after.values():
            self._tombstones.pop(entry.uid, None)
        news = bool(told) or not self.synced
        self._held, self._pending = after, {}
        self.unreadable = {name: why for name, why in self.unreadable.items() if name in after}
        self._resource_version = resource_version
        self._relist_at_s = now + self._random.uniform(*self._timing.relist_s)
        self._left_at = ""
        self._stream_next = self._streamed
        self.synced = True
        self.absent = False
        return news

    def _explained(self, name: str) -> bool:
        """Return True if the listed object `name` changed after the watch ended, so that the watch
        did not miss the change. A deletion never counts as explained.
        """
        listed = self._pending.get(name)
        return listed is not None and _newer(listed.resource_version, self._left_at)

    def _put(self, metadata: _Metadata, raw: Raw) -> bool:
        if metadata.uid in self._tombstones:
            return False
        held = self._held.get(metadata.name)
        if held is not None:
            if not _newer(metadata.resource_version, held.resource_version):
                return False
            if held.uid != metadata.uid:
                self._bury(held.uid)
        entry = self._held[metadata.name] = self._entry(metadata, raw)
        return entry.value != (held.value if held else None)

    def _delete(self, metadata: _Metadata) -> bool:
        self._bury(metadata.uid)
        held = self._held.get(metadata.name)
        if held is None or held.uid != metadata.uid:
            return False
        del self._held[metadata.name]
        self.unreadable.pop(metadata.name, None)
        return held.value is not None

    def _bury(self, uid: str) -> None:
        self._tombstones[uid] = None
        if len(self._tombstones) > TOMBSTONES_MAX:
            del self._tombstones[next(iter(self._tombstones))]

    def _entry(self, metadata: _Metadata, raw: Raw) -> _Held[T]:
        value: T | None = None
        self.unreadable.pop(metadata.name, None)
        try:
            value = self._read(bytes(raw))
        except ValueError as problem:
            self.unreadable[metadata.name] = str(problem)
        return _Held(metadata.uid, metadata.resource_version, value)


_RESUMABLE: Final = frozenset(
    {
        ApiFailure.UNAUTHORIZED,
        ApiFailure.FORBIDDEN,
        ApiFailure.THROTTLED,
        ApiFailure.SERVER,
        ApiFailure.UNREACHABLE,
        ApiFailure.SILENT,
    }
)
"""Failures of requests after which the resource version or page token stays valid."""
_REFUSED: Final = frozenset({ApiFailure.FORBIDDEN, ApiFailure.ABSENT})
_AT_ONCE: Final = frozenset({ApiFailure.GONE, ApiFailure.WATCH, ApiFailure.UNAUTHORIZED})


def _value(held: dict[str, _Held[T]], name: str) -> T | None:
    entry = held.get(name)
    return entry.value if entry is not None else None


def _read_page(body: bytes) -> _Page:
    page = _decode_page(body)
    if not page.metadata.resource_version:
        raise ValueError("it has no resourceVersion")
    return page


def _read_event(line: bytes) -> tuple[_Event, _Metadata]:
    try:
        event = _decode_event(line)
        if event.type == "ERROR":
            raise _watch_error(event.object)
        return event, _versioned(event)
    except ValueError as problem:
        raise ApiError(ApiFailure.UNREADABLE, f"invalid line of a watch: {problem}") from problem


def _ends_list(bookmark: Raw) -> bool:
    """Return True if the bookmark's annotation says that it ends a streamed list.

    The annotation is defined at
    https://kubernetes.io/docs/reference/using-api/api-concepts/#streaming-lists.
    """
    try:
        annotations = _decode_bookmark(bookmark).metadata.annotations
    except msgspec.ValidationError:
        return False
    return (annotations or {}).get("k8s.io/initial-events-end") == "true"


def _metadata(raw: Raw, *, named: bool = True) -> _Metadata:
    metadata = _decode_identified(raw).metadata
    if named and not (metadata.name and metadata.uid):
        raise ValueError("an object has no name or no uid")
    return metadata


def _versioned(event: _Event) -> _Metadata:
    metadata = _metadata(event.object, named=event.type != "BOOKMARK")
    if not metadata.resource_version:
        raise ValueError("it has no resourceVersion")
    return metadata


def _newer(version: str, than: str) -> bool:
    """Return True if the resource version `version` is newer than `than`.

    Numeric versions are compared as numbers; otherwise any different version is newer.
    """
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return version != than


def _watch_error(status: Raw) -> ApiError:
    told = _decode_status(status)
    gone = failure_of_status(told.code or 0) is ApiFailure.GONE
    return ApiError(
        ApiFailure.GONE if gone else ApiFailure.WATCH,
        f"the watch reported {told.code}: {told.message or 'no reason'}",
    )


class LineSplitter:
    """A splitter of the received bytes of a watch into complete lines, without blank ones.

    It fails if a line still has no end after more than `line_bytes_max` bytes.
    """

    def __init__(self, line_bytes_max: int) -> None:
        self._line_bytes_max = line_bytes_max
        self._parts: list[bytes] = []
        self._bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield every line of a watch that `chunk` completes, except blank lines. Raises `ApiError`
        if the incomplete line after them is too long.
        """
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line = b"".join((*self._parts, piece))
            self._parts.clear()
            self._bytes = 0
            if line.strip():
                yield line
        if rest:
            self._parts.append(rest)
            self._bytes += len(rest)
        if self._bytes > self._line_bytes_max:
            raise ApiError(
                ApiFailure.UNREADABLE,
                f"a line of a watch exceeds {self._line_bytes_max} bytes",
            )
