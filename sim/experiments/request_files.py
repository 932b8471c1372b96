"""A run's requests on disk, written as they end: a table for tools, a file of decisions for eyes."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from epp.core.decision.account import Leg
from sim.cluster.simulated_request import SimulatedRequest
from sim.experiments.decision_inputs import asked_of, scored_by
from sim.measurement.measures import queue_of, tpot_of, ttft_of

ROWS_PER_BATCH: Final = 16_384

_POOLS_KEPT_MAX: Final = 16
"""Sets of candidates of which it is kept how they are written."""
_PLACE: Final = "\0"
"""Stands for a number; no name has it."""
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
    """`requests.parquet`: one row a request, in the order in which they ended.

    Times that there were not are null: `pod` of a refused request, `tpot_s` of a one-token answer.
    """

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="snappy")
        self._rows: list[tuple[Any, ...]] = []

    def add(self, request: SimulatedRequest) -> None:
        """Append one request that has ended."""
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
            0 if engine is None else engine.cached_tokens,
            _known(queue_of(request)),
            _known(ttft_of(request)),
            _known(tpot_of(request)),
            request.ended_at - request.arrived_at,
            0 if engine is None else engine.preemptions,
        ))  # fmt: skip
        if len(self._rows) >= ROWS_PER_BATCH:
            self._flush()

    def close(self) -> None:
        """Write the rest; the file is readable from now on."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [list(column) for column in zip(*self._rows, strict=True)]
            self._rows.clear()
            self._writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))


class DecisionFile:
    """`decisions.jsonl`: one line a request, in the order of their arrival.

    A line is known when its request has ended, and waits until all before it have. `time_s` is null
    for one that never got to a picker, `served` names the pod that the gateway asked in the place of
    `endpoint`, null if none, `matched_blocks` and `total_blocks` count full blocks of
    the picker's index, and `candidates` is empty for a policy that scores none.

    Of requests that `note` was given, candidates also have what was `known` of them when they were
    scored, null for what was not, and their `costs` by each scorer that tells them, in its own unit;
    and the line has what of the request the scorers went by.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._waiting: dict[int, bytes] = {}
        self._noted: dict[int, msgspec.Raw] = {}
        self._next = 0

    def note(self, request: SimulatedRequest) -> None:
        """Keep what its candidates were like, just after it was decided; `add` follows when it has ended."""
        route = request.route
        if route is not None and route.decision is not None:
            # As text: a later decision changes what the candidates are views of.
            self._noted[request.sequence] = msgspec.Raw(_ENCODE(scored_by(route.decision.leg)))

    def add(self, request: SimulatedRequest) -> None:
        """Write one request that has ended, and what waited for it."""
        route = request.route
        decision = route.decision if route is not None else None
        noted = self._noted.pop(request.sequence, None)
        asked: dict[str, Any] = {}
        if decision is None:
            candidates = _NOBODY
        elif noted is None:
            candidates = candidates_of(decision.leg)
        else:
            candidates, asked = noted, asked_of(decision.leg)
        line = {
            "request": request.arrival.index,
            "time_s": request.routed_at,
            "outcome": request.fate,
            "endpoint": route.endpoint.name if route is not None else None,
            "served": request.pod.name if request.passed_over and request.pod else None,
            "refusal": request.refusal.message if request.refusal is not None else None,
            "total_blocks": 0 if decision is None else decision.leg.total_blocks,
            **asked,
            "candidates": candidates,
            "predicted_cached_tokens": request.predicted_cached_tokens,
            "cached_tokens": 0 if request.engine is None else request.engine.cached_tokens,
        }
        self._waiting[request.sequence] = _ENCODE(line)
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            self._file.write(waiting + b"\n")
            self._next += 1

    def close(self) -> None:
        """Write what still waits: after an interrupted run some requests have not ended."""
        for sequence in sorted(self._waiting):
            self._file.write(self._waiting[sequence] + b"\n")
        self._waiting.clear()
        self._file.close()


def candidates_of(leg: Leg) -> msgspec.Raw:
    """Those that were scored: what each held, its sum, and what every scorer added to it; as JSON.

    The numbers of all are encoded together and put in their places, column by column: an object for
    each candidate, and one for its parts, would cost twice as much.
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
    """The JSON of such candidates in pieces, with an empty one for each number; not to be changed."""
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
