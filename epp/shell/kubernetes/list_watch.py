"""List and watch one collection of the API server: a state machine, without I/O, clock or dice.

Theory. A list gives every object and a resource version; a watch from that version on gives what
changes after it. Everything that can go wrong comes down to one question: is the version still
good? If it is (the connection broke, the server closed, restarted or fell silent), the watch goes
on from the last version heard, and nothing is lost. If it is not (410, an ERROR event, a line that
is not understood), the list is taken anew and replaces what is held in one go, and until it is
complete the old objects stay in force. As a safety net the list is taken anew now and then; what
that finds wrong is counted, and should be nothing.

A list is asked for as a stream of events, which costs the server no copy of it, and page by page
from servers that do not know that (Kubernetes before 1.32, unless its gate `WatchList` is open) and
after any failure since the last list: pages are what every server knows.

A list may come from one of several sources, tried in order: the same kind in a newer and in an
older API group. A source that is absent or forbidden yields to the next.

`next` says what to do; what came of it is told to `page`, `initial`, `line`, `closed`, `unstreamed`
or `failed`.
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
"""UIDs of deleted objects that are remembered, so that no late event brings one back."""


class Timing(Struct, frozen=True, kw_only=True):
    """Every wait of the loop; pairs are drawn from evenly, so that replicas spread."""

    page_objects: int = 100
    """A page of pods is about 1 MB: decoding it keeps the loop from deciding for some 5 ms."""
    list_interval_s_min: Seconds = 1.0
    streamed_list_s_max: Seconds = 30.0
    """A server that does not know streamed lists may never say that all is told. 0: ask for none."""
    watch_s: tuple[Seconds, Seconds] = (240.0, 300.0)
    silence_s_max: Seconds = 90.0
    """Longer than the server's interval between bookmarks, which is about a minute; of a kind in
    which nothing happens it may leave some out."""
    reconnect_s: tuple[Seconds, Seconds] = (0.1, 1.0)
    relist_s: tuple[Seconds, Seconds] = (300.0, 600.0)
    backoff_s: tuple[Seconds, Seconds] = (0.5, 30.0)
    """After the first failure, and at most."""
    healthy_s: Seconds = 60.0
    """The back-off starts anew once nothing failed for this long."""
    refused_s: Seconds = 30.0
    """Until a kind that is absent or forbidden is tried again; sooner if it was there before."""
    retry_after_s_max: Seconds = 60.0


class Pause(Struct, frozen=True):
    seconds: Seconds


class ListPage(Struct, frozen=True):
    """GET the next page of at most `objects_max`."""

    source: int
    continue_token: str
    objects_max: int


class StreamedList(Struct, frozen=True):
    """GET all objects as events, until a bookmark says that these were all, for `timeout_s` at most."""

    source: int
    timeout_s: Seconds


class Watch(Struct, frozen=True):
    """GET the changes since `resource_version`, bookmarks included, for `timeout_s` at most."""

    source: int
    resource_version: str
    timeout_s: Seconds
    silence_s_max: Seconds


Step: TypeAlias = Pause | ListPage | StreamedList | Watch


class Statistics:
    """Totals of one kind of object; outlives the driver, so that they never fall."""

    __slots__ = ("errors", "lists", "repairs", "watches")

    def __init__(self) -> None:
        self.lists = 0
        """Begun."""
        self.watches = 0
        self.repairs = 0
        """Objects that the safety net found other than the watch had told."""
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
    """One object. `value` None: it is there, but of no interest or not understood."""

    uid: str
    resource_version: str
    value: T | None


_decode_identified = msgspec.json.Decoder(_Identified).decode
_decode_page = msgspec.json.Decoder(_Page).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_bookmark = msgspec.json.Decoder(_Bookmark).decode
_decode_status = msgspec.json.Decoder(_Status).decode


class ListWatch(Generic[T]):
    """One collection of objects, each of which `read` makes a `T` of.

    `read` may return None for an object of no interest, and raise `ValueError`
    (`msgspec.ValidationError` is one) for one that is not understood; `unreadable` says which.
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
        """`listed_at_s`: when a predecessor last began to list; the rate of lists counts it."""
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
        """Where the watch was when the safety net took over at once; "" after anything else."""
        self._not_before_s: Seconds = 0.0
        self._relist_at_s: Seconds = 0.0
        self.listed_at_s = listed_at_s
        self._failures = 0
        self._refusals = 0
        self._tried_at_once: set[ApiFailure] = set()
        self._healthy_since_s: Seconds | None = None
        self._broken = True
        self.heard_at_s: Seconds | None = None
        """When the last page, event or bookmark came, or a watch was taken up."""
        self.synced = False
        """A whole list came in; from then on the objects are never given up for an error."""
        self.absent = False
        """No source has the kind: its CRD is missing, or the right to read it."""
        self.unreadable: dict[str, str] = {}
        """Name of an object that `read` refused -> why; at most one entry for each object held."""

    def __repr__(self) -> str:
        state = "synced" if self.synced else "not synced"
        return f"<ListWatch [{len(self._held)} objects, {state}, {self._failures} failures]>"

    @property
    def objects(self) -> dict[str, T]:
        """By name, in order of names."""
        held = sorted(self._held.items())
        return {name: entry.value for name, entry in held if entry.value is not None}

    @property
    def in_touch(self) -> bool:
        """Synced, and the last step went well: what changes now would be heard of."""
        return self.synced and not self._broken

    # What to do.

    def next(self, now: Seconds) -> Step:
        """Say what to do now."""
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

    # What came of it. `page`, `initial` and `line` return whether `objects` or `synced` changed.

    def page(self, body: bytes, now: Seconds) -> bool:
        """Take in a page of a list. Raises `ApiError` if it is none."""
        try:
            page = _read_page(body)
            for raw in page.items or ():
                metadata = _metadata(raw)
                self._pending[metadata.name] = self._entry(metadata, raw)
        except ValueError as problem:
            raise ApiError(
                ApiFailure.UNREADABLE, f"a list is not understood: {problem}"
            ) from problem
        self._heard(now)
        self._continue_token = page.metadata.continue_token or ""
        if self._continue_token:
            return False
        return self._replace(page.metadata.resource_version, now)

    def initial(self, line: bytes, now: Seconds) -> bool | None:
        """Take in a whole line of a streamed list; None: more is to come. Errors as `line`."""
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
        """The server does not stream lists: from now on they are read page by page."""
        self._streamed = self._stream_next = False

    def line(self, line: bytes, now: Seconds) -> bool:
        """Take in a whole line of a watch. Raises `ApiError` if the list must be taken anew."""
        event, metadata = _read_event(line)
        self._heard(now)
        if event.type in {"ADDED", "MODIFIED"}:
            changed = self._put(metadata, event.object)
        elif event.type == "DELETED":
            changed = self._delete(metadata)
        else:
            # A bookmark, or a kind of event that is yet to be invented: it moves the version.
            changed = False
        self._resource_version = metadata.resource_version
        return changed

    def opened(self, now: Seconds) -> None:
        """The server took up the watch."""
        self._heard(now)

    def closed(self, now: Seconds) -> None:
        """The watch ended in good order: go on from the last version, but never at once."""
        self._succeeded(now)
        if now < self._relist_at_s:
            self._not_before_s = now + self._random.uniform(*self._timing.reconnect_s)

    def failed(self, error: ApiError, now: Seconds) -> None:
        """The step failed; the objects stay as they are."""
        kind = error.kind
        self.statistics.errors[kind] += 1
        self._broken = True
        self._healthy_since_s = None
        listing = not self._resource_version
        # The list will be late, and what vanished in between was not missed.
        self._left_at = ""
        if kind not in _RESUMABLE:
            self._resource_version = self._continue_token = ""
        if kind in _REFUSED:
            self._refuse(now, listing=listing)
            return
        self._stream_next = False
        self._failures += 1
        if kind in _AT_ONCE and kind not in self._tried_at_once:
            # What is wrong is known and mended by trying again: the version, or the token. A
            # server that restarted says so after an outage, whose back-off is not for this.
            self._tried_at_once.add(kind)
            pause_s = self._random.uniform(*self._timing.reconnect_s)
        elif error.retry_after_s is not None:
            pause_s = min(error.retry_after_s, self._timing.retry_after_s_max)
            pause_s += self._random.uniform(*self._timing.reconnect_s)
        else:
            pause_s = self._backoff_s()
        self._not_before_s = now + pause_s

    # The rest is how.

    def _refuse(self, now: Seconds, *, listing: bool) -> None:
        if listing and self._source + 1 < self._sources:
            self._source += 1
            return
        if listing:
            self._source = 0
            self.absent = True
        pause_s = self._timing.refused_s
        if self.synced:
            # It was granted before: a server that starts has not read its rules and kinds yet.
            self._refusals += 1
            pause_s = min(pause_s, self._timing.backoff_s[0] * 2.0 ** min(self._refusals, 16))
        self._not_before_s = now + pause_s * self._random.uniform(0.5, 1.0)

    def _backoff_s(self) -> Seconds:
        """Full jitter over a span that doubles with each failure."""
        least_s, most_s = self._timing.backoff_s
        # 2**16 times any least wait is more than any cap.
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
        """The list is whole: it is the truth."""
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
        """The object changed after the watch was left for the list: nothing was missed."""
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
"""After these the resource version, or the token of the next page, is as good as before."""
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
        raise ApiError(
            ApiFailure.UNREADABLE, f"a line of a watch is not understood: {problem}"
        ) from problem


def _ends_list(bookmark: Raw) -> bool:
    """As https://kubernetes.io/docs/reference/using-api/api-concepts/#streaming-lists has it."""
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
    """Resource versions are compared as numbers where they are some; otherwise the last is newest."""
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
    """Chunks of bytes -> whole lines, as long as `line_bytes_max`; what is unfinished is kept."""

    def __init__(self, line_bytes_max: int) -> None:
        self._line_bytes_max = line_bytes_max
        self._parts: list[bytes] = []
        self._bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield every line that `chunk` ends. Raises `ApiError` for one that is too long."""
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
                f"a line of a watch is longer than {self._line_bytes_max} bytes",
            )
