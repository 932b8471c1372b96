from epp.shell.engines.tokens.breaker import CircuitBreaker


def failing(count):
    breaker = CircuitBreaker(failures_max=3, open_s=10.0)
    opened = [breaker.failed(1.0) for _ in range(count)]
    return breaker, opened


def test_it_opens_after_so_many_failures_in_a_row():
    """And says so once."""
    breaker, opened = failing(2)
    assert breaker.allows(1.0)
    breaker.succeeded()
    assert not breaker.failed(1.0)
    breaker, opened = failing(4)
    assert opened == [False, False, True, False]
    assert breaker.is_open(10.9)


def test_one_question_tries_after_a_while():
    """How it ends decides."""
    breaker, _ = failing(3)
    assert breaker.allows(11.0)
    breaker.asked(11.0)
    assert not breaker.allows(11.0)
    breaker.failed(12.0)
    assert not breaker.allows(21.9)
    breaker.asked(22.0)
    breaker.succeeded()
    assert breaker.allows(22.0)


def test_one_that_never_ends_does_not_keep_it_open():
    """Another one tries after the same while."""
    breaker, _ = failing(3)
    breaker.asked(11.0)
    assert breaker.allows(21.0)
