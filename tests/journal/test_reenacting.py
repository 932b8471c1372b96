"""A folder of captures is decided again: joined, cut off, broken, by another configuration."""

import pytest

from epp.configuration.config import load_config
from epp.core.decision.inputs import PoolReplaced
from epp.core.decision.scheduler import Scheduler
from epp.core.journal.events import Level
from epp.core.peers.exchange import PeerExchange
from epp.core.peers.frames import ORIGIN_BYTES
from epp.core.prompt.request import InferenceRequest
from epp.core.types import ApiKind
from epp.journal.frames import frame_of, framed, packed_frames, segment_file
from epp.journal.problem import JournalError
from epp.journal.reenacting import decide_again, judge, totals
from tests.core.journal.traffic import PLUGINS, Live, configured, document, settings_of

ORIGIN = "20260101T000000-0000000a"


def write(folder, steps=200, *, files=1, origin=ORIGIN, live=None):
    """Write a capture of so many segments, each of two members of gzip; return its picker."""
    live = live or Live(document())
    for number in range(files):
        if number:
            live.begin_segment()
        live.run(steps // files)
        frames = [framed(frame_of(event)) for event in live.events]
        live.events.clear()
        half = len(frames) // 2
        name = folder / segment_file(Level.INPUTS, origin, number)
        parts = (b"".join(frames[:half]), b"".join(frames[half:]))
        name.write_bytes(b"".join(packed_frames(part, half) for part in parts))
    return live


def test_several_files_are_one_story(tmp_path):
    """Requests that end in a later segment are found there."""
    write(tmp_path, files=4)
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert (result.decisions, result.same, result.caveats()) == (200, 200, [])


def test_a_file_in_the_middle_that_is_gone_is_a_gap(tmp_path):
    """What follows begins anew, with what is told at the head of its file."""
    write(tmp_path, files=4)
    (tmp_path / segment_file(Level.INPUTS, ORIGIN, 1)).unlink()
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert result.gaps == 1
    assert 100 < result.decisions <= 150
    assert result.changed


def test_the_end_of_a_killed_writer_is_passed_over(tmp_path):
    """Whole members are read; half of one is not."""
    write(tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-40])
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert 0 < result.decisions < 200
    assert result.same == result.decisions


def test_two_processes_are_told_apart(tmp_path):
    """Each has its own scheduler."""
    write(tmp_path, 100)
    write(tmp_path, 60, origin="20260101T000500-0000000b")
    found = decide_again(tmp_path, PLUGINS)
    assert [one.decisions for one in found.values()] == [100, 60]
    assert totals(found)["same"] == 160


def test_another_configuration_is_held_against_what_was_decided(tmp_path):
    """The first differences are named."""
    write(tmp_path)
    config = load_config(document(weight=0), "new", PLUGINS)
    total = totals(decide_again(tmp_path, PLUGINS, config))
    assert 0 < total["changed"] < total["decisions"] == 200
    assert total["differences"] == {"the same was known": total["changed"]}
    assert {"request", "live", "again", "difference"} == set(total["first"][0])


def test_a_folder_without_a_capture_is_named(tmp_path):
    with pytest.raises(
        JournalError, match="contains no journal, expected files of `epp serve --cap"
    ):
        decide_again(tmp_path, PLUGINS)


class Peered(Live):
    """A picker that another one tells what it decides, which is not captured."""

    def __init__(self, text):
        super().__init__(text)
        self.peer = Scheduler(settings_of(configured(text)), seed=2)
        self.talks = [
            PeerExchange(scheduler, origin=bytes([number]) * ORIGIN_BYTES, now=0.0, replicas=2)
            for number, scheduler in enumerate((self.scheduler, self.peer))
        ]

    def begin(self, endpoints):
        super().begin(endpoints)
        at = [endpoint for _, endpoint in self.scheduler.pool.endpoints()]
        self.peer.take(PoolReplaced(at), self.now)

    def ask(self, **fields):
        prompt = f"family {self.random.randrange(12)} ".encode() * 300
        told = {"prompts": (prompt,), "prompt_tokens": len(prompt) // 4, "model": "base"}
        elsewhere = InferenceRequest(request_id="p", api=ApiKind.COMPLETIONS, **told)
        self.peer.schedule(elsewhere, self.now)
        for frame in self.talks[1].outgoing(self.now):
            self.talks[0].receive(frame, self.now, self.talks[1].origin)
        self.talks[0].apply(self.now)
        for frame in self.talks[0].outgoing(self.now):
            self.talks[1].receive(frame, self.now, self.talks[0].origin)
        return super().ask(**told | fields)


def test_of_what_peers_had_a_part_in_nothing_is_said(tmp_path):
    """By the very configuration that decided nothing would have changed, and it is not said that
    a third would have; what cannot be known is counted and has its reason.
    """
    write(tmp_path, live=Peered(document()))
    (result,) = decide_again(tmp_path, PLUGINS).values()
    assert result.learnt
    assert 0 < result.changed < result.decisions
    same = judge(tmp_path, PLUGINS, load_config(document(), "same", PLUGINS))
    assert (same.decisions, same.changed) == (result.decisions, 0)
    assert sum(same.unmade.values()) == result.changed
    assert same.made_again == result.same
    assert any("shared by peers are not captured" in told for told in same.caveats)

    other = judge(tmp_path, PLUGINS, load_config(document(weight=0), "other", PLUGINS))
    assert other.unmade == same.unmade, "it is the capture's, not the configuration's"
    assert 0 < other.changed <= other.made_again


def test_a_whole_capture_leaves_nothing_open(tmp_path):
    write(tmp_path)
    config = load_config(document(weight=0), "new", PLUGINS)
    judged = judge(tmp_path, PLUGINS, config)
    assert (judged.unmade, judged.caveats) == ({}, [])
    assert judged.changed == totals(decide_again(tmp_path, PLUGINS, config))["changed"]
