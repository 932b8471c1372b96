import pytest

from epp.core.decision.account import Ranking
from epp.core.decision.choice import predicted_tokens
from epp.core.decision.profile import Scored
from epp.core.types import Stage
from tests.shell.operators.decided import make_decision


def test_a_decision_has_one_account_and_it_one_leg():
    """Whoever asks first, all get the same."""
    decision = make_decision(endpoints=3, picked=1)
    account = decision.account
    assert account is decision.account
    assert [leg.stage for leg in account.legs] == [Stage.DECODE]
    assert account.leg.endpoint is decision.endpoint
    assert account.request is decision.lease.request
    assert account.leg.parts == decision.leg.scored.parts_of(1)
    assert account.leg.total == pytest.approx(sum(account.leg.parts))


def test_the_only_candidate_was_decided_by_nothing():
    """There was no choice, and nobody else whose numbers count."""
    leg = make_decision(endpoints=1, picked=0).account.leg
    assert (leg.runner_up, leg.decided_by, leg.runner_up_numbers) == (None, (), ())


def test_the_chosen_one_is_among_the_best_whatever_its_place():
    """It takes that of the last that is told."""
    leg = make_decision(endpoints=5, picked=4).account.leg
    total = leg.scored.total
    assert sorted(leg.best(5)) == [0, 1, 2, 3, 4]
    assert 4 in leg.best(1)
    assert leg.runner_up == max(range(4), key=lambda at: total[at])


def test_a_ranking_that_was_kept_tells_the_same():
    """Of the scores and the weights alone."""
    leg = make_decision(endpoints=5, picked=2).account.leg
    kept = Ranking(
        scorers=leg.scorers,
        scored=Scored.of(leg.scored.scores.copy(), leg.scored.weights),
        picked=leg.picked,
    )
    assert kept.scored.total.tobytes() == leg.scored.total.tobytes()
    assert (kept.total, kept.parts, kept.runner_up) == (leg.total, leg.parts, leg.runner_up)
    assert (kept.decided_by, kept.best(3)) == (leg.decided_by, leg.best(3))


@pytest.mark.parametrize(
    ("matched", "prompt_tokens", "predicted"), [(0, 100, 0), (1, 100, 64), (2, 100, 100)]
)
def test_no_more_is_predicted_than_there_is(matched, prompt_tokens, predicted):
    """Tokens are an estimate, blocks are not."""
    assert predicted_tokens(matched, 64, prompt_tokens) == predicted
