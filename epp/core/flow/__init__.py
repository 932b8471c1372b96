"""Flow control: a queue between session and scheduler for requests that no endpoint has room for.

`control` is the state machine. `bands` has the queues of one priority, and `band_selection` the
rules by which bands take turns. `agent_admission` admits agent sessions. `gate` decides whether
there is room: `detectors` measure the load of endpoints, `rooms` learns what they have room for,
`ceilings` keep room for higher priorities, and `rivalry` finds out whether a wait has a use.
`eviction` chooses a running request that ends for a waiting one, and `drain_rate` measures how fast
the queue drains. `shares` has what pickers exchange about their queues, and `uses` measures
fairness. `settings` has the limits and rules. `core/protocol/flow_queue` connects these parts with
sessions.
"""
