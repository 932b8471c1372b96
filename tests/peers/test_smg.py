"""smg 1.13.0: the fourth generation of cache-aware routing, and what it has besides."""

from collections import Counter

import pytest

from epp.plugins.contract import config_of, producer, step
from homing_rivals.radix_tree import RadixTreeSettings
from homing_rivals.smg_cache_aware import CacheAware4
from tests.peers.comparison import compare
from tests.peers.driver import PODS, Ours, running_peer
from tests.peers.workload import CHUNK, Step, chunk, conversations

pytestmark = pytest.mark.timeout(240)
MODULE = "smg.cli launch"
KEY = "x-smg-routing-key"
FLAGS = ("--disable-retries", "--disable-circuit-breaker", "--log-level", "warn")
NO_WARMUP = ("--worker-warmup-secs", "0", "--worker-warmup-thin-ratio", "0")
WAIT = "the expected wait is of reports every 10 s and of what was sent since; ours is of requests"


async def followed(tmp_path, versions, keep, steps, strategy, config, *flags, key="", note=""):
    """The comparison of `steps`, kept."""
    async with running_peer(tmp_path, MODULE, *flags, *FLAGS, key_header=key) as peer:
        done = await compare(
            f"smg {versions['smg']}",
            " ".join(flags).replace("--policy ", "").replace("--", ""),
            strategy,
            steps,
            peer,
            lambda order: Ours(config or strategy, order, key_header=key),
            note,
        )
    keep(done)
    return done


@pytest.mark.parametrize(("balance_abs", "balance_rel"), [(64, 1.5), (2, 1.2)])
async def test_cache_aware_follows_holders_alike(
    tmp_path, versions, keep, balance_abs, balance_rel
):
    """Where one pod holds the prefix and may be used; otherwise the expected wait decides."""
    config = config_of(
        producer(RadixTreeSettings.type_name, blockSizeTokens=16),
        step(CacheAware4.type_name, balanceAbs=balance_abs, balanceRel=balance_rel),
    )
    steps = list(conversations(200))
    done = await followed(
        *(tmp_path, versions, keep, steps, "smg-cache-aware-4", config),
        *("--policy", "cache_aware", "--balance-abs-threshold", str(balance_abs)),
        *("--balance-rel-threshold", str(balance_rel), *NO_WARMUP),
        note=WAIT,
    )
    held = [at for at, some in enumerate(done.allowed) if some == _holders(steps, done.went, at)]
    assert len(held) > 100
    assert not set(done.disagreed) & set(held)
    # Six system prompts are too few for even shares, wherever they go.
    assert min(*done.shares[0], *done.shares[1]) > 0.1
    assert done.hits[0] == pytest.approx(done.hits[1], abs=0.03)


def _holders(steps, went, at):
    """Pods that were sent the longest known head of prompt `at`, if that is over 0.3 of it."""
    prompt = steps[at].prompt
    before = list(zip(steps[:at], went, strict=False))
    for blocks in range(len(prompt) // CHUNK, 3 * len(prompt) // CHUNK // 10, -1):
        head = prompt[: blocks * CHUNK]
        found = frozenset(pod for step, pod in before if step.prompt.startswith(head))
        if found:
            return found
    return frozenset()


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [("min_load", "smg-manual-min-load"), ("min_group", "smg-manual-min-group")],
)
async def test_manual_assigns_alike(tmp_path, versions, keep, mode, strategy):
    """A key stays; a new one goes to the least of its kind, and so does what has none."""
    keyless = [
        step._replace(key="") if step.key.startswith("cold") else step
        for step in conversations(100, heads=3, inflight_max=12)
    ]
    done = await followed(
        *(tmp_path, versions, keep, keyless, strategy, ""),
        *("--policy", "manual", "--assignment-mode", mode),
        key=KEY,
    )
    assert done.disagreed == []
    assert done.decided > 40


async def test_two_choices_are_never_both_the_worst(tmp_path, versions, keep):
    """Who is drawn is chance, who of two is taken is not."""
    done = await followed(
        *(tmp_path, versions, keep, list(conversations(80)), "power-of-two-live", ""),
        *("--policy", "power_of_two", "--power-of-two-load-metric", "least_requests"),
    )
    assert done.disagreed == []


async def test_least_load_spreads_alike(tmp_path, versions, keep):
    """Shares within 15 points and hits within 10; request by request it counts other things.

    With a report a second: of one in ten seconds whoever is idle when it comes is preferred for long.
    """
    done = await followed(
        *(tmp_path, versions, keep, list(conversations(80)), "smg-least-load", ""),
        *("--policy", "least_load", "--load-monitor-interval", "1"),
        note=WAIT.replace("every 10 s", "every second"),
    )
    theirs, ours = done.shares
    assert theirs == pytest.approx(ours, abs=0.15)
    assert done.hits[0] == pytest.approx(done.hits[1], abs=0.1)


async def test_prefix_hash_sees_no_prefix_over_http(tmp_path, versions):
    """It has no ring for such workers: the first of the fewest requests. Ours is as documented."""
    steps = list(conversations(60))
    async with running_peer(tmp_path, MODULE, "--policy", "prefix_hash", *FLAGS) as peer:
        went = [await peer.send(one) for one in steps]
        order = peer.order
    inflight = []
    for one, pod in zip(steps, went, strict=True):
        inflight = inflight[one.ends :]
        counted = Counter(inflight)
        assert pod == min(order, key=counted.__getitem__)
        inflight.append(pod)


async def test_consistent_hashing_keeps_keys(tmp_path, versions):
    """The ring's hash is another; a key stays in both, keys spread, no key goes anywhere."""
    keyed = [Step(chunk(0, key), f"key-{key}", 1) for _ in range(2) for key in range(45)]
    keyed[0] = keyed[0]._replace(ends=0)
    keyless = [Step(chunk(1, at), "", 1) for at in range(40)]
    flags = ("--policy", "consistent_hashing", *FLAGS)
    async with running_peer(tmp_path, MODULE, *flags, key_header=KEY) as peer:
        went = [await peer.send(step) for step in (*keyed, *keyless)]
        order = peer.order
    ours = Ours("smg-consistent-hashing", order, key_header=KEY)
    chosen = [ours.send(step)[0] for step in (*keyed, *keyless)]
    for one in (went, chosen):
        assert one[:45] == one[45:90], "a key stays"
        assert len(set(one[:45])) == PODS
        assert set(one[90:]) == set(order), "without a key anybody"
