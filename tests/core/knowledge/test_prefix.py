import tracemalloc
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epp.core.duration import Duration, parse_duration
from epp.core.knowledge import prefix as module
from epp.core.knowledge.affinity import NoHitLruSettings
from epp.core.knowledge.hit_accuracy import Correction
from epp.core.knowledge.prefix import PrefixIndex, PrefixIndexSettings
from epp.core.prompt.blocks import hash_blocks
from epp.core.prompt.request import InferenceRequest

SLOTS = 4
BLOCK_BYTES = 256
TTL_S = 20


def chain_of(text: str) -> bytes:
    """One block a letter."""
    return hash_blocks(text.encode(), seed=1, block_bytes=1, blocks_max=len(text))


def request_of(*texts: str) -> InferenceRequest:
    return InferenceRequest(
        request_id="r", chains={BLOCK_BYTES: tuple(chain_of(text) for text in texts)}
    )


def opened(sweep_holdings_max: int = 4_096, **parameters: object) -> PrefixIndex:
    settings = PrefixIndexSettings(**parameters)
    return PrefixIndex(settings, sweep_holdings_max=sweep_holdings_max)


def matched(index: PrefixIndex, *texts: str, now: float = 0.0) -> list[int]:
    return index.match(request_of(*texts), SLOTS, now).matched.tolist()


