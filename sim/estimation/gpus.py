"""The table of GPUs: what data sheets say of memory, bandwidth, arithmetic and interconnect."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from epp.configuration.document import nearest
from sim.engine.profiles import ProfileError, toml_in

_Positive: TypeAlias = Annotated[float, Meta(gt=0.0)]
_BIG_CARD_BYTES: Final = 70 * 2**30
"""From so much memory on vLLM's defaults are larger, but not on an A100."""
_HUGE_CARD_BYTES: Final = 160 * 2**30
"""From so much memory on a step has twice as many tokens again."""


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU. Peaks are dense; bytes and floating-point operations, each per second."""

    name: str
    says: str
    """Vendor, product and memory, for people."""
    memory_bytes: _Positive
    """Memory of one GPU as its driver reports it."""
    memory_bytes_per_s: _Positive
    half_flops: _Positive
    """BF16, or FP16 where a GPU has no BF16."""
    fp8_flops: _Positive | None = None
    """None if the GPU does not compute in FP8."""
    int8_flops: _Positive | None = None
    """None if the GPU does not compute in INT8."""
    fp4_flops: _Positive | None = None
    """None if the GPU does not compute in FP4."""
    interconnect_bytes_per_s: _Positive
    """One direction, for each GPU, between GPUs of one host."""
    peer_to_peer: Literal["link", "pcie"] = "link"
    """`link`: NVLink or Infinity Fabric."""
    source: str

    @property
    def engine_defaults(self) -> tuple[int, int]:
        """`max_num_seqs` and `max_num_batched_tokens` that `vllm serve` has on this GPU by default.

        Source: vLLM 0.19 to 0.32, the batch defaults of its engine arguments by the GPU's memory.
        """
        if self.memory_bytes < _BIG_CARD_BYTES or self.name.startswith("a100"):
            return 256, 2048
        return 1024, 16_384 if self.memory_bytes >= _HUGE_CARD_BYTES else 8192


@cache
def gpus() -> Mapping[str, Gpu]:
    """All GPUs of the table by name, in its order."""
    table = toml_in(Path(__file__).with_name("gpus.toml"))
    return {name: msgspec.convert({**row, "name": name}, Gpu) for name, row in table.items()}


def gpu_named(name: str) -> Gpu:
    """Return a GPU of the table. Raise `ProfileError` with the names that exist."""
    known = gpus()
    found = known.get(name.lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise ProfileError(
            f"--gpu: no GPU {name!r}{nearest(name, known)}; expected one of {', '.join(known)}."
        )
    return found
