import itertools
import json
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.shell.kubernetes.api_errors import ApiError, ApiFailure
from epp.shell.kubernetes.list_watch import (
    LineSplitter,
    ListPage,
    ListWatch,
    Pause,
    StreamedList,
    Timing,
    Watch,
)

NEVER_S = 1e9
TIMING = Timing(page_objects=2, relist_s=(NEVER_S, NEVER_S), streamed_list_s_max=0)


def item(name, version, uid=None, **fields):
    metadata = {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, **fields}


def page(version, *items, token=""):
    metadata = {"resourceVersion": str(version), "continue": token}
    return json.dumps({"metadata": metadata, "items": items}).encode()


def event(kind, shown):
    return json.dumps({"type": kind, "object": shown}).encode()


def bookmark(version):
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


def read(raw):
    """The spec of an object; those without one are of no interest."""
    value = json.loads(raw).get("spec")
    if value == "bad":
        raise ValueError("spec is bad")
    return value


class Driven:
    """A driver with a clock that its pauses move."""

    def __init__(self, timing=TIMING, **arguments):
        self.now = 0.0
        self.driver = ListWatch(read, Random(1), timing, **arguments)

    def step(self):
        """The next thing to do that is not a pause."""
        while isinstance(step := self.driver.next(self.now), Pause):
            assert step.seconds > 0
            self.now += step.seconds
        return step

    def listed(self, version, *items):
        assert isinstance(self.step(), ListPage)
        return self.driver.page(page(version, *items), self.now)

    def line(self, line):
        return self.driver.line(line, self.now)

    def fail(self, kind, **fields):
        self.driver.failed(ApiError(kind, "told by a test", **fields), self.now)

    @property
    def objects(self):
        return self.driver.objects


@pytest.fixture
def driven():
    made = Driven()
    made.listed(10, item("a", 5, spec=1), item("b", 6, spec=2))
    return made


def test_a_list_in_pages_counts_only_when_it_is_whole():
    """Until then nothing is synced; then the watch starts at the list's version."""
    driven = Driven()
    assert driven.step() == ListPage(0, "", 2)
    assert not driven.driver.page(page(10, item("a", 5, spec=1), token="more"), 0.0)
    assert not driven.driver.synced
    assert driven.step() == ListPage(0, "more", 2)
    assert driven.driver.page(page(10, item("b", 6, spec=2)), 0.0)
    assert driven.driver.synced
    assert driven.objects == {"a": 1, "b": 2}
    watch = driven.step()
    assert isinstance(watch, Watch)
    assert watch.resource_version == "10"
    assert 240 <= watch.timeout_s <= 300


def test_an_expired_page_token_starts_the_list_again():
    """Pages of two lists are never mixed, and the second list waits its second."""
    driven = Driven()
    driven.step()
    driven.driver.page(page(10, item("a", 5, spec=1), token="more"), driven.now)
    driven.step()
    driven.fail(ApiFailure.GONE)
    assert driven.step() == ListPage(0, "", 2)
    assert driven.now >= 1.0
    driven.driver.page(page(20, item("b", 6, spec=2)), driven.now)
    assert driven.objects == {"b": 2}


STREAMED = msgspec.structs.replace(TIMING, streamed_list_s_max=30.0)
END = {"annotations": {"k8s.io/initial-events-end": "true"}, "resourceVersion": "12"}


def test_a_streamed_list_counts_only_when_a_bookmark_ends_it():
    """Other bookmarks say nothing; what changes while it streams is part of it."""
    driven = Driven(STREAMED)
    assert driven.step() == StreamedList(0, 30.0)
    for line in (
        event("ADDED", item("a", 5, spec=1)),
        event("ADDED", item("b", 6, spec=2)),
        event("ADDED", item("c", 7, spec=3)),
        bookmark(8),
        event("BOOKMARK", {"metadata": END | {"annotations": {"k8s.io/initial-events-end": 7}}}),
        event("MODIFIED", item("b", 10, spec=4)),
        event("DELETED", item("c", 11, spec=3)),
    ):
        assert driven.driver.initial(line, driven.now) is None
        assert not driven.driver.synced
    assert driven.driver.initial(event("BOOKMARK", {"metadata": END}), driven.now) is True
    assert driven.objects == {"a": 1, "b": 4}
    assert driven.step().resource_version == "12"


