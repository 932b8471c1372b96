"""The performance report: `python -m bench`. README.md beside this folder says how to read it.

One step of the report is one module:

    workloads    what is played, and the aims
    script       the bytes of a stream
    generator    plays them: closed loop, open loop, all at once
    contestants  the servers: Homing on each transport, and those that do nothing
    pages        metrics pages of a hundred pods
    accounting   CPU and memory of processes, and what else the machine did
    measuring    rounds, interleaved
    verdicts     medians, spread, and when there is nothing to say
    writing      Markdown, JSON and the plot
"""