def check_structure(index: PrefixIndex) -> None:
    """Recount everything that the index keeps counted, and check what its methods rely on."""
    nodes = {id(node): node for node in index._first.values()}
    children = dict.fromkeys(nodes, 0)
    blocks = [0] * len(index._slots)
    for node in nodes.values():
        assert node.holders
        assert node.run
        assert index._first[node.run[:8]] is node
        assert node.mask == sum(1 << slot for slot in node.holders)
        assert node.oldest <= min(node.holders.values())
        for slot in node.holders:
            blocks[slot] += len(node.run) // 8
        if node.parent is not None:
            children[id(node.parent)] += 1
            for slot, stamp in node.holders.items():
                assert stamp <= node.parent.holders[slot]
    assert all(node.children == children[key] for key, node in nodes.items())
    assert blocks == [slot.blocks for slot in index._slots]
    assert index.entries == sum(blocks)
    assert index._nodes == len(nodes)
    assert index._holdings == sum(len(node.holders) for node in nodes.values())
    assert index._run_blocks == sum(len(node.run) // 8 for node in nodes.values())
    assert len(index._fronts) == sum(slot.queued for slot in index._slots)
    assert index._records == sum(len(slot.stamps) for slot in index._slots)
    for slot in index._slots:
        assert list(slot.stamps) == sorted(set(slot.stamps))
        reached = set()
        for stamp, end in zip(slot.stamps, slot.ends, strict=True):
            node = end
            while node is not None and node.holders.get(slot.number) == stamp:
                assert id(node) not in reached
                reached.add(id(node))
                node = node.parent
        assert reached == {key for key, node in nodes.items() if slot.number in node.holders}


class Model:
    """What the index should say, from one dict a slot: block -> (order, depth, last routed)."""

    def __init__(self) -> None:
        self.held: list[dict[str, tuple[int, int, float]]] = [{} for _ in range(SLOTS)]
        self.capacity = [12] * SLOTS
        self.order = 0

    def record(self, texts: tuple[str, ...], slot: int, now: float) -> list[set[str]]:
        """Return, by prompt, the blocks that were held before."""
        before = []
        held = self.held[slot]
        for text in texts:
            self.order += 1
            before.append({text[:end] for end in range(1, len(text) + 1)} & set(held))
            for end in range(1, min(len(text), self.capacity[slot]) + 1):
                held[text[:end]] = (self.order, end, now)
            self.fit(slot)
        return before

    def fit(self, slot: int) -> None:
        held = self.held[slot]
        oldest_first = sorted(held, key=lambda block: (held[block][0], -held[block][1]))
        for block in oldest_first[: max(0, len(held) - self.capacity[slot])]:
            del held[block]

    def depth(self, text: str, slot: int, now: float) -> int:
        live = 0
        held = self.held[slot]
        while text[: live + 1] in held and live < len(text):
            if held[text[: live + 1]][2] < now - TTL_S:
                break
            live += 1
        return live


class AgainstModel(RuleBasedStateMachine):
    """Any order of calls: the index answers as the model that remembers every block."""

    def __init__(self) -> None:
        super().__init__()
        self.index = opened(ttl=Duration(TTL_S), lru_capacity_per_server=12)
        self.model = Model()
        self.now = 0.0
        self.recorded: list[tuple[Any, ...]] = []

    words = st.lists(st.sampled_from(["a", "b", "aaa", "cabc"]), max_size=4).map("".join)
    texts = st.lists(words, min_size=1, max_size=3).map(tuple)
    slot = st.integers(0, SLOTS - 1)

    @rule(texts=texts, slot=slot, wait=st.sampled_from([0, 0, 0, 1, 5]))
    def record(self, texts: tuple[str, ...], slot: int, wait: int) -> None:
        self.now += wait
        request = request_of(*texts)
        first = self.model.order
        before = self.model.record(texts, slot, self.now)
        noted = self.index.record(request, slot, self.now)
        self.recorded.append((request, texts, slot, before, first, noted))

    @rule(back=st.integers(0, 3))
    def retract(self, back: int) -> None:
        """Blocks that the request added there and nobody used since go; all else stays."""
        if back >= len(self.recorded):
            return
        request, texts, slot, before, first, noted = self.recorded.pop(-1 - back)
        held = self.model.held[slot]
        for text, kept in zip(reversed(texts), reversed(before), strict=True):
            for end in range(len(text), 0, -1):
                block = text[:end]
                own = block in held and first < held[block][0] <= first + len(texts)
                if own and block not in kept:
                    del held[block]
        self.index.retract(request, slot, noted, self.now)

    @rule(wait=st.integers(0, TTL_S))
    def expire(self, wait: int) -> None:
        self.now += wait
        self.index.expire(self.now)
        for held in self.model.held:
            for block in [b for b, (_, _, at) in held.items() if at < self.now - TTL_S]:
                del held[block]

    @rule(slot=slot)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.model.held[slot].clear()
        self.model.capacity[slot] = 12

    @rule(slot=slot, blocks=st.integers(1, 20))
    def resize(self, slot: int, blocks: int) -> None:
        self.index.resize(slot, blocks * 4, 16)
        self.model.capacity[slot] = blocks
        self.model.fit(slot)

    @rule(texts=texts, wait=st.sampled_from([0, 0, 7]))
    def match(self, texts: tuple[str, ...], wait: int) -> None:
        self.now += wait
        answer = self.index.match(request_of(*texts), SLOTS, self.now)
        assert answer.total == sum(map(len, texts))
        assert answer.matched.tolist() == [
            sum(self.model.depth(text, slot, self.now) for text in texts) for slot in range(SLOTS)
        ]
        assert answer.most in {None, max(answer.matched.tolist())}

    @invariant()
    def counts_agree(self) -> None:
        check_structure(self.index)
        assert [self.index.blocks_held(slot) for slot in range(SLOTS)] == [
            len(held) for held in self.model.held
        ]

    def teardown(self) -> None:
        statistics = self.index.statistics
        for slot in range(SLOTS):
            self.index.forget(slot)
        assert not self.index._first
        assert self.index.bytes_estimated == 0
        assert (
            statistics.full_hits + statistics.partial_hits + statistics.no_hits
            == statistics.lookups
        )


AgainstModel.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAgainstModel = AgainstModel.TestCase


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.sampled_from([b"1" * 8, b"2" * 8, b"3" * 8]), max_size=6).map(b"".join),
            st.sampled_from([None, None, 0, 1, 2]),
        ),
        max_size=30,
    )
)
def test_colliding_hashes_never_break_the_index(calls):
    """Hashes that repeat within and across prompts, as an attacker might craft them, end nowhere
    worse than in a wrong match: counts and structure stay right, and all can be forgotten.
    """
    index = opened(lru_capacity_per_server=9)
    recorded = []
    for turn, (slot, chain, take_back) in enumerate(calls):
        request = InferenceRequest(request_id="r", chains={BLOCK_BYTES: (chain,)})
        answer = index.match(request, SLOTS, turn)
        assert answer.most == max(answer.matched.tolist()) <= answer.total
        recorded.append((request, slot, index.record(request, slot, turn)))
        if take_back is not None and take_back < len(recorded):
            index.retract(*recorded[-1 - take_back], turn)
        assert index.blocks_held(slot) <= 9
        check_structure(index)
    index.expire(1e9)
    assert (index.entries, index.bytes_estimated) == (0, 0)


