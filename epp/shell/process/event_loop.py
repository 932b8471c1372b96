"""The event loop of the process, and how many files it may have open."""

import asyncio
import resource
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes uvloop's event loop; None, where it is not installed: asyncio's own."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415
    except ImportError:
        return None
    return new_event_loop


def raise_open_files_limit() -> None:
    """Allow as many open files as the hard limit: each endpoint's scrape keeps a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
