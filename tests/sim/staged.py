"""A configuration with stages, for simulated pods with roles."""

DISAGGREGATED = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: prefix-based-pd-decider}
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 256}
- type: decode-filter
- type: prefill-filter
- type: prefix-cache-scorer
- type: active-request-scorer
schedulingProfiles:
- name: decode
  plugins:
  - pluginRef: decode-filter
  - pluginRef: prefix-cache-scorer
  - pluginRef: active-request-scorer
- name: prefill
  plugins:
  - pluginRef: prefill-filter
  - pluginRef: prefix-cache-scorer
"""
