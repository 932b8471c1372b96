"""Requests made of messages, and a cache that is told of them one after another."""

from sim.caches.names import cache_named
from sim.engine.engine import EngineSettings
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.engine.request import EngineRequest, PromptParts
from sim.traces.arrival import Arrival
from sim.traces.prompts import PromptHashes

PROFILE = find_profile(DEFAULT_PROFILE)
SETTINGS = EngineSettings(blocks_total=PROFILE.kv_tokens // 16 + 1)


def request(*messages, output=8, answer=None, index=0):
    """Return an engine request with a prompt of these messages, each (id, tokens).

    `answer` is the id of its answer, or None if no later prompt contains the answer.
    """
    arrival = Arrival(
        index=index,
        time_s=0.0,
        prompt_tokens=sum(tokens for _, tokens in messages),
        output_tokens=output,
        blocks=tuple(number for number, _ in messages),
        lengths=tuple(tokens for _, tokens in messages),
        answer=answer,
    )
    hashes = PromptHashes(arrival)
    keys, ends = hashes.engine_pieces(16)
    return EngineRequest(
        str(index),
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=output,
        chain=keys,
        chain_ends=ends,
        parts=PromptParts(*hashes.engine_pieces(1)),
    )


def opened(name, before=None, profile=PROFILE, settings=SETTINGS):
    """Return the cache that `--cache` would give a pod."""
    return cache_named(name).open(profile, settings, before)


def begun(cache, one, now=0.0):
    """Return the number of cached tokens found, or None if the request has to wait."""
    found = cache.fetch(one, 0, now)
    return None if found is None else found.tokens


def ended(cache, one, now=0.0):
    """Tell the cache that a request is computed and answered; return how long the engine saves."""
    save_s = cache.computed(one, now)
    one.generated_tokens = one.output_tokens
    return save_s + cache.left(one, now)


def served(cache, *messages, now=0.0, **fields):
    """Serve a prompt to its end; return the number of cached tokens found for it."""
    one = request(*messages, **fields)
    tokens = begun(cache, one, now)
    ended(cache, one, now)
    return tokens
