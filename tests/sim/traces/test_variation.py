"""Other traffic of the same kind: drawn anew, or resampled by blocks that keep sessions whole."""

import json
from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.__main__ import main
from sim.traces import variation
from sim.traces.arrival import TraceError
from sim.traces.formats import open_trace
from sim.traces.reading import ReadOptions
from sim.traces.variation import BLOCKS_MIN, Blocks, resampled, sessions_of, varied
from sim.traces.workloads import Generated
from tests.sim.made import arrival


def chat(seed=1, *, sessions=60, gap_s=2.0, named=True):
    """Conversations below one system prompt, told with blocks of 64 tokens; some wait for answers."""
    random = Random(seed)
    made = []
    for session in range(sessions):
        time_s = session * gap_s + random.random()
        own = [10_000 * (session + 1)]
        for turn in range(random.randint(1, 5)):
            own.append(own[-1] + 1)
            blocks = (1, 2, *own)
            made.append(
                {
                    "time_s": time_s,
                    "prompt_tokens": 64 * len(blocks) + 5,
                    "blocks": blocks,
                    "block_tokens": 64,
                    "session": f"user-{session}" if named else "",
                    "turn": turn,
                }
            )
            time_s += random.uniform(0.5, 20)
    made.sort(key=lambda one: one["time_s"])
    return [arrival(index, **fields) for index, fields in enumerate(made)]


def waiting(requests):
    """The same, each turn after the answer to the one before it."""
    latest = {}
    for one in requests:
        fields = {name: getattr(one, name) for name in one.__struct_fields__}
        yield arrival(**(fields | {"after": latest.get(one.session), "think_s": 1.0}))
        latest[one.session] = one.index


def by_session(requests):
    found = defaultdict(list)
    for one in requests:
        found[one.session].append(one)
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_a_resample_is_whole_sessions_of_the_trace(seed):
    """In order, numbered from 0; each session has all turns of one that was recorded."""
    recorded = chat()
    shapes = Counter(
        tuple(one.prompt_tokens for one in turns) for turns in by_session(recorded).values()
    )
    _, other = resampled(recorded, seed=seed)
    other = list(other)
    assert [one.index for one in other] == list(range(len(other)))
    assert [one.time_s for one in other] == sorted(one.time_s for one in other)
    assert other[-1].time_s <= recorded[-1].time_s
    for turns in by_session(other).values():
        turns.sort(key=lambda one: one.turn)
        assert tuple(one.prompt_tokens for one in turns) in shapes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_who_is_drawn_twice_is_somebody_else(seed):
    """No two sessions share more than the system prompt; within one, each turn extends the last."""
    _, other = resampled(chat(), seed=seed)
    owner = {}
    for one in other:
        assert one.blocks[:2] == (1, 2)
        for text in one.blocks[2:]:
            assert owner.setdefault(text, one.session) == one.session
    assert len({one.session for one in chat()}) > len(
        {session.partition("~")[0] for session in owner.values()}
    ), "some are not drawn at all"
    assert any("~" in session for session in owner.values()), "some are drawn again"


def test_copies_do_not_take_the_ids_of_others():
    """New ids are none that the trace has."""
    recorded = chat()
    known = {text for one in recorded for text in one.blocks}
    _, other = resampled(recorded, seed=3)
    for one in other:
        fresh = set(one.blocks) - known
        assert not fresh or "~" in one.session


def test_the_amount_of_traffic_is_the_same_on_average():
    """Over a hundred resamples, within three standard errors."""
    recorded = chat()
    counts = [sum(1 for _ in resampled(recorded, seed=seed)[1]) for seed in range(100)]
    mean = sum(counts) / 100
    error = (sum((count - mean) ** 2 for count in counts) / 99 / 100) ** 0.5
    assert mean == pytest.approx(len(recorded), abs=3 * error)
    assert len(set(counts)) > 10, "and it varies"


def test_what_waits_for_an_answer_still_waits_for_its_own():
    """Or for nobody, where the circle has put it before what it waited for."""
    recorded = list(waiting(chat()))
    freed = 0
    for seed in range(10):
        other = list(resampled(recorded, seed=seed)[1])
        for one in other:
            if one.after is not None:
                assert one.after < one.index
                assert other[one.after].session == one.session
                assert other[one.after].turn == one.turn - 1
            freed += bool(one.after is None and one.turn)
    assert 0 < freed < 0.1 * 10 * len(recorded)


def test_sessions_without_names_are_found_by_their_prompts():
    """A prompt that goes on where an earlier one ended; what only begins alike is another session."""
    named, nameless = chat(), chat(named=False)
    found = sessions_of(nameless)
    expected = sessions_of(named)
    assert found == expected
    assert len(set(found.values())) == 60


