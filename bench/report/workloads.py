"""The workloads and the aims of the performance report.

All prompts are different; `script` describes what they share.
"""

from typing import Final

from msgspec import Struct

from bench.report.script import Shape


class Workload(Struct, frozen=True, kw_only=True):
    """A workload: streams of one shape, and when they begin (`bench.report.generator.Load`)."""

    name: str
    title: str
    shape: Shape
    connections: int = 2
    streams: int = 16
    duration_s: float = 1.5
    rate_per_s: float = 0.0
    at_once: int = 0
    against_g_max: float | None = None
    """Aim: maximum CPU of a request relative to the reference server G; None for no such aim."""
    tail_max: float | None = None
    """Aim: maximum wait of slow requests as a ratio (`bench.report.rows.tail`); None for no such
    aim.
    """
    fails_never: bool = False
    """True if the aim is that no stream fails in any round."""
    floors: bool = True
    """True if the servers that do nothing on Homing's transports get this workload too."""


_8_KB: Final = Shape(body_bytes=8_000)
BODY_BYTES_LARGE: Final = 4_500_000

REQUEST: Final = Workload(name="8kb", title="8 KB, request phase", shape=_8_KB, against_g_max=1.0)
LARGE: Final = Workload(
    name="4.5mb",
    title="4.5 MB, one at a time",
    shape=Shape(body_bytes=BODY_BYTES_LARGE),
    connections=1,
    streams=1,
    duration_s=2.0,
    against_g_max=0.3,
)

ALONE: Final = Workload(
    name="alone",
    title="8 KB, one request at a time",
    shape=_8_KB,
    connections=1,
    streams=1,
    duration_s=1.0,
    floors=False,
)
"""Workload of one request at a time, for comparison: it shows whether a server keeps up in an open
loop.
"""

ANSWERED: Final = Workload(
    name="8kb-response",
    title="8 KB, with response headers and end",
    shape=Shape(body_bytes=8_000, response_headers=True),
    against_g_max=1.0,
)

LOADS: Final = (
    REQUEST,
    ANSWERED,
    Workload(name="2kb", title="2 KB", shape=Shape(body_bytes=2_000), against_g_max=1.2),
    Workload(name="450kb", title="450 KB", shape=Shape(body_bytes=450_000), against_g_max=0.3),
    Workload(
        name="450kb-new",
        title="450 KB, never seen",
        shape=Shape(body_bytes=450_000, shares=False),
    ),
    LARGE,
    Workload(
        name="sse-50",
        title="stream of 50 chunks through the picker",
        shape=Shape(body_bytes=2_000, response_chunks=50),
        against_g_max=1.0,
    ),
    Workload(
        name="sse-1000",
        title="stream of 1,000 chunks through the picker",
        shape=Shape(body_bytes=2_000, response_chunks=1_000),
        streams=8,
        against_g_max=1.0,
    ),
    ALONE,
    *(
        Workload(
            name=f"open-{rate_per_s}",
            title=f"open loop, {rate_per_s:,}/s on one core",
            shape=_8_KB,
            duration_s=3.0,
            rate_per_s=rate_per_s,
            tail_max=5.0,
            fails_never=True,
            floors=False,
        )
        for rate_per_s in (500, 1_000)
    ),
    Workload(
        name="burst",
        title="4,000 requests at once on 4 connections",
        shape=Shape(body_bytes=2_000),
        connections=4,
        at_once=4_000,
        fails_never=True,
        floors=False,
    ),
)

LEAN: Final = "ngh2"
LEAN_AGAINST_GRPCIO_MAX: Final = 0.35
ENDPOINTS: Final = (10, 1_000)
ENDPOINTS_RATIO_MAX: Final = 2.0
OPERATED_ENDPOINTS: Final = 100
OPERATED: Final = (
    Workload(name="operators", title=ANSWERED.title, shape=ANSWERED.shape),
    Workload(
        name="operators-450kb",
        title="450 KB, with response headers and end",
        shape=Shape(body_bytes=450_000, response_headers=True),
    ),
)
"""Workloads with which features for operators are compared: prompts of 8 KB, and of 450 KB, which
have fifty-six times as many blocks.
"""
OPERATED_RATIO_MAX: Final = 1.05
"""Aim: maximum CPU of a request with all features for operators, relative to none of them."""
MEMORY_IN_BODIES_MAX: Final = 4.0
IDLE_CORES_MAX: Final = {"200ms": 0.08, "": 0.05}
"""Aims for an idle picker: scrape interval ("" for the default) -> maximum CPU use in cores."""
IDLE_S: Final = 2.0
SOAK: Final = "python -m bench.soak --minutes 120 --rate-per-s 300"

APART: Final = ("endpoints", "operators")
"""Names of the comparisons in which pickers of their own are compared with each other."""
NAMES: Final = (*(each.name for each in LOADS), *APART, "memory", "idle")
"""Names of measurements that `--only` accepts."""
