import struct
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.kv_events import mirror as module
from epp.core.kv_events.mirror import Mirror
from epp.core.kv_events.payload import BlockExtra, Fault, Removed, Stored
from epp.core.moment import PlacedMedia
from epp.core.prompt.token_blocks import hash_tokens, token_seed
from tests.core.kv_events.publisher import FakeEngine
from tests.core.kv_events.test_payload import read_payload


def packed(tokens):
    return struct.pack(f"<{len(tokens)}I", *tokens)


def keys_of(tokens, block_tokens, *, adapter="", salt="", media=()):
    """What a request with these tokens asks for."""
    chain = hash_tokens(
        packed(tokens),
        media=media,
        seed=token_seed(adapter, salt),
        block_tokens=block_tokens,
        blocks_max=10_000,
    )
    return [*struct.unpack(f"={len(chain) // 8}Q", chain)]


class Followed:
    """A mirror, and the keys that it says are held, by tier."""

    def __init__(self, block_tokens=64, rows_max=10_000):
        self.mirror = Mirror(block_tokens)
        self.rows_max = rows_max
        self.held = {}
        self.faults = []

    def take(self, *events):
        changes = []
        for event in events:
            if isinstance(event, Removed):
                self.mirror.remove(event, changes)
            else:
                fault = self.mirror.store(event, changes, self.rows_max - len(self.mirror))
                self.faults += [fault] * (fault is not None)
        for changed in changes:
            held = self.held.setdefault(changed.tier, set())
            (held.update if changed.held else held.difference_update)(changed.keys)
        return self

    def keys(self, tier="gpu"):
        return self.held.get(tier, set())


