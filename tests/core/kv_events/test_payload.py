import struct
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.core.kv_events import payload as module
from epp.core.kv_events.payload import (
    BLOCKS_MAX,
    PAYLOAD_BYTES_MAX,
    Batch,
    BlockExtra,
    Cleared,
    Fault,
    Removed,
    Stored,
    rank_in,
    read_payload,
)

IDS = [*range(32)]
PACKED = struct.pack("<32I", *IDS)
DIGEST = bytes(range(32))
OF_DIGEST = int.from_bytes(DIGEST[-8:], "big")


def payload(*events, rank=0):
    return msgspec.msgpack.encode([1.5, [*events], rank])


def read(*events):
    """The events of one payload, in which nothing is at fault."""
    batch = read_payload(payload(*events))
    assert batch.faults == ()
    return [*batch.events]


def stored(**members):
    """A map of vLLM since 0.24."""
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": IDS,
        "block_size": 16,
    }
    return event | members


ARRAYS = {
    "vllm 0.9": ["BlockStored", [1, 2], 7, IDS, 16, None],
    "vllm 0.10": ["BlockStored", [1, 2], 7, IDS, 16, None, "GPU"],
    "vllm 0.14": ["BlockStored", [1, 2], 7, IDS, 16, None, "GPU", None],
    "vllm 0.17": ["BlockStored", [1, 2], 7, IDS, 16, None, "GPU", None, [None, None]],
    "vllm 0.20": ["BlockStored", [1, 2], 7, IDS, 16, None, "GPU", None, None, 0],
    "vllm 0.22": [
        "BlockStored",
        [1, 2],
        7,
        IDS,
        16,
        None,
        "GPU",
        None,
        None,
        0,
        "full_attention",
        None,
    ],
    "later": [
        "BlockStored",
        [1, 2],
        7,
        IDS,
        16,
        None,
        "GPU",
        None,
        None,
        0,
        "",
        0,
        "new",
        [1, [2]],
    ],
    "sglang": ["BlockStored", [1, 2], 7, IDS, 16, None, "GPU"],
}


@pytest.mark.parametrize("event", ARRAYS.values(), ids=ARRAYS)
def test_arrays_of_every_release_are_read(event):
    """Members are missing at the end, or too many."""
    (found,) = read(event)
    assert (found.hashes, found.parent, found.tokens) == ([1, 2], 7, PACKED)
    assert (found.block_tokens, found.tier, found.group) == (16, "gpu", 0)


def test_maps_are_read_without_the_members_that_have_their_defaults():
    """And with some that are not known."""
    event = stored(locality="LOCAL", ownership={"a": [1]}, session_id="s", new=[[]])
    (found,) = read(event)
    assert found == Stored(hashes=[1, 2], tokens=PACKED, block_tokens=16)


def test_hashes_are_integers_of_either_sign_or_digests():
    """Of which the low 64 bits count."""
    (found,) = read(stored(block_hashes=[DIGEST, -1], parent_block_hash=DIGEST))
    assert found.hashes == [OF_DIGEST, 2**64 - 1]
    assert found.parent == OF_DIGEST
    assert read(["BlockRemoved", [DIGEST], "GPU"])[0].hashes == [OF_DIGEST]


def test_removals_that_follow_each_other_are_one():
    """Engines write one a block."""
    events = read(
        ["BlockRemoved", [1], "GPU"],
        ["BlockRemoved", [2], "GPU"],
        ["BlockRemoved", [3], "CPU"],
        ["BlockRemoved", [4], "CPU", 1],
        ["AllBlocksCleared"],
        ["BlockRemoved", [5], "CPU", 1],
    )
    assert events == [
        Removed([1, 2]),
        Removed([3], "cpu"),
        Removed([4], "cpu", 1),
        Cleared(),
        Removed([5], "cpu", 1),
    ]


OTHERS = [
    stored(),
    {"type": "AllBlocksCleared"},
    {"type": "BlockRemoved", "block_hashes": [5, 6], "medium": "GPU", "group_idx": 0},
    {"type": "BlockRemoved", "block_hashes": [2**63], "medium": "CPU", "group_idx": 0},
    {"type": "BlockRemoved", "block_hashes": [2**63], "medium": "GPU", "group_idx": 1},
    {"type": "Other"},
]


@settings(deadline=None)
@given(
    st.lists(st.integers(min_value=0, max_value=2**64 - 1), max_size=40),
    st.lists(st.sampled_from(OTHERS), max_size=4),
)
def test_removals_as_vllm_writes_them_are_read_as_any_others(hashes, others):
    """They are cut out; with a member more each is read by itself."""
    usual = [
        {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}
        for block in hashes
    ]
    by_itself = [event | {"new": None} for event in usual]
    found = read_payload(payload(*usual, *others))
    assert found == read_payload(payload(*by_itself, *others))
    assert not hashes or found.events[0].hashes[: len(hashes)] == hashes


