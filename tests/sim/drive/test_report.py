"""The reports of `sim drive` warn of requests that were not sent, and name the reasons."""

from sim.drive.report import warnings_of
from sim.measurement.summaries import DrivenRequests, DriveSummary
from tests.sim.made import filled


def warned(**counts):
    requests = DrivenRequests(
        **({"sent": 9, "whole": 9, "errors": 0, "not_sent": 0, "unfit": 0, "cut": 0} | counts)
    )
    return warnings_of(filled(DriveSummary, complete=True, requests=requests))


def test_both_reasons_for_an_unfit_request_are_named():
    """The driver counts them together."""
    assert warned() == []
    (said,) = warned(unfit=2)
    assert said == (
        "2 requests were not sent, because their token ids cannot be written as text or their "
        "recorded bodies are not JSON."
    )
