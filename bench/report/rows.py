"""Conversion of the report's results to rows: the measured value for each aim, its floor, and the
verdict.
"""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from bench.report import workloads
from bench.report.contestants import GO, homing, nothing
from bench.report.measuring import Reading, Results, Sample, idle_name
from bench.report.operators import EVERYTHING, NAMES, NOTHING, SPARINGLY
from bench.report.verdicts import Figure, Verdict, crosses, figure, judge, ratios
from bench.report.workloads import LEAN, Workload


class Row(Struct, frozen=True, kw_only=True):
    """The result for one aim of one workload, as a row of the report."""

    title: str
    measure: str
    seen: dict[str, Figure]
    """Measured value of the picker, by name of the transport."""
    floor: dict[str, Figure]
    """Measured value of the server that does nothing on the same transport, by name of the
    transport. It is that of G for failures and slow requests. Empty if no such server took part.
    """
    aim_max: float | None
    judged: str
    """Name of the transport to which the verdict applies."""
    verdict: Verdict | None
    reason: str


class Reported(Struct, frozen=True):
    """The results and the rows that the report's writers write."""

    results: Results
    rows: list[Row]
    transports: list[str]

    @property
    def was_busy(self) -> bool:
        return any(row.verdict is Verdict.BUSY for row in self.rows)


def rows(results: Results, transports: Sequence[str]) -> list[Row]:
    """Return the report's rows in the order of the aims, without workloads that were not played."""
    made = _Rows(results, transports)
    for load in workloads.LOADS:
        made.add_load(load)
        if load is workloads.REQUEST:
            made.add_lean_against_grpcio()
        if load is workloads.LARGE:
            made.add_readings(
                "memory",
                "4.5 MB, one at a time",
                "memory above an idle picker, in bodies",
                workloads.MEMORY_IN_BODIES_MAX,
            )
    made.add_endpoints()
    made.add_operators()
    for refresh, aim_max in workloads.IDLE_CORES_MAX.items():
        scraped = "every 200 ms" if refresh else "at the default interval"
        title = f"idle, 100 pods {scraped}, pages of 60 KB"
        made.add_readings(idle_name(refresh), title, "cores", aim_max)
    return made.rows


