"""Generators of requests from workloads that are described by parameters instead of recorded.

All random choices follow from one seed, with a separate generator for each purpose. Block ids are
counted up from 1, because a prompt in bytes can encode ids below 16 million if blocks may be one
token long; a larger id is an error there.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice, repeat, takewhile
from random import Random
from typing import Final

from msgspec import Struct, structs

from epp.core.types import Seconds
from sim.traces.arrival import Arrival, FieldError
from sim.traces.lengths import Spread, fixed
from sim.traces.sessions import Session, Turn, arrival_of, merge


class Stage(Struct, frozen=True, kw_only=True):
    """A period of an open load in which requests arrive at a constant mean rate."""

    rate_per_s: float
    duration_s: Seconds


class OpenLoad(Struct, frozen=True, kw_only=True):
    """A load whose requests arrive at given times, whether or not earlier ones were answered."""

    stages: tuple[Stage, ...]
    gap_s: Seconds = 0.0
    """Pause in seconds between two stages of the load."""
    burstiness: float = 1.0
    """Coefficient of variation of the gaps between arrivals: 0 for even arrivals, 1 for Poisson,
    above 1 for bursts.
    """

    def times(self, random: Random) -> Iterator[Seconds]:
        """Yield the random arrival times of the load's requests in seconds, in order."""
        begin = 0.0
        for stage in self.stages:
            end = begin + stage.duration_s
            now = begin + self._gap_s(stage, random)
            while now < end:
                yield now
                now += self._gap_s(stage, random)
            begin = end + self.gap_s

    def _gap_s(self, stage: Stage, random: Random) -> Seconds:
        if not stage.rate_per_s:
            return math.inf
        if not self.burstiness:
            return 1 / stage.rate_per_s
        # A gamma distribution with this shape has this coefficient of variation; 1 is the
        # exponential.
        shape = 1 / self.burstiness**2
        return random.gammavariate(shape, 1 / (shape * stage.rate_per_s))


class Concurrency(Struct, frozen=True, kw_only=True):
    """One stage of a closed loop: `requests` in total, with at most `lanes` concurrent ones.

    Each lane sends its next request when its previous one is answered.
    """

    lanes: int
    requests: int


class ClosedLoad(Struct, frozen=True, kw_only=True):
    """A load in which each request of a lane waits for the answer to the one before.

    A lane begins the next stage `gap_s` seconds after its last request is answered.
    """

    stages: tuple[Concurrency, ...]
    gap_s: Seconds = 0.0


class Adapters(Struct, frozen=True, kw_only=True):
    """The LoRA adapters that a workload's requests name, as (name, weight of its random choice);
    empty if all requests use the base model.
    """

    weights: tuple[tuple[str, float], ...] = ()

    def draws(self, random: Random) -> Iterator[str]:
        """Yield randomly chosen adapter names without end, or "" if there are no adapters."""
        if not self.weights:
            yield from repeat("")
        names = [name for name, _ in self.weights]
        weights = list(accumulate(weight for _, weight in self.weights))
        while True:
            yield random.choices(names, cum_weights=weights)[0]


class SharedPrefix(Struct, frozen=True, kw_only=True):
    """Prompts in groups with a common system prompt; each group repeats a fixed number of
    questions.

    With `multi_turn` each question belongs to a user, whose prompts grow by answer and question in
    each turn.
    """

    groups: int
    prompts_per_group: int
    system_tokens: int
    question: Spread
    output: Spread
    multi_turn: bool = False
    context_tokens_max: int = 225_000
    """Length in tokens of prompt and answer above which a conversation (`multi_turn`) restarts. A
    single question with its answer may be longer.
    """
    skew: float | None = None
    """Zipf exponent of the groups' popularity; None to send all prompts round robin, in shuffled
    order.
    """


class Conversations(Struct, frozen=True, kw_only=True):
    """Conversations that share one system prompt; each has its own context and several turns."""

    conversations: int
    shared_tokens: int
    own: Spread
    turns: Spread
    question: Spread
    output: Spread
    think_s: Spread = fixed(0)
    context_tokens_max: int = 225_000


