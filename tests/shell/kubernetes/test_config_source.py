import pytest

from epp.shell.kubernetes.config_source import ConfigSource

V1, V2, V3 = b"one", b"two", b"three"


@pytest.fixture
def applied():
    return []


@pytest.fixture
def source(applied):
    made = ConfigSource(lambda text, _: applied.append(text), watched="map", file="file")
    made.started(V1)
    return made


def test_without_a_watch_the_file_counts(source, applied):
    """Every change of it, also back."""
    for text in (V2, V1, V1, V3):
        source.file_changed(text)
    assert applied == [V2, V1, V3]


def test_the_watch_is_first_and_the_file_that_catches_up_is_no_news(source, applied):
    """The kubelet shows each version up to 90 s later, or skips it."""
    source.watch_in_touch(True)
    source.watch_told(V1)
    source.watch_told(V2)
    source.watch_told(V3)
    source.watch_in_touch(False)
    source.file_changed(V2)
    source.file_changed(V3)
    assert applied == [V2, V3]


def test_a_file_with_news_waits_until_the_watch_is_gone(source, applied):
    """Half open connections are found out by their silence; the file may be faster."""
    source.watch_in_touch(True)
    source.file_changed(V2)
    assert applied == []
    source.watch_in_touch(False)
    assert applied == [V2]


def test_what_the_watch_tells_outdates_what_the_file_showed(source, applied):
    """Even if the file showed something that the watch never told."""
    source.watch_in_touch(True)
    source.file_changed(V2)
    source.watch_told(V3)
    source.watch_in_touch(False)
    assert applied == [V3]


def test_going_back_while_the_watch_is_away_counts(source, applied):
    """The file was at the version before: it is news again."""
    source.watch_in_touch(True)
    source.watch_told(V2)
    source.file_changed(V2)
    source.watch_in_touch(False)
    source.file_changed(V1)
    assert applied == [V2, V1]


def test_the_first_word_of_the_watch_replaces_an_old_file(source, applied):
    """A pod may start with the kubelet's old copy; the same text again is no change."""
    source.watch_told(V1)
    assert applied == []
    source.watch_told(V2)
    assert applied == [V2]


def test_a_text_is_told_under_the_name_of_where_it_was_read():
    """Whoever looks for a mistake looks there."""
    told = []
    source = ConfigSource(lambda *what: told.append(what), watched="ConfigMap a/b", file="/c/d")
    source.started(V1)
    source.watch_in_touch(True)
    source.watch_told(V2)
    source.file_changed(V3)
    source.watch_in_touch(False)
    source.file_changed(V1)
    assert told == [(V2, "ConfigMap a/b"), (V3, "/c/d"), (V1, "/c/d")]
