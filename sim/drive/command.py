"""The command `sim drive`: send the requests of a trace as real requests to a live gateway."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rich.progress import Progress

from sim.drive.report import drive_page, drive_report, drive_table
from sim.drive.summary import DriveMeasures
from sim.interrupts import INTERRUPTED, interrupts_call
from sim.measurement.summaries import as_json, read_run
from sim.output import (
    OutputError,
    add_output_options,
    open_folder,
    progress_bar,
    write_whole,
)
from sim.sentences import failed, unread, warned
from sim.traces.arrival import Arrival
from sim.traces.formats import open_trace
from sim.traces.plausibility import warnings_of
from sim.traces.reading_flags import add_reading_flags, read_options

if TYPE_CHECKING:
    from sim.drive.driver import Driven, Driver, DriveSettings

_HEADERS_MAX: Final = 64
_IN_FLIGHT_MAX: Final = 100_000


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of `sim drive`."""
    parser = subparsers.add_parser(
        "drive",
        help="send a trace as real requests to a live gateway",
        description="Send the requests of TRACE to a gateway at the trace's times, and measure "
        "latencies as clients see them. Prompts are generated text with the trace's shared prefixes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "trace", metavar="TRACE", help="a trace, or the directory of a live capture"
    )
    add = parser.add_argument_group("Gateway").add_argument
    add(
        "--url",
        type=_url,
        required=True,
        metavar="URL",
        help="URL of the gateway, with http:// or https://",
    )
    add("--model", action="append", type=_model, default=[], metavar="[TRACED=]NAME",
        help="request model NAME instead of the trace's models, or instead of TRACED only")  # fmt: skip
    add("--unlisted-models", action="store_true",
        help="do not check first whether the gateway serves the models")  # fmt: skip
    add("--header", action="append", type=_header, default=[], metavar="NAME:VALUE",
        help="header to add to every request; never written to a report")  # fmt: skip
    add("--header-file", type=Path, metavar="FILE",
        help="file with headers to add to every request, one a line; use it for API keys")  # fmt: skip
    add("--pod-header", default="x-homing-endpoint", metavar="NAME",
        help="response header that names the pod (default: x-homing-endpoint)")  # fmt: skip
    add = parser.add_argument_group("Load").add_argument
    add(
        "--speed",
        type=_positive,
        default=1.0,
        metavar="X",
        help="send the requests X times as fast as in the trace (default: 1)",
    )
    add("--requests", type=_count, metavar="N", help="send only the first N requests")
    add("--in-flight", type=_in_flight, default=1_000, metavar="N",
        help="maximum number of concurrent requests; requests beyond it are counted but not sent "
        "(default: 1000)")  # fmt: skip
    add("--timeout", type=_positive, default=600.0, metavar="S",
        help="timeout of one request in seconds (default: 600)")  # fmt: skip
    add(
        "--beside",
        type=Path,
        metavar="DIR",
        help="folder that `sim replay --out` wrote; its figures are shown beside the measured ones",
    )
    add("--seed", type=int, default=1, help="seed of a generated workload (default: 1)")
    add_reading_flags(parser, "--trace-format")
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `sim drive` and return its exit code.

    0: done. 1: no request has a complete answer, or the gateway does not serve a model. 130:
    interrupted; the results up to then are written.
    """
    # The HTTP client takes a tenth of a second to import, which other commands avoid.
    from sim.drive.driver import DriveSettings  # noqa: PLC0415
    from sim.drive.served_models import (  # noqa: PLC0415
        ModelsUnknownError,
        NotServedError,
        check_served,
        requested_models,
    )

    beside = None if options.beside is None else read_run(options.beside / "summary.json")
    headers = dict([*options.header, *_headers_in(options.header_file)])
    trace = open_trace(Path(options.trace), read_options(options, options.seed))
    total = trace.requests_expected()
    total = total if options.requests is None else min(total, options.requests)
    settings = DriveSettings(
        url=options.url,
        models=dict(options.model),
        headers=headers,
        pod_header=options.pod_header.lower(),
        speed=options.speed,
        in_flight_max=options.in_flight,
        timeout_s=options.timeout,
    )
    for warning in warnings_of(trace):
        warned(warning)
    if not options.unlisted_models:
        asked = requested_models(islice(iter(trace), options.requests), settings.models)
        try:
            asyncio.run(check_served(settings, asked))
        except NotServedError as unserved:
            return failed(str(unserved), code=1)
        except ModelsUnknownError as untold:
            warned(f"The gateway did not report which models it serves: {untold}.")
    folder = open_folder(options)
    measures, progress = DriveMeasures(), progress_bar("drive")
    told = _shown(progress, total, measures)
    arrivals = islice(iter(trace), options.requests)
    with progress:
        driver, took_s, stopped = asyncio.run(_drive(settings, told, arrivals))
    summary = measures.summary(
        conditions=_conditions(options),
        took_s=took_s,
        not_sent=driver.not_sent,
        unfit=driver.unfit,
        cut=driver.cut,
        complete=not stopped,
    )
    print(drive_table(summary, beside))
    for problem in trace.problems:
        print(f"skipped: {problem}", file=sys.stderr)
    if folder is not None:
        write_whole(folder / "summary.json", as_json(summary))
        write_whole(folder / "report.md", drive_report(summary, beside).encode())
        write_whole(folder / "report.html", drive_page(summary, measures, beside).encode())
        print(f"results are in {folder}")
    if stopped:
        print("sim: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0 if summary.requests.whole else 1


async def _drive(
    settings: "DriveSettings", told: "Callable[[Driven], None]", arrivals: Iterator[Arrival]
) -> "tuple[Driver, float, bool]":
    """Send the requests of the trace to the gateway. Return the driver, the time that it took in
    seconds, and True if it was interrupted.
    """
    from sim.drive.driver import Driver  # noqa: PLC0415

    driver = Driver(settings, told)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        loop.call_soon_threadsafe(driver.stop)

    with interrupts_call(stop):
        took_s = await driver.run(arrivals)
    return driver, took_s, stopped


def _shown(progress: Progress, total: int, measures: DriveMeasures) -> "Callable[[Driven], None]":
    """Return a function that records a request that has ended in `measures`, and advances the
    progress bar. `total` is 0 if the number of requests is unknown.
    """
    task = progress.add_task("drive", total=total or None)

    def ended(driven: "Driven") -> None:
        measures.add(driven)
        progress.advance(task)

    return ended


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of a run of `sim drive` (trace, URL, models and other flags) by name,
    for reports. They do not contain the given headers, because these may be keys.
    """
    return {
        "trace": Path(options.trace).name,
        "url": options.url,
        "models": ", ".join(f"{traced}={name}".lstrip("=") for traced, name in options.model),
        "pod_header": options.pod_header,
        "speed": options.speed,
        "requests": options.requests,
        "in_flight": options.in_flight,
        "timeout_s": options.timeout,
    }


