"""A sizing's autoscaler as manifests: a HorizontalPodAutoscaler, and KEDA's ScaledObject beside it."""

from typing import Final

from sim.measurement.summaries import AutoscalingSummary
from sim.reports.report import limit, number

QUERY: Final = "sum(vllm:num_requests_running) + sum(vllm:num_requests_waiting)"
"""What the engines of the pool are at, for Prometheus."""
METRIC: Final = "vllm_requests_inflight"
"""As an adapter has to name it for Kubernetes."""
_STABILIZATION_S: Final = 300


def autoscaling_manifests(found: AutoscalingSummary) -> str:
    """Two documents, of which one is to be applied: both would pull at the same Deployment."""
    milli = f"{round(found.target * 1000)}m"
    measured = "kept" if found.kept else "not shown to be kept"
    return f"""\
# Made by sim size. Apply one of the two documents, never both.
# Names of the Deployment and of Prometheus are yours to fill in, and so are labels in the query
# where Prometheus knows other engines than those of this pool.
# Target: {number(found.target)} requests a pod, running and waiting; measured with pods that
# serve {limit(found.startup_s)} after they are asked for: the bounds were {measured}.
---
# Needs an adapter that answers {METRIC} with:
#   {QUERY}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: model-servers
spec:
  scaleTargetRef: {{apiVersion: apps/v1, kind: Deployment, name: model-servers}}
  minReplicas: {found.pods_min}
  maxReplicas: {found.pods_max}
  metrics:
  - type: External
    external:
      metric: {{name: {METRIC}}}
      target: {{type: AverageValue, averageValue: "{milli}"}}
  behavior:
    scaleDown: {{stabilizationWindowSeconds: {_STABILIZATION_S}}}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: model-servers
spec:
  scaleTargetRef: {{name: model-servers}}
  minReplicaCount: {found.pods_min}
  maxReplicaCount: {found.pods_max}
  pollingInterval: 15
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown: {{stabilizationWindowSeconds: {_STABILIZATION_S}}}
  triggers:
  - type: prometheus
    metricType: AverageValue
    metadata:
      serverAddress: http://prometheus:9090
      query: {QUERY}
      threshold: "{found.target:g}"
"""