class AgentTree(Struct, frozen=True, kw_only=True):
    """Agentic tasks: a planner starts several agents, which alternate with tools.

    All tasks share a system prompt, and each has one of several tool schemas. The planner's first
    answer starts the agents in parallel. The prompt of each agent has the planner's prompt and
    answer, then its own branch.
    """

    root_tokens: int = 2000
    toolsets: int = 8
    toolset_tokens: int = 4000
    task: Spread = Spread(type="lognormal", mean=800, std_dev=600, min=50, max=8000)
    agents: Spread = Spread(type="uniform", mean=3, min=1, max=5)
    branch: Spread = Spread(type="lognormal", mean=300, std_dev=200, min=20, max=2000)
    turns: Spread = Spread(type="lognormal", mean=6, std_dev=5, min=1, max=30)
    tool_result: Spread = Spread(type="lognormal", mean=1200, std_dev=1500, min=30, max=16000)
    output: Spread = Spread(type="lognormal", mean=250, std_dev=200, min=20, max=2000)
    tool_s: Spread = Spread(type="lognormal", mean=4, std_dev=6, min=0.1, max=60)
    context_tokens_max: int = 120_000


class Lengths(Struct, frozen=True, kw_only=True):
    """Content of a workload: prompts of given lengths that share no text with each other."""

    prompt: Spread
    output: Spread


Content = SharedPrefix | Conversations | AgentTree | Lengths


class Workload(Struct, frozen=True, kw_only=True):
    """A workload: the content of requests, and their arrival times."""

    content: Content
    load: OpenLoad | ClosedLoad
    adapters: Adapters = Adapters()
    source: str = ""
    """Publication from which the parameters were taken; "" for Homing's own."""
    priority: int = 0
    """Priority that all requests generated from `content` have."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers of all requests of `content`, as (name in lower case, value)."""
    beside: tuple["Workload", ...] = ()
    """Workloads whose requests are sent at the same time. They share no text with `content`, and
    have nothing beside them.
    """


