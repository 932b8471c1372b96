"""Select the event loop of the process, and raise the process's limit of open files."""

import asyncio
import resource
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return a factory of uvloop's event loops, or None if uvloop is not installed."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415
    except ImportError:
        return None
    return new_event_loop


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files to the hard limit, because each scrape keeps a
    connection open.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