def test_match_narrows_each_endpoint_by_itself():
    """An endpoint matches up to its own first missing block, whatever others hold beyond it."""
    index = opened()
    index.record(request_of("abcdef"), 0, 0.0)
    index.record(request_of("abc"), 1, 0.0)
    index.record(request_of("abcdxy"), 2, 0.0)
    assert matched(index, "abcdefgh") == [6, 3, 4, 0]
    assert matched(index, "abx") == [2, 2, 2, 0]
    assert matched(index, "x") == [0, 0, 0, 0]


def test_prompts_of_one_request_are_summed():
    """Matches and totals of all prompts add up, and all of them are recorded."""
    index = opened()
    index.record(request_of("aaa", "bb"), 0, 0.0)
    index.record(request_of("a"), 1, 0.0)
    answer = index.match(request_of("aab", "bbb"), SLOTS, 0.0)
    assert (answer.matched.tolist(), answer.total) == ([4, 1, 0, 0], 6)


def test_the_first_holder_is_whoever_was_routed_deepest_first():
    """Also where the prompt leaves a run in its midst; nobody, once all of it is older than the TTL."""
    index = opened(ttl=Duration(TTL_S))
    index.record(request_of("abcd"), 0, 0.0)
    index.record(request_of("abcd"), 1, 1.0)
    index.record(request_of("ab"), 2, 5.0)
    index.record(request_of("abcdef"), 2, 5.0)
    assert index.first_holder(request_of("abcd"), 5.0) == 0
    assert index.first_holder(request_of("abcx"), 5.0) == 0
    assert index.first_holder(request_of("abx"), 5.0) == 0
    assert index.first_holder(request_of("abcdex"), 5.0) == 2
    assert index.first_holder(request_of("x"), 5.0) == -1
    assert index.first_holder(request_of(), 5.0) == -1
    assert index.first_holder(request_of("abcd"), 6.0 + TTL_S) == -1
    index.forget(0)
    assert index.first_holder(request_of("abcd"), 5.0) == 1, "the next to come"


def test_many_slots_are_matched_as_few_are():
    """The answer for a thousand holders is exact, and has the length that was asked for."""
    index = opened()
    for slot in range(1_000):
        index.record(request_of("a" * (1 + slot % 40)), slot, 0.0)
    answer = index.match(request_of("a" * 30), 900, 0.0)
    assert answer.matched.tolist() == [min(30, 1 + slot % 40) for slot in range(900)]
    assert index.match(request_of("a"), 0, 0.0).matched.tolist() == []
    index.forget(3)
    answer = index.match(request_of("a" * 30), 1_000, 0.0)
    expected = [min(30, 1 + slot % 40) if slot != 3 else 0 for slot in range(1_000)]
    assert (answer.matched.tolist(), answer.most) == (expected, 30)


def test_a_prompt_longer_than_the_capacity_keeps_its_head():
    """A tail without its head would match nothing."""
    index = opened(lru_capacity_per_server=3)
    index.record(request_of("abcde"), 0, 0.0)
    assert matched(index, "abcde") == [3, 0, 0, 0]


def test_capacity_evicts_the_oldest_tail_first_and_no_more_than_needed():
    """The least recently routed prompt loses its last blocks, its head stays."""
    index = opened(lru_capacity_per_server=8)
    index.record(request_of("aaaaa"), 0, 0.0)
    index.record(request_of("bbb"), 0, 1.0)
    index.record(request_of("cc"), 0, 2.0)
    assert [matched(index, text)[0] for text in ("aaaaa", "bbb", "cc")] == [3, 3, 2]
    assert index.statistics.evicted_capacity == 2
    assert index.blocks_held(0) == index.capacity_blocks(0) == 8


def test_the_ttl_counts_from_routing_and_only_for_the_blocks_that_were_routed():
    """A look-up refreshes nothing; a prompt refreshes the head it shares, not the rest."""
    index = opened(ttl=Duration(10))
    index.record(request_of("aabb"), 0, 0.0)
    assert matched(index, "aabb", now=9.0) == [4, 0, 0, 0]
    index.record(request_of("aa"), 0, 9.0)
    assert matched(index, "aabb", now=10.0) == [4, 0, 0, 0]
    assert matched(index, "aabb", now=11.0) == [2, 0, 0, 0]
    assert matched(index, "aabb", now=20.0) == [0, 0, 0, 0]
    index.expire(11.0)
    assert (index.blocks_held(0), index.statistics.evicted_ttl) == (2, 2)