def test_removals_that_are_cut_short_are_no_batch():
    whole = payload(
        *[{"type": "BlockRemoved", "block_hashes": [2**63], "medium": "GPU", "group_idx": 0}] * 3
    )
    assert all(read_payload(whole[:end]).broken for end in range(1, len(whole) - 1))


def test_an_engine_that_counts_copies_itself_says_how_many_are_left():
    """One a hash."""
    event = {"type": "BlockRemoved", "block_hashes": [1, 2], "remaining_copy_counts": [1, 0]}
    assert read(event) == [Removed([1, 2], copies_left=[1, 0])]


@pytest.mark.parametrize(
    ("medium", "tier"), [(None, "gpu"), ("", "gpu"), ("CPU", "cpu"), ("CPU_TIER1", "cpu_tier1")]
)
def test_tiers_are_compared_in_lower_case(medium, tier):
    """None told is the device."""
    assert read(stored(medium=medium))[0].tier == tier


def test_blocks_elsewhere_and_hashes_alone_are_told_as_such():
    """A block that any endpoint can load, and a placeholder of an offloading connector."""
    assert not read(stored(locality="REMOTE"))[0].local
    (found,) = read(stored(token_ids=[], block_size=0, medium="CPU"))
    assert (found.tokens, found.sparse, found.tier) == (b"", False, "cpu")


def test_a_group_that_lists_some_of_its_blocks_is_sparse():
    """The tokens of all are there, and are not those of the hashes."""
    (found,) = read(
        stored(
            block_hashes=[2],
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=16,
        )
    )
    assert found.sparse
    assert (found.tokens, found.group, found.kind, found.window) == (b"", 1, "sliding_window", 16)


@pytest.mark.parametrize(
    ("members", "adapter", "extras"),
    [
        (
            {"lora_id": 1, "lora_name": "sql", "extra_keys": [["sql"], ["sql"]]},
            "sql",
            (BlockExtra(),) * 2,
        ),
        ({"extra_keys": [["tenant"], None]}, "", (BlockExtra(salt="tenant"), BlockExtra())),
        ({"cache_salt": "tenant"}, "", (BlockExtra(salt="tenant"), BlockExtra())),
        (
            {
                "lora_name": "sql",
                "extra_keys": [["sql", ["cat", 3], "tenant"], ["sql", ["cat", -13]]],
            },
            "sql",
            (BlockExtra((("cat", 3),), "tenant"), BlockExtra()),
        ),
        (
            {"lora_id": 0, "extra_keys": [None, [["cat", 0], ["dog", 9]]]},
            "",
            (BlockExtra(), BlockExtra((("cat", 0), ("dog", 9)))),
        ),
    ],
)
def test_what_decides_beside_the_tokens_is_told_by_its_place(members, adapter, extras):
    """The adapter first, then media, then the salt of a first block."""
    (found,) = read(stored(**members))
    assert (found.adapter, found.extras) == (adapter, extras)


@pytest.mark.parametrize(
    "members",
    [
        {"lora_id": 3},
        {"extra_keys": [None, ["bare"]]},
        {"extra_keys": [["bare", ["cat", 1]], None]},
        {"extra_keys": [[b"embeds"], None]},
        {"extra_keys": [[["cat", 99]], None]},
        {"extra_keys": [[["cat", -1]], None]},
        {"extra_keys": [["salt"]]},
        {"extra_keys": ["salt", "salt"]},
        {"extra_keys": [["s" * 300], None]},
        {"lora_name": "a" * 300},
        {"medium": "m" * 300},
    ],
)
def test_what_cannot_be_told_apart_is_not_known(members):
    """Two prompts would be taken for one."""
    batch = read_payload(payload(stored(**members)))
    assert (batch.events, batch.faults) == ((), (Fault.KEYS,))


