"""The commands `sim trace inspect`, `generate` and `convert`, with results as a table or JSON."""

import argparse
import contextlib
import gzip
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track
from rich.table import Table

from epp.core.journal.lines import Salt
from sim.engine.profiles import DEFAULT_PROFILE, Profile, estimate_warnings, profile_named
from sim.output import Printer
from sim.sentences import sentence_of, warned
from sim.traces.arrival import Arrival
from sim.traces.capture import CaptureWriter
from sim.traces.formats import open_trace
from sim.traces.inspection import Inspection, PodCeilings, Pool, Quantiles, inspect
from sim.traces.mooncake import MooncakeWriter
from sim.traces.plausibility import warnings_of
from sim.traces.reading import LineFormat, Trace
from sim.traces.reading_flags import add_reading_flags, read_options
from sim.traces.standard import STANDARD, Drawing
from sim.traces.workloads import ClosedLoad, cannot_be_steady

_PODS_MAX: Final = 1000
_SALT_BYTES: Final = 32
_ESTIMATES: Final = (
    *("ceilings.per_pod", "ceilings.one_cache_at_capacity", "ceilings.per_pod_at_capacity"),
    *("ceilings.affinity_load_max_over_mean", "place"),
)
"""Fields in the JSON output of `sim trace inspect` that are always estimates. The others are exact,
except `_TOKEN_ESTIMATES` for prompts as text, and times between uses above a million uses.
"""
_TOKEN_ESTIMATES: Final = (
    *("prompt_tokens", "output_tokens", "prompt_tokens_total", "output_tokens_total"),
)
"""Fields of the output of `sim trace inspect` that are estimates too if the trace has prompts as
text instead of token counts.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `sim trace` with its subcommands inspect, generate and convert."""
    trace = commands.add_parser(
        "trace", help="inspect, generate and convert traces", allow_abbrev=False
    )
    kinds = trace.add_subparsers(required=True, metavar="COMMAND")
    _add_inspect(kinds)
    _add_generate(kinds)
    _add_convert(kinds)


