import pytest

from epp.shell.kubernetes.api_errors import ApiError, ApiFailure, failure_of_status


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, ApiFailure.UNAUTHORIZED),
        (410, ApiFailure.GONE),
        (429, ApiFailure.THROTTLED),
        (301, ApiFailure.STATUS),
        (422, ApiFailure.STATUS),
        (500, ApiFailure.SERVER),
        (504, ApiFailure.SERVER),
        (599, ApiFailure.SERVER),
        (0, ApiFailure.STATUS),
    ],
)
def test_a_status_is_the_failure_that_its_answer_calls_for(status, kind):
    """Redirects are not followed, so they are failures too."""
    assert failure_of_status(status) is kind


def test_an_error_is_its_sentence():
    """With what the server said of the time to wait."""
    error = ApiError(ApiFailure.THROTTLED, "GET /x: 429", retry_after_s=3.0)
    assert str(error) == "GET /x: 429"
    assert error.retry_after_s == 3.0
