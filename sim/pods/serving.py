"""The command `sim serve`: simulated vLLM pods over HTTP until SIGINT or SIGTERM."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

import msgspec
import structlog

from epp.plugins.filters import ROLE_LABEL
from sim.engine.engine import EngineSettings
from sim.engine.features import Speculative, WholePrompts, batched_tokens, features_named
from sim.engine.profiles import find_profile
from sim.pods.pods import PodSettings
from sim.pods.server import PodAddress, listen, serve, write_endpoints
from sim.sentences import failed


def run(options: argparse.Namespace) -> int:
    """Run `sim serve` with the parsed flags.

    Return the exit code: 0 if it was stopped, 1 if it failed, 2 if the flags are invalid or
    contradict each other.
    """
    _configure_logs(options.log_format)
    try:
        profile = find_profile(options.profile)
        features = features_named(options.engine)
        engine = EngineSettings(
            blocks_total=options.blocks or profile.kv_tokens // options.block_size + 1,
            block_size_tokens=options.block_size,
            max_num_seqs=options.max_num_seqs or profile.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens
            or batched_tokens(features, profile),
            max_loras=options.max_loras,
            chunked_prefill=WholePrompts() not in features,
        )
    except ValueError as problem:
        return failed(str(problem), code=2)
    settings = PodSettings(
        profile=profile,
        engine=engine,
        features=features,
        model=options.model or profile.model,
        adapters=tuple(dict.fromkeys(options.lora)),
        speed=options.speed,
        seed=options.seed,
        max_num_queued_reqs=options.max_num_queued_reqs,
        kv_events=options.kv_events is not None,
        stream_interval_tokens=options.stream_interval,
        kv_link=options.kv_link,
    )
    if settings.ranks > 1 and profile.expert_s:
        return failed(
            f"--engine ranks does not work with {options.profile}: ranks that share expert layers are "
            "not simulated.",
            code=2,
        )
    if options.roles and any(isinstance(feature, Speculative) for feature in features):
        return failed(
            "--roles does not work with --engine speculative: KV transfers to engines with "
            "speculative decoding are not simulated.",
            code=2,
        )
    if settings.model in settings.adapters:
        return failed(f"--lora {settings.model} is the name of the model.", code=2)
    if settings.adapters and not options.max_loras:
        return failed("--lora needs --max-loras of at least 1.", code=2)

    code = 0

    def ready(addresses: Sequence[PodAddress]) -> None:
        if options.endpoints_out is not None:
            write_endpoints(options.endpoints_out, addresses)
        print(_announcement(settings.model, addresses, as_json=options.json), flush=True)

    pods = len(options.roles) or options.pods
    try:
        sockets = listen(options.host, options.port, pods)
        events = []
        if options.kv_events is not None:
            ranks = pods * settings.ranks
            events = listen(options.host, options.kv_events, 2 * ranks)
        asyncio.run(serve(settings, sockets, ready, events, options.roles))
    except* OSError as problems:
        code = failed(str(problems.exceptions[0]), code=1)
    return code


def _announcement(model: str, addresses: Sequence[PodAddress], *, as_json: bool) -> str:
    if as_json:
        pods = [{**msgspec.to_builtins(pod), "url": pod.url} for pod in addresses]
        return json.dumps({"model": model, "pods": pods})
    return f"{model} on " + " ".join(
        f"{pod.url} ({role})" if (role := pod.labels.get(ROLE_LABEL)) else pod.url
        for pod in addresses
    )


def _configure_logs(log_format: str) -> None:
    renderer = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
