"""Traces: arrival time, lengths and shared text of the requests of a workload.

    a file -> formats.open_trace -> Arrival, in order of time -> prompts -> InferenceRequest,
    bytes of a body, hashes for an engine

| module | what |
|---|---|
| `arrival` | `Arrival`: one request, the common form of all formats |
| `formats` | list of formats, detection by content |
| `reading` | files, bad lines, order |
| `published`, `litellm`, `openai_requests`, `inference_perf`, `capture`, `columns` | the formats |
| `prompts` | block ids -> hashes or bytes of prompts that share the same prefixes |
| `workloads` | generated traces |
| `inspection` | lengths, bursts, reuse, highest possible hit ratio, hit ratios of simple placements |
| `command` | `sim trace inspect`, `generate`, `convert` |
"""
