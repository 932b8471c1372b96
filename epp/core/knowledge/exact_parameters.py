"""The parameters of `precise-prefix-cache-producer`, spelt as in llm-d-router."""

import re
from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta, field, structs

from epp.core.duration import Duration, check_above_zero, parse_duration
from epp.core.knowledge.index import RANKS_MAX
from epp.core.kv_events.payload import DEVICE
from epp.core.parameters import Parameters

Port: TypeAlias = Annotated[int, Meta(ge=1, le=65_535)]

BLOCK_TOKENS: Final = 16
"""Default number of tokens in a block, as in the reference picker (llm-d-router)."""
BLOCK_TOKENS_ADVISED: Final = 32
UNLISTED_WEIGHT: Final = 0.5
"""Default of `kvCacheDefaultBackendWeight`: the weight of a block in a tier that is neither the
device nor listed in `kvCacheBackendConfigs`.
"""

ROW_BYTES: Final = 92
"""Memory in bytes of one entry of a table of the exact prefix index: of a key with the ranks that
have it cached, of an engine's block, or of the tokens that a block of the engine has after its last
full step (`core/prompt/token_blocks`).

Measured growth of a process in CPython 3.11, averaged over the fill of its tables.
"""
NUMBER_BYTES: Final = 48
"""Memory in bytes of an integer that a mirror stores for a block, if the integer is not the key of
a row. It is the integer for the end of an engine's block, or the key of an index's block that ends
within one.
"""
_BYTES: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *([KMGT]?)(I?)B?", re.IGNORECASE)
_PREFIXES: Final = ("", "k", "m", "g", "t")

_PORT: Final = re.compile("[0-9]{1,5}")
_PORT_MAX: Final = 65_535
_EVERYWHERE: Final = ("*", "0.0.0.0", "::")  # noqa: S104  connections are checked


class TokenProcessorConfig(Parameters, frozen=True):
    """The settings of llm-d-router's token processor. Only the block size has an effect here."""

    block_size_tokens: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Deprecated name of `blockSizeTokens`; it applies if that one is not given."""
    hash_seed: str = ""
    """Accepted without effect, because keys of the index need not equal the hashes of the engines."""
    hash_algorithm: str = ""
    """Accepted without effect, because keys of the index need not equal the hashes of the engines."""

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens in a block that results from these settings."""
        return self.block_size_tokens or self.block_size or BLOCK_TOKENS


class TierWeight(Parameters, frozen=True):
    """The weight, from 0 to 1, of a cached block in the tier `name`: a match adds this number for
    it, instead of 1.
    """

    name: Annotated[str, Meta(min_length=1)]
    weight: Annotated[float, Meta(ge=0, le=1)]


class InMemoryConfig(Parameters, frozen=True):
    """Settings of llm-d-router's memory store; `size` is its maximum number of keys."""

    size: Annotated[int, Meta(ge=1)] | None = None
    pod_cache_size: Annotated[int, Meta(ge=1)] | None = None
    """Accepted without effect, because a key is stored for every endpoint that has it cached."""


class CostAwareMemoryConfig(Parameters, frozen=True):
    size: str = ""
    """Maximum size of llm-d-router's memory store in bytes, as text with a unit such as MB or GiB.
    """

    def __post_init__(self) -> None:
        self._read_size()

    @property
    def size_bytes(self) -> int | None:
        """Return the maximum size of llm-d-router's memory store in bytes, or None if it is not
        given.
        """
        return self._read_size()

    def _read_size(self) -> int | None:
        if not self.size:
            return None
        given = _BYTES.fullmatch(self.size.strip())
        if given is None:
            raise ValueError(f"size is {self.size!r}; expected a number of bytes such as 2GiB")
        number, prefix, binary = given.groups()
        size_bytes = float(number) * (1_024 if binary else 1_000) ** _PREFIXES.index(prefix.lower())
        return max(1, int(size_bytes))


