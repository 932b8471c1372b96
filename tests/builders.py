"""Values for tests: those that authors of plugins have too, under the names that these tests use."""

from epp.testing.builders import NOW_S, PREFIX, affinity, candidates, endpoint, request
from epp.testing.builders import loaded_adapters as lora
from epp.testing.builders import resident_adapters as resident

__all__ = ["NOW_S", "PREFIX", "affinity", "candidates", "endpoint", "lora", "request", "resident"]
