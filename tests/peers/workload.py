"""Workload that peers and our strategies are sent alike: seeded requests that share heads.

Every prompt is a path in a tree whose edges are `CHUNK` characters, and no two edges of a node
begin with the same character. So two prompts share the same length in characters, which peers
compare, as in blocks of 16 tokens, which our tree compares.
"""

from random import Random
from typing import NamedTuple

CHUNK = 64
"""Number of characters of an edge: one block of 16 tokens."""
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Step(NamedTuple):
    """One request, and how many of those in flight end before it, the oldest first."""

    prompt: str
    key: str
    """Key of the conversation that the request belongs to."""
    ends: int


def chunk(branch, *path):
    """Return an edge: the `branch`th of the node that `path` names."""
    random = Random(f"{path}:{branch}")
    return _LETTERS[branch] + "".join(random.choices(_LETTERS, k=CHUNK - 1))


def conversations(requests, *, seed=1, heads=6, inflight_max=8, cold=0.15):
    """Yield turns of conversations under `heads` system prompts, and prompts that share nothing.

    A turn repeats the one before it and adds one to three chunks. Up to `inflight_max` requests are
    in flight at once; their number varies.
    """
    random = Random(f"{seed}:peers")
    systems = [
        "".join(chunk(head if not at else 0, seed, head, at) for at in range(random.randint(2, 7)))
        for head in range(heads)
    ]
    talks = {}
    inflight = 0
    for number in range(requests):
        ends = min(inflight, random.choice((0, 0, 1, 1, 1, 4)))
        ends = max(ends, inflight - inflight_max + 1)
        inflight += 1 - ends
        if random.random() < cold:
            # Letters that no head begins with; the tail tells those apart that share one.
            first = heads + number % (len(_LETTERS) - heads)
            size = random.randint(2, 8)
            prompt = "".join(chunk(0 if at else first, seed, "cold", at) for at in range(size))
            yield Step(prompt, f"cold-{number}", ends)
            continue
        head, talk = random.randrange(heads), random.randrange(8)
        before = talks.get((head, talk), systems[head])
        turn = len(before) // CHUNK
        added = "".join(
            chunk(talk if before == systems[head] and not at else 0, seed, head, talk, turn + at)
            for at in range(random.randint(1, 3))
        )
        talks[head, talk] = before + added
        yield Step(before + added, f"talk-{head}-{talk}", ends)


def hit_rate(steps, pods):
    """Return the share of prompt tokens cached from earlier requests to the same pod.

    The caches of pods have no limit. The count is that of vLLM: full blocks, and never the last
    token of a prompt.
    """
    known = set()
    hits = total = 0
    for step, pod in zip(steps, pods, strict=True):
        blocks = len(step.prompt) // CHUNK
        heads = [(pod, step.prompt[: CHUNK * (at + 1)]) for at in range(blocks)]
        hits += next((at for at, head in enumerate(heads[:-1]) if head not in known), blocks - 1)
        total += blocks
        known.update(heads)
    return hits / total
