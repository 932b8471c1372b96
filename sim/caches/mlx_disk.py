"""A disk behind the prompt cache of mlx-lm. Its content outlives the engine's process."""

from bisect import bisect_left
from typing import ClassVar, Final

from msgspec import Struct

from epp.core.types import Seconds
from sim.caches.behaviour import Bytes, Stored, Tokens, parts_of
from sim.caches.mlx_memory import ASSISTANT, MlxParameters, Sequences
from sim.engine.engine import EngineSettings
from sim.engine.profiles import Profile
from sim.engine.prompt_cache import Found, PromptCache
from sim.engine.request import EngineRequest, PromptParts

MEASURED_TOKENS: Final = (4 * 1024, 16 * 1024, 32 * 1024, 96 * 1024)
RESTORE_S: Final = (2.0e-3, 5.9e-3, 15.9e-3, 30.8e-3)
SAVE_S: Final = (54e-3, 95e-3, 163e-3, 593e-3)
"""Seconds to write sequences of the lengths `MEASURED_TOKENS`. These values and `RESTORE_S` are
from benjamin-levin/mlx-lm#6, Qwen3.6-35B-A3B in 4 bits on an M4 Max.
"""


class MlxDisk(MlxParameters, frozen=True):
    """mlx-lm's `LRUPromptCache` with a disk (benjamin-levin/mlx-lm#6, merged in the fork in May
    2026).

    This cache also writes each stored sequence that is long enough to the disk, unless it is there.
    If memory has no beginning of a prompt, the longest whole sequence on the disk with which the
    prompt begins is read and stored in memory again. If the files on the disk exceed their budget,
    the least recently used ones are deleted. Reading and writing a file take the times that its
    author measured (`MEASURED_TOKENS`), interpolated linearly from zero, whatever the model. The
    size of a file is computed from the profile's bytes per token. A new engine process in the same
    pod finds the files on the disk as the previous process left them.
    """

    type_name: ClassVar[str] = "mlx-disk"

    disk_bytes: Bytes = 4 * 2**30
    """Maximum size in bytes of all files on the disk together."""
    disk_min_tokens: Tokens = 256
    """Minimum length in tokens of a sequence that is written to the disk."""

    def open(
        self, profile: Profile, settings: EngineSettings, before: PromptCache | None
    ) -> "SequencesOnDisk":
        """Return a cache with an empty memory, and with the disk of the previous process if there
        was one.
        """
        disk = before.disk if isinstance(before, SequencesOnDisk) else Disk(self.disk_bytes)
        return SequencesOnDisk(self, profile.kv_bytes_per_token, disk)


class _File(Struct, eq=False):
    """A file on the disk with one token sequence; `used` is the number of its latest use."""

    stored: Stored
    bytes: int
    used: int


class Disk:
    """A store of token sequences in files. If they exceed the budget, the least recently used files
    are deleted.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._files: dict[tuple[int, int], _File] = {}
        """Files by (key of the sequence's last part, number of tokens of the sequence)."""
        self._uses = 0

    @property
    def kept_bytes(self) -> int:
        """Total size in bytes of all files on the disk."""
        return sum(file.bytes for file in self._files.values())

    @property
    def sequences(self) -> list[Stored]:
        """Sequences on the disk, the least recently used first."""
        return [file.stored for file in sorted(self._files.values(), key=lambda file: file.used)]

    def write(self, stored: Stored, size_bytes: int) -> bool:
        """Write a sequence to the disk, delete the least recently used files beyond the budget, and
        return True. If the sequence is already on the disk, only record its use and return False.
        """
        name = stored.key, stored.tokens
        self._uses += 1
        if name in self._files:
            self._files[name].used = self._uses
            return False
        self._files[name] = _File(stored, size_bytes, self._uses)
        excess = self.kept_bytes - self._bytes_max
        for oldest in sorted(self._files.values(), key=lambda file: file.used):
            if excess <= 0:
                break
            del self._files[oldest.stored.key, oldest.stored.tokens]
            excess -= oldest.bytes
        return True

    def read(self, prompt: PromptParts) -> Stored | None:
        """Return the longest sequence on the disk with which the prompt begins, and record its use.
        Return None if there is none.
        """
        fitting = [file for file in self._files.values() if file.stored.begins(prompt)]
        if not fitting:
            return None
        longest = max(fitting, key=lambda file: file.stored.tokens)
        self._uses += 1
        longest.used = self._uses
        return longest.stored


class SequencesOnDisk(Sequences):
    """mlx-lm's prompt cache in one engine: sequences in memory that are also written to a disk."""

    def __init__(self, parameters: MlxDisk, bytes_per_token: int, disk: Disk) -> None:
        super().__init__(parameters, bytes_per_token)
        self.disk = disk
        self._min_tokens = parameters.disk_min_tokens
        self._save_s = 0.0
        """Time in seconds spent on writing to the disk since the last call of `_saved_s`."""

    def fetch(self, request: EngineRequest, held_tokens: int, now: Seconds) -> Found | None:
        """Return the part of the prompt found in memory. If memory has none, read the longest
        sequence on the disk with which the prompt begins into memory, and return it with the
        reading time.
        """
        found = super().fetch(request, held_tokens, now)
        if found is not None and found.tokens:
            return found
        stored = self.disk.read(parts_of(request))
        if stored is None:
            return found
        super().insert(stored, ASSISTANT)
        return Found(stored.tokens, measured_s(RESTORE_S, stored.tokens))

    def computed(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the computed prompt as the cache without a disk does, and also on the disk if it is
        long enough. Return the time in seconds for writing to the disk.
        """
        super().computed(request, now)
        return self._saved_s()

    def left(self, request: EngineRequest, now: Seconds) -> Seconds:
        """Store the prompt with its answer as the cache without a disk does, and also on the disk
        if it is long enough. Return the time in seconds for writing to the disk.
        """
        super().left(request, now)
        return self._saved_s()

    def insert(self, stored: Stored, kind: str) -> None:
        """Store a sequence in memory, and write it to the disk if it is long enough."""
        super().insert(stored, kind)
        if stored.tokens >= self._min_tokens and self.disk.write(
            stored, stored.tokens * self._bytes_per_token
        ):
            self._save_s += measured_s(SAVE_S, stored.tokens)

    def _saved_s(self) -> Seconds:
        save_s, self._save_s = self._save_s, 0.0
        return save_s


def measured_s(times_s: tuple[Seconds, ...], tokens: int) -> Seconds:
    """Return the time in seconds to read or write `tokens` tokens. It is interpolated linearly from
    (0, 0) through the times at `MEASURED_TOKENS`, and extended by the last line.
    """
    points = (0, *MEASURED_TOKENS)
    values = (0.0, *times_s)
    at = min(max(1, bisect_left(points, tokens)), len(points) - 1)
    slope = (values[at] - values[at - 1]) / (points[at] - points[at - 1])
    return values[at - 1] + slope * (tokens - points[at - 1])
