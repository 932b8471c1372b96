"""The performance report: `python -m bench`. README.md of the parent folder explains it.

Each step of the report is one module:

    workloads    the loads to generate, and the aims
    script       the messages of a load's streams, as bytes
    generator    the process that generates a load: closed loop, open loop, or all at once
    contestants  the measured servers: Homing on each transport, and those that do nothing
    pages        metrics pages of a hundred pods
    operators    pickers with features for operators
    accounting   CPU and memory of processes, and CPU use of other programs
    measuring    the rounds, in which the servers alternate
    verdicts     medians, spread, and reasons why there is no verdict
    rows         the measured value, the floor and the verdict for each aim
    writing      the report as Markdown, JSON and a plot
"""
