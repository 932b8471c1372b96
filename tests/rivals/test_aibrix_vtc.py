"""AIBrix's fairness: where users are placed, and what that is not."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from epp.core.decision.inputs import PoolReplaced, RequestEnded
from epp.core.knowledge.candidates import Affinity
from epp.core.knowledge.inflight import Outcome
from homing_rivals.aibrix_vtc import NoisyMaxScore, UserTokenPlace
from homing_rivals.user_tokens import TOKENS, TOKENS_MAX, TOKENS_MIN
from tests.builders import candidates, endpoint, request
from tests.rivals.driven import scheduler_of


def scores(tokens, least, most, loads, total=1):
    columns = {TOKENS: tokens, TOKENS_MIN: least, TOKENS_MAX: most}
    known = Affinity(
        np.zeros(len(loads), dtype=np.int64),
        total,
        {name: np.full(len(loads), float(value)) for name, value in columns.items()},
    )
    pool = candidates(inflight_requests=loads, affinities={"user-tokens-producer": known})
    return UserTokenPlace().score(request(), pool).tolist()


@pytest.mark.parametrize(
    ("tokens", "place"), [(0, 0), (500, 0), (1_000, 1), (2_100, 2), (90_000, 3)]
)
def test_the_more_a_user_had_the_later_its_endpoint(tokens, place):
    """In steps of at least 1,000 tokens, up to the last one."""
    found = scores(tokens, 0, 1_000, [0, 0, 0, 0])
    assert np.argmax(found) == place
    assert found[place] == 1 - abs(min(tokens / 1_000, 3) - place) / 4


def test_a_step_is_the_middle_between_the_least_and_the_most():
    """4,000 of 2,000 to 6,000 is one step; by hand, with loads."""
    assert scores(4_000, 2_000, 6_000, [50, 0, 0, 200]) == pytest.approx(
        [1 - 1.5 / 4, 1, 1 - 1 / 4, 1 - 3 / 4]
    )
    assert scores(9_000, 0, 1, [0, 0], total=0) == [1, 1]


def test_noise_decides_between_near_equals_and_no_further():
    """A tenth of a place."""
    picker, random, pool = NoisyMaxScore(), Random(1), candidates(4)

    def picks(sums):
        return {picker.pick(np.array(sums), pool, random, 0).item() for _ in range(60)}

    assert picks([1.0, 1.0, 1.0, 1.0]) == {0, 1, 2, 3}
    assert picks([1.0, 1.0 - 0.05 / 4, 0.5, 0.5]) == {0, 1}
    assert picks([1.0, 1.0 - 0.11 / 4, 0.5, 0.5]) == {0}


def test_two_heavy_users_share_the_last_endpoint_while_others_are_idle():
    """It is not fair queueing: places in the list are handed out, not service."""
    scheduler = scheduler_of("aibrix-vtc")
    scheduler.take(PoolReplaced([endpoint(number) for number in range(4)]), 0.0)
    went = {user: Counter() for user in ("heavy-1", "heavy-2", "light", "")}
    for number in range(60):
        for user, tokens in (("heavy-1", 4_000), ("heavy-2", 4_000), ("light", 4), ("", 4_000)):
            decision = scheduler.schedule(
                request(headers={"user": user}, prompt_tokens=tokens), 0.5 * number
            )
            scheduler.take(RequestEnded(decision.lease, Outcome(status=200)), 0.5 * number)
            if number > 5:
                went[user][decision.endpoint.name] += 1
        # A crowd of small users, so that the middle is low.
        small = request(headers={"user": f"small-{number}"}, prompt_tokens=4)
        scheduler.take(RequestEnded(scheduler.schedule(small, 0.5 * number).lease, Outcome()), 0.0)
    assert went["light"].keys() == {"pod-0"}
    assert went["heavy-1"].keys() == went["heavy-2"].keys()
    assert "pod-0" not in went["heavy-1"]
    assert len(went[""]) == 4, "without a user it is anybody's"
