"""Arrivals and clusters for tests, small unless told otherwise."""

from random import Random
from types import UnionType
from typing import get_args, get_origin

from msgspec import Struct, structs

from sim.cluster.cluster import Cluster
from sim.cluster.policies import policy_source
from sim.cluster.settings import ClusterSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.traces.arrival import Arrival
from sim.traces.prompts import request_of

BLOCK_TOKENS = 64


def arrival(index=0, **fields):
    """One request of 128 prompt tokens of its own and 4 output tokens."""
    defaults = {"index": index, "time_s": 0.0, "prompt_tokens": 128, "output_tokens": 4}
    return Arrival(**(defaults | fields))


def arrivals(count, *, rate=20.0, groups=8, seed=1, blocks=(2, 12), output=(1, 24)):
    """Prompts with a head that their group shares and a tail of their own, as a Poisson process."""
    random = Random(f"{seed}:made")
    time_s = 0.0
    for index in range(count):
        time_s += random.expovariate(rate)
        group = random.randrange(groups)
        shared = random.randint(*blocks)
        own = random.randint(0, 3)
        heads = tuple(1 + group * 1_000 + at for at in range(shared))
        tails = tuple(1_000_000 + index * 10 + at for at in range(own))
        yield arrival(
            index,
            time_s=time_s,
            prompt_tokens=(shared + own) * BLOCK_TOKENS + random.randrange(BLOCK_TOKENS) + 1,
            output_tokens=random.randint(*output),
            blocks=heads + tails,
            block_tokens=BLOCK_TOKENS,
            session=f"session-{group}",
        )


def kind(*, blocks_total=None, profile=DEFAULT_PROFILE, **engine):
    """A pod; `blocks_total` gives it a small cache."""
    usual = PodKind.of(find_profile(profile))
    if blocks_total is not None:
        engine["blocks_total"] = blocks_total
    return structs.replace(usual, engine=structs.replace(usual.engine, **engine))


def cluster(
    given,
    *,
    policy="default",
    open_policy=None,
    pods=4,
    seed=1,
    ended=None,
    stepped=None,
    faults=(),
    resolver=None,
    prefill_rule=None,
    **settings,
):
    """A cluster that is about to run `given`; `pods`: how many, or their kinds.

    Prompts are looked up in blocks of `BLOCK_TOKENS` and of the sizes that the policy names;
    `open_policy`: what makes pickers in its place.
    """
    kinds = (kind(),) * pods if isinstance(pods, int) else pods
    made = ClusterSettings(pods=kinds, **settings)
    source = policy_source(policy) if isinstance(policy, str) else policy
    opener = made.opener(source)
    decides = opener(seed).settings
    indexes = decides.indexes.values() if decides else ()
    sizes = {BLOCK_TOKENS, *(getattr(index, "block_tokens", BLOCK_TOKENS) for index in indexes)}
    told = [index.block_tokens for index in indexes if index.abilities.hears_engines]
    return Cluster(
        made,
        open_policy or opener,
        lambda one, hashes: request_of(
            one, sorted(sizes), hashes, told_block_tokens=told if made.kv_events else ()
        ),
        given,
        seed=seed,
        ended=ended or (lambda request: None),
        stepped=stepped,
        faults=faults,
        resolver=resolver,
        prefill_rule=prefill_rule,
    )


def ran(given, **fields):
    """Run it; the requests in the order of their arrival, and the cluster."""
    requests = []
    one = cluster(given, ended=requests.append, **fields)
    one.run()
    return sorted(requests, key=lambda request: request.sequence), one


def filled(kind, **given):
    """A summary of `kind` that says what is given, and nothing else; dictionaries stand for parts of it."""
    hints = {one.name: one.type for one in structs.fields(kind) if one.required}
    told = {name: _neutral(hint) for name, hint in hints.items()} | given
    types = {one.name: one.type for one in structs.fields(kind)}
    for name, value in told.items():
        part = next((one for one in _alternatives(types[name]) if _is_struct(one)), None)
        if part is not None and type(value) is dict:
            told[name] = filled(part, **value)
    return kind(**told)


def _neutral(hint):
    """Null where that may be, else nothing."""
    options = _alternatives(hint)
    if type(None) in options:
        return None
    return (
        filled(options[0]) if _is_struct(options[0]) else (get_origin(options[0]) or options[0])()
    )


def _alternatives(hint):
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _is_struct(hint):
    return isinstance(hint, type) and issubclass(hint, Struct)
