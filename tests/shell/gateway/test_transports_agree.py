"""One transport against the other: the same streams, the same answers, the same ends."""

from random import Random

import pytest

from epp.core.decision.inputs import Tick
from epp.core.protocol.session import Session, SessionSettings
from epp.shell.gateway.ext_proc import PROCESS, ExtProc
from tests import gateway as gw
from tests.shell.gateway.test_ext_proc import Told
from tests.shell.gateway.test_http2 import HEADERS, connected, framed
from tests.test_hermetic import pods
from tests.transports import TRANSPORTS, carried, transport_of

STREAMS = 60
MODES = (gw.FULL_DUPLEX, gw.BUFFERED, gw.BUFFERED_PARTIAL, gw.STREAMED, gw.NONE)


def message(dice):
    """One that may or may not be allowed where it comes."""
    ends = dice.random() < 0.6
    match dice.randrange(9):
        case 0 | 1:
            modes = gw.protocol(dice.choice(MODES), dice.choice(MODES))
            return gw.request_headers(modes=dice.choice((None, modes)), end=dice.random() < 0.2)
        case 2 | 3 | 4:
            body = dice.choice((b"", b"{", gw.prompt(), gw.prompt("x" * dice.randrange(200_000))))
            return gw.request_body(body, end=ends)
        case 5:
            return gw.request_trailers()
        case 6:
            return gw.response_headers(dice.choice((200, 503)), end=ends)
        case 7:
            return gw.response_body(dice.choice((b"", b"data: x\n\n")), end=ends)
        case _:
            return dice.choice((gw.response_trailers(), dice.randbytes(12)))


def script(seed):
    """The messages of a stream, mostly in an order that is allowed."""
    dice = Random(seed)
    messages = [message(dice) for _ in range(dice.randrange(6))]
    if dice.random() < 0.8:
        modes = gw.protocol(dice.choice(MODES), dice.choice(MODES))
        messages.insert(0, gw.request_headers(modes=modes))
    return messages


async def played(port, seed):
    """(bytes of the answers, status of the end) of the stream of `seed`, all of it sent at once."""
    async with connected(port) as client:
        headers = [(name, PROCESS.encode() if name == b":path" else at) for name, at in HEADERS]
        stream = client.open(*map(framed, script(seed)), headers=headers, end=True)
        return await client.status(stream), client.received(stream)


async def ends_of(name, seeds):
    scheduler, told = pods((0, 0.1)), Told()
    service = ExtProc(
        lambda gateway: Session(scheduler, SessionSettings(), gateway, told, lambda: "id"), told
    )
    async with carried(transport_of(name, service.methods)) as port:
        found = [await played(port, seed) for seed in seeds]
    scheduler.take(Tick(), 1e12)
    assert service.open_streams == 0
    assert scheduler.ledger.open_leases == 0
    return found


@pytest.mark.parametrize("part", range(2))
async def test_a_gateway_cannot_tell_which_transport_answers(part):
    """Whatever it sends: the bytes of the answers and the status of the end are the same."""
    seeds = range(part * STREAMS, (part + 1) * STREAMS)
    one, other = [await ends_of(name, seeds) for name in TRANSPORTS]
    for seed, here, there in zip(seeds, one, other, strict=True):
        assert here == there, f"stream {seed}"
