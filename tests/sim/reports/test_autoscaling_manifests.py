"""What a sizing writes for an autoscaler."""

import yaml

from sim.measurement.summaries import AutoscalingSummary
from sim.reports.autoscaling_manifests import autoscaling_manifests
from tests.sim.made import filled

FOUND = filled(AutoscalingSummary, target=12.5, pods_min=2, pods_max=9, startup_s=120.0, kept=True)


def test_both_documents_say_the_same():
    """Target and bounds, in the spelling of each."""
    hpa, scaled = yaml.safe_load_all(autoscaling_manifests(FOUND))
    assert (hpa["kind"], scaled["kind"]) == ("HorizontalPodAutoscaler", "ScaledObject")
    target = hpa["spec"]["metrics"][0]["external"]["target"]
    assert target == {"type": "AverageValue", "averageValue": "12500m"}
    trigger = scaled["spec"]["triggers"][0]
    assert float(trigger["metadata"]["threshold"]) == 12.5
    assert trigger["metricType"] == "AverageValue"
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (2, 9)
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 9)


def test_what_was_not_shown_is_not_claimed():
    """A target that broke bounds, or of one run, says so where it is applied."""
    assert "the bounds were kept with 95 % confidence." in autoscaling_manifests(FOUND)
    for kept in (None, False):
        told = autoscaling_manifests(filled(AutoscalingSummary, target=1.0, kept=kept))
        assert "the bounds were not shown to be kept." in told
