"""The autoscaler that `sim size` determined, as manifests: a HorizontalPodAutoscaler and a
ScaledObject of KEDA.
"""

from typing import Final

from sim.measurement.summaries import AutoscalingSummary
from sim.reports.report import limit, number

QUERY: Final = "sum(vllm:num_requests_running) + sum(vllm:num_requests_waiting)"
"""Prometheus query for the number of running and waiting requests of all engines that Prometheus
scrapes.
"""
METRIC: Final = "vllm_requests_inflight"
"""Name of the external metric under which a metrics adapter must serve the result of `QUERY` to
Kubernetes.
"""
_STABILIZATION_S: Final = 300


def autoscaling_manifests(found: AutoscalingSummary) -> str:
    """Return a YAML text with two manifests, a HorizontalPodAutoscaler and a ScaledObject.

    Only one of them may be applied, because both would scale the same Deployment.
    """
    milli = f"{round(found.target * 1000)}m"
    measured = "kept with 95 % confidence" if found.kept else "not shown to be kept"
    return f"""\
# Made by sim size. Apply one of the two documents, never both.
# Fill in the names of the Deployment and of Prometheus. Add labels to the query
# if Prometheus also scrapes engines of other pools.
# Target: {number(found.target)} requests per pod, running and waiting; measured with pods that
# serve {limit(found.startup_s)} after they are requested: the bounds were {measured}.
---
# This document needs a metrics adapter that serves {METRIC} as:
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
