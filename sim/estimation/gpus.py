"""The table of GPUs: memory, bandwidth, arithmetic and interconnect, from data sheets."""

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
"""GPU memory in bytes from which vLLM's default batch limits are larger, except on an A100."""
_HUGE_CARD_BYTES: Final = 160 * 2**30
"""GPU memory in bytes from which vLLM's default limit on tokens in a step is twice that of
`_BIG_CARD_BYTES`.
"""


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU. Peaks are without sparsity, in bytes or floating-point operations per
    second.
    """

    name: str
    says: str
    """Vendor, product and memory of the GPU, for display."""
    memory_bytes: _Positive
    """Memory of one GPU in bytes, as its driver reports it."""
    memory_bytes_per_s: _Positive
    half_flops: _Positive
    """Peak arithmetic in BF16, or in FP16 if the GPU has no BF16."""
    fp8_flops: _Positive | None = None
    """Peak arithmetic in FP8, or None if the GPU does not support FP8."""
    int8_flops: _Positive | None = None
    """Peak arithmetic in INT8, or None if the GPU does not support INT8."""
    fp4_flops: _Positive | None = None
    """Peak arithmetic in FP4, or None if the GPU does not support FP4."""
    interconnect_bytes_per_s: _Positive
    """Bandwidth in bytes per second of each GPU to the other GPUs of its host, in one direction."""
    peer_to_peer: Literal["link", "pcie"] = "link"
    """Connection between the GPUs of a host: `link` for NVLink or Infinity Fabric, `pcie` for
    PCIe.
    """
    source: str

    @property
    def engine_defaults(self) -> tuple[int, int]:
        """Defaults of `vllm serve` on this GPU, as (`max_num_seqs`, `max_num_batched_tokens`).

        Source: vLLM 0.19 to 0.32, the batch defaults of its engine arguments by the GPU's memory.
        """
        if self.memory_bytes < _BIG_CARD_BYTES or self.name.startswith("a100"):
            return 256, 2048
        return 1024, 16_384 if self.memory_bytes >= _HUGE_CARD_BYTES else 8192


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return all GPUs of the table by name, in the order of the table."""
    table = toml_in(Path(__file__).with_name("gpus.toml"))
    return {name: msgspec.convert({**row, "name": name}, Gpu) for name, row in table.items()}


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name from the table. Case does not matter, and spaces and
    underscores count as hyphens. Raises `ProfileError`, which lists the names, if there is none.
    """
    known = gpus()
    found = known.get(name.lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise ProfileError(
            f"--gpu: no GPU {name!r}{nearest(name, known)}; expected one of {', '.join(known)}."
        )
    return found