def test_a_server_that_streams_no_lists_is_asked_for_pages_from_then_on():
    """Also when the list is taken again."""
    driven = Driven(STREAMED)
    assert isinstance(driven.step(), StreamedList)
    driven.driver.unstreamed()
    driven.listed(10, item("a", 5, spec=1))
    driven.step()
    driven.fail(ApiFailure.GONE)
    assert isinstance(driven.step(), ListPage)


@pytest.mark.parametrize("kind", [ApiFailure.UNREACHABLE, ApiFailure.GONE, ApiFailure.UNREADABLE])
def test_a_streamed_list_that_failed_is_read_in_pages_and_the_next_is_streamed_again(kind):
    """Half of a stream is not mixed with the pages."""
    driven = Driven(STREAMED)
    driven.step()
    driven.driver.initial(event("ADDED", item("half", 5, spec=1)), driven.now)
    driven.fail(kind)
    driven.listed(10, item("a", 5, spec=1))
    assert driven.objects == {"a": 1}
    driven.step()
    driven.fail(ApiFailure.GONE)
    assert isinstance(driven.step(), ListPage)
    driven.driver.page(page(20, item("a", 5, spec=1)), driven.now)
    driven.now += NEVER_S
    assert isinstance(driven.step(), StreamedList)


@pytest.mark.parametrize(
    "kind", [ApiFailure.SERVER, ApiFailure.UNREACHABLE, ApiFailure.SILENT, ApiFailure.THROTTLED]
)
def test_a_broken_watch_goes_on_from_the_last_version(driven, kind):
    """Objects stay, nothing is listed, bookmarks count."""
    driven.step()
    assert driven.line(event("MODIFIED", item("a", 11, spec=7)))
    assert not driven.line(bookmark(15))
    driven.fail(kind)
    assert not driven.driver.in_touch
    assert driven.objects == {"a": 7, "b": 2}
    assert driven.step().resource_version == "15"


@pytest.mark.parametrize("kind", [ApiFailure.GONE, ApiFailure.WATCH, ApiFailure.UNREADABLE])
def test_a_version_that_is_no_good_leads_to_a_list(driven, kind):
    """What vanished meanwhile is deleted in the same step as the new list counts."""
    driven.step()
    driven.fail(kind)
    assert driven.objects == {"a": 1, "b": 2}
    assert driven.listed(20, item("b", 6, spec=2), item("c", 19, spec=3))
    assert driven.objects == {"b": 2, "c": 3}
    assert driven.driver.statistics.repairs == 0


def test_an_error_event_is_an_error(driven):
    """410 by its code, anything else as an error of the watch."""
    for code, kind in ((410, ApiFailure.GONE), (500, ApiFailure.WATCH), (None, ApiFailure.WATCH)):
        with pytest.raises(ApiError) as error:
            driven.line(event("ERROR", {"code": code, "message": "no more"}))
        assert error.value.kind is kind


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b'{"type": "ADDED"}', event("ADDED", {"metadata": {}}), b'{"type": "BOOKMARK", "object": {}}'],
)  # fmt: skip
def test_a_line_that_is_no_event_is_unreadable(driven, line):
    """Then the list is taken anew: who knows what was in it."""
    with pytest.raises(ApiError) as error:
        driven.line(line)
    assert error.value.kind is ApiFailure.UNREADABLE


def test_a_clean_close_reconnects_after_a_short_random_pause(driven):
    """Never at once: a server that closes every watch must not be flooded."""
    for _ in range(50):
        driven.step()
        driven.driver.opened(driven.now)
        before = driven.now
        driven.driver.closed(driven.now)
        assert isinstance(driven.step(), Watch)
        assert 0.1 <= driven.now - before <= 1.0


