"""Decides. No I/O, no clock, no dice of its own: it is told `now`, and its generators are seeded.

The life of one request, a row a step:

| step                          | function                         | module          |
|-------------------------------|----------------------------------|-----------------|
| protobuf message to event     | `decode`                         | `shell/codec`   |
| phases, buffering, limits     | `Session.receive`                | `core/session`  |
| bytes to request              | `parse_request`                  | `core/parse`    |
| who may serve, is there room  | `EndpointPool.ready`, `saturation` | `core/pool`, `core/saturation` |
| prompt to chained hashes      | `InferenceRequest.chains_of`     | `core/blocks`   |
| who holds the prefix          | `AffinityIndex.match`            | `core/prefix`, `core/affinity` |
| who is left                   | `SchedulingProfile.filter`       | `core/profile`, `plugins/filters` |
| how good is each              | `SchedulingProfile.score`        | `core/profile`, `plugins/scorers` |
| which one                     | `Picker.pick`                    | `plugins/pickers` |
| remember it                   | `AffinityIndex.record`, `InflightLedger.open` | `core/prefix`, `core/inflight` |
| answer to protobuf            | `encode`                         | `shell/codec`   |

`Scheduler.schedule` in `core/scheduler` is the middle of that table in one function.
"""