class Generated(Struct, frozen=True, kw_only=True):
    """A workload with seed and limits, from which requests are generated. Each seed gives other
    requests.
    """

    workload: Workload
    seed: int | None = None
    """Seed that the file of the workload defines, or None if it defines none."""
    requests_max: int | None = None
    steady: bool = False
    """True if `steady_arrivals` generates the requests, False for `arrivals`."""

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Yield the requests that follow from `seed`, in order of time."""
        drawn = steady_arrivals if self.steady else arrivals
        return drawn(self.workload, seed, self.requests_max)


def arrivals(workload: Workload, seed: int, requests_max: int | None = None) -> Iterator[Arrival]:
    """Yield the generated requests of `workload` in order of time, at most `requests_max`."""
    if workload.beside or workload.priority or workload.headers:
        return islice(_together((workload, *workload.beside), seed), requests_max)
    return _of_content(workload, seed, requests_max)


def _together(workloads: tuple[Workload, ...], seed: int) -> Iterator[Arrival]:
    """Yield the requests of all `workloads` in order of time, with ids that differ between them."""
    numbers: dict[tuple[int, int], int] = {}
    """Index of each request in the merged trace, by the position of its workload and its index
    among that workload's requests.
    """
    several = (
        zip(repeat(part), _of_content(workload, _seed_of(seed, part), None))
        for part, workload in enumerate(workloads)
    )
    for index, (part, one) in enumerate(heapq.merge(*several, key=lambda pair: pair[1].time_s)):
        numbers[part, one.index] = index
        workload = workloads[part]
        yield structs.replace(
            one,
            index=index,
            after=None if one.after is None else numbers[part, one.after],
            blocks=tuple(block * len(workloads) + part for block in one.blocks),
            answer=None if one.answer is None else one.answer * len(workloads) + part,
            session=f"{part}.{one.session}" if one.session else "",
            priority=workload.priority,
            headers=workload.headers,
        )


def _seed_of(seed: int, part: int) -> int:
    """Return the seed of the workload at position `part` of several. The first one has `seed`."""
    return seed if not part else Random(f"{seed}:beside:{part}").getrandbits(32)


def _of_content(workload: Workload, seed: int, requests_max: int | None) -> Iterator[Arrival]:
    """Yield at most `requests_max` requests of the content of `workload`, in order of time."""
    content, load = workload.content, workload.load
    source = _source(content, seed, workload.adapters)
    if isinstance(load, ClosedLoad):
        if isinstance(content, SharedPrefix) and content.multi_turn:
            # A user sends one request at a time, so there are at most as many lanes as users.
            users = content.groups * content.prompts_per_group
            stages = (structs.replace(one, lanes=min(one.lanes, users)) for one in load.stages)
            load = structs.replace(load, stages=tuple(stages))
        return merge(_lanes(load, source), requests_max)
    times = load.times(Random(f"{seed}:arrivals"))
    if isinstance(content, SharedPrefix) and content.multi_turn:
        return islice(
            _rounds(source, content.groups * content.prompts_per_group, times), requests_max
        )
    return merge((Session(start_s=at, turns=source(0, 1)) for at in times), requests_max)


HISTORY_S_MAX: Final[Seconds] = 3600.0
"""Maximum time before the start of a steady trace for which sessions are drawn. Sessions that last
longer are rare.
"""
_SESSIONS_MEASURED: Final = 200
"""Number of sessions that are generated to find how long the longest session lasts."""


def steady_arrivals(
    workload: Workload, seed: int, requests_max: int | None = None
) -> Iterator[Arrival]:
    """Return the generated requests of `workload` in order of time; its sessions begin at a constant
    mean rate.

    Sessions that began before the trace are under way at its start: the trace has their remaining
    turns. No request arrives after the end of the load. All times assume that answers take no time.
    Raises `FieldError` if `cannot_be_steady` gives a reason.
    """
    problem = cannot_be_steady(workload)
    if problem:
        raise FieldError("workload.steady", problem)
    load = workload.load
    assert isinstance(load, OpenLoad)
    [stage] = load.stages
    history_s = _session_s_max(workload.content, seed)
    longer = structs.replace(stage, duration_s=history_s + stage.duration_s)
    whole = structs.replace(workload, load=structs.replace(load, stages=(longer,)))
    end_s = history_s + stage.duration_s
    in_time = takewhile(lambda one: one.time_s < end_s, arrivals(whole, seed))
    return islice(_without_history(in_time, history_s), requests_max)


def cannot_be_steady(workload: Workload) -> str:
    """Return the reason why `workload` cannot be generated as steady traffic, as a sentence; "" if
    it can.
    """
    content, load = workload.content, workload.load
    if workload.beside:
        return "Expected one kind of traffic: this workload has others beside it"
    if isinstance(content, SharedPrefix) and content.multi_turn:
        return "Expected sessions that end: users of this workload talk until the trace ends"
    if not isinstance(load, OpenLoad):
        return "Expected arrivals at a rate: requests of this workload wait for answers"
    if len(load.stages) != 1:
        return "Expected one rate: the load of this workload has several stages"
    return ""


def _session_s_max(content: Content, seed: int) -> Seconds:
    """Return the duration of the longest of 200 generated sessions if answers take no time, at most
    `HISTORY_S_MAX`.
    """
    source = _source(content, seed, Adapters())
    lengths_s = (
        max((one.time_s for one in merge([Session(turns=source(0, 1))])), default=0.0)
        for _ in range(_SESSIONS_MEASURED)
    )
    return min(max(lengths_s), HISTORY_S_MAX)


def _without_history(given: Iterator[Arrival], history_s: Seconds) -> Iterator[Arrival]:
    """Yield the requests that arrive from `history_s` on, with indices and times counted from
    there.
    """
    numbers: dict[int, int] = {}
    for one in given:
        if one.time_s < history_s:
            continue
        number = numbers[one.index] = len(numbers)
        after = None if one.after is None else numbers.get(one.after)
        yield structs.replace(one, index=number, time_s=one.time_s - history_s, after=after)


_Source = Callable[[int, int], Iterator[Turn]]
"""Function (number of the lane, number of lanes) -> the turns of one more session. A lane of a
closed loop sends one request after the other.
"""


def _source(content: Content, seed: int, adapters: Adapters) -> _Source:
    random = Random(f"{seed}:content")
    drawn = adapters.draws(Random(f"{seed}:adapters"))
    ids = count(1)
    match content:
        case SharedPrefix():
            return _shared_prefix(content, random, ids, drawn)
        case Conversations():
            return _conversations(content, seed, ids, drawn)
        case AgentTree():
            return _agent_tree(content, random, ids, drawn)
        case Lengths():
            return _nothing_shared(content, random, ids, drawn)


def _lanes(load: ClosedLoad, source: _Source) -> Iterator[Session]:
    """Yield a session for each lane of the first stage.

    Lanes of later stages are child sessions of the stage before.
    """

    def lane(stage: int, number: int) -> Iterator[Turn]:
        lanes, requests = load.stages[stage].lanes, load.stages[stage].requests
        quota = requests // lanes + (number < requests % lanes)
        turns = islice(_endless(source, number, lanes), quota)
        last: Turn | None = None
        for turn in turns:
            if last is not None:
                yield last
            last = turn
        if last is None:
            return
        following: tuple[Session, ...] = ()
        if stage + 1 < len(load.stages):
            following = tuple(
                Session(start_s=load.gap_s, turns=lane(stage + 1, child))
                for child in range(number, load.stages[stage + 1].lanes, min(lanes, requests))
            )
        yield structs.replace(last, children=(*last.children, *following))

    if load.stages:
        for number in range(load.stages[0].lanes):
            yield Session(turns=lane(0, number))


def _endless(source: _Source, lane: int, lanes: int) -> Iterator[Turn]:
    """Yield the turns of one session of `source` after another, until a session has no turns."""
    while True:
        turn = None
        for turn in source(lane, lanes):
            yield turn
        if turn is None:
            return


def _rounds(source: _Source, users: int, times: Iterator[Seconds]) -> Iterator[Arrival]:
    """Yield turns of the users round robin at the given times. Each turn also waits for the user's
    previous answer.
    """
    latest: dict[int, int] = {}
    for index, at in enumerate(times):
        user = index % users
        [turn] = source(user, users)
        yield arrival_of(turn, index=index, time_s=at, after=latest.get(user))
        latest[user] = index


def _nothing_shared(
    content: Lengths, random: Random, ids: Iterator[int], adapters: Iterator[str]
) -> _Source:
    def source(lane: int, lanes: int) -> Iterator[Turn]:
        parts = ((next(ids), content.prompt.count(random)),)
        yield Turn(parts, content.output.count(random), adapter=next(adapters))

    return source


class _Prompt(Struct):
    """One prompt of a group: a question after the group's system prompt; with `multi_turn` also the
    conversation before the question.
    """

    name: str
    system: tuple[int, int]
    question: tuple[int, int]
    output_tokens: int
    history: tuple[tuple[int, int], ...] = ()
    turns: int = 0


def _shared_prefix(
    content: SharedPrefix, random: Random, ids: Iterator[int], adapters: Iterator[str]
) -> _Source:
    groups: list[list[_Prompt]] = []
    for group in range(content.groups):
        system = (next(ids), content.system_tokens)
        groups.append(
            [
                _Prompt(
                    f"{group}.{number}",
                    system,
                    (next(ids), content.question.count(random)),
                    content.output.count(random),
                )
                for number in range(content.prompts_per_group)
            ]
        )
    prompts = [prompt for group in groups for prompt in group]
    random.shuffle(prompts)
    popularity = list(
        accumulate(1 / rank ** (content.skew or 0) for rank in range(1, content.groups + 1))
    )
    turn_of_lane: dict[tuple[int, int], int] = {}

    def draw(lane: int, lanes: int) -> _Prompt | None:
        if content.skew is not None:
            [group] = random.choices(groups, cum_weights=popularity)
            return random.choice(group)
        if not content.multi_turn:
            lane, lanes = 0, 1
        mine = prompts[lane::lanes]
        if not mine:
            return None
        turn = turn_of_lane.get((lane, lanes), 0)
        turn_of_lane[lane, lanes] = turn + 1
        return mine[turn % len(mine)]

    def source(lane: int, lanes: int) -> Iterator[Turn]:
        prompt = draw(lane, lanes)
        if prompt is None:
            return
        if not content.multi_turn:
            parts: tuple[tuple[int, int], ...] = _with_tokens(prompt.system, prompt.question)
            yield Turn(parts, prompt.output_tokens, adapter=next(adapters))
            return
        parts = (*prompt.history, prompt.question)
        answer = next(ids)
        size = sum(tokens for _, tokens in parts) + content.system_tokens + prompt.output_tokens
        if size > content.context_tokens_max and prompt.history:
            parts = (prompt.question,)
        prompt.history = (*parts, (answer, prompt.output_tokens))
        yield Turn(
            _with_tokens(prompt.system, *parts),
            prompt.output_tokens,
            answer=answer,
            adapter=next(adapters),
            session=prompt.name,
            number=prompt.turns,
        )
        prompt.turns += 1

    return source


def _with_tokens(*parts: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the parts of a prompt that have at least one token."""
    return tuple(part for part in parts if part[1])