def test_duplicates_and_late_events_change_nothing(driven):
    """By uid and version; a deleted uid never comes back."""
    driven.step()
    assert driven.line(event("MODIFIED", item("a", 12, spec=12)))
    assert not driven.line(event("MODIFIED", item("a", 12, spec=12)))
    assert not driven.line(event("MODIFIED", item("a", 11, spec=11)))
    assert driven.line(event("DELETED", item("b", 13)))
    assert not driven.line(event("MODIFIED", item("b", 9, spec=9)))
    assert driven.objects == {"a": 12}


def test_a_pod_reborn_under_its_name_survives_the_late_death_of_the_old_one(driven):
    """The deletion names the old uid."""
    driven.step()
    assert driven.line(event("ADDED", item("a", 15, uid="new", spec=3)))
    assert not driven.line(event("DELETED", item("a", 14)))
    assert not driven.line(event("MODIFIED", item("a", 13, spec=1)))
    assert driven.objects["a"] == 3


def test_an_object_that_is_not_understood_is_left_out_and_named(driven):
    """All others go on."""
    driven.step()
    assert driven.line(event("MODIFIED", item("a", 11, spec="bad")))
    assert driven.driver.unreadable == {"a": "spec is bad"}
    assert driven.objects == {"b": 2}
    assert driven.line(event("MODIFIED", item("a", 12, spec=1)))
    assert driven.driver.unreadable == {}


def test_the_safety_net_counts_what_the_watch_missed():
    """Not what changed after the watch was left."""
    driven = Driven(Timing(relist_s=(5.0, 5.0), streamed_list_s_max=0))
    driven.listed(10, item("a", 5, spec=1), item("b", 6, spec=2), item("c", 7))
    assert driven.step().timeout_s == 5.0
    driven.now += 5.0
    driven.driver.closed(driven.now)
    assert driven.listed(20, item("a", 8, spec=3), item("d", 15, spec=4))
    assert driven.objects == {"a": 3, "d": 4}
    assert driven.driver.statistics.repairs == 2, "a was missed, b vanished, d is new"


def test_what_vanished_while_the_server_was_away_is_no_repair():
    """The safety net came late: the watch could not have told."""
    driven = Driven(Timing(relist_s=(5.0, 5.0), streamed_list_s_max=0))
    driven.listed(10, item("a", 5, spec=1), item("b", 6, spec=2))
    driven.step()
    driven.now += 5.0
    driven.driver.closed(driven.now)
    assert isinstance(driven.step(), ListPage)
    driven.fail(ApiFailure.UNREACHABLE)
    assert driven.listed(20, item("a", 5, spec=1))
    assert driven.driver.statistics.repairs == 0


def test_retry_after_is_obeyed_up_to_a_limit(driven):
    """With jitter, so that all clients do not come back at once."""
    driven.step()
    for told_s, most_s in ((7.0, 8.0), (86_400.0, 61.0)):
        before = driven.now
        driven.fail(ApiFailure.THROTTLED, retry_after_s=told_s)
        driven.step()
        assert min(told_s, 60.0) < driven.now - before <= most_s


def test_the_back_off_grows_to_its_cap_and_resets_only_after_a_while(driven):
    """A connection that works for a moment proves nothing."""
    pauses = []
    for _ in range(200):
        driven.step()
        driven.driver.opened(driven.now)
        before = driven.now
        driven.fail(ApiFailure.SERVER)
        driven.step()
        pauses.append(driven.now - before)
    assert all(0.5 <= pause <= 30.0 for pause in pauses)
    assert max(pauses[:2]) <= 2.0
    assert max(pauses) > 20.0
    driven.driver.opened(driven.now)
    driven.line(bookmark(11))
    driven.now += 61.0
    driven.line(bookmark(12))
    before = driven.now
    driven.fail(ApiFailure.SERVER)
    driven.step()
    assert driven.now - before <= 1.0