def test_a_session_without_name_does_not_outlast_its_gap():
    """The same text an hour later is another visit."""
    first = arrival(0, prompt_tokens=64, blocks=(5,), block_tokens=64)
    soon, late = (
        arrival(1, time_s=time_s, prompt_tokens=128, blocks=(5, 6), block_tokens=64)
        for time_s in (600.0, 3600.0)
    )
    assert sessions_of([first, soon]) == {0: 0, 1: 0}
    assert sessions_of([first, late]) == {0: 0, 1: 1}


def test_blocks_are_as_many_as_a_short_trace_needs():
    """Twenty at least, of 120 s at most until there are two hundred."""
    minute = [arrival(at, time_s=float(at)) for at in range(61)]
    assert resampled(minute, seed=1)[0] == Blocks(count=BLOCKS_MIN, block_s=3.0)
    hour = [arrival(at, time_s=36.0 * at) for at in range(101)]
    assert resampled(hour, seed=1)[0] == Blocks(count=30, block_s=120.0)
    assert str(resampled(hour, seed=1)[0]) == "30 blocks of 120 s"


def test_lanes_that_begin_at_once_are_drawn_by_themselves():
    """A closed loop keeps its concurrency: as many lanes, all of them from the beginning."""
    lanes = [
        arrival(turn * 8 + lane, after=(turn - 1) * 8 + lane if turn else None)
        for turn in range(10)
        for lane in range(8)
    ]
    blocks, other = resampled(lanes, seed=4)
    other = list(other)
    assert str(blocks) == "8 sessions"
    assert len(other) == 80
    assert sum(one.after is None for one in other) == 8


@pytest.mark.parametrize("think_s", [0.0, 30.0])
def test_lanes_that_think_are_drawn_by_themselves_too(think_s):
    """Their times are those without answers: all at once, or as their thinking says."""
    lanes = [
        arrival(
            turn * 8 + lane, time_s=turn * think_s, after=(turn - 1) * 8 + lane if turn else None
        )
        for turn in range(10)
        for lane in range(8)
    ]
    assert str(resampled(lanes, seed=4)[0]) == "8 sessions"


