"""Big traces, kept as they were read."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from sim.traces import kept, reading
from sim.traces.arrival import TraceError
from sim.traces.capture import CaptureWriter
from sim.traces.formats import open_trace
from sim.traces.kept import CachedTraces, NotCached, kept_folder
from sim.traces.reading import ReadOptions
from tests.sim.made import arrival, arrivals

OTHER = [arrival(at, blocks=(at, 2**64 - 1), block_tokens=64, session="s") for at in range(5)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Any file is big, and an entry has several frames."""
    monkeypatch.setattr(reading, "_KEPT_FROM_BYTES", 1)
    monkeypatch.setattr(kept, "FRAME_ARRIVALS_MAX", 7)


def write(path, count=50, seed=1):
    with path.open("wb") as file:
        writer = CaptureWriter(file, source="test")
        for one in arrivals(count, seed=seed):
            tokens = 64 * len(one.blocks) + 1
            writer.write_arrival(msgspec.structs.replace(one, prompt_tokens=tokens))
    return path


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "trace.jsonl")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "traces"


@pytest.fixture
def opened(source, folder):
    """The trace, opened anew, kept in the folder."""

    def open_(path=source, **options):
        return open_trace(path, ReadOptions(kept_in=str(folder), **options))

    return open_


@pytest.fixture
def unreadable(monkeypatch):
    """From now on lines cannot be read: what is given has been kept."""

    def forbid():
        def read(self):
            raise AssertionError("the file was read")
            yield

        monkeypatch.setattr(reading.Trace, "_in_order", read)

    return forbid


def entries(folder):
    return sorted(folder.glob("*")) if folder.exists() else []


def test_a_big_trace_is_read_once(source, opened, folder, unreadable):
    """In a folder that only this user may read; the second time gives the same."""
    plain = list(open_trace(source))
    assert list(opened()) == plain
    (entry,) = entries(folder)
    assert entry.suffix == ".arrivals"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    unreadable()
    trace = opened()
    assert list(trace) == plain
    assert list(trace) == plain, "as often as it is asked for"


def test_every_field_is_kept(folder):
    """Of an arrival with all of them, and of one with none."""
    full = arrival(
        7, time_s=0.1, output_tokens_max=9, lengths=(3, 4), blocks=(2**64 - 1, 1), answer=5,
        model="m", adapter="a", cache_salt="c", session="ü", turn=3, priority=-2, after=1,
        think_s=1e-9, path="/v1/x",
    )  # fmt: skip
    shelf = CachedTraces(folder)
    told = list(shelf.keeping("one", iter([full, arrival(1)]), lambda: True))
    assert list(shelf.read("one")) == told == [full, arrival(1)]


def test_small_traces_described_workloads_and_unasked_ones_are_read_as_ever(
    tmp_path, source, opened, folder, monkeypatch
):
    """Nothing is written for them."""
    list(open_trace(source, ReadOptions()))
    assert not folder.exists()
    monkeypatch.setattr(reading, "_KEPT_FROM_BYTES", source.stat().st_size + 1)
    list(opened())
    opened().keep()
    assert not folder.exists()


@pytest.mark.parametrize(
    "options", [{"skip_bad": True}, {"reorder_max": 5}, {"rate_per_s": 2.0}, {"format": "capture"}]
)
def test_how_it_is_read_decides_what_is_kept(opened, folder, options):
    """But the name of the format, which is the same whether it was given or found."""
    list(opened())
    list(opened(**options))
    assert len(entries(folder)) == (1 if "format" in options else 2)


def test_another_content_or_other_code_is_another_entry(source, opened, folder, monkeypatch):
    """Whatever the file is called and however old it says it is."""
    list(opened())
    told = source.stat()
    write(source, seed=2)
    os.utime(source, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert list(opened()) == list(open_trace(source))
    assert len(entries(folder)) == 2
    monkeypatch.setattr(kept, "_version_of_reading", lambda: "another")
    list(opened())
    assert len(entries(folder)) == 3
    monkeypatch.setattr(kept, "_version_of_reading", lambda: "")
    assert list(opened()) == list(open_trace(source)), "sources that cannot be told apart"
    assert len(entries(folder)) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        lambda content: content + b"more",
    ],
)
def test_a_spoilt_entry_is_read_anew_and_replaced(source, opened, folder, capsys, spoil):
    """Cut short, empty, a bit turned, something behind it: told, and no other arrivals come."""
    plain = list(opened())
    (entry,) = entries(folder)
    content = entry.read_bytes()
    entry.write_bytes(spoil(content))
    assert list(opened()) == plain
    assert capsys.readouterr().err.endswith("the trace file is read instead\n")
    assert entry.read_bytes() == content


def test_an_entry_that_lies_is_left_where_it_stops_to_be_one(source, opened, folder):
    """Its sum is right, its second frame is no list of arrivals: the rest is from the file."""
    plain = list(opened())
    (entry,) = entries(folder)
    content = entry.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    lie = content[:length] + (3).to_bytes(8, "little") + b"\xa2no" + bytes(8)
    entry.write_bytes(lie + kept.xxhash.xxh3_128_digest(lie))
    assert list(opened()) == plain