@pytest.mark.parametrize("kind", [ApiFailure.GONE, ApiFailure.WATCH, ApiFailure.UNAUTHORIZED])
def test_after_an_outage_what_trying_again_mends_is_tried_again_at_once(driven, kind):
    """An API server that restarted knows no old version: its 410 must not wait for the back-off."""
    for _ in range(20):
        driven.step()
        driven.fail(ApiFailure.UNREACHABLE)
    driven.step()
    driven.driver.opened(driven.now)
    before = driven.now
    driven.fail(kind)
    driven.step()
    assert driven.now - before <= 1.0
    pauses = []
    for _ in range(20):
        before = driven.now
        driven.fail(kind)
        driven.step()
        pauses.append(driven.now - before)
    assert max(pauses) > 10.0, "once, until all has been well for a while"


@pytest.mark.parametrize("kind", [ApiFailure.FORBIDDEN, ApiFailure.ABSENT])
def test_what_was_granted_before_is_asked_for_again_soon(driven, kind):
    """A starting API server refuses until it has read its rules and kinds; the objects stay."""
    pauses = []
    for _ in range(10):
        driven.step()
        before = driven.now
        driven.fail(kind)
        driven.step()
        pauses.append(driven.now - before)
    assert pauses[0] <= 1.0
    assert pauses[1] <= 2.0
    assert all(15.0 <= pause <= 30.0 for pause in pauses[6:])
    assert driven.objects == {"a": 1, "b": 2}


def test_a_kind_that_is_absent_in_one_group_is_read_from_the_next():
    """And the first is tried again at every list."""
    driven = Driven(Timing(relist_s=(100.0, 100.0), streamed_list_s_max=0), sources=2)
    assert driven.step().source == 0
    driven.fail(ApiFailure.ABSENT)
    step = driven.step()
    assert (step.source, driven.now) == (1, pytest.approx(1.0))
    driven.driver.page(page(10, item("a", 5, spec=1)), driven.now)
    assert driven.step().source == 1
    driven.now += 101.0
    assert driven.step() == ListPage(0, "", 100)


def test_a_kind_that_is_nowhere_is_probed_again():
    """Slowly, and nothing counts as synced."""
    driven = Driven(sources=2)
    for _ in range(3):
        before = driven.now
        for source in (0, 1):
            assert driven.step().source == source
            driven.fail(ApiFailure.FORBIDDEN if source else ApiFailure.ABSENT)
        assert driven.driver.absent
        assert not driven.driver.synced
        driven.step()
        assert driven.now - before > 15.0
        driven.fail(ApiFailure.ABSENT)
        driven.step()
        driven.fail(ApiFailure.ABSENT)


def test_a_successor_keeps_the_rate_of_lists():
    """A selector that flaps must not list more often than once a second."""
    driven = Driven()
    driven.step()
    successor = ListWatch(read, Random(2), TIMING, listed_at_s=driven.driver.listed_at_s)
    assert successor.next(0.25) == Pause(0.75)


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 7))
def test_lines_are_put_together_from_chunks_of_any_size(lines, size):
    """Empty lines and what is unfinished are no lines."""
    lines = [line.replace(b"\n", b"") for line in lines]
    stream = b"\n".join([*lines, b"unfinished"])
    splitter = LineSplitter(100)
    chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
    found = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert found == [line for line in lines if line.strip()]


def test_a_line_without_end_is_cut_off():
    """Memory has a limit."""
    splitter = LineSplitter(100)
    assert list(splitter.feed(b"x" * 100)) == []
    with pytest.raises(ApiError) as error:
        list(splitter.feed(b"x"))
    assert error.value.kind is ApiFailure.UNREADABLE


class World:
    """What a perfect server would know: objects, and everything that ever happened to them."""

    def __init__(self):
        self.version = 100
        self.objects = {}
        self.events = []
        self.compacted = 0
        self.born = 0

    def change(self, name, action):
        self.version += 1
        held = self.objects.get(name)
        if action == "delete" and held:
            del self.objects[name]
            dead = item(name, self.version, uid=held["metadata"]["uid"], spec=held["spec"])
            self.events.append((self.version, event("DELETED", dead)))
            return
        if action == "rebirth" and held:
            self.change(name, "delete")
            self.version += 1
            held = None
        self.born += held is None
        uid = held["metadata"]["uid"] if held else f"uid-{self.born}"
        shown = self.objects[name] = item(name, self.version, uid=uid, spec=self.version)
        self.events.append((self.version, event("MODIFIED" if held else "ADDED", shown)))

    def truth(self):
        return {name: shown["spec"] for name, shown in sorted(self.objects.items())}