def test_expiry_is_bounded_in_each_call_and_completes_over_several():
    """One call takes at most so many runs; what is not yet swept is not matched either."""
    index = opened(sweep_holdings_max=3, ttl=Duration(10))
    for letter in "abcdefgh":
        index.record(request_of(letter * 5), 0, 0.0)
    assert matched(index, "aaaaa", now=11.0) == [0, 0, 0, 0]
    left = []
    for _ in range(3):
        index.expire(11.0)
        left.append(index.entries)
    assert left == [25, 10, 0]


def test_the_memory_limit_evicts_the_oldest_of_all_endpoints():
    """The estimate stays below the limit, and what was routed last is still there."""
    index = opened(memory_max_bytes=20_000)
    texts = [f"{number:04}" for number in range(200)]
    for turn, text in enumerate(texts):
        index.record(request_of(text), turn % SLOTS, turn)
        assert index.bytes_estimated <= 20_000
    held = [max(matched(index, text)) for text in texts]
    assert held == sorted(held)
    assert held[0] < 4
    assert held[-20:] == [4] * 20
    assert index.statistics.evicted_memory > 0
    check_structure(index)


def test_a_lowered_memory_limit_is_reached_in_bounded_steps():
    """A hot reload does not stop the picker: each sweep takes at most its share."""
    index = opened(sweep_holdings_max=10)
    for turn in range(40):
        index.record(request_of(f"{turn:04}"), turn % SLOTS, turn)
    assert PrefixIndexSettings(memory_max_bytes=1).adopt(index)
    before = index.entries
    index.expire(40)
    assert 0 < index.entries < before
    for _ in range(20):
        index.expire(40)
    assert index.bytes_estimated == 0


def test_repeating_a_prompt_does_not_grow_the_index():
    """A queue of stale entries is swept out; the endpoint still loses its oldest first."""
    index = opened(lru_capacity_per_server=8)
    index.record(request_of("cold"), 0, 0.0)
    for turn in range(5_000):
        index.record(request_of("warm"), 0, float(turn))
    assert index.bytes_estimated < 20_000
    index.record(request_of("new"), 0, 5_000.0)
    assert [matched(index, text, now=5_000.0)[0] for text in ("cold", "warm", "new")] == [0, 4, 3]


def test_forgetting_an_endpoint_drops_all_it_held_and_nothing_else():
    """A restarted engine has an empty cache, and its capacity is unknown again."""
    index = opened()
    for slot in (0, 1):
        index.record(request_of("abc"), slot, 0.0)
    index.resize(0, 10, 64)
    index.forget(0)
    index.forget(99)
    assert matched(index, "abc") == [0, 3, 0, 0]
    assert index.capacity_blocks(0) == 31_250
    assert index.statistics.evicted_forgotten == 3


def test_retract_takes_back_what_the_request_added_and_no_more():
    """What the endpoint held before stays; another endpoint's share is not touched."""
    index = opened()
    index.record(request_of("ab"), 0, 0.0)
    index.record(request_of("abcd"), 1, 0.0)
    request = request_of("abcdef")
    recorded = index.record(request, 0, 1.0)
    assert matched(index, "abcdef") == [6, 4, 0, 0]
    index.retract(request, 0, recorded, 1.0)
    assert matched(index, "abcdef") == [2, 4, 0, 0]
    assert index.statistics.retracted == 4


def test_retract_leaves_what_another_request_has_used_since():
    """The endpoint did get the other request, and with it these blocks."""
    index = opened()
    request = request_of("abcd")
    recorded = index.record(request, 0, 0.0)
    index.record(request_of("abc"), 0, 0.0)
    index.retract(request, 0, recorded, 1.0)
    assert matched(index, "abcd") == [3, 0, 0, 0]


def test_what_is_kept_of_a_retracted_request_still_expires():
    """The second prompt shares the first one's head and had more of its own: both keep their age,
    and nothing is left behind that no sweep finds.
    """
    index = opened(ttl=Duration(10))
    index.record(request_of("aaabb"), 0, 0.0)
    request = request_of("aaax", "aaabbb")
    index.retract(request, 0, index.record(request, 0, 5.0), 5.0)
    check_structure(index)
    assert matched(index, "aaabbb", now=15.0) == [5, 0, 0, 0]
    assert matched(index, "aaax", now=15.0) == [3, 0, 0, 0]
    index.expire(16.0)
    assert index.entries == 0