class KvBlockIndexConfig(Parameters, frozen=True):
    """The settings of llm-d-router's index store. Here the index is always in memory, within the
    given sizes.
    """

    in_memory_config: InMemoryConfig | None = None
    cost_aware_memory_config: CostAwareMemoryConfig | None = None
    redis_config: dict[str, Any] | None = None
    valkey_config: dict[str, Any] | None = None
    enable_metrics: bool = False
    metrics_logging_interval: str | int = 0
    """Interval between log lines with metrics, as a duration text or in nanoseconds; it has no
    effect.
    """

    def __post_init__(self) -> None:
        if isinstance(self.metrics_logging_interval, str):
            parse_duration(self.metrics_logging_interval)
        if self.redis_config is not None or self.valkey_config is not None:
            raise ValueError(
                "an index in Redis or Valkey is not supported, because each picker receives the "
                "events of every engine; remove `redisConfig` and `valkeyConfig`"
            )

    @property
    def memory_max_bytes(self) -> int | None:
        """Return the smaller of the maximum memory sizes in bytes that are given for the index, or
        None if none is given.
        """
        given: list[int | None] = []
        if self.in_memory_config is not None and self.in_memory_config.size is not None:
            given.append(2 * ROW_BYTES * self.in_memory_config.size)
        if self.cost_aware_memory_config is not None:
            given.append(self.cost_aware_memory_config.size_bytes)
        return min((size for size in given if size is not None), default=None)


class IndexerConfig(Parameters, frozen=True):
    kv_block_index_config: KvBlockIndexConfig = field(default_factory=KvBlockIndexConfig)
    kv_cache_backend_configs: tuple[TierWeight, ...] = (
        TierWeight(name=DEVICE, weight=1.0),
        TierWeight(name="cpu", weight=0.8),
    )
    kv_cache_default_backend_weight: Annotated[float, Meta(ge=0, le=1)] = UNLISTED_WEIGHT
    """Weight of a block in a tier that is neither the device (`gpu`) nor listed in
    `kvCacheBackendConfigs`.
    """
    tokenizers_pool_config: Any = None

    def __post_init__(self) -> None:
        if self.tokenizers_pool_config is not None:
            raise ValueError(
                "tokenizers are not configured here, but by `token-producer`; "
                "remove `tokenizersPoolConfig`"
            )


class PodDiscoveryConfig(Parameters, frozen=True):
    """The ports at which each endpoint publishes its KV-cache events."""

    socket_port: Port | None = None
    """Port at which the first rank of a pod publishes its events. If None, the picker asks each
    endpoint, again until it is reachable, and uses 5557 if the answer is an error.
    """
    replay_socket_port: Port | None = None
    """Port at which the picker requests past events of endpoints that do not name their ports, and of
    engines that connect to the picker. If None, past events of these are not requested.
    """
    data_parallel_size: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    """Number of data-parallel ranks behind each address. It has an effect if `socketPort` is set,
    if engines connect to the picker, or if an endpoint answers the request for its ports with an
    error.
    The next rank publishes at the next port, or names its rank in its messages if engines connect
    to the picker.
    """
    pod_label_selector: str = ""
    """Accepted without effect, because the picker subscribes to the endpoints of its pool."""
    pod_namespace: str = ""

    def __post_init__(self) -> None:
        for name, port in (
            ("socketPort", self.socket_port),
            ("replaySocketPort", self.replay_socket_port),
        ):
            if port is not None and port + self.data_parallel_size - 1 > _PORT_MAX:
                raise ValueError(
                    f"{name} is {port} with dataParallelSize {self.data_parallel_size}; "
                    f"the port of the last rank must be at most {_PORT_MAX}"
                )


class KvEventsConfig(Parameters, frozen=True):
    """The settings for receiving KV-cache events from engines."""

    zmq_endpoint: str = ""
    """Address at which the picker listens for engines, such as "tcp://*:5557". An engine then sends
    to one picker only.
    """
    topic_filter: str = ""
    """Prefix of the topics to which the picker subscribes. Endpoints are distinguished by their
    connection. Endpoints that connect from a shared address are also distinguished by their topic,
    `kv@IP:PORT@MODEL`.
    """
    concurrency: Annotated[int, Meta(ge=1)] = 4
    engine_type: Literal["vllm", "sglang"] = "vllm"
    discover_pods: bool = True
    """True if the picker connects to each endpoint of the pool to receive its events."""
    pod_discovery_config: PodDiscoveryConfig = field(default_factory=PodDiscoveryConfig)

    def __post_init__(self) -> None:
        self._read_binds()

    @property
    def binds(self) -> tuple[str, int] | None:
        """Return the (address, port) at which the picker accepts connections of engines, with ""
        for every address, or None if it accepts none.
        """
        return self._read_binds()

    def _read_binds(self) -> tuple[str, int] | None:
        if not self.zmq_endpoint:
            return None
        scheme, _, address = self.zmq_endpoint.partition("://")
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        port_given = _PORT.fullmatch(port) and int(port) <= _PORT_MAX
        if scheme != "tcp" or not port_given or not _is_own_address(host):
            raise ValueError(
                f"zmqEndpoint is {self.zmq_endpoint!r}; expected tcp://ADDRESS:PORT of the picker "
                "itself, such as tcp://*:5557"
            )
        return ("" if host in _EVERYWHERE else host, int(port))