def _headers_in(path: Path | None) -> list[tuple[str, str]]:
    """Return the request headers in a file as (name, value), one of each line; none if there is no
    file. Raises `OutputError` and `OSError`.

    The errors do not quote the content, because it may be a key.
    """
    if path is None:
        return []
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as problem:
        raise OutputError(unread(path, problem, "one header per line")) from None
    if len(lines) > _HEADERS_MAX:
        raise OutputError(f"{path}: expected at most {_HEADERS_MAX} headers, got {len(lines)}")
    try:
        return [_header(line) for line in lines]
    except argparse.ArgumentTypeError as problem:
        raise OutputError(f"{path}: {problem}") from None


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError("expected http://HOST[:PORT] or https://HOST[:PORT]")
    if "@" in parts.netloc:
        raise argparse.ArgumentTypeError("expected a URL without password: use --header-file")
    return f"{text.rstrip('/')}/"


def _model(text: str) -> tuple[str, str]:
    traced, equals, name = text.rpartition("=")
    if not name or (equals and not traced):
        raise argparse.ArgumentTypeError("expected NAME or TRACED=NAME")
    return traced, name


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not name.strip().isprintable():
        raise argparse.ArgumentTypeError("expected NAME:VALUE")
    return name.strip().lower(), value.strip()


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _in_flight(text: str) -> int:
    value = _count(text)
    if value > _IN_FLIGHT_MAX:
        raise argparse.ArgumentTypeError(f"expected at most {_IN_FLIGHT_MAX}, got {text}")
    return value
