"""Configurations that others publish, to compare one's own with: what `--config NAME` runs.

Texts are `EndpointPickerConfig`s as a user would write them, with every parameter that decides.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from epp.configuration.config import DEFAULT_CONFIG
from epp.strategies import STRATEGIES

DEFAULT_POLICY: Final = "default"
"""The configuration that `epp serve` has when it is given none."""

_WEIGHTED_3_2_2: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
    weight: 3
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: kv-cache-utilization-scorer
    weight: 2
  - pluginRef: max-score-picker
"""
"""What llm-d-router decides by when it is given no configuration (v0.10)."""

_STICKY_UNTIL_SATURATED: Final = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: approx-prefix-cache-producer
- type: prefix-cache-affinity-filter
  parameters: {affinityThreshold: 0.8, maxTTFTPenaltyMs: 18000, peakPrefillThroughput: 15928}
- type: token-load-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-affinity-filter
  - pluginRef: token-load-scorer
    weight: 1
  - pluginRef: max-score-picker
"""
"""llm-d's guide optimized-baseline since August 2026: stay with the prefix until 18 s behind.

The speed is what that guide measured of Qwen3-32B on two H100s: set another for other pods."""

CONFIGURATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        DEFAULT_POLICY: DEFAULT_CONFIG,
        "llm-d-3-2-2": _WEIGHTED_3_2_2,
        "sticky-until-saturated": _STICKY_UNTIL_SATURATED,
        **{name: strategy.config for name, strategy in STRATEGIES.items()},
    }
)
"""Name -> text."""