changes = st.tuples(st.sampled_from("abcd"), st.sampled_from(["change", "delete", "rebirth"]))
faults = st.sampled_from(
    [
        *("none", "close", "silent", "server", "garbage", "error", "compact", "unauthorized"),
        *("duplicate", "swap", "old", "throttled", "cut"),
    ]
)
schedules = st.lists(
    st.tuples(st.lists(changes, max_size=4), faults, st.integers(0, 3)), max_size=14
)


@given(schedules)
def test_whatever_goes_wrong_no_object_is_lost_and_none_is_made_up(schedule):
    """After any faults, one good step of each kind and the objects are the server's."""
    world, driven = World(), Driven()
    tokens = {}
    listed_at = []
    for happened, fault, where in [*schedule, *[([], "none", 0)] * 4]:
        step = driven.step()
        for name, action in happened:
            world.change(name, action)
        if isinstance(step, ListPage):
            if not step.continue_token:
                listed_at.append(driven.now)
            _serve_list(driven, world, step, fault, tokens)
        else:
            _serve_watch(driven, world, step, fault, where)
    assert driven.objects == world.truth()
    assert driven.driver.statistics.repairs == 0
    assert all(later - before >= 0.999 for before, later in itertools.pairwise(listed_at))


def _serve_list(driven, world, step, fault, tokens):
    kinds = {
        "server": ApiFailure.SERVER,
        "silent": ApiFailure.SILENT,
        "unauthorized": ApiFailure.UNAUTHORIZED,
        "throttled": ApiFailure.THROTTLED,
        "garbage": ApiFailure.UNREADABLE,
    }
    if fault in kinds:
        driven.fail(kinds[fault])
        return
    if fault == "compact":
        tokens.clear()
    if step.continue_token:
        if step.continue_token not in tokens:
            driven.fail(ApiFailure.GONE)
            return
        version, rest = tokens.pop(step.continue_token)
    else:
        version, rest = world.version, [world.objects[name] for name in sorted(world.objects)]
    token = ""
    if len(rest) > 2:
        token = f"{version}:{len(rest)}"
        tokens[token] = version, rest[2:]
    driven.driver.page(page(version, *rest[:2], token=token), driven.now)


def _serve_watch(driven, world, step, fault, where):
    kinds = {
        "server": ApiFailure.SERVER,
        "silent": ApiFailure.SILENT,
        "unauthorized": ApiFailure.UNAUTHORIZED,
        "throttled": ApiFailure.THROTTLED,
        "cut": ApiFailure.UNREACHABLE,
    }
    if fault == "compact":
        world.compacted = world.version
    since = int(step.resource_version)
    if since < world.compacted:
        driven.fail(ApiFailure.GONE)
        return
    driven.driver.opened(driven.now)
    pending = [line for version, line in world.events if version > since]
    if fault == "duplicate":
        pending = [line for line in pending for _ in range(2)]
    elif fault == "swap" and where + 1 < len(pending):
        pending[where], pending[where + 1] = pending[where + 1], pending[where]
    elif fault == "old":
        # Something of long ago, once more.
        pending += [line for _, line in world.events[-8:][: where + 1]]
    cut = where if fault in {*kinds, "close", "garbage", "error"} else len(pending)
    for line in pending[:cut]:
        driven.line(line)
    if fault in kinds:
        driven.fail(kinds[fault])
    elif fault in {"garbage", "error"}:
        broken = b"{" if fault == "garbage" else event("ERROR", {"code": 500})
        with pytest.raises(ApiError) as error:
            driven.line(broken)
        driven.driver.failed(error.value, driven.now)
    else:
        driven.driver.closed(driven.now)
