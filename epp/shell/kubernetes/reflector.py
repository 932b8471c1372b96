"""Perform the requests of one `ListWatch` over HTTP, and log its problems."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final, Generic, TypeVar

import structlog

from epp.core.types import Seconds
from epp.shell.kubernetes.api_errors import ApiError, ApiFailure
from epp.shell.kubernetes.client import KubeClient
from epp.shell.kubernetes.list_watch import (
    LineSplitter,
    ListPage,
    ListWatch,
    Pause,
    Statistics,
    Step,
    StreamedList,
    Timing,
    Watch,
)
from epp.shell.kubernetes.objects import Collection
from epp.shell.kubernetes.state import Reflection

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Maximum number of bytes of a line in a watch; etcd stores objects of 1.5 MB, which JSON escapes
may lengthen.
"""
REPEAT_S: Final[Seconds] = 300.0
"""Interval in seconds at which a lasting problem of a list or watch is logged again."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Reflector(Generic[T]):
    """A copy of one kind of object of the API server in `objects`; `on_change` is called after the
    first list and after changes, of which it may report several at once.

    `sources` are tried in order, and the first one that can be read is used. If `optional`, a
    missing CRD means that the feature is disabled, which is not an error.
    """

    def __init__(
        self,
        client: KubeClient,
        sources: Sequence[Collection],
        read: Callable[[bytes], T | None],
        on_change: Callable[[], None],
        *,
        random: Random,
        timing: Timing,
        optional: bool = False,
        predecessor: "Reflector[T] | None" = None,
    ) -> None:
        """Create the copy of a kind of object. `predecessor` copies the same kind with other
        selectors; its totals and its rate limit of lists are continued.
        """
        self._client = client
        self._sources = tuple(sources)
        self._on_change = on_change
        self._optional = optional
        self._driver = ListWatch(
            read,
            random,
            timing,
            sources=len(self._sources),
            statistics=predecessor.statistics if predecessor else None,
            listed_at_s=predecessor.listed_at_s if predecessor else None,
        )
        self._logged: tuple[ApiFailure, Seconds] | None = None
        self._unreadable: Mapping[str, str] = {}

    @property
    def objects(self) -> dict[str, T]:
        """Current objects of this kind in the API server by name, in order of names."""
        return self._driver.objects

    @property
    def synced(self) -> bool:
        return self._driver.synced

    @property
    def in_touch(self) -> bool:
        """True if changes of the objects in the API server are currently received."""
        return self._driver.in_touch

    @property
    def statistics(self) -> Statistics:
        return self._driver.statistics

    @property
    def listed_at_s(self) -> Seconds | None:
        return self._driver.listed_at_s

    def reflection(self) -> Reflection:
        driver, told = self._driver, self._driver.statistics
        heard_at_s = driver.heard_at_s
        return Reflection(
            objects=len(driver.objects),
            synced=driver.synced,
            stale_s=math.inf if heard_at_s is None else time.monotonic() - heard_at_s,
            lists=told.lists,
            watches=told.watches,
            repairs=told.repairs,
            errors={
                kind.value: count for kind, count in told.errors.items() if not self._is_off(kind)
            },
        )

    async def run(self) -> None:
        """List and watch this kind of object in the API server until cancelled. Failures are
        logged, and the list or watch is repeated after a delay.
        """
        while True:
            step = self._driver.next(time.monotonic())
            try:
                await self._do(step)
            except ApiError as error:
                self._fail(step, error)
            except Exception as bug:  # noqa: BLE001 - a task boundary: the watch must go on
                _log.exception(
                    "a list or watch failed because of a defect of the picker",
                    resource=str(self._sources[0]),
                )
                self._fail(step, ApiError(ApiFailure.INTERNAL, type(bug).__name__))

    async def _do(self, step: Step) -> None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, ListPage):
            await self._list(step)
        elif isinstance(step, StreamedList):
            await self._stream_list(step)
        else:
            await self._watch(step)

    async def _list(self, step: ListPage) -> None:
        source = self._sources[step.source]
        query = {"limit": str(step.objects_max), **source.selectors}
        if step.continue_token:
            query["continue"] = step.continue_token
        body = await self._client.request("GET", source.path, query, accept=source.accept("list"))
        changed = self._driver.page(body, time.monotonic())
        if not step.continue_token:
            self._log_listed(source)
        self._logged = None
        self._tell(changed)

    async def _stream_list(self, step: StreamedList) -> None:
        source = self._sources[step.source]
        query = {
            "sendInitialEvents": "true",
            "resourceVersionMatch": "NotOlderThan",
            **_watch_query(source, step.timeout_s),
        }
        splitter = LineSplitter(LINE_BYTES_MAX)
        try:
            async with (
                asyncio.timeout(step.timeout_s),
                self._client.stream(
                    *("GET", source.path, query),
                    accept=source.accept("watch"),
                    silence_s_max=step.timeout_s,
                ) as chunks,
            ):
                async for chunk in chunks:
                    for line in splitter.feed(chunk):
                        changed = self._driver.initial(line, time.monotonic())
                        if changed is not None:
                            self._log_listed(source)
                            self._tell(changed)
                            return
        except TimeoutError:
            pass
        except ApiError as error:
            # Statuses 400 and 422 mean that the server does not know or allow the parameter.
            if error.kind is not ApiFailure.STATUS:
                raise
        _log.info("API server does not stream lists, they are read in pages", resource=str(source))
        self._driver.unstreamed()

    def _log_listed(self, source: Collection) -> None:
        if self._logged:
            _log.info("objects of this kind can be listed again", resource=str(source))
        self._logged = None

    async def _watch(self, step: Watch) -> None:
        source = self._sources[step.source]
        query = {
            "resourceVersion": step.resource_version,
            **_watch_query(source, step.timeout_s),
        }
        splitter = LineSplitter(LINE_BYTES_MAX)
        opened = False
        try:
            async with (
                asyncio.timeout(step.timeout_s),
                self._client.stream(
                    *("GET", source.path, query),
                    accept=source.accept("watch"),
                    silence_s_max=step.silence_s_max,
                ) as chunks,
            ):
                opened = True
                self._driver.opened(time.monotonic())
                async for chunk in chunks:
                    self._take(splitter, chunk)
        except TimeoutError:
            # The server exceeded `timeoutSeconds`, and the list is due.
            pass
        except ApiError as error:
            # A quiet kind may have no bookmarks for longer. The next watch shows whether the server
            # is still reachable.
            if not opened or error.kind is not ApiFailure.SILENT:
                raise
        self._driver.closed(time.monotonic())

    def _take(self, splitter: LineSplitter, chunk: bytes) -> None:
        """Process received lines of a watch. At most one change is reported per chunk, so that a
        burst of events is one change.
        """
        changed = False
        try:
            for line in splitter.feed(chunk):
                changed |= self._driver.line(line, time.monotonic())
                self._logged = None
        finally:
            self._tell(changed)

    def _tell(self, changed: bool) -> None:
        unreadable = dict(self._driver.unreadable)
        for name, why in unreadable.items():
            if self._unreadable.get(name) != why:
                _log.error(
                    "invalid Kubernetes object ignored",
                    resource=str(self._sources[0]),
                    name=name,
                    problem=why,
                )
        self._unreadable = unreadable
        if changed:
            self._on_change()

    def _is_off(self, kind: ApiFailure) -> bool:
        return self._optional and kind is ApiFailure.ABSENT

    def _fail(self, step: Step, error: ApiError) -> None:
        now = time.monotonic()
        self._driver.failed(error, now)
        known = self._logged is not None and self._logged[0] is error.kind
        if known and self._logged and now < self._logged[1] + REPEAT_S:
            return
        off = self._is_off(error.kind)
        if off and (known or self.synced):
            return
        self._logged = error.kind, now
        source = self._sources[0 if isinstance(step, Pause) else step.source]
        verb = "watch" if isinstance(step, Watch) else "list"
        # A server that starts may briefly deny what it granted before; only a lasting problem is an
        # error.
        lasts = known or not self.synced or error.kind is ApiFailure.INTERNAL
        ours = error.kind in _OURS_TO_MEND and lasts
        say = _log.info if off else _log.error if ours else _log.warning
        say(_sentence(error, verb, source), resource=str(source), synced=self.synced)


def _watch_query(source: Collection, timeout_s: Seconds) -> dict[str, str]:
    """Return the query parameters that every watch has."""
    return {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(math.ceil(timeout_s)),
        **source.selectors,
    }


_OURS_TO_MEND: Final = frozenset({ApiFailure.FORBIDDEN, ApiFailure.ABSENT, ApiFailure.INTERNAL})


def _sentence(error: ApiError, verb: str, source: Collection) -> str:
    if error.kind is ApiFailure.FORBIDDEN:
        role = "Role" if source.namespace else "ClusterRole"
        return (
            f"forbidden to {verb} {source}: the {role} of the picker's ServiceAccount needs the "
            f"verbs get, list and watch on resource {source.resource} of apiGroup {source.group!r} "
            f"({error})"
        )
    if error.kind is ApiFailure.ABSENT:
        kind = f"{source.resource}.{source.group}" if source.group else source.resource
        return f"the API server has no {kind} of {source.version}: is its CRD installed?"
    return str(error)
