"""What comes of choosing a rank, and how it is told why none was named."""

from typing import ClassVar

import pytest
from msgspec import Struct

from epp.core.abilities import Abilities
from epp.core.decision.rank_choice import RankChoice, RankChooser
from epp.core.failures import PluginFailures


class Chooser(Struct, frozen=True):
    """The one that holds most, if nobody else holds as much and it was sent fewer than two."""

    type_name: ClassVar[str] = "chooser"
    abilities: ClassVar[Abilities] = Abilities(chooses_ranks=True)
    rank_header: ClassVar[str] = "x-rank"
    says: object = "what it is to say"

    def rank_of(self, held_tokens, sent, /):
        if self.says != "what it is to say":
            return self.says
        most = max(held_tokens)
        rank = held_tokens.index(most)
        return rank if held_tokens.count(most) == 1 and sent[rank] < 2 else None


@pytest.mark.parametrize(
    ("held_tokens", "sent", "rank", "choice"),
    [
        ([0, 64], [0, 0], 1, RankChoice.NAMED),
        ([0, 64], [0, 1], 1, RankChoice.NAMED),
        ([0, 64], [0, 2], None, RankChoice.CROWDED),
        ([64, 64], [0, 0], None, RankChoice.ALIKE),
        ([64, 64], [2, 0], None, RankChoice.ALIKE),
        ([0, 0], [0, 0], None, RankChoice.UNHELD),
        ([0, 0], [0, 2], None, RankChoice.UNHELD),
    ],
)
def test_why_none_is_named(held_tokens, sent, rank, choice):
    failures = PluginFailures()
    chooser = RankChooser("chooser", Chooser(), failures)
    assert chooser.choose(held_tokens, sent) == (rank, choice)
    assert not len(failures)


@pytest.mark.parametrize("says", [2, -1, True, "0"])
def test_a_plugin_that_fails_is_asked_once(says):
    """And named with what was wrong."""
    failures = PluginFailures()
    chooser = RankChooser("chooser", Chooser(says=says), failures)
    assert chooser.choose([0, 64], [0, 0]) == (None, RankChoice.FAILED)
    (failing,) = failures
    assert (failing.name, failing.failures) == ("chooser", 1)
    assert failing.what == f"rank_of returned {says!r}, expected None or a rank below 2"