def _conversations(
    content: Conversations, seed: int, ids: Iterator[int], adapters: Iterator[str]
) -> _Source:
    shared = (next(ids), content.shared_tokens)
    texts: dict[tuple[int, int], int] = {}
    """Block id of each text by (conversation, turn), for repeated conversations; turn -1 is the
    conversation's own context.
    """
    numbers = count()

    def text(conversation: int, turn: int) -> int:
        if not content.conversations:
            return next(ids)
        known = texts.get((conversation, turn))
        if known is None:
            known = texts[conversation, turn] = next(ids)
        return known

    def source(lane: int, lanes: int) -> Iterator[Turn]:
        number = next(numbers)
        conversation = number % content.conversations if content.conversations else number
        # A repeated conversation has the same lengths each time, because it is the same text.
        random = Random(f"{seed}:conversation:{conversation}")
        adapter = next(adapters)
        parts = _with_tokens(shared, (text(conversation, -1), round(content.own.draw(random))))
        for turn in range(content.turns.count(random)):
            think_s = content.think_s.draw(random)
            parts += ((text(conversation, turn), content.question.count(random)),)
            output_tokens = content.output.count(random)
            if sum(tokens for _, tokens in parts) + output_tokens > content.context_tokens_max:
                if turn:
                    return
                parts = _cut(parts, content.context_tokens_max - output_tokens)
            answer = next(ids)
            yield Turn(
                parts,
                output_tokens,
                answer=answer,
                think_s=think_s if turn else 0.0,
                adapter=adapter,
                session=str(number),
                number=turn,
            )
            parts += ((answer, output_tokens),)

    return source


