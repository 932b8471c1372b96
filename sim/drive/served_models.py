"""A check that a gateway serves the models of a trace, before the trace is sent."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout
from msgspec import Struct

from epp.core.types import Seconds
from sim.drive.driver import DriveSettings
from sim.traces.arrival import Arrival
from sim.traces.prompts import model_of

LOOKED_AT_MAX: Final = 1_000
"""Number of requests, from the beginning of the trace, whose models are checked."""
_TIMEOUT_S: Final = 10.0
_ANSWER_BYTES_MAX: Final = 1024 * 1024
_NAMES_TOLD_MAX: Final = 20


class NotServedError(Exception):
    """The gateway does not serve a model of the trace; the message is in full sentences."""


class ModelsUnknownError(Exception):
    """The gateway did not report which models it serves; the message is a clause with the
    reason.
    """


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


def requested_models(arrivals: Iterable[Arrival], models: Mapping[str, str]) -> dict[str, str]:
    """Return the models that the first requests will name, each with its name in the trace.

    `models` has the replacements of names, in the form of `DriveSettings.models`.
    """
    asked: dict[str, str] = {}
    for arrival in islice(arrivals, LOOKED_AT_MAX):
        traced = model_of(arrival)
        asked.setdefault(models.get(traced) or models.get("") or traced, traced)
    return asked


async def check_served(settings: DriveSettings, asked: Mapping[str, str]) -> None:
    """Request `/v1/models` from the gateway, and check that it serves each model in `asked`.

    Raises `NotServedError` if it does not serve one, and `ModelsUnknownError` if it does not answer
    with a list of models.
    """
    served = await _served(settings)
    missing = [name for name in asked if name not in served]
    if missing:
        raise NotServedError(
            f"{settings.url} does not serve {_listed(missing)}, the model that requests would name. It serves "
            f"{_listed(served)}: choose one with --model NAME, or with --model TRACED=NAME for one "
            "model of the trace. --unlisted-models sends the requests without this check."
        )


async def _served(settings: DriveSettings) -> list[str]:
    timeout_s: Seconds = min(_TIMEOUT_S, settings.timeout_s)
    url = f"{settings.url.rstrip('/')}/v1/models"
    try:
        async with (
            ClientSession(timeout=ClientTimeout(total=timeout_s)) as session,
            # Redirects are not followed, because keys in the headers are only for the named
            # gateway.
            session.get(url, headers=settings.headers, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ModelsUnknownError(f"the answer has status {response.status}")
            body = await response.content.read(_ANSWER_BYTES_MAX)
            while len(body) < _ANSWER_BYTES_MAX and (
                more := await response.content.read(_ANSWER_BYTES_MAX - len(body))
            ):
                body += more
        return [model.id for model in msgspec.json.decode(body, type=_Models).data]
    except (ClientError, TimeoutError, OSError) as problem:
        raise ModelsUnknownError(str(problem) or type(problem).__name__) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ModelsUnknownError("the answer is not a list of models") from None


def _listed(names: Iterable[str]) -> str:
    told = [repr(name[:100]) for name in islice(names, _NAMES_TOLD_MAX + 1)]
    if not told:
        return "none"
    return ", ".join(told[:_NAMES_TOLD_MAX]) + (" and more" if len(told) > _NAMES_TOLD_MAX else "")