def test_an_endpoint_that_was_swept_empty_is_swept_again():
    """Its place in the order of sweeping comes back with its next prompt."""
    index = opened(ttl=Duration(10))
    for turn in range(3):
        index.record(request_of("abc"), 0, turn * 100.0)
        index.expire(turn * 100.0 + 11)
        assert index.entries == 0


def test_the_engine_tells_the_capacity_in_its_own_blocks():
    """num_gpu_blocks x block_size / blockSizeTokens; a smaller cache evicts at once."""
    index = opened()
    index.record(request_of("abcdefgh"), 0, 0.0)
    index.resize(0, 16, 16)
    assert index.capacity_blocks(0) == 4
    assert matched(index, "abcdefgh") == [4, 0, 0, 0]
    index.resize(0, 0, 16)
    index.resize(1, 100, 128)
    assert (index.capacity_blocks(0), index.capacity_blocks(1)) == (4, 200)
    assert index.capacity_blocks(2) == 31_250


def test_without_auto_tune_the_engine_is_not_asked():
    """`autoTune: false` keeps `lruCapacityPerServer`, also when it is switched off later."""
    index = opened(auto_tune=False, lru_capacity_per_server=7)
    index.resize(0, 16, 16)
    assert index.capacity_blocks(0) == 7
    assert PrefixIndexSettings(lru_capacity_per_server=7).adopt(index)
    index.resize(0, 16, 16)
    assert index.capacity_blocks(0) == 4
    assert PrefixIndexSettings(lru_capacity_per_server=9).adopt(index)
    assert index.capacity_blocks(0) == 4
    assert PrefixIndexSettings(lru_capacity_per_server=9, auto_tune=False).adopt(index)
    assert index.capacity_blocks(0) == 9


def test_new_settings_apply_to_a_running_index_unless_the_block_size_changes():
    """TTL, capacity and match limit are adopted with the content; another block size is not."""
    index = opened()
    index.record(request_of("abcd"), 0, 0.0)
    wider = PrefixIndexSettings(block_size_tokens=128)
    assert not wider.adopt(index)
    assert not PrefixIndexSettings().adopt(NoHitLruSettings().open())
    changed = PrefixIndexSettings(
        ttl=Duration(5), max_prefix_tokens_to_match=128, lru_capacity_per_server=2
    )
    assert changed.adopt(index)
    answer = index.match(request_of("abcd"), SLOTS, 5.0)
    assert (answer.matched.tolist(), answer.total) == ([2, 0, 0, 0], 2)
    assert matched(index, "abcd", now=6.0) == [0, 0, 0, 0]
    index.record(request_of("xy"), 0, 6.0)
    assert index.blocks_held(0) == 2


def test_where_memory_is_scarce_an_index_takes_a_share_of_its_limit_until_it_is_not():
    """In bounded steps, whatever settings come meanwhile; the oldest goes, the newest stays."""
    index = opened(sweep_holdings_max=8, memory_max_bytes=40_000)
    for number in range(200):
        index.record(request_of(f"{number:04}"), number % SLOTS, float(number) / 100)
    full_bytes = index.bytes_estimated
    assert 30_000 < full_bytes <= 40_000
    index.limit_memory(0.25)
    assert index.bytes_estimated == full_bytes
    index.expire(2.0)
    assert 10_000 < index.bytes_estimated < full_bytes
    assert PrefixIndexSettings(memory_max_bytes=40_000, ttl=Duration(600)).adopt(index)
    for _ in range(20):
        index.expire(2.0)
    assert 0 < index.bytes_estimated <= 10_000
    assert matched(index, "0199", now=2.0)[199 % SLOTS] == 4
    index.limit_memory(1.0)
    for number in range(200, 400):
        index.record(request_of(f"{number:04}"), number % SLOTS, float(number) / 100)
    assert 30_000 < index.bytes_estimated <= 40_000
    check_structure(index)