def run(tokens, size, *, first=100, parent=None, **members):
    """The store of a run of blocks whose hashes count from `first`."""
    hashes = [first + at for at in range(len(tokens) // size)]
    return Stored(hashes=hashes, parent=parent, tokens=packed(tokens), block_tokens=size, **members)


def alone(stored):
    """The same, told as SGLang does: each page in a store of its own."""
    size = stored.block_tokens * 4
    parent = stored.parent
    for at, block in enumerate(stored.hashes):
        tokens = stored.tokens[at * size : (at + 1) * size]
        yield Stored([block], parent, tokens, stored.block_tokens)
        parent = block


DICE = Random(7)
TOKENS = [DICE.getrandbits(17) for _ in range(512)]


@pytest.mark.parametrize("size", [1, 2, 8, 16, 24, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("ours", [16, 32, 64, 100])
def test_keys_do_not_depend_on_the_block_size_of_the_engine(size, ours):
    """Whether ours are longer, as long, shorter, or neither divides the other."""
    whole = len(TOKENS) // size * size
    followed = Followed(ours).take(run(TOKENS[:whole], size))
    assert followed.keys() == {*keys_of(TOKENS[:whole], ours)}


@pytest.mark.parametrize("size", [1, 8, 16, 24, 64, 128])
def test_a_run_goes_on_where_the_one_before_it_ended(size):
    """Inside one of our blocks too."""
    cut = 3 * size
    whole = len(TOKENS) // size * size
    followed = Followed().take(
        run(TOKENS[:cut], size), run(TOKENS[cut:whole], size, first=500, parent=102)
    )
    assert followed.keys() == {*keys_of(TOKENS[:whole], 64)}


def test_two_prompts_part_inside_one_of_our_blocks():
    """At any block of the engine, not only at the end of what was stored in one go."""
    other = [*TOKENS[:48], *range(80)]
    followed = Followed().take(run(TOKENS[:256], 16), run(other[48:], 16, first=900, parent=102))
    assert followed.keys() == {*keys_of(TOKENS[:256], 64), *keys_of(other, 64)}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("ours", [16, 64])
def test_two_prompts_part_inside_a_step(size, ours):
    """At a page of which nothing of ours ends, in the middle of what was stored in one go."""
    cut = 72
    other = [*TOKENS[:cut], *range(120)]
    followed = Followed(ours).take(
        run(TOKENS[:240], size),
        run(other[cut:], size, first=900, parent=100 + cut // size - 1),
    )
    assert followed.keys() == {*keys_of(TOKENS[:240], ours), *keys_of(other, ours)}
    assert not followed.mirror.floating_runs


def test_a_prompt_that_goes_on_inside_a_step_is_not_pushed_out_by_another():
    """However long that is."""
    other = [*range(5_000)]
    followed = Followed().take(
        *alone(run(TOKENS[:100], 1, first=10_000)),
        *alone(run(other, 1, first=20_000)),
        *alone(run(TOKENS[100:400], 1, first=30_000, parent=10_099)),
    )
    assert followed.keys() == {*keys_of(TOKENS[:400], 64), *keys_of(other, 64)}
    assert len(followed.mirror) == 5_400


def test_one_of_ours_is_gone_with_the_block_in_which_it_ends():
    """Four of the engine's make one of ours."""
    followed = Followed().take(run(TOKENS[:128], 16), Removed([107]))
    assert followed.keys() == {*keys_of(TOKENS[:64], 64)}
    followed.take(Removed([106, 105, 104, 103]))
    assert followed.keys() == set()
    assert len(followed.mirror) == 3


def test_several_of_ours_are_gone_with_their_block():
    followed = Followed().take(run(TOKENS[:256], 128), Removed([101]))
    assert followed.keys() == {*keys_of(TOKENS[:128], 64)}
    followed.take(Removed([100]))
    assert followed.keys() == set()
    assert not len(followed.mirror)


def test_each_copy_is_stored_and_removed():
    """The last one takes it along."""
    store = run(TOKENS[:64], 64)
    followed = Followed().take(store, store, store, Removed([100]), Removed([100]))
    assert len(followed.keys()) == 1
    assert followed.mirror.copies == 1
    followed.take(Removed([100]))
    assert followed.keys() == set()


def test_an_engine_that_does_not_count_is_not_counted():
    """A removal is of all copies: too much is forgotten rather than too little."""
    followed = Followed()
    followed.mirror.counting = False
    store = run(TOKENS[:64], 64)
    followed.take(store, store, Removed([100]))
    assert followed.keys() == set()


def test_an_engine_that_says_how_many_copies_are_left_is_believed():
    followed = Followed().take(run(TOKENS[:64], 64), Removed([100], copies_left=[1]))
    assert len(followed.keys()) == 1
    followed.take(Removed([100], copies_left=[0]))
    assert followed.keys() == set()


def test_more_copies_than_blocks_do_not_balance():
    """Hits that are announced again, or removals that are told once."""
    followed = Followed()
    store = run(TOKENS[:128], 64)
    for _ in range(3):
        followed.take(store)
    assert followed.mirror.copies == 6
    assert followed.mirror.unbalanced(6)
    assert not followed.mirror.unbalanced(7)


def test_a_run_without_its_parent_waits_for_it():
    """To hang it at the root would take one prompt for another."""
    head, middle = run(TOKENS[:64], 16), run(TOKENS[64:96], 16, first=200, parent=103)
    tail = run(TOKENS[96:128], 16, first=300, parent=201)
    followed = Followed().take(tail, middle)
    assert followed.keys() == set()
    assert followed.mirror.floating_runs == 2
    followed.take(head)
    assert followed.keys() == {*keys_of(TOKENS[:128], 64)}
    assert followed.mirror.floating_runs == 0
    followed.take(Removed([301]))
    assert followed.keys() == {*keys_of(TOKENS[:64], 64)}


def test_what_is_removed_while_it_waits_is_not_held_later():
    """Nor what follows it."""
    followed = Followed().take(
        run(TOKENS[64:256], 64, first=200, parent=100), Removed([201]), run(TOKENS[:64], 64)
    )
    assert followed.keys() == {*keys_of(TOKENS[:128], 64)}


def test_runs_that_wait_are_bounded(monkeypatch):
    """The oldest goes."""
    monkeypatch.setattr(module, "FLOATING_RUNS_MAX", 2)
    followed = Followed().take(
        *(run(TOKENS[:64], 64, first=10 * at, parent=10 * at - 1) for at in range(1, 4))
    )
    assert followed.mirror.floating_runs == 2
    assert sorted(followed.mirror._floating_at) == [20, 30]


def test_adapters_and_salts_have_keys_of_their_own():
    """And go on with them."""
    salted = (BlockExtra(salt="tenant"),)
    followed = Followed().take(
        run(TOKENS[:64], 64, adapter="sql", extras=salted),
        run(TOKENS[64:128], 64, first=101, parent=100, adapter="sql"),
        run(TOKENS[:64], 64, first=300),
    )
    keys = keys_of(TOKENS[:128], 64, adapter="sql", salt="tenant") + keys_of(TOKENS[:64], 64)
    assert followed.keys() == {*keys}
    assert followed.mirror.adapters == {"sql"}


@pytest.mark.parametrize("size", [16, 32, 64])
def test_an_image_is_part_of_the_key_from_where_it_begins(size):
    """Its placeholder is the same for all."""
    media = (PlacedMedia("cat", 40, 100), PlacedMedia("dog", 150, 9))
    extras = []
    for start in range(0, 256, size):
        over = [
            (item.identifier, item.offset - start)
            for item in media
            if item.offset < start + size and item.offset + item.length > start
        ]
        extras.append(BlockExtra(tuple(pair for pair in over if pair[1] >= 0)))
    followed = Followed().take(run(TOKENS[:256], size, extras=tuple(extras)))
    assert followed.keys() == {*keys_of(TOKENS[:256], 64, media=media)}
    plain = keys_of(TOKENS[:256], 64)
    assert not followed.keys() & {*plain}
    later = (PlacedMedia("cat", 200, 10),)
    assert keys_of(TOKENS[:256], 64, media=later)[:3] == plain[:3]


@pytest.mark.parametrize("size", [1, 8, 24])
@pytest.mark.parametrize("cut", [24, 48, 72, 144, 168])
def test_an_image_inside_a_step_is_part_of_the_key_of_who_goes_on_there(size, cut):
    """Whether it begins before or behind the place where the prompt goes on, two of them in their order."""
    media = (PlacedMedia("cat", 66, 3), PlacedMedia("dog", 70, 90), PlacedMedia("cow", 164, 9))
    extras = tuple(
        BlockExtra(
            tuple(
                (item.identifier, item.offset - start)
                for item in media
                if start <= item.offset < start + size
            )
        )
        for start in range(0, 240, size)
    )
    blocks = cut // size
    followed = Followed().take(
        run(TOKENS[:240], size, extras=extras),
        run([*TOKENS[:cut], *range(120)][cut:], size, first=900, parent=100 + blocks - 1),
    )
    other = [*TOKENS[:cut], *range(120)]
    before = tuple(item for item in media if item.offset < cut)
    assert followed.keys() == {
        *keys_of(TOKENS[:240], 64, media=media),
        *keys_of(other, 64, media=before),
    }
    again = Followed().take(
        run(TOKENS[:cut], size, extras=extras[:blocks]),
        run(TOKENS[cut:240], size, first=900, parent=100 + blocks - 1, extras=extras[blocks:]),
    )
    assert again.keys() == {*keys_of(TOKENS[:240], 64, media=media)}


def test_a_tier_knows_hashes_that_the_device_told():
    """A placeholder has no tokens."""
    hashes = Stored(hashes=[100, 101, 555], tier="cpu")
    followed = Followed().take(run(TOKENS[:128], 64), hashes, Removed([100, 101]))
    assert followed.keys() == set()
    assert followed.keys("cpu") == {*keys_of(TOKENS[:128], 64)}
    assert followed.mirror.counts.skipped == 1
    followed.take(run(TOKENS[128:192], 64, first=102, parent=101))
    assert followed.keys() == {keys_of(TOKENS[:192], 64)[2]}, "it goes on where the tier ends"
    followed.take(Removed([100, 101], "cpu"))
    assert followed.keys("cpu") == set()


def test_a_prompt_goes_on_inside_a_step_from_another_tier():
    """Where the device has given the page up."""
    pages = [*range(100, 172)]
    followed = Followed(16).take(
        run(TOKENS[:72], 1), Stored(hashes=pages, tier="cpu"), Removed(pages[::-1])
    )
    assert followed.keys() == set()
    assert followed.keys("cpu") == {*keys_of(TOKENS[:72], 16)}
    followed.take(run(TOKENS[72:96], 1, first=900, parent=171))
    assert followed.keys() == {*keys_of(TOKENS[:96], 16)[4:]}
    followed.take(Removed(pages, "cpu"), Removed([*range(900, 924)]))
    assert not len(followed.mirror)
    assert not followed.mirror.rows


def test_a_copy_of_a_page_inside_a_step_is_one_of_it():
    """What goes on from there does so until the last is gone."""
    page = run(TOKENS[:8], 8)
    followed = Followed(16).take(page, page, Removed([100]))
    assert len(followed.mirror) == followed.mirror.copies == 1
    followed.take(run(TOKENS[8:16], 8, first=200, parent=100))
    assert followed.keys() == {*keys_of(TOKENS[:16], 16)}
    followed.take(Removed([100]), run([7] * 8, 8, first=300, parent=100))
    assert followed.keys() == {*keys_of(TOKENS[:16], 16)}
    assert followed.mirror.floating_runs == 1


def test_what_is_held_elsewhere_ties_nothing_to_this_endpoint():
    followed = Followed().take(run(TOKENS[:64], 64, local=False), Removed([100], local=False))
    assert followed.keys() == set()


def test_tiers_are_bounded():
    followed = Followed()
    for number in range(50):
        followed.take(run(TOKENS[:64], 64, tier=f"tier-{number}"))
    assert len(followed.mirror.tiers) == module.TIERS_MAX


def test_a_run_of_which_not_all_blocks_are_told_is_a_fault():
    """Its tokens are not those of its hashes."""
    followed = Followed().take(Stored(hashes=[1], block_tokens=16, sparse=True))
    assert followed.faults == [Fault.NOT_DENSE]


def test_the_groups_of_a_hybrid_are_bounded():
    """The fault says so."""
    followed = Followed()
    for group in range(1, module.GROUPS_MAX + 2):
        followed.take(Stored(hashes=[group], block_tokens=16, group=group, kind="mamba"))
    assert len(followed.mirror.groups) == module.GROUPS_MAX
    assert followed.faults == [Fault.TOO_MANY_GROUPS]


def steps_of(tokens):
    return keys_of(tokens, 16)


@pytest.mark.parametrize(
    ("kind", "window", "held", "blocks"),
    [
        ("sliding_window", 96, range(5, 8), 4),
        ("sliding_window", 96, range(6, 8), 0),
        ("sliding_window", 96, [2, 3, 4, 5], 3),
        ("sliding_window", 96, [0, 1], 1),
        ("sliding_window", 0, range(1, 8), 0),
        ("mamba", 0, [7], 4),
        ("mamba", 0, [6, 3], 2),
        ("mamba", 0, [2, 4, 6], 0),
        ("full_attention", 0, range(6), 3),
        ("chunked_local_attention", 128, range(4), 2),
        ("unheard of", 0, range(8), 4),
    ],
)
def test_a_hybrid_can_use_what_all_groups_hold_at_one_place(kind, window, held, blocks):
    """Blocks of 32 tokens, eight of which make four of ours."""
    other = Stored(
        hashes=[100 + at for at in held],
        block_tokens=32,
        group=1,
        kind=kind,
        window=window,
        sparse=True,
    )
    for events in ((run(TOKENS[:256], 32), other), (other, run(TOKENS[:256], 32))):
        if events[0] is other and kind == "full_attention":
            continue
        followed = Followed().take(*events)
        assert followed.mirror.supported(steps_of(TOKENS[:256]), 4) == blocks
    assert Followed().take(run(TOKENS[:256], 32)).mirror.supported([], 4) == 4


def test_a_hybrid_gives_up_blocks_by_group():
    """Copies too."""
    other = Stored(hashes=[101, 103], block_tokens=32, group=1, kind="mamba", sparse=True)
    followed = Followed().take(run(TOKENS[:128], 32), other, other)
    assert followed.mirror.supported(steps_of(TOKENS[:128]), 2) == 2
    followed.take(Removed([103], group=1))
    assert followed.mirror.supported(steps_of(TOKENS[:128]), 2) == 2
    followed.take(Removed([103], group=1))
    assert followed.mirror.supported(steps_of(TOKENS[:128]), 2) == 1
    assert len(followed.keys()) == 2, "the group that looks back to the start has it still"
    followed.take(Removed([103], group=7))
    assert len(followed.keys()) == 2


def test_what_there_is_no_room_for_is_not_kept():
    """The head of a prompt is worth more than its tail."""
    followed = Followed(rows_max=2).take(run(TOKENS[:256], 64))
    assert followed.keys() == {*keys_of(TOKENS[:128], 64)}
    assert followed.mirror.cut


def test_what_was_stored_last_is_given_up_first():
    followed = Followed().take(run(TOKENS[:256], 64))
    changes = []
    assert followed.mirror.give_up(3, changes) == 3
    gone = [key for changed in changes for key in changed.keys]
    assert sorted(gone) == sorted(keys_of(TOKENS[:256], 64)[1:])
    assert followed.mirror.cut


def test_what_is_inside_a_step_is_given_up_before_anything_else():
    """In every tier: keys go when there is nothing else."""
    pages = [*range(100, 180)]
    followed = Followed(16).take(
        run(TOKENS[:80], 1), Stored(hashes=pages, tier="cpu"), run(TOKENS[:64], 8, first=300)
    )
    mirror = followed.mirror
    changes = []
    assert len(mirror) == 80 + 80 + 8
    assert mirror.rows == len(mirror) + 75 + 75 + 4
    assert mirror.give_up(75 + 75 + 4, changes) == 154
    assert changes == []
    assert mirror.rows == len(mirror) == 5 + 5 + 4
    assert mirror.give_up(1_000, changes) == 14
    assert mirror.rows == len(mirror) == 0
    assert {changed.tier: {*changed.keys} for changed in changes} == {
        "gpu": {*keys_of(TOKENS[:80], 16)},
        "cpu": {*keys_of(TOKENS[:80], 16)},
    }


class Counted(dict):
    """A table of which it is counted how often its end is looked at; to go through it is a fault."""

    looked = 0

    def popitem(self):
        Counted.looked += 1
        return super().popitem()

    def __iter__(self):
        raise AssertionError("a table is gone through")

    __reversed__ = keys = values = items = __iter__


@pytest.mark.parametrize("size", [1, 16, 64])
def test_giving_up_looks_at_what_is_given_up_and_at_nothing_else(size, monkeypatch):
    """`next(reversed(table))` goes by what was given up before, each time."""
    followed = Followed().take(run(TOKENS, size))
    mirror = followed.mirror
    tier = mirror.tiers["gpu"]
    for name in ("blocks", "tails"):
        setattr(tier, name, Counted(getattr(tier, name)))
    monkeypatch.setattr(Counted, "looked", 0)
    before = len(mirror)
    assert mirror.give_up(7, []) == 7
    assert mirror.give_up(0, []) == 0
    assert Counted.looked == 7
    assert len(mirror) == before - 7


class Read(list):
    """Hashes of which it is counted how often one is read."""

    count = 0

    def __getitem__(self, at):
        self.count += 1
        return super().__getitem__(at)

    def index(self, *_):
        raise AssertionError("hashes are gone through")


def test_who_removes_a_run_that_waits_page_by_page_has_each_page_read_once():
    """From its end, leaving out every other one, so that each removal is of another place."""
    hashes = Read(range(10_000, 20_000))
    waiting = Stored(hashes, 1, packed(range(10_000)), 1)
    followed = Followed().take(waiting)
    hashes.count = 0
    followed.take(*(Removed([block]) for block in range(19_998, 9_999, -2)))
    assert hashes.count == 10_000
    assert not followed.mirror._floating_at


def test_a_run_that_waits_no_more_takes_no_block_of_another_along():
    """It was told again, behind another parent, after it had been removed from the first."""
    followed = Followed().take(
        run(TOKENS[64:192], 64, first=200, parent=100),
        Removed([201]),
        run(TOKENS[256:320], 64, first=201, parent=300),
        run(TOKENS[:64], 64),
        Removed([201]),
        run(TOKENS[192:256], 64, first=300),
    )
    assert followed.keys() == {*keys_of(TOKENS[:128], 64), *keys_of(TOKENS[192:256], 64)}


def test_pages_that_wait_for_their_parents_are_bounded(monkeypatch):
    """By their number too: their tokens may be few."""
    monkeypatch.setattr(module, "FLOATING_BLOCKS_MAX", 100)
    followed = Followed().take(
        *(run(TOKENS[:40], 1, first=1_000 * at, parent=at) for at in range(1, 6))
    )
    assert sorted({block // 1_000 for block in followed.mirror._floating_at}) == [4, 5]


@pytest.mark.parametrize("ours", [16, 64, 100, 1_000])
@pytest.mark.parametrize("size", [1, 15, 16])
def test_whatever_pages_an_engine_tells_no_more_rows_are_kept_than_there_is_room_for(ours, size):
    """Pages without a parent, long runs and branches; and they go in any order."""
    dice = Random(11)
    followed = Followed(ours, rows_max=3_000)
    mirror = followed.mirror
    known = []
    for first in range(0, 100_000, 250):
        parent = dice.choice([None, None, *known[-3:], first + 10**9])
        length = dice.choice([1, 3, 250])
        tokens = [dice.getrandbits(17) for _ in range(length * size)]
        followed.take(run(tokens, size, first=first, parent=parent))
        known.append(first + length // 2)
        assert len(mirror) <= followed.rows_max
        assert mirror.rows <= 2 * followed.rows_max
    assert mirror.cut
    blocks = [*range(100_000)]
    dice.shuffle(blocks)
    followed.take(Removed(blocks))
    assert len(mirror) == mirror.rows == 0
    assert not any(followed.held.values())
    assert not mirror._floating_at


@settings(deadline=None, max_examples=100)
@given(
    st.data(),
    st.sampled_from([1, 2, 4, 8, 16, 24, 32, 64, 128]),
    st.sampled_from([16, 64]),
    st.booleans(),
    st.sampled_from(["map", "array"]),
    st.booleans(),
)
def test_a_mirror_follows_a_pool(data, size, ours, digests, form, one_by_one):
    """Random prompts with much in common, copies and all: it holds what the pool holds, and no more."""
    # A pool of small pages has room for a prompt or two, as one of larger ones has.
    engine = FakeEngine(max(12, 400 // size), size, form=form, digests=digests)
    followed = Followed(ours)
    lengths = st.sampled_from([3, 7, 20, 64, 128])
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = []
        for part in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)):
            tokens += [part * 1_000 + at for at in range(data.draw(lengths))]
        engine.serve(tokens, twins=data.draw(st.integers(1, 2)))
        for event in read_payload(engine.step()).events:
            apart = one_by_one and isinstance(event, Stored)
            followed.take(*alone(event) if apart else (event,))
        hit = engine.cached_tokens(tokens)
        believed = 0
        known = followed.keys()
        for key in keys_of(tokens, ours)[: (len(tokens) - 1) // ours]:
            if key not in known:
                break
            believed += ours
        if ours % size == 0:
            assert believed == hit // ours * ours
        elif size < ours:
            # Two blocks of the engine may hold one of ours, which goes with the first of them.
            assert min(believed, (len(tokens) - 1) // size * size // ours * ours) <= hit
        assert len(followed.mirror) == len({*engine.free.values()})
        assert followed.mirror.copies == len(engine.free)
        assert not followed.mirror.floating_runs