class _Rows:
    def __init__(self, results: Results, transports: Sequence[str]) -> None:
        self._results = results
        self._transports = transports
        self._lean = LEAN if LEAN in transports else transports[0]
        self.rows: list[Row] = []

    def _samples(self, workload: str, contestant: str) -> list[Sample]:
        return [
            each
            for each in self._results.samples
            if each.workload == workload and each.contestant == contestant
        ]

    def _cpu(self, workload: str, contestant: str) -> dict[int, float]:
        return {
            each.round: each.cpu_us
            for each in self._samples(workload, contestant)
            if each.cpu_us is not None
        }

    def _against(self, workload: str, of: str, to: str) -> Figure | None:
        return figure(ratios(self._cpu(workload, of), self._cpu(workload, to)))

    def _add(
        self,
        title: str,
        measure: str,
        seen: Callable[[str], Figure | None],
        aim_max: float | None,
        played: Sequence[Sample | Reading],
        *,
        floor: Callable[[str], Figure | None] = lambda _: None,
        judged: str = "",
        settings: Sequence[str] = ("",),
    ) -> None:
        """Add a row. Failed requests of the judged transport's pickers with `settings` count
        against the aim.
        """
        named = [judged] if judged else self._transports
        judged = judged or self._lean
        figures = {each: told for each in named if (told := seen(each)) is not None}
        floors = {each: told for each in named if (told := floor(each)) is not None}
        verdict, reason = None, ""
        note = played[-1].note if isinstance(played[-1], Reading) else ""
        if aim_max is not None:
            told = figures.get(judged)
            samples = [each for each in played if isinstance(each, Sample)]
            verdict = judge(
                told,
                aim_max,
                disturbances=[each.disturbance for each in played],
                generator_shares=[each.generator_share for each in samples],
            )
            pickers = {homing(judged, each) for each in settings}
            failed = sum(
                sum(each.failed.values()) for each in samples if each.contestant in pickers
            )
            reason = _reason(verdict, told, aim_max, floors.get(judged), judged)
            if verdict is Verdict.MISSING:
                reason = self._missing(judged)
            if failed and measure != _FAILED:
                verdict, reason = Verdict.NOT_MET, f"{failed:,} requests failed"
        self.rows.append(
            Row(
                title=title,
                measure=measure,
                seen=figures,
                floor=floors,
                aim_max=aim_max,
                judged=judged,
                verdict=verdict,
                reason="; ".join(part for part in (reason, note) if part),
            )
        )

    def _missing(self, judged: str) -> str:
        if judged not in self._transports:
            return f"`epp serve` has no transport {judged}"
        return " ".join(self._results.missing)

    def add_load(self, load: Workload) -> None:
        """Add the rows of a workload if it was played: one for each aim about failures and slow
        requests, and one for CPU if the servers that do nothing should play it too.
        """
        played = [each for each in self._results.samples if each.workload == load.name]
        if not played:
            return
        name = load.name
        if load.fails_never:
            self._add(
                load.title,
                _FAILED,
                # The worst round counts, because an aim of no failures has no median.
                lambda each: _worst(self._samples(name, homing(each))),
                0.0,
                played,
                floor=lambda _: _worst(self._samples(name, GO)),
            )
        if load.tail_max is not None:
            self._add(
                load.title,
                _TAIL,
                lambda each: self._tail(name, homing(each)),
                load.tail_max,
                played,
                floor=lambda _: self._tail(name, GO),
            )
        if load.floors:
            self._add(
                load.title,
                "CPU per request, in units of G",
                lambda each: self._against(name, homing(each), GO),
                load.against_g_max,
                played,
                floor=lambda each: self._against(name, nothing(each), GO),
            )

    def _tail(self, workload: str, contestant: str) -> Figure | None:
        alone = {
            each.round: each.p50_ms for each in self._samples(workloads.ALONE.name, contestant)
        }
        return figure(
            [
                tail(each.p50_ms, each.p99_ms, alone[each.round])
                for each in self._samples(workload, contestant)
                if each.p50_ms and alone.get(each.round)
            ]
        )

    def add_lean_against_grpcio(self) -> None:
        """Add the row that compares the CPU of the transport ngh2 with that of grpcio, in the same
        rounds on the same core.
        """
        name = workloads.REQUEST.name
        played = [each for each in self._results.samples if each.workload == name]
        if not played:
            return
        self._add(
            workloads.REQUEST.title,
            "CPU per request, lean in units of grpcio",
            lambda each: self._against(name, homing(each), homing("grpcio")),
            workloads.LEAN_AGAINST_GRPCIO_MAX,
            played,
            floor=lambda each: self._against(name, nothing(each), nothing("grpcio")),
            judged=LEAN,
        )

    def add_endpoints(self) -> None:
        """Add the row that compares the CPU of a picker with a thousand endpoints with
        that at ten.
        """
        played = [each for each in self._results.samples if each.workload == "endpoints"]
        if not played:
            return
        few, many = (f"{count:,} endpoints" for count in workloads.ENDPOINTS)
        base = workloads.ENDPOINTS[0]
        self._add(
            f"8 KB, {many} against {base}",
            f"CPU per request, in units of that at {base}",
            lambda each: self._against("endpoints", homing(each, many), homing(each, few)),
            workloads.ENDPOINTS_RATIO_MAX,
            played,
            settings=(few, many),
        )

    def add_operators(self) -> None:
        """Add rows that compare the CPU of pickers with features for operators with that of a
        picker without any.
        """
        for load in workloads.OPERATED:
            played = [each for each in self._results.samples if each.workload == load.name]
            for name in NAMES:
                if played and name != NOTHING:
                    self._add(
                        f"{load.title}: {name or 'as installed'}",
                        f"CPU per request, in units of that with {NOTHING}",
                        lambda each, name=name, load=load: self._against(
                            load.name,
                            homing(each, name),
                            homing(each, NOTHING),
                        ),
                        workloads.OPERATED_RATIO_MAX if name in {EVERYTHING, SPARINGLY} else None,
                        played,
                        judged=LEAN,
                        settings=(name, NOTHING),
                    )

    def add_readings(self, name: str, title: str, measure: str, aim_max: float) -> None:
        """Add a row for the readings `name`, if there are any: the memory of a picker, or the CPU
        of an idle one.
        """
        read = [each for each in self._results.readings if each.name == name]
        if read:
            self._add(
                title,
                measure,
                lambda each: _read(read, homing(each)),
                aim_max,
                read,
            )


_FAILED: Final = "requests failed, in the worst round"
_TAIL: Final = "p99 in units of p50, or p50 in units of a lone request's p50 if that is greater"


def _worst(samples: Sequence[Sample]) -> Figure | None:
    failed = figure([float(sum(each.failed.values())) for each in samples])
    return failed and Figure(failed.high, failed.low, failed.high, failed.rounds)


def tail(p50_ms: float, p99_ms: float, alone_p50_ms: float) -> float:
    """Return the wait of slow requests as a ratio: p99 relative to p50, or p50 relative to that of
    a lone request if that is greater.

    If a server does not keep up, all requests wait alike, and p99 alone would not show it.
    """
    return max(p99_ms / p50_ms, p50_ms / alone_p50_ms)


def _read(readings: Sequence[Reading], contestant: str) -> Figure | None:
    return figure([each.value for each in readings if each.contestant == contestant])


def _reason(
    verdict: Verdict, seen: Figure | None, aim_max: float, floor: Figure | None, transport: str
) -> str:
    """Return why the aim is not met, as far as the floor shows it, and whether single rounds
    disagree with the median.
    """
    if seen is None or verdict not in {Verdict.MET, Verdict.NOT_MET}:
        return ""
    parts = []
    if verdict is Verdict.NOT_MET and floor is not None:
        if floor.median > aim_max:
            parts.append(f"the floor of {transport} alone is {floor.median:.3g}")
        else:
            parts.append(
                f"the server on {transport} that does nothing takes {floor.median:.3g}, "
                f"the remaining {seen.median - floor.median:.3g} is the picker's own work"
            )
    if crosses(seen, aim_max):
        parts.append("single rounds disagree with the median")
    return "; ".join(parts)
