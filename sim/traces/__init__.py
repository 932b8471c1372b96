"""Traces: who asked when, how much, and which text prompts share.

    a file -> reading.open_trace -> Arrival, in order of time -> prompts -> InferenceRequest,
    bytes of a body, hashes for an engine

| module | what |
|---|---|
| `arrival` | `Arrival`: what every format is read into |
| `reading` | files, formats found by content, bad lines, order |
| `published`, `litellm`, `openai_requests`, `inference_perf`, `capture` | the formats |
| `prompts` | block ids -> hashes or bytes that share in the same places |
| `workloads` | generated traces |
| `inspection` | lengths, bursts, reuse, the hit ceiling, what placements reach |
| `command` | `sim trace inspect`, `generate`, `convert` |
"""
