from collections import Counter
from random import Random

from epp.core.prompt.rewrite import ModelRewrites, RewriteRule, Target


def rule(models, *targets):
    return RewriteRule(models=tuple(models), targets=tuple(Target(*target) for target in targets))


def test_an_exact_rule_goes_before_one_for_any_model():
    """Wherever it stands."""
    rewrites = ModelRewrites([rule([], ("default", 1)), rule(["food"], ("food-v1", 1))])
    assert rewrites.target("food", Random(1)) == "food-v1"
    assert rewrites.target("other", Random(1)) == "default"


def test_of_two_rules_that_fit_the_first_wins():
    """Order is precedence."""
    rewrites = ModelRewrites(
        [
            rule(["a", "b"], ("one", 1)),
            rule(["a"], ("two", 1)),
            rule([], ("x", 1)),
            rule([], ("y", 1)),
        ]
    )
    assert rewrites.target("a", Random(1)) == "one"
    assert rewrites.target("c", Random(1)) == "x"


def test_without_a_rule_that_fits_nothing_is_said():
    """And no rules at all are false."""
    assert ModelRewrites([rule(["a"], ("b", 1))]).target("c", Random(1)) is None
    assert not ModelRewrites()
    assert ModelRewrites([rule([], ("a", 1))])


def test_targets_share_requests_by_weight_and_by_the_seed():
    """90 to 10 within what 2,000 throws allow; the same seed throws the same."""
    rewrites = ModelRewrites([rule(["a"], ("v1", 90), ("v2", 10))])

    def thrown(seed):
        dice = Random(seed)
        return [rewrites.target("a", dice) for _ in range(2_000)]

    share = Counter(thrown(1))["v2"] / 2_000
    assert 0.07 < share < 0.13
    assert thrown(1) == thrown(1)
