"""Decides. No I/O, no clock, no dice of its own: it is told `now`, and its generators are seeded.

The life of one request, a row a step:

| step                         | function                                      | module                                             |
| ---------------------------- | --------------------------------------------- | -------------------------------------------------- |
| protobuf message to event    | `Decoder.decode`                              | `shell/gateway/wire`                               |
| phases, buffering, limits    | `Session.receive`                             | `core/protocol/session`                            |
| what would decoding cost     | `admit`                                       | `core/prompt/outline`                              |
| bytes to request             | `parse_request`                               | `core/prompt/parse`                                |
| does it have to wait         | `Resolver.begin`, `Session.resolved`          | `core/protocol/waiting`, `core/protocol/session`   |
| who may serve, is there room | `EndpointPool.ready`, `saturation`            | `core/knowledge/pool`, `core/knowledge/saturation` |
| prompt to chained hashes     | `InferenceRequest.chains_of`                  | `core/prompt/blocks`                               |
| who holds the prefix         | `AffinityIndex.match`                         | `core/knowledge/prefix`, `core/knowledge/affinity` |
| who is left                  | `SchedulingProfile.filter`                    | `core/decision/profile`, `plugins/filters`         |
| how good is each             | `SchedulingProfile.score`                     | `core/decision/profile`, `plugins/scorers`         |
| which one                    | `Picker.pick`                                 | `plugins/pickers`                                  |
| remember it                  | `AffinityIndex.record`, `InflightLedger.open` | `core/knowledge/prefix`, `core/knowledge/inflight` |
| answer to protobuf           | `encode`                                      | `shell/gateway/codec`                              |
| why, for whoever asks        | `Decision.account`                            | `core/decision/account`                            |

Four wings, each of which imports only those below it: `protocol` (one stream) over `decision` (one
request to one endpoint) over `knowledge` (what is believed of each endpoint) over `prompt` (a body
to a request and its chains), all over the nouns in `types`, `duration`, `parameters`, `moment`
and `session_tokens`.

`Scheduler.schedule` in `core/decision/scheduler` is the middle of that table in one function; what
else happens to it is one of `core/decision/inputs`, given to `Scheduler.take`.
"""