def test_an_iteration_that_is_left_leaves_nothing(opened, folder):
    """`--requests`, Ctrl-C, an error."""
    reader = iter(opened())
    next(reader)
    assert len(entries(folder)) == 1, "it is being written"
    reader.close()
    assert entries(folder) == []


def test_bad_lines_are_counted_each_time(source, opened, folder):
    """So that a trace with some is not kept, nor one that ends in an error."""
    with source.open("ab") as file:
        file.write(b"no line\n")
    with pytest.raises(TraceError):
        list(opened())
    for _ in range(2):
        trace = opened(skip_bad=True)
        assert len(list(trace)) == 50
        assert trace.bad_lines == 1
    assert entries(folder) == []


def test_what_people_wrote_is_not_kept(folder):
    """Bodies stay in the file that they came in."""
    shelf = CachedTraces(folder)
    with_body = arrival(9, path="/v1/completions", body=b"a secret")
    assert list(shelf.keeping("one", iter([*OTHER, with_body, arrival(10)]), lambda: True)) == [
        *OTHER, with_body, arrival(10),
    ]  # fmt: skip
    assert entries(folder) == []


def test_a_file_that_changes_while_it_is_read_is_not_kept(source, opened, folder):
    """Its name is that of the bytes before."""
    reader = iter(opened())
    next(reader)
    with source.open("ab") as file:
        file.write(b'{"time_s": 99.0, "prompt_tokens": 1, "output_tokens": 1}\n')
    list(reader)
    assert entries(folder) == []


def test_two_that_read_at_once_leave_one_whole_entry(opened, folder, unreadable):
    """Each writes beside its place."""
    one, other = iter(opened()), iter(opened())
    told = [next(one)], [next(other)]
    assert len(entries(folder)) == 2
    told[0].extend(one)
    told[1].extend(other)
    assert told[0] == told[1]
    assert len(entries(folder)) == 1
    unreadable()
    assert list(opened()) == told[0]


def test_the_longest_unused_goes(tmp_path, folder, opened):
    """What is read counts as used; what is new stays, however large."""
    shelf = CachedTraces(folder, bytes_max=10**6)

    def keep(name):
        list(shelf.keeping(name, iter(OTHER), lambda: True))
        return folder / f"{name}.arrivals"

    old, used = keep("old"), keep("used")
    for path in (old, used):
        os.utime(path, (1, 1))
    list(shelf.read("used"))
    assert used.stat().st_mtime > 1
    size = old.stat().st_size
    shelf = CachedTraces(folder, bytes_max=2 * size)
    new = keep("new")
    assert entries(folder) == sorted([used, new])


def test_what_is_larger_than_all_may_be_is_not_kept(folder):
    """Nor what was there thrown away for it."""
    list(CachedTraces(folder).keeping("old", iter(OTHER), lambda: True))
    shelf = CachedTraces(folder, bytes_max=100)
    assert len(list(shelf.keeping("big", iter(OTHER * 20), lambda: True))) == 100
    assert [path.stem for path in entries(folder)] == ["old"]


def test_what_a_dead_process_has_begun_goes_after_an_hour(folder):
    """Not what another is writing now."""
    folder.mkdir(parents=True)
    dead, alive = folder / "dead.part", folder / "alive.part"
    dead.touch()
    alive.touch()
    os.utime(dead, (1, 1))
    list(CachedTraces(folder).keeping("one", iter(OTHER), lambda: True))
    assert entries(folder) == sorted([alive, folder / "one.arrivals"])


def test_a_folder_that_refuses_costs_a_sentence(tmp_path, source, capsys):
    """The arrivals come all the same."""
    blocked = tmp_path / "file"
    blocked.touch()
    trace = open_trace(source, ReadOptions(kept_in=str(blocked / "traces")))
    assert list(trace) == list(open_trace(source))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sim: the trace is not cached in {blocked / 'traces'}: ")


def test_a_full_disk_costs_a_sentence(opened, source, folder, monkeypatch, capsys):
    """In the middle of it; nothing is left behind."""

    def full(self, part):
        raise OSError(28, "No space left on device", "there")

    monkeypatch.setattr(kept._Writer, "_write", full)
    assert list(opened()) == list(open_trace(source))
    assert "No space left on device" in capsys.readouterr().err
    assert entries(folder) == []


def test_it_is_kept_for_others(opened, folder, unreadable):
    """Read once, not when it is there."""
    opened().keep()
    assert len(entries(folder)) == 1
    unreadable()
    opened().keep()


def test_a_missing_entry_is_none(folder):
    """And no sentence: it is the ordinary case."""
    with pytest.raises(NotCached):
        next(CachedTraces(folder).read("none"))


@pytest.mark.parametrize(
    ("named", "home", "folder"),
    [
        ("/there", "/home/me", "/there/homing/traces"),
        ("", "/home/me", "/home/me/.cache/homing/traces"),
        ("relative", "/home/me", "/home/me/.cache/homing/traces"),
        ("", None, ""),
    ],
)
def test_the_folder_is_where_the_xdg_specification_says(named, home, folder, monkeypatch):
    """Relative paths are void; without a home nothing is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", named)

    def of_user():
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return Path(home)

    monkeypatch.setattr(Path, "home", of_user)
    assert kept_folder() == folder
