"""Runs of pods that serve whole requests: their digests from before engines could hand over."""

import pytest
from msgspec import structs

from sim.caches.names import cache_named
from sim.cluster.faults import draw_faults
from sim.cluster.settings import ClientSettings
from sim.cluster.simulated_pod import PodKind
from sim.engine.features import features_named
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.measurement.measures import Measures, Targets
from tests.sim.made import arrivals, cluster

PROFILE = find_profile(DEFAULT_PROFILE)
EXPERTS = structs.replace(PROFILE, expert_tokens=(64, 1064), expert_s=(2e-3, 12e-3))
OFFLOAD = "offload:memory_bytes=300000000,shared_bytes=1000000000"


def made(*features, profile=PROFILE, cache="vllm", **engine):
    kind = PodKind.of(profile, features=features_named(features), cache=cache_named(cache))
    return structs.replace(kind, engine=structs.replace(kind.engine, **engine))


def with_adapters(count):
    for one in arrivals(count):
        yield structs.replace(one, adapter=("", "sql", "chat", "code")[one.index % 4])


CASES = {
    "usual": lambda: (arrivals(200, rate=30.0), (made(),) * 3, {}),
    "small cache": lambda: (
        arrivals(150, rate=60.0, output=(10, 120)),
        (made(blocks_total=129),) * 2,
        {},
    ),
    "faults": lambda: (
        arrivals(150, rate=20.0),
        (made(),) * 3,
        {
            "faults": draw_faults(3, mean_gap_s=2.0),
            "abort_share": 0.3,
            "abort_after_s": 0.3,
            "clients": ClientSettings(retries=2),
        },
    ),
    "adapters": lambda: (with_adapters(120), (made(max_loras=2),) * 2, {}),
    "whole prompts": lambda: (arrivals(120, rate=40.0), (made("whole-prompts"),) * 2, {}),
    "speculative": lambda: (
        arrivals(120, rate=40.0, output=(10, 60)),
        (made("speculative:acceptance=0.7/0.4/0.2"),) * 2,
        {},
    ),
    "ranks": lambda: (
        arrivals(120, rate=40.0),
        (made("ranks:count=3", profile=EXPERTS), made("ranks:count=2")),
        {},
    ),
    "offload": lambda: (arrivals(120, rate=40.0), (made(cache=OFFLOAD, blocks_total=257),) * 2, {}),
}
GOLDEN = {
    ("round-robin", "usual"): ("f1a1fc0ae762b2d1", 2486, 0.007857229733881015, 1352),
    ("round-robin", "small cache"): ("2c78b5ab014970da", 9955, 0.00843610296168761, 1162),
    ("round-robin", "faults"): ("2c1933ba8fe6571f", 1737, 0.008187613224771233, 1031),
    ("round-robin", "adapters"): ("7838e6ef82198509", 1546, 0.008681794505585556, 816),
    ("round-robin", "whole prompts"): ("8fd8eee1be9e2c12", 1546, 0.00799210831253927, 862),
    ("round-robin", "speculative"): ("77f3a782ea006e3f", 4321, 0.010280210144249735, 1029),
    ("round-robin", "ranks"): ("928f5cd39fbb9f2e", 1546, 0.009354103771313464, 923),
    ("round-robin", "offload"): ("e87bc92a71ccba9c", 1546, 0.008184966768335203, 850),
    ("least-requests", "usual"): ("86eba63dd1f59c73", 2486, 0.007834550342360016, 1336),
    ("least-requests", "small cache"): ("1066e4fe7ea624ae", 9955, 0.008384601177147444, 1154),
    ("least-requests", "faults"): ("7774cefe419376cc", 1735, 0.007819453482691, 1003),
    ("least-requests", "adapters"): ("5f76902777debe40", 1546, 0.021337184104850627, 687),
    ("least-requests", "whole prompts"): ("f3d8cd786178d838", 1546, 0.007993258108616409, 846),
    ("least-requests", "speculative"): ("237a3f08234e0dbf", 4321, 0.01020715359076288, 1025),
    ("least-requests", "ranks"): ("a177a89c869e73a8", 1546, 0.009205432306316267, 940),
    ("least-requests", "offload"): ("1d422e694e2110e1", 1546, 0.008143958960001403, 843),
}
"""Digest of all requests, output tokens, mean gap between tokens and number of events. Only a
change of the engine, the cluster or the measures may change them; baselines do not depend on the
scheduler."""


@pytest.mark.parametrize(("policy", "name"), GOLDEN)
def test_a_pool_without_roles_computes_what_it_did(policy, name):
    given, pods, more = CASES[name]()
    measures = Measures(Targets())
    one = cluster(
        given,
        pods=pods,
        policy=policy,
        seed=3,
        ended=measures.add,
        stepped=measures.gaps.add,
        **more,
    )
    one.run()
    gaps = measures.gaps.whole()
    told = (measures.digest, gaps.output_tokens, gaps.mean_s, one.loop.events)
    assert told == GOLDEN[policy, name]