def test_look_ups_are_counted_by_how_much_the_best_endpoint_held():
    """Full, partial or none; a request without a full block is not a look-up."""
    index = opened()
    index.record(request_of("abc"), 0, 0.0)
    for texts in (("abc",), ("ab", "abc"), ("abd",), ("abc", "x"), ("x",), ("",), ()):
        matched(index, *texts)
    statistics = index.statistics
    assert (statistics.full_hits, statistics.partial_hits, statistics.no_hits) == (2, 2, 1)
    assert statistics.lookups == 5


def test_settings_are_spelt_as_in_the_field():
    """Names, defaults and the order of the limits of the reference picker."""
    read = msgspec.convert(
        {
            "autoTune": False,
            "blockSizeTokens": 16,
            "lruCapacityPerServer": 5,
            "maxPrefixTokensToMatch": 0,
            "maxPrefixBlocksToMatch": 7,
            "ttl": "1m30s",
            "memoryMaxBytes": 9,
        },
        PrefixIndexSettings,
        dec_hook=lambda _, text: parse_duration(text),
    )
    assert (read.block_tokens, read.blocks_max, read.ttl) == (64, 7, 90.0)
    assert PrefixIndexSettings().blocks_max == 2_048
    assert PrefixIndexSettings(max_prefix_tokens_to_match=640).blocks_max == 10
    unlimited = PrefixIndexSettings(max_prefix_tokens_to_match=0, max_prefix_blocks_to_match=0)
    assert unlimited.blocks_max == 65_536
    assert PrefixIndexSettings(block_size=256).block_tokens == 256
    assert PrefixIndexSettings(block_size=256, block_size_tokens=128).block_tokens == 128
    with pytest.raises(msgspec.ValidationError, match="lruCapacity"):
        msgspec.convert({"lruCapacity": 5}, PrefixIndexSettings)
    with pytest.raises(ValueError, match=r"ttl is 0\.0s; it must be finite and above 0s"):
        PrefixIndexSettings(ttl=Duration(0))


@pytest.mark.parametrize(("shortest", "longest"), [(4, 8), (32, 32)])
def test_a_full_index_takes_at_most_64_bytes_a_pair_and_knows_it(shortest, longest):
    """A quarter of the blocks on eight endpoints, the rest on one; the estimate is within a fifth.

    A tenth of the size of `bench/index.py`: memory is linear in it.
    """
    random = Random(1)
    index = opened(memory_max_bytes=1 << 40)
    tracemalloc.start()
    try:
        turn = prompts = 0
        while index.entries < 300_000:
            chain = random.randbytes(8 * random.randint(shortest, longest))
            prompts += 1
            for _ in range(1 if prompts % 4 else 8):
                request = InferenceRequest(request_id="r", chains={BLOCK_BYTES: (chain,)})
                index.record(request, turn % 10, float(turn))
                turn += 1
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes / index.entries <= 64
    assert 0.8 <= index.bytes_estimated / used_bytes <= 1.2


# Corrections by what engines find.


def correction(error: float, slot: int = 0, bytes_per_token: float = 4.0) -> Correction:
    return Correction(slot=slot, error=error, bytes_per_token=bytes_per_token)


def test_nothing_is_corrected_unless_it_is_asked_for():
    index = opened(lru_capacity_per_server=10)
    index.correct(correction(0.5))
    assert index.capacity_blocks(0) == 10


def test_too_much_believed_shrinks_from_what_is_held():
    """Half of the capacity was in use: a tenth less than that counts at once."""
    index = opened(lru_capacity_per_server=10, correct_by_engine=True)
    index.record(request_of("abcde"), 0, 0.0)
    index.correct(correction(0.1))
    assert index.capacity_blocks(0) == 4
    assert matched(index, "abcde")[0] == 4
    assert index.capacity_blocks(1) == 10


def test_too_little_believed_grows_what_made_it_forget():
    index = opened(lru_capacity_per_server=10, correct_by_engine=True, ttl=Duration(TTL_S))
    index.correct(correction(-0.5))
    assert index.capacity_blocks(0) == 10, "nothing was forgotten"
    index.record(request_of("abcdefghij"), 0, 0.0)
    index.record(request_of("KLM"), 0, 0.0)
    index.correct(correction(-0.5))
    assert index.capacity_blocks(0) == 12
    assert matched(index, "KLM", now=21.0)[0] == 0, "the TTL made nothing be forgotten"
    index.expire(21.0)
    index.correct(correction(-0.1))
    assert index.capacity_blocks(0) == 12
    index.record(request_of("xyz"), 0, 30.0)
    assert matched(index, "xyz", now=51.5)[0] == 3
    assert matched(index, "xyz", now=52.5)[0] == 0


