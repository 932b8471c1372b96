import pytest

from epp.shell.engines.tokens.question import Question, TokensResult, TokensUnknownError
from tests.builders import request


@pytest.mark.parametrize("result", TokensResult)
def test_why_not_is_one_of_few_words(result):
    """They are label values."""
    error = TokensUnknownError(result)
    assert (error.result, str(error)) == (result, result.value)
    assert result.value.replace("-", "").isalpha()


def test_a_question_is_in_time_until_its_deadline():
    """What its task was cancelled for tells who is at fault."""
    asked = Question(request(), b"{}")
    assert not asked.expired
