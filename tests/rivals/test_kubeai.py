"""KubeAI's ring and its bound, by hand and under load."""

from collections import Counter
from random import Random

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.inflight import Outcome
from epp.core.prompt.parse import parse_request
from homing_rivals.kubeai import BoundedPrefixHash
from tests.builders import candidates, endpoint, lora, request
from tests.rivals.driven import scheduler_of
from tests.rivals.simulated import first_tokens_s, hit_rate, simulated
from tests.sim.made import arrivals, kind

PODS = 8
FACTOR = 1.25


def chat(*messages, name=""):
    """A request of a conversation: (role, text) each."""
    body = b",".join(
        b'{"role": "%s", "content": "%s"%s}'
        % (role.encode(), text.encode(), b', "name": "n"' if name else b"")
        for role, text in messages
    )
    parsed = parse_request(
        path="/v1/chat/completions",
        headers={},
        body=b'{"model": "m", "messages": [%s]}' % body,
        request_id="1",
    )
    return parsed.request


def key(asked, **parameters):
    asked.chains_of(100, 64)
    return BoundedPrefixHash(**parameters)._key(asked)


def test_the_key_is_the_users_first_hundred_characters():
    """Runes, not bytes; no system prompt, no later message, no name."""
    long = "é" * 99
    assert key(chat(("user", long + "ab"))) == key(chat(("user", long + "acd")))
    assert key(chat(("user", long[1:] + "ab"))) != key(chat(("user", long[1:] + "ac")))
    question = ("user", "What is a ring?")
    assert key(chat(("system", "Be brief."), question)) == key(chat(question))
    assert key(chat(question, ("assistant", "Round."), ("user", "Why?"))) == key(chat(question))
    assert key(chat(question, name="n")) == key(chat(question))
    assert key(chat(question)) != key(chat(("user", "What is a line?")))
    assert key(chat(("system", "Only this."))) == key(chat(("system", "Or that.")))


def test_adapters_have_keys_of_their_own():
    """The adapter is in front of the text."""
    texts = [request(api="completions", prompts=(b"Hello\xf8",), model=model) for model in "ab"]
    assert key(texts[0]) != key(texts[1])


def test_a_prompt_without_text_has_its_first_blocks():
    """25 tokens of it, or more for a longer key; without a block all are alike."""

    def replayed(*blocks):
        return request(chains={100: (b"".join(block * 8 for block in blocks),)})

    assert key(replayed(b"a", b"b")) == key(replayed(b"a", b"c"))
    assert key(replayed(b"a", b"b"), prefix_chars=200) != key(
        replayed(b"a", b"c"), prefix_chars=200
    )
    assert key(replayed()) == key(replayed())


def test_who_is_above_the_bound_is_passed_over():
    """It moves on to the next clockwise, not to the least loaded, and comes back."""
    plugin = BoundedPrefixHash()
    asked = chat(("user", "Hello"))
    asked.chains_of(100, 1)

    def pick(loads):
        return int(plugin.score(asked, candidates(inflight_requests=loads)).argmax())

    home = pick([0] * PODS)
    loads = [4] * PODS
    # (33 + 1) / 8 x 1.25 = 5.3: five are within it; six are not within (34 + 1) / 8 x 1.25 = 5.5.
    loads[home] = 5
    assert pick(loads) == home
    loads[home] = 6
    second = pick(loads)
    assert second != home
    loads[second] = 7
    assert pick(loads) not in {home, second}
    assert pick([6] * PODS) == home


def test_only_who_has_the_adapter_is_asked():
    """Whatever its load: then the first that has it."""
    reports = [lora("other", slots_max=2)] * 3 + [lora("a", slots_max=2)]
    asked = request(model="a", chains={100: (b"",)})
    pool = candidates(adapters=reports, inflight_requests=[0, 0, 0, 50])
    assert BoundedPrefixHash().score(asked, pool).tolist() == [0, 0, 0, 1]


def test_the_bound_is_never_exceeded():
    """What its authors promise, with one prompt for everybody and requests that come and go."""
    scheduler = scheduler_of("kubeai-chwbl")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(PODS)]), 0.0)
    random = Random(1)
    leases = []
    used = Counter()
    for number in range(600):
        loads = scheduler.pool.columns.inflight_requests[:PODS].copy()
        lease = scheduler.schedule(
            request(request_id=f"{number}", api="completions", prompts=(b"same" * 50,)), 0.0
        ).lease
        assert loads[lease.slot] <= FACTOR * (loads.sum() + 1) / PODS or not loads.any()
        leases.append(lease)
        used[lease.slot] += 1
        while leases and random.random() < 0.45:
            ended = leases.pop(random.randrange(len(leases)))
            scheduler.take(RequestEnded(ended, Outcome(status=200)), 0.0)
    assert len(used) > PODS / 2, "one prompt for all, and yet it is spread"


def test_conversations_that_begin_alike_share_an_endpoint_until_it_is_full():
    """A reported weakness: a template is one key."""
    scheduler = scheduler_of("kubeai-chwbl")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(PODS)]), 0.0)
    homes = set()
    for number in range(40):
        asked = chat(("system", f"Tenant {number}"), ("user", "Summarise this document:"))
        lease = scheduler.schedule(asked, 0.0).lease
        homes.add(lease.slot)
        scheduler.take(RequestEnded(lease, Outcome(status=200)), 0.0)
    assert len(homes) == 1


def test_a_replayed_trace_is_kept_together_by_its_heads():
    """In the simulator, which makes blocks of 25 tokens for it: more hits than by load alone."""

    def hits(policy):
        return hit_rate(simulated(arrivals(200, rate=10.0, groups=12), policy))

    assert hits("kubeai-chwbl") > 1.1 * hits("least-requests-live")


def test_first_tokens_come_sooner_than_by_least_load_or_turns():
    """The order that KubeAI publishes, where all prompts together are more than a pod can cache.

    On average over rings: how evenly one of them cuts forty prefixes is luck.
    """

    def run(policy):
        pods = (kind(blocks_total=3_200, max_num_seqs=64),) * 4
        made = []
        for seed in range(5):
            families = arrivals(300, rate=40.0, groups=40, blocks=(60, 60), output=(16, 48))
            made += simulated(families, policy, pods=pods, seed=seed)
        return made

    runs = [run(name) for name in ("kubeai-chwbl", "least-requests-live", "round-robin-live")]
    hashed, *others = (first_tokens_s(requests)[len(requests) // 2] for requests in runs)
    assert hashed < 0.7 * min(others)
    assert hit_rate(runs[0]) > 1.5 * max(map(hit_rate, runs[1:]))
