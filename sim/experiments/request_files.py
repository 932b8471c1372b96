"""Files with the requests of a run, written while requests end: a Parquet table of requests and a
JSON Lines file of decisions.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from epp.core.decision.account import Leg
from sim.cluster.simulated_request import SimulatedRequest
from sim.experiments.decision_inputs import candidate_entries, request_properties
from sim.measurement.measures import queue_of, tpot_of, ttft_of

ROWS_PER_BATCH: Final = 16_384

_POOLS_KEPT_MAX: Final = 16
"""Maximum number of distinct (endpoints, scorers) combinations for which the JSON text around the
numbers is cached.
"""
_PLACE: Final = "\0"
"""Text that stands for a number in a JSON structure until the number is inserted; no endpoint name
contains it.
"""
_NOBODY: Final = msgspec.Raw(b"[]")
_ENCODE: Final = msgspec.json.Encoder().encode

_SCHEMA: Final = pa.schema(
    [
        ("request", pa.int64()),
        ("arrival_s", pa.float64()),
        ("session", pa.string()),
        ("replica", pa.int32()),
        ("pod", pa.string()),
        ("outcome", pa.string()),
        ("status", pa.int32()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("predicted_cached_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("queue_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("preemptions", pa.int32()),
    ]
)


class RequestTable:
    """The file `requests.parquet`: one row for each request, in the order in which requests ended.

    Names, statuses and times that do not exist are null, such as `pod` of a refused request or
    `tpot_s` of a one-token answer; counts are 0 then. `output_tokens` of a request that no engine
    received is that of the trace.
    """

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="snappy")
        self._rows: list[tuple[Any, ...]] = []

    def add(self, request: SimulatedRequest) -> None:
        """Append the row of a request that has ended to the table."""
        arrival, engine = request.arrival, request.engine
        assert request.fate is not None
        assert request.ended_at is not None
        self._rows.append((
            arrival.index,
            request.arrived_at,
            arrival.session or None,
            request.replica,
            None if request.pod is None else request.pod.name,
            request.fate.value,
            request.status or None,
            arrival.prompt_tokens,
            arrival.output_tokens if engine is None else engine.generated_tokens,
            request.predicted_cached_tokens,
            request.cached_tokens,
            _known(queue_of(request)),
            _known(ttft_of(request)),
            _known(tpot_of(request)),
            request.ended_at - request.arrived_at,
            0 if engine is None else engine.preemptions,
        ))  # fmt: skip
        if len(self._rows) >= ROWS_PER_BATCH:
            self._flush()

    def close(self) -> None:
        """Write the remaining rows and close the Parquet file, which is readable from then on."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [list(column) for column in zip(*self._rows, strict=True)]
            self._rows.clear()
            self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


class DecisionFile:
    """The file `decisions.jsonl`: one line for each request, in the order of arrival.

    A line is complete when its request has ended, and is written after the lines of all earlier
    requests. `time_s` is null for a request that never reached a picker. `served` names the
    fallback pod that the gateway tried last instead of `endpoint`, or is null. `matched_blocks` and
    `total_blocks` count full blocks of the picker's prefix index. `candidates` is empty for a
    request that no picker placed or that was evicted, and for a baseline, which does not score.

    If a request was passed to `note`, each of its candidates also has `known`, the inputs of
    scorers (null if unknown when they scored), and `costs`, by each scorer that reports costs, in
    that scorer's unit. The line then also has the properties of the request that scorers use.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._waiting: dict[int, bytes] = {}
        self._noted: dict[int, msgspec.Raw] = {}
        self._next = 0

    def note(self, request: SimulatedRequest) -> None:
        """Record the inputs of a request's candidates just after its decision; do nothing if it has
        none. The caller passes the request to `add` later, when it has ended.
        """
        route = request.route
        if route is not None and route.decision is not None:
            # The inputs are stored as text, because later decisions change the arrays behind the
            # candidates.
            self._noted[request.sequence] = msgspec.Raw(
                _ENCODE(candidate_entries(route.decision.leg))
            )

    def add(self, request: SimulatedRequest) -> None:
        """Complete the line of a request that has ended, and write all lines that no longer wait
        for an earlier request.
        """
        route = request.route
        decision = route.decision if route is not None else None
        noted = self._noted.pop(request.sequence, None)
        asked: dict[str, Any] = {}
        if decision is None:
            candidates = _NOBODY
        elif noted is None:
            candidates = candidates_of(decision.leg)
        else:
            candidates, asked = noted, request_properties(decision.leg)
        line = {
            "request": request.arrival.index,
            "time_s": request.routed_at,
            "outcome": request.fate,
            "endpoint": route.endpoint.name if route is not None else None,
            "served": request.pod.name if request.passed_over and request.pod else None,
            **_stages_of(request),
            "refusal": request.refusal.message if request.refusal is not None else None,
            "total_blocks": 0 if decision is None else decision.leg.total_blocks,
            **asked,
            "candidates": candidates,
            "predicted_cached_tokens": request.predicted_cached_tokens,
            "cached_tokens": request.cached_tokens,
        }
        self._waiting[request.sequence] = _ENCODE(line)
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            self._file.write(waiting + b"\n")
            self._next += 1

    def close(self) -> None:
        """Write the lines of ended requests that still wait for earlier ones, and close the file.
        After an interrupted run, requests that have not ended have no line.
        """
        for sequence in sorted(self._waiting):
            self._file.write(self._waiting[sequence] + b"\n")
        self._waiting.clear()
        self._file.close()


def _stages_of(request: SimulatedRequest) -> dict[str, Any]:
    """Return the route and the prefill pod of a request as entries of its line; no entries if it
    has neither.
    """
    route = request.route
    if route is None or (route.decision is None and route.prefill is None):
        return {}
    told = None if route.decision is None else route.decision.account.route
    if told is None and route.prefill is None:
        return {}
    return {"route": told, "prefill": None if route.prefill is None else route.prefill.name}


def candidates_of(leg: Leg) -> msgspec.Raw:
    """Return the scored candidates of a decision as JSON: matched blocks, total score, and each
    scorer's part of the score.

    All numbers are encoded together and inserted column by column. Encoding an object for each
    candidate and another for its parts would take twice as long.
    """
    candidates, scored = leg.candidates, leg.scored
    n, columns = len(scored.total), 2 + len(leg.scorers)
    parts = scored.parts.ravel().tolist()
    numbers = [*candidates.matched_blocks.tolist(), *scored.total.tolist(), *parts]
    spelt = _ENCODE(numbers)[1:-1].split(b",")
    names = tuple([endpoint.name for endpoint in candidates.endpoints])
    pieces = _around_numbers(names, leg.scorers).copy()
    for column in range(columns):
        pieces[2 * column + 1 :: 2 * columns] = spelt[column * n : (column + 1) * n]
    return msgspec.Raw(b"".join(pieces))


@lru_cache(_POOLS_KEPT_MAX)
def _around_numbers(names: tuple[str, ...], scorers: tuple[str, ...]) -> list[bytes]:
    """Return the JSON of candidates with these endpoint names and scorers in pieces, with an empty
    piece at the place of each number.

    Callers must not change the list, because it is cached.
    """
    places = dict.fromkeys(scorers, _PLACE)
    objects = [
        {"endpoint": name, "matched_blocks": _PLACE, "score": _PLACE, "parts": places}
        for name in names
    ]
    first, *others = _ENCODE(objects).split(_ENCODE(_PLACE))
    pieces = [first]
    for piece in others:
        pieces += (b"", piece)
    return pieces


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