def test_bursts_stay_bursts():
    """Requests of their own in two bursts an hour apart: what is drawn are stretches, empty or full."""
    given = [arrival(at, time_s=3600.0 * (at // 50) + 0.01 * at) for at in range(100)]
    blocks, _ = resampled(given, seed=1)
    assert blocks.count == 31
    counts = {sum(1 for _ in resampled(given, seed=seed)[1]) for seed in range(20)}
    assert counts <= {50 * bursts for bursts in range(10)}
    assert len(counts) > 2


def capture(path, *flags):
    assert main(["trace", "generate", "shared-prefix", "--out", str(path), *flags]) == 0
    return open_trace(path, ReadOptions())


def told(variation):
    return [(one.time_s, one.prompt_tokens, one.blocks) for one in variation.arrivals]


def test_a_generated_capture_is_drawn_anew(tmp_path):
    """Repetition k is what `sim trace generate` would have written with the k-th seed after its own."""
    flags = ("--rate", "5", "--duration", "20", "--requests", "50")
    trace = capture(tmp_path / "one", *flags, "--seed", "7")
    again = capture(tmp_path / "two", *flags, "--seed", "9")
    asked = {"seed": 1, "requests_max": None}
    second = varied(trace, 2, **asked)
    assert second.generated
    assert second.blocks is None
    found, expected = told(second), told(varied(again, 0, **asked))
    assert [one[1:] for one in found] == [one[1:] for one in expected]
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=2e-6)
    assert told(varied(trace, 0, **asked)) != found


@pytest.mark.parametrize("seed_line", ["", "base_seed: 4, "])
def test_a_workload_file_is_drawn_anew_whether_it_names_a_seed_or_not(tmp_path, seed_line):
    """Its own seed draws the first repetition only."""
    path = tmp_path / "workload.yaml"
    path.write_text(
        f"load: {{type: poisson, {seed_line}stages: [{{rate: 5, duration: 20}}]}}\n"
        "data: {type: shared_prefix, shared_prefix: {num_groups: 2}}\n"
    )
    runs = [
        told(varied(open_trace(path, ReadOptions(seed=at)), at, seed=at, requests_max=None))
        for at in range(3)
    ]
    assert len({tuple(run) for run in runs}) == 3


def test_a_workload_that_nobody_knows_is_named(tmp_path):
    """A capture of a later version: replayed as it is, and not drawn anew."""
    path = tmp_path / "later.jsonl"
    header = {"format": "homing-capture", "version": 1, "workload": {"kind": "later"}}
    path.write_text(
        json.dumps(header) + '\n{"time_s": 0, "prompt_tokens": 5, "output_tokens": 1}\n'
    )
    trace = open_trace(path, ReadOptions())
    assert len(told(varied(trace, 0, seed=1, requests_max=None))) == 1
    with pytest.raises(
        TraceError, match=r"workload.kind: Expected a standard workload, got 'later'"
    ):
        varied(trace, 1, seed=1, requests_max=None)


def test_a_trace_that_cannot_be_held_is_refused(tmp_path, monkeypatch):
    """With how to take less of it."""
    monkeypatch.setattr("sim.traces.variation.HELD_MAX", 3)
    path = tmp_path / "long.jsonl"
    path.write_text(
        '{"format": "homing-capture", "version": 1}\n'
        + '{"time_s": 0, "prompt_tokens": 5, "output_tokens": 1}\n' * 5
    )
    trace = open_trace(path, ReadOptions())
    with pytest.raises(
        TraceError, match=r"at most 3 requests and blocks to resample; the first 4 .*--requests"
    ):
        varied(trace, 1, seed=1, requests_max=None)
    assert varied(trace, 1, seed=1, requests_max=3).blocks is not None


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 30), count=st.integers(1, 30), repetition=st.integers(0, 2))
def test_a_part_of_a_trace_is_what_lies_between(tmp_path_factory, start, count, repetition):
    """From the first of them on, as it is or as others like it: no part has requests of another."""
    path = tmp_path_factory.mktemp("part") / "made.jsonl"
    lines = [
        {
            "timestamp": 250 * at,
            "input_length": 130,
            "output_length": 2,
            "hash_ids": [5_000 + at, 99, 98],
        }
        for at in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = open_trace(path, ReadOptions(block_tokens=64))
    part = list(varied(trace, repetition, seed=7, requests_max=count, requests_from=start).arrivals)
    whole = list(trace)[start : start + count]
    if repetition:
        # Text that is drawn twice gets ids that nothing has; what is drawn once keeps its own.
        known = {one.blocks[0] for one in part} & set(range(5_000, 5_060))
        assert known <= {one.blocks[0] for one in whole}
    else:
        assert [one.blocks for one in part] == [one.blocks for one in whole]
        assert part[0].time_s == 0.0
        assert part[-1].time_s == pytest.approx(whole[-1].time_s - whole[0].time_s)


@pytest.fixture
def generated(tmp_path):
    """A trace that is drawn, and how often it was."""
    path = tmp_path / "drawn.jsonl"
    assert (
        main(["trace", "generate", "shared-prefix", "--requests", "200", "--out", str(path)]) == 0
    )
    return open_trace(path, ReadOptions())


@pytest.mark.parametrize("drawn_max", [10**6, 100, 1])
def test_a_late_stretch_is_the_same_however_often_it_is_asked_for(
    generated, monkeypatch, drawn_max
):
    """Kept, kept in the place of another, or too large to be: who asks does not see which."""
    monkeypatch.setattr(variation, "DRAWN_MAX", drawn_max)
    monkeypatch.setattr(variation, "_DRAWN", variation._Drawn())

    def stretch(repetition):
        return list(
            varied(
                generated, repetition, seed=repetition, requests_from=150, requests_max=20
            ).arrivals
        )

    whole = list(varied(generated, 1, seed=1, requests_max=None).arrivals)
    first = stretch(1)
    assert [one.prompt_tokens for one in first] == [one.prompt_tokens for one in whole[150:170]]
    assert first[0].time_s == 0.0
    others = [stretch(repetition) for repetition in (2, 3, 4)]
    assert all(other != first for other in others)
    assert stretch(1) == first
    assert [stretch(repetition) for repetition in (2, 3, 4)] == others


def test_a_late_stretch_is_drawn_once_and_what_is_kept_is_bounded(generated, monkeypatch):
    """What comes before it is drawn for nothing; the stretch that came first leaves."""
    drawn = []
    draw = Generated.arrivals
    monkeypatch.setattr(
        Generated, "arrivals", lambda self, seed: drawn.append(seed) or draw(self, seed)
    )
    monkeypatch.setattr(variation, "_DRAWN", variation._Drawn())

    def size_of(repetition):
        found = varied(generated, repetition, seed=1, requests_from=150, requests_max=20)
        return sum(1 + len(one.blocks) for one in found.arrivals)

    size = size_of(1)
    assert size_of(1) == size
    assert len(drawn) == 1
    monkeypatch.setattr(variation, "DRAWN_MAX", size)
    size_of(2)
    size_of(2)
    size_of(1)
    assert len(drawn) == 3
