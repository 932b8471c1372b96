"""Traces: arrival time, lengths and shared text of the requests of a workload.

    a file -> reading.open_trace -> Arrival, in order of time -> prompts -> InferenceRequest,
    bytes of a body, hashes for an engine

| module | what |
|---|---|
| `arrival` | `Arrival`: one request, the common form of all formats |
| `reading` | files, formats found by content, bad lines, order |
| `published`, `litellm`, `openai_requests`, `inference_perf`, `capture` | the formats |
| `prompts` | block ids -> hashes or bytes of prompts that share the same prefixes |
| `workloads` | generated traces |
| `inspection` | lengths, bursts, reuse, highest possible hit ratio, hit ratios of simple placements |
| `command` | `sim trace inspect`, `generate`, `convert` |
"""
