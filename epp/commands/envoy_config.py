"""Implement `epp envoy-config`: print or write the bootstrap configuration of a static Envoy, which
no control plane configures.
"""

from pathlib import Path
from typing import Final, TextIO

import msgspec

from epp.flags.reading import FlagError
from epp.flags.subcommands import EnvoyFlags
from epp.shell.gateway.bootstrap import BootstrapOptions, render

WRITTEN: Final = 0
UNWRITABLE: Final = 1


def envoy_config(flags: EnvoyFlags, out: TextIO, err: TextIO) -> int:
    """Print or write the bootstrap configuration of Envoy.

    Return 0, or 1 if the file cannot be written. Raises `FlagError` if the flags do not describe a
    valid bootstrap.
    """
    options = msgspec.structs.asdict(flags)
    file, timeout = options.pop("out"), options.pop("message_timeout")
    try:
        # The flags and the options have the same field names; `convert` validates the values again.
        text = render(
            msgspec.convert(options | {"message_timeout_s": float(timeout)}, BootstrapOptions)
        )
    except (ValueError, msgspec.ValidationError) as error:
        raise FlagError(str(error)) from error
    if not file:
        out.write(text)
        return WRITTEN
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"epp envoy-config: {file} cannot be written: {error.strerror}", file=err)
        return UNWRITABLE
    return WRITTEN
