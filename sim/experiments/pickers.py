"""The pickers of a run: how many, who reaches which, what they tell each other, and when they die.

Flags say it or a scenario does, never both.
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
    """What a picker sends and is sent takes longer."""

    picker: Annotated[int, Meta(ge=0, lt=PICKERS_MAX)]
    more_s: Duration


class PickerRestart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pickers die at `at_s` with all that they know; new ones take their places `startup_s` later.

    At 0: they join late.
    """

    at_s: Instant
    pickers: Numbers = ()
    startup_s: Duration = 10.0


class PeerPartition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From `from_s` to `to_s` nothing passes between `pickers` and the others."""

    from_s: Instant
    to_s: Instant
    pickers: Annotated[Numbers, Meta(min_length=1)]

    def __post_init__(self) -> None:
        check_window(self.from_s, self.to_s)


class Pickers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[pickers]` of a scenario; what happens to them on the way are events."""

    count: Annotated[int, Meta(ge=1, le=PICKERS_MAX)] = 1
    assignment: Assignment = Assignment.RANDOM
    fallback_endpoints_max: Annotated[int, Meta(ge=0, le=64)] = 0
    peer_delay_s: Duration | None = None
    """None: each is blind to the others."""
    peer_loss: Share | None = None
    peer_interval_s: Annotated[float, Meta(ge=1e-6, le=1e9)] | None = None
    peer_snapshot: bool | None = None
    peer_slow: tuple[SlowPicker, ...] = ()


class PickersPlan(Struct, frozen=True, kw_only=True):
    """All that is said of pickers, by flags or by a scenario."""

    pickers: Pickers = Pickers()
    restarts: tuple[PickerRestart, ...] = ()
    partitions: tuple[PeerPartition, ...] = ()

    @property
    def absences(self) -> tuple[Absence, ...]:
        """When which of them is away."""
        return tuple(
            Absence(picker, restart.at_s, restart.at_s + restart.startup_s)
            for restart in self.restarts
            for picker in restart.pickers or range(self.pickers.count)
        )

    @property
    def peers(self) -> PeerSettings | None:
        """What they tell each other. `ClusterSettingsError` if that is nothing, and more is said."""
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
                "(peer_delay_s): without it pickers tell each other nothing"
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
"""What a plan and its pickers can be told -> the flag that says it."""


def pickers_plan(flags: Mapping[str, Any], scenario: PickersPlan | None, file: str) -> PickersPlan:
    """What is said of pickers: `flags` by the keys of `FLAGS`, None where a flag was not given.

    `scenario`: what `file` says, None if nothing. `ClusterSettingsError` if both speak.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if scenario is None:
        of_plan = {name: given.pop(name) for name in ("restarts", "partitions") if name in given}
        return PickersPlan(pickers=Pickers(**given), **of_plan)
    if given:
        raise ClusterSettingsError(
            f"{file} says which pickers there are: leave out "
            + ", ".join(FLAGS[name] for name in given)
        )
    return scenario
