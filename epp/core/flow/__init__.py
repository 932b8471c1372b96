"""Flow control: a queue between session and scheduler for requests that no endpoint has room for.

`control` is the state machine, and `bands` has the queues of one priority, and
`band_selection` the rules by which bands take turns. `agent_admission` admits agent sessions.
`gate` decides whether
there is room: `detectors` measure the load of endpoints, and `rooms` learns what they have room for.
`settings` has the limits and rules. `core/protocol/flow_queue` connects them with sessions.
"""
