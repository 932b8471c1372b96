"""The performance report: `python -m bench`. README.md of the parent folder explains it.

Each step of the report is one module:

    workloads    loads, and the aims
    script       the bytes of a stream
    generator    plays them: closed loop, open loop, all at once
    contestants  the servers: Homing on each transport, and those that do nothing
    pages        metrics pages of a hundred pods
    accounting   CPU and memory of processes, and other work of the machine
    measuring    rounds, interleaved
    verdicts     medians, spread, and reasons why there is no verdict
    writing      Markdown, JSON and the plot
"""
