from hypothesis import given
from hypothesis import strategies as st

from epp.core.knowledge.pair_failures import PairFailures


def test_the_endpoint_of_two_pairs_is_blamed_and_its_partners_are_not():
    pairs = PairFailures()
    assert pairs.failed([1, 10]) == []
    assert pairs.failed([1, 10]) == []
    assert pairs.failed([2, 10]) == [10]
    assert pairs.failed([1, 11]) == []


def test_a_success_clears_all_who_took_part():
    pairs = PairFailures()
    pairs.failed([1, 10])
    pairs.succeeded([1, 11])
    pairs.succeeded([10, 2])
    assert pairs.failed([1, 12]) == []
    assert pairs.failed([10, 3]) == []


def test_of_three_the_one_in_common_is_blamed():
    pairs = PairFailures()
    assert pairs.failed([1, 10, 20]) == []
    assert pairs.failed([1, 10, 21]) == []
    assert pairs.failed([1, 11, 22]) == [1]


def test_an_endpoint_that_left_explains_nothing_any_more():
    pairs = PairFailures()
    pairs.failed([1, 10])
    pairs.forget(10)
    assert pairs.failed([1, 11]) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(10, 13)), max_size=30))
def test_nobody_is_blamed_before_two_different_partners(failures):
    pairs = PairFailures()
    partners = {}
    for one, other in failures:
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
        for slot in pairs.failed([one, other]):
            assert len(partners[slot]) >= 2
