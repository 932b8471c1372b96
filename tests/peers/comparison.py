"""One comparison, and the table that all of them make."""

from collections import Counter
from typing import NamedTuple

from tests.peers.workload import hit_rate


class Comparison(NamedTuple):
    """Choices of a peer and of one of our strategies for the same requests."""

    peer: str
    policy: str
    strategy: str
    order: tuple[str, ...]
    went: tuple[str, ...]
    """The pod that the peer chose, by request."""
    allowed: tuple[frozenset[str], ...]
    """Pods that our strategy might have chosen after the peer's earlier choices, by request."""
    ours: tuple[str, ...]
    """The pod that our strategy chose on its own, by request."""
    hits: tuple[float, float]
    """Share of prompt tokens that were cached: the peer's, read at the pods, and ours."""
    note: str = ""

    @property
    def disagreed(self):
        """Return numbers of requests that our strategy would not have sent where the peer did."""
        return [at for at, (pod, some) in enumerate(self._pairs()) if pod not in some]

    @property
    def decided(self):
        """Return the number of requests for which our strategy allows exactly one pod."""
        return sum(len(some) == 1 for some in self.allowed)

    @property
    def shares(self):
        """Return the share of requests by pod, in the peer's order: (the peer's, ours)."""
        return tuple(
            tuple(Counter(chosen)[pod] / len(chosen) for pod in self.order)
            for chosen in (self.went, self.ours)
        )

    def row(self):
        """Return the cells of one line of the table."""
        theirs, ours = (" : ".join(f"{100 * share:.0f}" for share in one) for one in self.shares)
        agreed = len(self.went) - len(self.disagreed)
        return (
            self.peer,
            f"`{self.policy}`",
            f"`{self.strategy}`",
            f"{agreed} of {len(self.went)}",
            str(self.decided),
            f"{theirs} / {ours}",
            " / ".join(f"{100 * hits:.1f}" for hits in self.hits),
            self.note,
        )

    def _pairs(self):
        return zip(self.went, self.allowed, strict=True)


HEADINGS = (
    "peer",
    "policy",
    "our strategy",
    "allowed",
    "one choice",
    "shares, % (peer / ours)",
    "hits, % (peer / ours)",
    "why",
)


async def compare(peer_name, policy, strategy, steps, peer, make_ours, note=""):
    """Send `steps` to `peer`; then to our strategy, which follows; then to it alone.

    `make_ours` returns a fresh strategy for the peer's order of pods.
    """
    went = tuple([await peer.send(step) for step in steps])
    measured = await peer.hit_rate()
    expected = hit_rate(steps, went)
    assert abs(measured - expected) < 0.005, f"pods {measured}, by the prompts {expected}"
    following, alone = make_ours(peer.order), make_ours(peer.order)
    allowed = tuple(
        following.send(step, told=pod)[1] for step, pod in zip(steps, went, strict=True)
    )
    ours = tuple(alone.send(step)[0] for step in steps)
    return Comparison(
        peer_name,
        policy,
        strategy,
        tuple(peer.order),
        went,
        allowed,
        ours,
        (measured, hit_rate(steps, ours)),
        note,
    )
