"""The division of a pool into prefill and decode pods that `sim size` tries."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from sim.cluster.prefill_rules import DECODE, PREFILL
from sim.cluster.simulated_pod import PodKind
from sim.engine.profiles import Profile
from sim.experiments.demand import Stretch, busy_times

CACHED_SHARES: Final = (0.8, 0.5, 0.0)
"""Shares of the prompt tokens that pods may have cached. Each leads to a division into prefill and
decode pods that is tried.
"""
SHARE_MIN: Final = 0.1
SHARE_MAX: Final = 0.9


class Split(Struct, frozen=True, kw_only=True):
    """A division of a pool: which share of its pods prefill. The others decode."""

    prefill_share: float

    def prefill_pods(self, pods: int) -> int:
        """Return the number of prefill pods of a pool with `pods` pods: at least 1, and all but one
        at most. `pods` must be at least 2.
        """
        return min(max(1, round(self.prefill_share * pods)), pods - 1)

    def divided(self, pods: int, kinds: Sequence[PodKind]) -> tuple[PodKind, ...]:
        """Return the pods of a pool with `pods` pods, the prefill pods first. `kinds` has a pod of
        each role.
        """
        by_role = {kind.role: kind for kind in kinds}
        prefill = self.prefill_pods(pods)
        return (by_role[PREFILL],) * prefill + (by_role[DECODE],) * (pods - prefill)


def splits_for(stretch: Stretch, profile: Profile) -> list[Split]:
    """Return the divisions that are worth a try for the work of `stretch`.

    Each has the share of prefill in the busy time of pods, P / (P + D) with P = uncached tokens /
    prefill speed and D = output tokens x step time / batch (`demand.busy_times`), for one of
    `CACHED_SHARES`, limited to `SHARE_MIN` to `SHARE_MAX`. Equal shares are tried once.
    """
    shares = set()
    for cached_share in CACHED_SHARES:
        prefill_s, decode_s = busy_times(stretch, profile, cached_share)
        share = prefill_s / ((prefill_s + decode_s) or 1.0)
        shares.add(round(min(max(share, SHARE_MIN), SHARE_MAX), 2))
    return [Split(prefill_share=share) for share in sorted(shares)]