BROKEN = {
    "nothing": (b"", Fault.NOT_A_BATCH),
    "cut off": (payload(stored())[:-9], Fault.NOT_A_BATCH),
    "no list": (msgspec.msgpack.encode({"ts": 1}), Fault.NOT_A_BATCH),
    "no events": (msgspec.msgpack.encode([1.0]), Fault.NOT_A_BATCH),
    "events are text": (msgspec.msgpack.encode([1.0, "abc", 0]), Fault.NOT_A_BATCH),
    "claims four thousand million events": (
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        Fault.NOT_A_BATCH,
    ),
    "nested": (b"\x93\xcb" + bytes(8) + b"\x91" * 100_000, Fault.NOT_A_BATCH),
    "too large": (bytes(PAYLOAD_BYTES_MAX + 1), Fault.TOO_LARGE),
    "too many": (payload(["BlockRemoved", [0] * (BLOCKS_MAX + 1)]), Fault.TOO_MANY),
    "text for hashes": (payload(["BlockRemoved", "abc"]), Fault.REMOVAL),
    "a group that is none": (payload(["BlockRemoved", [1], "GPU", -1]), Fault.REMOVAL),
    "a short digest": (payload(["BlockRemoved", [b"abc"]]), Fault.REMOVAL),
    "counts of others": (
        payload({"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": []}),
        Fault.REMOVAL,
    ),
    "an event that is a number": (payload(7), Fault.REMOVAL),
    "an event without a type": (payload({}), Fault.REMOVAL),
    "a negative id": (payload(stored(token_ids=[-1] * 32)), Fault.STORE),
    "an id of 64 bits": (payload(stored(token_ids=[2**40] * 32)), Fault.STORE),
    "an id that is a fraction": (payload(stored(token_ids=[0.5] * 32)), Fault.STORE),
    "a negative size": (payload(stored(block_size=-16)), Fault.STORE),
    "an unknown type": (payload(["BlockMoved", 1]), Fault.UNKNOWN_TYPE),
}


@pytest.mark.parametrize(("broken", "fault"), BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_read_costs_a_fault_and_no_exception(broken, fault):
    """By its reason; what may hide a removal says so."""
    batch = read_payload(broken)
    assert batch.events == ()
    assert batch.faults == (fault,)
    assert batch.broken is (fault not in {Fault.STORE, Fault.UNKNOWN_TYPE})


def test_one_event_that_cannot_be_read_costs_no_other():
    """Arrays and maps in one payload too."""
    batch = read_payload(payload(["BlockRemoved", [1]], stored(token_ids="x"), stored(), ["New"]))
    assert [type(event) for event in batch.events] == [Removed, Stored]
    assert batch.faults == (Fault.STORE, Fault.UNKNOWN_TYPE)
    assert not batch.broken


def test_the_rank_is_told_and_may_be_missing():
    """Or be what no rank is."""
    assert read_payload(payload(rank=3)) == Batch(at_s=1.5, rank=3)
    assert read_payload(msgspec.msgpack.encode([1.5, []])).rank == 0
    assert read_payload(payload(rank=-5)).rank == 0


@pytest.mark.parametrize(
    ("batch", "rank"),
    [
        ([1.5, [], 0], 0),
        ([1.5, [["AllBlocksCleared"]], 63], 63),
        ([1.5, [], 127], 127),
        ([1.5, [], 128], None),
        ([1.5, [], -1], None),
        ([1.5, [], None], None),
        ([1.5, [1]], None),
        (1, None),
        ({}, None),
    ],
)
def test_the_rank_is_told_without_reading_the_rest(batch, rank):
    """As whoever reads all finds it."""
    encoded = msgspec.msgpack.encode(batch)
    assert rank_in(encoded) == rank
    if rank is not None:
        assert read_payload(encoded).rank == rank
    assert rank_in(b"") is rank_in(b"\x93") is None


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch(data):
    """Nothing raises."""
    read_payload(data)
    read_payload(b"\x93\xcb" + bytes(8) + data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = [
    *stored(),
    "medium",
    "lora_id",
    "lora_name",
    "extra_keys",
    "group_idx",
    "cache_salt",
    "locality",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "remaining_copy_counts",
]


@settings(deadline=None)
@given(
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]),
    st.dictionaries(st.sampled_from(MEMBERS), VALUES),
    st.lists(VALUES, max_size=12),
)
def test_members_of_any_type_are_read_or_are_a_fault(tag, members, positional):
    """In either form: what is known has hashes of 64 bits and whole ids."""
    for event in ({**stored(), **members, "type": tag}, [tag, *positional]):
        for found in read_payload(payload(event)).events:
            if isinstance(found, Stored):
                assert len(found.tokens) in {0, len(found.hashes) * found.block_tokens * 4}
                assert len(found.extras) in {0, len(found.hashes)}
            if not isinstance(found, Cleared):
                assert all(0 <= each < 2**64 for each in found.hashes)


def test_both_forms_of_the_same_events_are_the_same():
    """Of random ones."""
    dice = Random(1)
    for _ in range(50):
        size = dice.choice([1, 16, 64])
        hashes = [dice.getrandbits(64) for _ in range(dice.randint(1, 5))]
        ids = [dice.getrandbits(17) for _ in range(len(hashes) * size)]
        event = stored(
            block_hashes=hashes,
            parent_block_hash=dice.choice([None, 5]),
            token_ids=ids,
            block_size=size,
        )
        event |= {"lora_id": None, "medium": dice.choice(["GPU", "CPU"])}
        assert read(event) == read([*event.values()])


def test_what_a_fault_may_hide_is_said_of_every_one():
    """A new one has to be thought about."""
    hides = {fault for fault in Fault if fault.may_hide_a_removal}
    assert hides == module._HIDES
    assert Fault.NOT_DENSE not in hides
