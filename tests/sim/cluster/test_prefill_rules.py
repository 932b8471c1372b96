"""Roles of pods, and the choice of prefill pods."""

import pytest

from epp.core.prompt.request import InferenceRequest
from sim.cluster.prefill_rules import RoundRobinPrefill, decodes, prefills


@pytest.mark.parametrize(
    ("role", "prefill", "decode"),
    [
        ("prefill", True, False),
        ("decode", False, True),
        ("prefill-decode", True, True),
        ("both", True, True),
        ("encode", False, False),
        ("encode-prefill", True, False),
        ("encode-prefill-decode", True, True),
        ("encode-decode", False, False),
        (None, False, True),
    ],
)
def test_roles_are_those_of_the_field(role, prefill, decode):
    labels = {} if role is None else {"llm-d.ai/role": role}
    assert (prefills(labels), decodes(labels)) == (prefill, decode)


def test_round_robin_takes_each_prefill_pod_in_turn():
    rule = RoundRobinPrefill(tokens_min=100)
    long, short = (InferenceRequest(request_id="", prompt_tokens=tokens) for tokens in (100, 99))
    assert [rule.choose(long, "d", ["a", "b", "c"]) for _ in range(4)] == ["a", "b", "c", "a"]
    assert rule.choose(short, "d", ["a", "b"]) is None
    assert rule.choose(long, "d", []) is None
