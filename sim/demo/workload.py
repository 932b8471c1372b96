"""The demo's chat traffic: many tenants, each with its own system prompt, and conversations of
several turns.

Conversations arrive as a Poisson process, independent of the servers. Within a conversation, the
next turn is sent after the answer and a think time, and contains the real answer. All else is drawn
in advance from one seed, so that in two runs the same conversations begin at the same times, with
the same questions word for word.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from random import Random

from msgspec import Struct

from sim.pods.tokens import draw_words


class WorkloadSettings(Struct, frozen=True, kw_only=True):
    """Settings of the demo's workload in counts, tokens and seconds. Token counts are medians of
    lognormal distributions.
    """

    arrival_window_s: float = 18.0
    conversations_per_s: float = 3.5
    tenants: int = 32
    """Number of tenants. Each has its own system prompt; their popularity follows Zipf's law with
    exponent `tenant_skew`.
    """
    tenant_skew: float = 0.7
    system_tokens: int = 5000
    question_tokens: int = 200
    answer_tokens: int = 100
    turns_min: int = 2
    turns_max: int = 5
    think_s_mean: float = 1.5
    think_s_max: float = 4.0


class Turn(Struct, frozen=True):
    """One question of a conversation, sent `think_s` seconds after the answer to the previous
    question (0 for the first one, which is sent when the conversation arrives).
    """

    question: str
    answer_tokens: int
    think_s: float


class Conversation(Struct, frozen=True, kw_only=True):
    """The questions of one user to one tenant's assistant."""

    arrives_s: float
    """Time in seconds from the start of the run to the first question."""
    tenant: int
    system: str
    turns: tuple[Turn, ...]


def conversations(settings: WorkloadSettings, seed: int) -> list[Conversation]:
    """Return the conversations of the demo's workload, in order of arrival."""
    systems = _systems(settings, seed)
    popularity = list(
        accumulate(1 / (rank + 1) ** settings.tenant_skew for rank in range(settings.tenants))
    )
    arrivals = Random(f"{seed}:arrivals")
    shapes = Random(f"{seed}:conversations")
    found: list[Conversation] = []
    now = arrivals.expovariate(settings.conversations_per_s)
    while now < settings.arrival_window_s:
        [tenant] = shapes.choices(range(settings.tenants), cum_weights=popularity)
        turns = range(shapes.randint(settings.turns_min, settings.turns_max))
        found.append(
            Conversation(
                arrives_s=now,
                tenant=tenant,
                system=systems[tenant],
                turns=tuple(_turn(settings, shapes, first=turn == 0) for turn in turns),
            )
        )
        now += arrivals.expovariate(settings.conversations_per_s)
    return found


def requests_in(workload: Sequence[Conversation]) -> int:
    """Return how many requests all conversations of the workload send in total, if every request is
    answered.
    """
    return sum(len(conversation.turns) for conversation in workload)


def _systems(settings: WorkloadSettings, seed: int) -> list[str]:
    systems = Random(f"{seed}:systems")
    return [
        f"You are the assistant of tenant {tenant}. "
        + draw_words(systems, _length(systems, settings.system_tokens))
        for tenant in range(settings.tenants)
    ]


def _turn(settings: WorkloadSettings, random: Random, *, first: bool) -> Turn:
    think_s = min(random.expovariate(1 / settings.think_s_mean), settings.think_s_max)
    return Turn(
        question=draw_words(random, _length(random, settings.question_tokens)),
        answer_tokens=_length(random, settings.answer_tokens),
        think_s=0.0 if first else think_s,
    )


def _length(random: Random, median_tokens: int) -> int:
    """Return a random number of tokens around the median; nine of ten lie between half of it and
    twice it.
    """
    return max(1, round(random.lognormvariate(math.log(median_tokens), 0.4)))
