"""Pickers with features for operators (records, capture, spans, shadow profile), enabled one by
one.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import yaml

from bench.report.contestants import Settings
from epp.plugins.strategies import STRATEGIES

NOTHING: Final = "nothing of it"
RECORDS: Final = ""
"""Name of the picker with the features that are enabled as installed."""
CAPTURE: Final = "and a capture of every request"
TRACING: Final = "and spans, one of a hundred sampled"
EVERYTHING: Final = "and a shadow profile"
SPARINGLY: Final = "all of it, capture and shadow of a tenth"
NAMES: Final = (NOTHING, RECORDS, CAPTURE, TRACING, EVERYTHING, SPARINGLY)
"""Names of the measured pickers; each has one feature more than the one before it, except
the last.
"""
_STRATEGY: Final = "homing"
_SAMPLED_SHARE: Final = "0.01"
_SPARING_SHARE: Final = 0.1


def operated(folder: Path, collector: str) -> list[Settings]:
    """Return the settings of the measured pickers in the order of `NAMES`.

    Captures and configurations are written to `folder`, spans are sent to the URL `collector`.
    """
    spans = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": _SAMPLED_SHARE,
    }
    document: dict[str, Any] = yaml.safe_load(STRATEGIES[_STRATEGY].config)
    (profile,) = document["schedulingProfiles"]
    shadow = {"name": "shadow", "plugins": profile["plugins"]}
    shadowed = document | {"shadow": shadow}
    sparing = document | {"shadow": shadow | {"share": _SPARING_SHARE}}

    def captured(name: str, *flags: str) -> Settings:
        """Return settings with a capture into a folder of its own and the given flags; with
        `--tracing`, spans go to the collector.
        """
        apart = f"--capture={folder / f'capture-{NAMES.index(name)}'}"
        return Settings(name=name, flags=(apart, *flags), environment=spans)

    return [
        Settings(name=NOTHING, flags=("--decision-records-keep=0s",)),
        Settings(name=RECORDS),
        captured(CAPTURE),
        captured(TRACING, "--tracing"),
        captured(EVERYTHING, "--tracing", _written(folder / "shadowed.json", shadowed)),
        captured(
            SPARINGLY,
            "--tracing",
            f"--capture-share={_SPARING_SHARE}",
            _written(folder / "sparing.json", sparing),
        ),
    ]


def _written(file: Path, document: dict[str, Any]) -> str:
    file.write_text(json.dumps(document))
    return f"--config-file={file}"


class _Collector(BaseHTTPRequestHandler):
    """Handler of the HTTP requests of a collector of spans, which confirms them and stores none."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing: an HTTP server of Python would print a line for each request."""


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """Run a collector of spans that stores none during the context, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