def _add_inspect(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "inspect",
        help="show lengths, bursts, reuse, possible hit rates and the gain of prefix routing",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE")
    add_reading_flags(parser, "--format", "--trace-format")
    add(
        "--pods", type=_pods, default=8, metavar="N", help="number of pods in the pool (default: 8)"
    )
    add(
        "--profile",
        type=profile_named,
        default=DEFAULT_PROFILE,
        metavar="NAME|FILE.toml",
        help=f"engine profile: model and GPU (default: {DEFAULT_PROFILE})",
    )
    add(
        "--kv-tokens",
        type=_positive,
        metavar="N",
        help="KV cache size of each pod in tokens (default: the profile's)",
    )
    add("--seed", type=int, default=1, help="seed of the random placement (default: 1)")
    add("--json", action="store_true", help="print the properties of the trace as JSON")
    parser.set_defaults(run=_run(_inspect))


def _add_generate(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "generate",
        help="write a standard workload as a capture",
        description="KIND is one of: " + ", ".join(sorted(STANDARD)) + ".",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("kind", choices=sorted(STANDARD), metavar="KIND")
    add(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="output file; compressed if the name ends in .gz",
    )
    add("--force", action="store_true", help="replace FILE if it exists")
    add("--requests", type=_positive, metavar="N", help="stop after N requests")
    add(
        "--rate",
        type=_rate,
        metavar="R",
        help="arrival rate in sessions or requests a second, depending on the workload; replaces the "
        "workload's own rates",
    )
    add(
        "--burstiness",
        type=_burstiness,
        metavar="CV",
        help="coefficient of variation of the gaps between arrivals: 0 even, 1 Poisson, above 1 bursts",
    )
    add(
        "--duration",
        type=_rate,
        metavar="S",
        help="duration of the traffic of --rate in seconds (default: 300, or until --requests is reached)",
    )
    add("--steady", action="store_true", help="generate constant traffic: sessions are already "
        "running at the start, and no request arrives after the end; needs a workload with one rate, or --rate")  # fmt: skip
    add("--seed", type=int, default=1, help="seed of the random draw (default: 1)")
    add("--json", action="store_true", help="print the summary of the written file as JSON")
    parser.set_defaults(run=_run(_generate))


def _add_convert(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "convert", help="convert a trace to a capture or to Mooncake's format", allow_abbrev=False
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="IN")
    add("out", type=Path, metavar="OUT", help="output file; compressed if the name ends in .gz")
    add_reading_flags(parser, "--format", "--trace-format")
    add("--to", choices=("capture", "mooncake"), required=True, help="format of the file OUT")
    add("--limit", type=_positive, metavar="N", help="stop after N requests")
    add(
        "--salt-file",
        type=Path,
        metavar="FILE",
        help="file with a secret of up to 64 bytes, with which block ids, sessions, cache salts and header "
        "values are hashed in the capture (default: a random secret for prompts as text, else no hashing)",
    )
    add(
        "--seed",
        type=int,
        default=1,
        help="random seed of a workload file that defines none (default: 1)",
    )
    add("--force", action="store_true", help="replace OUT if it exists")
    add("--json", action="store_true", help="print the summary of the written file as JSON")
    parser.set_defaults(run=_run(_convert))


class _OptionsError(ValueError):
    """An error about options that contradict each other; the exit code is 2."""


def _run(
    command: Callable[[argparse.Namespace, Console], int],
) -> Callable[[argparse.Namespace], int]:
    """Wrap a subcommand of `sim trace` so that it prints an error as one sentence on stderr.

    The exit code is then 1, or 2 if options contradict each other.
    """

    def run(options: argparse.Namespace) -> int:
        try:
            return command(options, Printer())
        except BrokenPipeError:
            raise  # the reader of the output has left, which is no problem of the command
        except (ValueError, OSError) as problem:
            sys.stderr.write(f"sim: {sentence_of(problem)}\n")
            return 2 if isinstance(problem, _OptionsError) else 1

    return run


def _inspect(options: argparse.Namespace, console: Console) -> int:
    _say_seed(console, options)
    trace = open_trace(options.trace, read_options(options, options.seed))
    profile: Profile = options.profile
    kv_tokens = options.kv_tokens or profile.kv_tokens
    pool = Pool(pods=options.pods, profile=profile, kv_tokens=kv_tokens)
    first, stream = _peek(_shown(trace, "Reading", trace.requests_expected))
    if first is None:
        raise trace.without_requests()
    found = inspect(stream, pool, options.seed)
    warnings = warnings_of(trace)
    if options.json:
        document = {
            "schema": 1,
            "seed": options.seed,
            "trace": str(options.trace),
            "format": trace.format.name,
            "bad_lines": trace.bad_lines,
            "warnings": warnings,
            "estimates": [*_ESTIMATES, *(_TOKEN_ESTIMATES if _token_estimate(trace) else ())],
            "pool": {"pods": pool.pods, "profile": profile.name, "kv_tokens": kv_tokens},
            **({"estimated": profile.estimated.said} if profile.estimated else {}),
            **msgspec.to_builtins(found),
        }
        _write_json(document)
        return 0
    _print(console, trace, pool, found)
    for sentence in estimate_warnings([profile]):
        console.print(sentence, markup=False, highlight=False)
    for warning in warnings:
        warned(warning)
    return 0


def _generate(options: argparse.Namespace, console: Console) -> int:
    drawing = _drawing(options)
    stream = drawing.generated().arrivals(drawing.seed)
    _say_seed(console, options)
    with _new_file(options.out, replace=options.force) as file:
        source = f"sim trace generate {options.kind}, seed {options.seed}"
        writer = CaptureWriter(file, source=source, workload=drawing)
        for arrival in _shown(stream, "Writing", lambda: options.requests):
            writer.write_arrival(arrival)
    _say_written(console, options, writer.lines, {"seed": options.seed, "kind": options.kind})
    return 0


def _drawing(options: argparse.Namespace) -> Drawing:
    if options.duration and not options.rate:
        raise _OptionsError("--duration needs --rate.")
    waits = isinstance(STANDARD[options.kind].load, ClosedLoad)
    if options.burstiness is not None and waits and not options.rate:
        raise _OptionsError(
            f"--burstiness needs --rate: requests of {options.kind} wait for earlier answers."
        )
    drawing = Drawing(
        kind=options.kind,
        seed=options.seed,
        requests=options.requests,
        rate_per_s=options.rate,
        duration_s=options.duration,
        burstiness=options.burstiness,
    )
    if not options.steady:
        return drawing
    if problem := cannot_be_steady(drawing.generated().workload):
        raise _OptionsError(f"--steady with {options.kind}: {problem}.")
    return replace(drawing, steady=True)


def _convert(options: argparse.Namespace, console: Console) -> int:
    trace = open_trace(options.trace, read_options(options, options.seed))
    extra: dict[str, object] = {}
    if trace.drawn_by_seed():
        _say_seed(console, options)
        extra["seed"] = options.seed
    limit = options.limit
    first, stream = _peek(
        _shown(
            islice(trace, limit),
            "Converting",
            lambda: min(trace.requests_expected(), limit or sys.maxsize),
        )
    )
    if first is None:
        raise trace.without_requests()
    salt = _salt(options, has_text=bool(first.body))
    with _new_file(options.out, replace=options.force) as file:
        if options.to == "mooncake":
            lines = _convert_mooncake(stream, file)
        else:
            # The header has the block size of the trace, which only the first request shows.
            writer = CaptureWriter(
                file,
                block_tokens=first.block_tokens or 64,
                source=f"{trace.format.name} trace",
            )
            lines = _convert_capture(stream, writer, salt)
    warnings = warnings_of(trace)
    extra |= {"bad_lines": trace.bad_lines, "format": trace.format.name, "warnings": warnings}
    for warning in warnings:
        warned(warning)
    _say_written(console, options, lines, extra)
    _say_problems(console, trace, quiet=options.json)
    return 0


def _salt(options: argparse.Namespace, *, has_text: bool) -> Salt | None:
    if options.salt_file is not None:
        key = options.salt_file.read_bytes().strip()
        if not 0 < len(key) <= 64:
            raise ValueError(f"{options.salt_file}: Expected 1 to 64 bytes, got {len(key)}.")
        return Salt(key)
    return Salt(secrets.token_bytes(_SALT_BYTES)) if has_text else None


def _convert_capture(stream: Iterable[Arrival], writer: CaptureWriter, salt: Salt | None) -> int:
    for arrival in stream:
        writer.write_arrival(arrival, salt)
    return writer.lines


def _convert_mooncake(stream: Iterable[Arrival], file: BinaryIO) -> int:
    writer = MooncakeWriter(file)
    for arrival in stream:
        writer.write(arrival)
    return writer.lines


def _peek(stream: Iterable[Arrival]) -> tuple[Arrival | None, Iterator[Arrival]]:
    rest = iter(stream)
    first = next(rest, None)

    def whole() -> Iterator[Arrival]:
        if first is not None:
            yield first
            yield from rest

    return first, whole()


@contextlib.contextmanager
def _new_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` after the block, or deleted if the block
    fails. Raises `ValueError` if `path` exists and `replace` is False.
    """
    if path.exists() and not replace:
        raise ValueError(f"{path} exists; --force replaces it.")
    partial = path.with_name(path.name + ".partial")
    try:
        with contextlib.ExitStack() as stack:
            file: BinaryIO = stack.enter_context(partial.open("wb"))
            if path.suffix == ".gz":
                # The gzip header has no name and no time, so that the same trace gives the same
                # bytes. The type checker does not accept a GzipFile as BinaryIO.
                packed = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
                yield stack.enter_context(packed)  # type: ignore[misc]
            else:
                yield file
        partial.replace(path)
    except OSError as problem:
        # The user knows the name that was given, but not the temporary one.
        if problem.filename == str(partial):
            problem.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _shown(
    stream: Iterable[Arrival], what: str, requests: Callable[[], int | None]
) -> Iterable[Arrival]:
    """Return the stream of requests, wrapped in a progress bar if stderr is a terminal.

    `requests` returns the expected total and is called only for the bar.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return stream
    return track(stream, what, total=requests(), console=console, transient=True)


def _say_seed(console: Console, options: argparse.Namespace) -> None:
    """Print the line `seed N`, unless the output is JSON, which has the seed as a member."""
    if not options.json:
        console.print(f"seed {options.seed}", highlight=False, markup=False)


def _say_written(
    console: Console, options: argparse.Namespace, lines: int, extra: dict[str, object]
) -> None:
    if options.json:
        _write_json({"schema": 1, "out": str(options.out), "requests": lines, **extra})
        return
    console.print(f"{lines:,} requests written to {options.out}", highlight=False, markup=False)


def _say_problems(console: Console, trace: Trace, *, quiet: bool) -> None:
    if quiet or not trace.bad_lines:
        return
    console.print(f"{trace.bad_lines:,} malformed lines skipped. The first ones:", markup=False)
    for problem in trace.problems:
        console.print(f"  {problem}", markup=False, highlight=False)


def _write_json(document: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def _print(console: Console, trace: Trace, pool: Pool, found: Inspection) -> None:
    table = Table(title=f"{trace.path.name} ({trace.format.name})", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    token_estimate = _token_estimate(trace)
    for name, value in _rows(found):
        table.add_row(name, value)
    console.print(table)
    console.print(_lengths_table(found, estimated=bool(token_estimate)))
    if token_estimate:
        console.print(token_estimate, markup=False, highlight=False)
    console.print(_ceilings_table(pool, found))
    console.print("Conclusions from these estimates, by rules of thumb:")
    for sentence in found.place.sentences:
        console.print(sentence, markup=False, highlight=False)
    _say_problems(console, trace, quiet=False)


def _token_estimate(trace: Trace) -> str:
    return trace.format.token_estimate if isinstance(trace.format, LineFormat) else ""


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    span = "at one instant"
    if found.duration_s:
        span = f"in {_figure(found.duration_s)} s, {_figure(found.rate_per_s)} a second"
    yield "requests", f"{found.requests:,} {span}"
    if found.waiting_for_answers:
        yield (
            "closed loop",
            (
                f"{found.waiting_for_answers:,} requests wait for an earlier answer; arrival times "
                "do not include that wait"
            ),
        )
    if found.duration_s:
        yield (
            "bursts",
            (
                f"coefficient of variation of gaps {found.gap_cv:.2f} (1 is Poisson), rate of the "
                f"busiest 10 s {found.peak_over_mean:.1f} times the mean"
            ),
        )
    yield "names", f"{found.models} models, {found.adapters} adapters, {found.sessions} sessions"
    reuse = found.reuse
    if not reuse.references:
        yield "reuse", "the trace does not say what prompts share"
        return
    yield (
        "blocks",
        (
            f"{reuse.references:,} uses of {reuse.distinct:,} distinct blocks, {reuse.used_once:.1%} of "
            f"which are used once; {reuse.distinct_first:,} distinct first blocks"
        ),
    )
    yield (
        "time to next use of a block",
        f"p50 {_figure(reuse.gap_s.p50)} s, p90 {_figure(reuse.gap_s.p90)} s",
    )
    yield (
        "working set",
        (f"{reuse.live_tokens_max:,} tokens, {_figure(found.place.working_set_over_pod)} pods"),
    )
    prefill = f"{found.place.prefill_share:.0%} prefill"
    used = f"{found.place.utilisation:.0%} of the pool's, " if found.duration_s else ""
    yield "GPU time (estimate)", used + prefill


def _figure(value: float) -> str:
    """Format a number with three significant digits, or as a whole number from 100 on."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _lengths_table(found: Inspection, *, estimated: bool) -> Table:
    table = Table("tokens (estimate)" if estimated else "tokens")
    for heading in ("mean", "p50", "p90", "p99", "longest", "in all"):
        table.add_column(heading, justify="right")

    def row(name: str, spread: Quantiles, total: int) -> None:
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max, total)
        table.add_row(name, *(f"{value:,.0f}" for value in values))

    row("prompt", found.prompt_tokens, found.prompt_tokens_total)
    row("answer", found.output_tokens, found.output_tokens_total)
    return table


def _ceilings_table(pool: Pool, found: Inspection) -> Table:
    ceilings = found.ceilings
    table = Table(
        title="Hit ratios, as shares of prompt tokens: upper bound, and estimates for placements",
        caption="Only 'one cache' with unlimited room is an upper bound for every run. The others are "
        "estimates of the hit rate if requests are placed at random, by round robin, or by a hash of "
        "the first uncommon part of their prompt (affinity); a scheduler may do better.",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("one cache", "random", "round robin", "affinity"):
        table.add_column(heading, justify="right")

    def row(name: str, one: float, pods: PodCeilings) -> None:
        ratios = (one, pods.random, pods.round_robin, pods.affinity)
        table.add_row(name, *(f"{ratio:.1%}" for ratio in ratios))

    row(f"unlimited caches, {pool.pods} pods", ceilings.one_cache, ceilings.per_pod)
    row(
        f"{pool.kv_tokens:,} tokens per pod, {pool.pods} pods",
        ceilings.one_cache_at_capacity,
        ceilings.per_pod_at_capacity,
    )
    return table


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 0 < number <= 10**12:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to 10^12")
    return number


def _pods(text: str) -> int:
    number = _positive(text)
    if number > _PODS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_PODS_MAX} pods")
    return number


def _rate(text: str) -> float:
    number = _number(text)
    if not 0 < number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 10^9")
    return number


def _burstiness(text: str) -> float:
    number = _number(text)
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
