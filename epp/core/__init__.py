"""The deciding half of the picker, without I/O, clock or unseeded randomness.

The caller passes the time as `now`, and every random generator has a seed. The table lists the
steps of one request:

| step                         | function                                | module                                              |
| ---------------------------- | --------------------------------------- | --------------------------------------------------- |
| protobuf message to event    | `Decoder.decode`                        | `shell/gateway/wire`                                |
| phases, buffering, limits    | `Session.receive`                       | `core/protocol/session`                             |
| limit the cost of decoding   | `admit`                                 | `core/prompt/outline`                               |
| bytes to request             | `parse_request`                         | `core/prompt/parse`                                 |
| wait for tokens or a slot    | `Resolver.begin`, `Session.resolved`    | `core/protocol/waiting`, `core/protocol/session`    |
| ready endpoints, saturation  | `EndpointPool.ready`, `saturation`      | `core/knowledge/pool`, `core/knowledge/saturation`  |
| prompt to chained hashes     | `InferenceRequest.chains_of`            | `core/prompt/blocks`                                |
| leave out those without room | `available`                             | `core/knowledge/availability`                       |
| match the cached prefix      | `Indexes.match`, `AffinityIndex.match`  | `core/knowledge/indexes`, `core/knowledge/prefix`   |
| choose by stages, if several | `decode_first`, `prefill_first`         | `core/decision/staged_choice`                       |
| choose one: the next four    | `choose`                                | `core/decision/choice`                              |
| - filter the candidates      | `SchedulingProfile.filter`              | `core/decision/profile`, `plugins/filters`          |
| - prefer fresh metrics       | `choose`                                | `core/decision/choice`                              |
| - score the candidates       | `SchedulingProfile.score`               | `core/decision/profile`, `plugins/scorers`          |
| - pick one                   | `Picker.pick`                           | `plugins/pickers`                                   |
| record the decision          | `Indexes.record`, `InflightLedger.open` | `core/knowledge/indexes`, `core/knowledge/inflight` |
| answer to protobuf           | `encode`                                | `shell/gateway/codec`                               |
| explain the decision         | `Decision.account`                      | `core/decision/account`                             |

The core has six layers. Each layer imports only the layers below it:

- `protocol`: the phases of one ext_proc stream. `peers`, `journal` and `subscription` are in the
  same layer.
- `decision`: the choice of one endpoint for one request.
- `flow`: the queue for requests that no endpoint has room for.
- `knowledge`: the state and the estimates of each endpoint.
- `kv_events`: the events in which engines report cached blocks.
- `prompt`: the path from a request body to a parsed request and its hash chains.

All layers may use the basic types in `types`, `duration`, `parameters`, `moment` and
`session_tokens`, and count the failures of plugins in `failures`.

`Scheduler.schedule` in `core/decision/scheduler` runs the middle of the table in one function.
Every other event is one of `core/decision/inputs` and is passed to `Scheduler.take`. The table
in `Scheduler._handlers_by_input` says what each input does. The scheduler itself only connects its
parts: the state of the pool, `choose`, the choice by stages, placements, outcomes and admission.
"""
