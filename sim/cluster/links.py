"""Network links that carry KV blocks between pods, and the fair shares of their bandwidth.

A transfer first takes its set-up time, during which no bytes flow. Then it gets the smaller of two
shares: an equal share of what the source sends, and an equal share of what the target receives.
Shares are computed again whenever a transfer with the same source or target starts or ends. Unused
bandwidth is not given to other transfers, so a transfer can be slower than in reality.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from epp.core.types import Seconds
from sim.cluster.loop import Loop
from sim.engine.links import Link


class KVTransferSettings(Struct, frozen=True, kw_only=True):
    """The network and the connector that disaggregated requests use."""

    link: Link
    hop_s: Seconds = 0.001
    """Time in seconds of one message between the sidecar of the decode pod and the prefill pod."""
    concurrent: bool = False
    """True if both legs are sent at once, as by the connectors for SGLang and Mooncake."""
    push: bool = False
    """True if the prefill engine writes each layer when it is computed. It needs profiles with
    `layers`. It also needs concurrent legs, because the decode engine must have reserved its blocks
    before.
    """
    first_contact_s: Seconds = 0.0
    """Additional seconds of the first transfer between two engine processes; about 5 s are reported
    for NIXL. 0 if all processes have connected to each other before the run.
    """


class Nics:
    """All network interfaces (NICs) of a pod together, in one direction (sending or receiving).
    Tensor-parallel shards move in parallel over them.
    """

    __slots__ = ("active", "bytes_per_s")

    def __init__(self, bytes_per_s: float) -> None:
        """Create the idle NICs of one pod for one direction, with a total bandwidth of
        `bytes_per_s`, which must be above 0.
        """
        assert bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self.active: dict[Transfer, None] = {}
        """Transfers over these NICs whose set-up has ended, the oldest first."""

    @property
    def share_bytes_per_s(self) -> float:
        """Equal share of the bandwidth of these NICs for each active transfer, in bytes per second,
        or for the next one if none is active.
        """
        return self.bytes_per_s / max(1, len(self.active))

    def share_with_another_bytes_per_s(self) -> float:
        """Return the share of the bandwidth of these NICs, in bytes per second, that each transfer
        has if one more becomes active.
        """
        return self.bytes_per_s / (len(self.active) + 1)


class Transfer:
    """A transfer of bytes from one pod to another."""

    __slots__ = ("_done", "_version", "bytes_left", "bytes_per_s", "settled_at", "source", "target")

    def __init__(
        self, source: Nics, target: Nics, bytes_left: float, done: Callable[[], None]
    ) -> None:
        self.source = source
        self.target = target
        self.bytes_left = bytes_left
        """Bytes of this transfer that had not arrived at the time `settled_at`."""
        self.bytes_per_s = 0.0
        """Present bandwidth of this transfer in bytes per second; 0 during its set-up and after its
        end.
        """
        self.settled_at: Seconds = 0.0
        self._done = done
        self._version = 0


class Network:
    """A network that starts the KV-cache transfers of a simulated cluster."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def start(
        self,
        source: Nics,
        target: Nics,
        *,
        size_bytes: float,
        setup_s: Seconds,
        done: Callable[[], None],
    ) -> Transfer:
        """Start a transfer of `size_bytes`, whose bytes flow after `setup_s` seconds, and return
        it. `done` is called when the last byte has arrived.
        """
        transfer = Transfer(source, target, size_bytes, done)
        self._loop.after(setup_s, self._flow, transfer, transfer._version)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer before its last byte; `done` is not called. Do nothing if it has ended."""
        transfer._version += 1
        if transfer in transfer.source.active:
            self._leave(transfer)

    def change(self, nics: Nics, bytes_per_s: float) -> None:
        """Change the total bandwidth of `nics` to `bytes_per_s`, also for active transfers."""
        nics.bytes_per_s = bytes_per_s
        self._share(list(nics.active))

    def _flow(self, transfer: Transfer, version: int) -> None:
        """Begin to move the bytes of a transfer, because its set-up has ended. Do nothing if the
        transfer was cancelled.
        """
        if version != transfer._version:
            return
        transfer.settled_at = self._loop.now
        transfer.source.active[transfer] = None
        transfer.target.active[transfer] = None
        self._share(_neighbours(transfer))

    def _end(self, transfer: Transfer, version: int) -> None:
        if version != transfer._version:
            return
        transfer._version += 1
        self._leave(transfer)
        transfer._done()

    def _leave(self, transfer: Transfer) -> None:
        self._settle(transfer)
        transfer.bytes_per_s = 0.0
        del transfer.source.active[transfer]
        del transfer.target.active[transfer]
        self._share(_neighbours(transfer))

    def _share(self, transfers: Iterable[Transfer]) -> None:
        """Compute the bandwidth of each of the active `transfers` again, and schedule its end by
        it.
        """
        for transfer in transfers:
            self._settle(transfer)
            transfer.bytes_per_s = min(
                transfer.source.share_bytes_per_s, transfer.target.share_bytes_per_s
            )
            transfer._version += 1
            left_s = transfer.bytes_left / transfer.bytes_per_s
            self._loop.after(left_s, self._end, transfer, transfer._version)

    def _settle(self, transfer: Transfer) -> None:
        """Subtract the bytes that have arrived since the last change of the transfer's bandwidth."""
        now = self._loop.now
        arrived = transfer.bytes_per_s * (now - transfer.settled_at)
        transfer.bytes_left = max(0.0, transfer.bytes_left - arrived)
        transfer.settled_at = now


def _neighbours(transfer: Transfer) -> Mapping[Transfer, None]:
    """Return the active transfers that share the sender or the receiver of `transfer`."""
    return {**transfer.source.active, **transfer.target.active}


def exposed_share(*, transfer_s: Seconds, overlap_s: Seconds, layers: int) -> float:
    """Return the share of a layer-wise transfer that remains when the prefill ends, from 0 to 1.

    Each layer may move as soon as it is computed, so the last layer always remains. `transfer_s` is
    the time of the whole transfer, and `overlap_s` that part of the prefill in which blocks could
    already move. The exposed time is max(transfer/L, transfer - overlap*(L-1)/L) for L layers.
    """
    if not transfer_s:
        return 1.0
    exposed_s = max(transfer_s / layers, transfer_s - overlap_s * (layers - 1) / layers)
    return exposed_s / transfer_s