def test_ttls_that_differ_are_each_their_own():
    """Of one prefix that two hold; a sweep takes it from the one alone."""
    index = opened(correct_by_engine=True, ttl=Duration(TTL_S))
    for slot in (0, 1):
        index.record(request_of("abc"), slot, 0.0)
    index.correct(correction(0.1, slot=1))
    assert matched(index, "abc", now=17.0)[:2] == [3, 3]
    assert matched(index, "abc", now=19.0)[:2] == [3, 0]
    index.expire(19.0)
    check_structure(index)
    assert [index.blocks_held(slot) for slot in (0, 1)] == [3, 0]
    index.record(request_of("abc"), 2, 19.0)
    assert matched(index, "abc", now=38.0)[:3] == [0, 0, 3], "a new slot has the configured one"


def test_corrections_end_somewhere():
    """Whatever engines say for however long."""
    index = opened(lru_capacity_per_server=100, correct_by_engine=True)
    for _ in range(50):
        index.correct(correction(1.0))
    assert index.capacity_blocks(0) == 12
    for _ in range(50):
        index.record(request_of("abcdefghij" * 90), 0, 0.0)
        index.record(request_of("ABCDEFGHIJ" * 90), 0, 0.0)
        index.correct(correction(-1.0))
    assert index.capacity_blocks(0) == 800


def test_no_more_is_believed_than_the_engine_says_that_it_can_hold():
    index = opened(correct_by_engine=True)
    index.resize(0, 10, 64)
    for letters in ("abcdefghij", "KLMNOPQRST"):
        index.record(request_of(letters), 0, 0.0)
    index.correct(correction(-0.5))
    assert index.capacity_blocks(0) == 10


def test_an_endpoint_of_which_all_is_forgotten_keeps_its_capacity_but_for_the_step():
    """Nothing is held of it, which says nothing of how much it can hold."""
    index = opened(lru_capacity_per_server=100, correct_by_engine=True)
    index.correct(correction(0.1))
    assert index.capacity_blocks(0) == 90


def test_a_correction_takes_so_many_blocks_at_once_and_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr(module, "CORRECTED_BLOCKS_MAX", 3)
    index = opened(correct_by_engine=True)
    index.resize(0, 20, 64)
    index.record(request_of("abcdefghij"), 0, 0.0)
    held = []
    for _ in range(3):
        index.correct(correction(0.0, bytes_per_token=1.0))
        held.append(index.blocks_held(0))
    assert held == [7, 5, 5]


def test_sweeps_of_ttls_that_differ_are_bounded_and_go_on():
    index = opened(sweep_holdings_max=2, correct_by_engine=True, ttl=Duration(TTL_S))
    for slot in (0, 1):
        for letter in "abcde":
            index.record(request_of(letter), slot, 0.0)
    index.correct(correction(0.1, slot=1))
    left = []
    for _ in range(5):
        index.expire(100.0)
        left.append(index.blocks_held(0) + index.blocks_held(1))
    assert left == [8, 6, 4, 2, 0]
    check_structure(index)


def test_small_errors_are_left_alone():
    index = opened(lru_capacity_per_server=100, correct_by_engine=True)
    index.correct(correction(0.02))
    index.correct(correction(-0.02))
    assert index.capacity_blocks(0) == 100


def test_what_the_engine_holds_is_counted_by_the_bytes_of_a_token():
    index = opened(correct_by_engine=True)
    index.resize(0, 1_000, 64)
    assert index.capacity_blocks(0) == 1_000
    index.correct(correction(0.0, bytes_per_token=3.0))
    assert index.capacity_blocks(0) == 750
    index.resize(0, 2_000, 64)
    assert index.capacity_blocks(0) == 1_500


def test_a_restart_and_a_configuration_without_it_end_corrections():
    index = opened(lru_capacity_per_server=100, correct_by_engine=True)
    for slot in (0, 1):
        index.correct(correction(1.0, slot=slot))
    index.forget(0)
    assert index.capacity_blocks(0) == 100
    assert index.capacity_blocks(1) < 100
    assert index.configure(PrefixIndexSettings(lru_capacity_per_server=100))
    assert index.capacity_blocks(1) == 100
