from epp.shell.per_second import PerSecond


def test_the_first_of_a_second_are_admitted_and_the_rest_counted():
    """The count is told once, with the next line."""
    limit = PerSecond(2)
    assert [limit.admits(5.0 + step / 10) for step in range(5)] == [True, True, False, False, False]
    assert limit.admits(6.0)
    assert limit.left_out() == {"left_out": 3}
    assert limit.left_out() == {}
