"""The configuration of pickers whose requests wait, for measurements with little room."""

_TEXT = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: added-time-scorer
- type: max-score-picker
- type: concurrency-detector
  parameters: {{maxConcurrency: {room}}}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: added-time-scorer
  - pluginRef: max-score-picker
flowControl:
  saturationDetector: {{pluginRef: concurrency-detector}}
  defaultPriorityBand: {{fairnessPolicyRef: {fairness}}}
"""


def config_with_queue(room: int, fairness: str = "token-fairness-policy") -> str:
    """Return a configuration like docs/examples/queue.yaml, with the default limits and a gate that
    closes when each pod has `room` requests, instead of the learned one. `fairness` is the type of
    the fairness policy.
    """
    return _TEXT.format(room=room, fairness=fairness)