def _is_own_address(host: str) -> bool:
    """Return whether `host` is "*" or an IP address, at which the picker can listen. A host name is
    refused, because it may belong to another machine.
    """
    if host == "*":
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class PrecisePrefixCacheParameters(Parameters, frozen=True):
    """The parameters of `precise-prefix-cache-producer` and the older
    `precise-prefix-cache-scorer`.
    """

    token_processor_config: TokenProcessorConfig = field(default_factory=TokenProcessorConfig)
    """Block size: `blockSizeTokens`, 16 by default, or the older `blockSize`. `hashSeed` and
    `hashAlgorithm` have no effect, because keys need not equal those of the engines.
    """
    indexer_config: IndexerConfig = field(default_factory=IndexerConfig)
    """Weights and sizes. `kvCacheBackendConfigs` lists tiers with `name` and `weight`. If it does
    not list a tier, a block in the tier `gpu` counts in full, and in any other tier by
    `kvCacheDefaultBackendWeight`. The store in `kvBlockIndexConfig` is
    always memory, with metrics. `inMemoryConfig.size`, in keys, and `costAwareMemoryConfig.size`,
    such as "2GiB", lower `memoryMaxBytes`.
    """
    kv_events_config: KvEventsConfig = field(default_factory=KvEventsConfig)
    """Event settings: `engineType`, `topicFilter`, `discoverPods`, and in `podDiscoveryConfig`
    `socketPort`, `replaySocketPort` and `dataParallelSize`. Without `socketPort`, the picker asks
    each endpoint for these three. `zmqEndpoint` is the address to which engines connect.
    """
    speculative_indexing: bool = True
    """True if a prompt that was sent to an endpoint counts as cached there for `speculativeTTL`,
    because the engine's events come later.
    """
    speculative_ttl: Duration = field(default=Duration(2.0), name="speculativeTTL")
    """Time for which a prompt counts as cached after the decision, because the engine's events
    come later. It is longer while those of an endpoint are late.
    """
    memory_max_bytes: Annotated[int, Meta(ge=1)] = 536_870_912
    """Maximum estimated memory of the whole index in bytes. Above it, the blocks that were stored
    last are dropped first.
    """

    def __post_init__(self) -> None:
        check_above_zero("speculativeTTL", self.speculative_ttl)
        size = self.indexer_config.kv_block_index_config.memory_max_bytes
        if size is not None and size < self.memory_max_bytes:
            # Memory planning and reports read this one number.
            structs.force_setattr(self, "memory_max_bytes", size)

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens in a block that results from these parameters."""
        return self.token_processor_config.block_tokens

    def warnings(self) -> list[str]:
        """Return sentences about parameters that are deprecated, have no effect, use much memory or
        keep all KV-cache events away.
        """
        found: list[str] = []
        processor, events = self.token_processor_config, self.kv_events_config
        if processor.block_size is not None:
            found.append("tokenProcessorConfig.blockSize is deprecated, use blockSizeTokens")
        if self.block_tokens < BLOCK_TOKENS_ADVISED:
            found.append(
                f"blocks of {self.block_tokens} tokens use much memory; "
                f"{BLOCK_TOKENS_ADVISED} or 64 give the same matches"
            )
        if processor.hash_seed or processor.hash_algorithm:
            found.append(
                "hashSeed and hashAlgorithm have no effect, because keys need not equal those of "
                "engines"
            )
        store = self.indexer_config.kv_block_index_config
        if store.in_memory_config is not None and store.in_memory_config.pod_cache_size is not None:
            found.append(
                "podCacheSize has no effect, because a key is stored for every endpoint that has it"
            )
        discovery = events.pod_discovery_config
        if discovery.pod_label_selector or discovery.pod_namespace:
            found.append(
                "podLabelSelector and podNamespace have no effect, because the picker subscribes "
                "to the endpoints of the pool"
            )
        if not (events.discover_pods or events.zmq_endpoint):
            found.append("discoverPods is false: the picker receives events from no engine")
        return found

    def weight_of(self, tier: str) -> float:
        """Return the number from 0 to 1 that a match adds for a cached block in `tier`: the weight
        in `kvCacheBackendConfigs`, or else 1 for the device and `kvCacheDefaultBackendWeight` for
        any other tier.
        """
        for listed in self.indexer_config.kv_cache_backend_configs:
            if listed.name.lower() == tier:
                return listed.weight
        return 1.0 if tier == DEVICE else self.indexer_config.kv_cache_default_backend_weight
