"""The pickers of a simulation run: their number, which requests reach each, messages between them,
and failures.

Either flags or a scenario file define them, but not both.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from sim.cluster.assignment import Assignment
from sim.cluster.peering import Partition, PeerSettings, SlowPeer
from sim.cluster.settings import Absence, ClusterSettingsError
from sim.cluster.windows import Duration, Instant, Numbers, Share, check_window

PICKERS_MAX: Final = 1_000


class SlowPicker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A picker whose messages to and from its peers take `more_s` seconds longer than other
    messages.
    """

    picker: Annotated[int, Meta(ge=0, lt=PICKERS_MAX)]
    more_s: Duration


class PickerRestart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A restart of pickers: at `at_s` they fail and lose all state, and `startup_s` seconds later
    new ones replace them. An empty `pickers` means all.

    With `at_s` 0, the pickers join `startup_s` seconds after the start of the run.
    """

    at_s: Instant
    pickers: Numbers = ()
    startup_s: Duration = 10.0


class PeerPartition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network partition: from `from_s` to `to_s` no messages pass between `pickers` and the other
    pickers.
    """

    from_s: Instant
    to_s: Instant
    pickers: Annotated[Numbers, Meta(min_length=1)]

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Pickers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[pickers]` of a scenario file. Changes of pickers during the run are events of the
    scenario.
    """

    count: Annotated[int, Meta(ge=1, le=PICKERS_MAX)] = 1
    assignment: Assignment = Assignment.RANDOM
    fallback_endpoints_max: Annotated[int, Meta(ge=0, le=64)] = 0
    peer_delay_s: Duration | None = None
    """Delay of messages between pickers in seconds; None if pickers exchange no messages."""
    peer_loss: Share | None = None
    peer_interval_s: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    peer_snapshot: bool | None = None
    peer_slow: tuple[SlowPicker, ...] = ()


class PickersPlan(Struct, frozen=True, kw_only=True):
    """All settings of the pickers of a run, from flags or from a scenario file."""

    pickers: Pickers = Pickers()
    restarts: tuple[PickerRestart, ...] = ()
    partitions: tuple[PeerPartition, ...] = ()

    @property
    def absences(self) -> tuple[Absence, ...]:
        """Periods in which a picker is absent because of a restart."""
        return tuple(
            Absence(picker, restart.at_s, restart.at_s + restart.startup_s)
            for restart in self.restarts
            for picker in restart.pickers or range(self.pickers.count)
        )

    @property
    def peers(self) -> PeerSettings | None:
        """Settings of the messages between pickers, or None if pickers exchange none. Raises
        `ClusterSettingsError` if other settings of these messages are given without their delay.
        """
        pickers = self.pickers
        told: dict[str, Any] = {
            "loss": pickers.peer_loss,
            "interval_s": pickers.peer_interval_s,
            "slow": tuple(SlowPeer(slow.picker, slow.more_s) for slow in pickers.peer_slow),
            "partitions": tuple(
                Partition(one.from_s, one.to_s, one.pickers) for one in self.partitions
            ),
        }
        told = {name: value for name, value in told.items() if value not in (None, ())}
        if pickers.peer_delay_s is not None:
            snapshot = pickers.peer_snapshot is not False
            return PeerSettings(delay_s=pickers.peer_delay_s, snapshot=snapshot, **told)
        if told:
            raise ClusterSettingsError(
                "peer_loss, peer_interval_s, peer_slow and partitions need --peer-delay "
                "(peer_delay_s): without it pickers exchange nothing"
            )
        return None


FLAGS: Final[Mapping[str, str]] = {
    "count": "--replicas",
    "assignment": "--assignment",
    "fallback_endpoints_max": "--fallback-endpoints-max",
    "peer_delay_s": "--peer-delay",
    "peer_loss": "--peer-loss",
    "peer_interval_s": "--peer-interval",
    "peer_snapshot": "--peer-snapshot",
    "peer_slow": "--peer-slow",
    "restarts": "--picker-away",
    "partitions": "--peer-partition",
}
"""Command-line flag for each field of `Pickers` and `PickersPlan`, by name of the field."""


def pickers_plan(flags: Mapping[str, Any], scenario: PickersPlan | None, file: str) -> PickersPlan:
    """Return the settings of the pickers from the flags or from the scenario. `flags` has the keys
    of `FLAGS`, with None for each flag that was not given.

    `scenario` has the pickers of the scenario file `file`; it is None without a file, or if the
    file defines no pickers. Raises `ClusterSettingsError` if both the flags and the scenario define
    pickers.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if scenario is None:
        of_plan = {name: given.pop(name) for name in ("restarts", "partitions") if name in given}
        return PickersPlan(pickers=Pickers(**given), **of_plan)
    if given:
        raise ClusterSettingsError(
            f"{file} defines the pickers: leave out " + ", ".join(FLAGS[name] for name in given)
        )
    return scenario