def _cut(parts: tuple[tuple[int, int], ...], tokens_max: int) -> tuple[tuple[int, int], ...]:
    """Return the beginning of the prompt with at most `tokens_max` tokens, and at least one."""
    kept: list[tuple[int, int]] = []
    left = max(1, tokens_max)
    for part, tokens in parts:
        if left:
            kept.append((part, min(tokens, left)))
            left -= min(tokens, left)
    return tuple(kept)


def _agent_tree(
    content: AgentTree, random: Random, ids: Iterator[int], adapters: Iterator[str]
) -> _Source:
    root = (next(ids), content.root_tokens)
    toolsets = [(next(ids), content.toolset_tokens) for _ in range(content.toolsets)]
    numbers = count()

    def agent(parts: tuple[tuple[int, int], ...], name: str, adapter: str) -> Iterator[Turn]:
        parts += ((next(ids), content.branch.count(random)),)
        for number in range(content.turns.count(random)):
            output_tokens = content.output.count(random)
            if sum(tokens for _, tokens in parts) + output_tokens > content.context_tokens_max:
                return
            answer = next(ids)
            yield Turn(
                parts,
                output_tokens,
                answer=answer,
                think_s=content.tool_s.draw(random) if number else 0.0,
                adapter=adapter,
                session=name,
                number=number,
            )
            parts += ((answer, output_tokens), (next(ids), content.tool_result.count(random)))

    def source(lane: int, lanes: int) -> Iterator[Turn]:
        name, adapter = str(next(numbers)), next(adapters)
        parts = (root, random.choice(toolsets), (next(ids), content.task.count(random)))
        output_tokens = content.output.count(random)
        answer = next(ids)
        planned = (*parts, (answer, output_tokens))
        agents = tuple(
            Session(
                start_s=content.tool_s.draw(random), turns=agent(planned, f"{name}.{one}", adapter)
            )
            for one in range(content.agents.count(random))
        )
        yield Turn(
            parts, output_tokens, answer=answer, adapter=adapter, session=name, children=agents
        )

    return source
