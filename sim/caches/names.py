"""Prompt caches by name, as `--cache` and scenario files specify them."""

from collections.abc import Mapping
from typing import Final

import msgspec

from epp.core.expectation import misfit
from sim.caches.behaviour import CacheBehaviour
from sim.caches.kronk_imc_v1 import KronkImcV1
from sim.caches.kronk_imc_v2 import KronkImcV2
from sim.caches.kronk_spc import KronkSpc
from sim.caches.lmcache_cpu import LmcacheCpu
from sim.caches.mlx_disk import MlxDisk
from sim.caches.mlx_memory import MlxMemory
from sim.caches.offload import Offload
from sim.caches.ruvllm_faithful import RuvllmFaithful
from sim.caches.ruvllm_fixed import RuvllmFixed
from sim.engine.profiles import Profile

VLLM: Final = "vllm"
"""Name, in `--cache`, of vLLM's own block pool without a further prompt cache."""

BEHAVIOURS: Final[Mapping[str, type[CacheBehaviour]]] = {
    behaviour.type_name: behaviour
    for behaviour in (
        RuvllmFaithful,
        RuvllmFixed,
        KronkSpc,
        KronkImcV1,
        KronkImcV2,
        MlxMemory,
        MlxDisk,
        LmcacheCpu,
        Offload,
    )
}
NAMES: Final = (VLLM, *BEHAVIOURS)


class CacheNameError(ValueError):
    """The name or a parameter of a prompt cache is unknown or invalid, or the profile lacks a value
    that the cache needs. The message is one sentence.
    """


def cache_named(text: str) -> CacheBehaviour | None:
    """Return the prompt cache that a text NAME or NAME:PARAMETER=VALUE,... describes, or None for
    vLLM's own. Raises `CacheNameError` for an unknown or invalid text.
    """
    name, _, told = text.partition(":")
    if name == VLLM and not told:
        return None
    behaviour = BEHAVIOURS.get(name)
    if behaviour is None:
        raise CacheNameError(f"No cache {text!r}; expected one of {', '.join(NAMES)}.")
    parameters: dict[str, str] = {}
    for part in told.split(",") if told else ():
        parameter, equals, value = part.partition("=")
        if not equals or parameter not in behaviour.__struct_fields__:
            raise CacheNameError(
                f"No parameter {part!r} of the cache {name}; expected PARAMETER=VALUE with one of "
                f"{', '.join(behaviour.__struct_fields__)}."
            )
        parameters[parameter] = value
    try:
        return msgspec.convert(parameters, behaviour, strict=False)
    except msgspec.ValidationError as problem:
        raise CacheNameError(f"{misfit(f'The cache {text!r}', problem, behaviour)}.") from problem


def cache_spelt(cache: CacheBehaviour | None) -> str:
    """Return the text of a prompt cache as `--cache` accepts it. Parameters with default values are
    left out.
    """
    if cache is None:
        return VLLM
    parameters = [
        f"{field}={value}"
        for field, value in msgspec.structs.asdict(cache).items()
        if value != getattr(type(cache)(), field)
    ]
    return cache.type_name + (f":{','.join(parameters)}" if parameters else "")


def check_cache(cache: CacheBehaviour | None, profile: Profile) -> None:
    """Raise `CacheNameError` if the profile lacks `kv_bytes_per_token`, which every cache except
    vLLM's needs.
    """
    if cache is not None and not profile.kv_bytes_per_token:
        raise CacheNameError(
            f"The cache {cache.type_name} counts bytes, but the profile {profile.name} has no "
            "kv_bytes_per_token."
        )
