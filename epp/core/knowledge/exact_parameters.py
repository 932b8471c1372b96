"""Parameters of `precise-prefix-cache-producer`, as the field spells them."""

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
"""Where nothing is said, as in the reference picker."""
BLOCK_TOKENS_ADVISED: Final = 32
UNLISTED_WEIGHT: Final = 0.5
"""Of a tier that is neither the device nor listed."""

ROW_BYTES: Final = 92
"""Of a key, with who holds it; of a block of the engine; and of the tokens that are kept of one that ends
inside a step. What a process grows by in CPython 3.11, in the mean of how full its tables are."""
NUMBER_BYTES: Final = 48
"""Of a number with which a block of the engine ends, or of ours within it, that is not the key of a row."""
_BYTES: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *([KMGT]?)(I?)B?", re.IGNORECASE)
_PREFIXES: Final = ("", "k", "m", "g", "t")

_PORT: Final = re.compile("[0-9]{1,5}")
_PORT_MAX: Final = 65_535
_EVERYWHERE: Final = ("*", "0.0.0.0", "::")  # noqa: S104  who connects is looked at


class TokenProcessorConfig(Parameters, frozen=True):
    """How keys are made; of this only the size of a block matters here."""

    block_size_tokens: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    """Deprecated name; counts while `blockSizeTokens` is not given."""
    hash_seed: str = ""
    """No effect: keys are not the engines' here, nothing has to equal theirs."""
    hash_algorithm: str = ""
    """No effect, likewise."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, in effect."""
        return self.block_size_tokens or self.block_size or BLOCK_TOKENS


class TierWeight(Parameters, frozen=True):
    """What a block is worth in a tier, beside one on the device."""

    name: Annotated[str, Meta(min_length=1)]
    weight: Annotated[float, Meta(ge=0, le=1)]


class InMemoryConfig(Parameters, frozen=True):
    """`size` in keys."""

    size: Annotated[int, Meta(ge=1)] | None = None
    pod_cache_size: Annotated[int, Meta(ge=1)] | None = None
    """No effect: a key is known of every endpoint that holds it."""


class CostAwareMemoryConfig(Parameters, frozen=True):
    size: str = ""
    """In bytes, with a unit such as MB or GiB."""

    def __post_init__(self) -> None:
        self._read_size()

    @property
    def size_bytes(self) -> int | None:
        """None: it is not given."""
        return self._read_size()

    def _read_size(self) -> int | None:
        if not self.size:
            return None
        given = _BYTES.fullmatch(self.size.strip())
        if given is None:
            raise ValueError(f"size is {self.size!r}, expected bytes with a unit, such as 2GiB")
        number, prefix, binary = given.groups()
        size_bytes = float(number) * (1_024 if binary else 1_000) ** _PREFIXES.index(prefix.lower())
        return max(1, int(size_bytes))


class KvBlockIndexConfig(Parameters, frozen=True):
    """Where the field keeps its index; here it is in memory, whatever is given, and as small as that."""

    in_memory_config: InMemoryConfig | None = None
    cost_aware_memory_config: CostAwareMemoryConfig | None = None
    redis_config: dict[str, Any] | None = None
    valkey_config: dict[str, Any] | None = None
    enable_metrics: bool = False
    metrics_logging_interval: str | int = 0
    """As text, or in nanoseconds."""

    def __post_init__(self) -> None:
        if isinstance(self.metrics_logging_interval, str):
            parse_duration(self.metrics_logging_interval)
        if self.redis_config is not None or self.valkey_config is not None:
            raise ValueError(
                "the index is not kept in Redis or Valkey, each picker hears every engine itself: "
                "remove `redisConfig`"
            )

    @property
    def memory_max_bytes(self) -> int | None:
        """What the sizes leave to the index; None: none is given."""
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
    """Of tiers that are not listed."""
    tokenizers_pool_config: Any = None

    def __post_init__(self) -> None:
        if self.tokenizers_pool_config is not None:
            raise ValueError(
                "tokenizers are not configured here, prompts become tokens by `token-producer`: "
                "remove `tokenizersPoolConfig`"
            )


class PodDiscoveryConfig(Parameters, frozen=True):
    """Where each endpoint sends its events."""

    socket_port: Port | None = None
    """Of the first rank; None: each endpoint is asked, and 5557 if it does not say."""
    replay_socket_port: Port | None = None
    """Where old events are asked for; None: where the endpoint says, or not at all."""
    data_parallel_size: Annotated[int, Meta(ge=1, le=RANKS_MAX)] = 1
    """Ranks behind each address, where it is not asked: the next one publishes at the next port, or says
    in what it sends that it is the next where engines connect."""
    pod_label_selector: str = ""
    """The endpoints of the pool are listened to, whatever it says."""
    pod_namespace: str = ""

    def __post_init__(self) -> None:
        for name, port in (
            ("socketPort", self.socket_port),
            ("replaySocketPort", self.replay_socket_port),
        ):
            if port is not None and port + self.data_parallel_size - 1 > _PORT_MAX:
                raise ValueError(
                    f"{name} is {port} with dataParallelSize {self.data_parallel_size}, expected "
                    f"the port of the last rank to be {_PORT_MAX} at most"
                )


class KvEventsConfig(Parameters, frozen=True):
    """How engines are heard."""

    zmq_endpoint: str = ""
    """Where the picker listens and engines connect to, "tcp://*:5557": each tells one picker alone."""
    topic_filter: str = ""
    """What topics begin with. Endpoints are told apart by the connection; those that connect and share
    an address also by their topic, `kv@IP:PORT@MODEL`."""
    concurrency: Annotated[int, Meta(ge=1)] = 4
    engine_type: Literal["vllm", "sglang"] = "vllm"
    discover_pods: bool = True
    """The picker connects to each endpoint of the pool."""
    pod_discovery_config: PodDiscoveryConfig = field(default_factory=PodDiscoveryConfig)

    def __post_init__(self) -> None:
        self._read_binds()

    @property
    def binds(self) -> tuple[str, int] | None:
        """(address, port) at which engines may connect, "" for every address; None: they may not."""
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
                f"zmqEndpoint is {self.zmq_endpoint!r}, expected tcp://ADDRESS:PORT of the picker "
                "itself, such as tcp://*:5557"
            )
        return ("" if host in _EVERYWHERE else host, int(port))


def _is_own_address(host: str) -> bool:
    """As the picker can listen at; a name may be anybody's."""
    if host == "*":
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class PrecisePrefixCacheParameters(Parameters, frozen=True):
    """What `precise-prefix-cache-producer` and the older `precise-prefix-cache-scorer` take."""

    token_processor_config: TokenProcessorConfig = field(default_factory=TokenProcessorConfig)
    """`blockSizeTokens`, 16 if it is not given, or the older `blockSize`; keys are not the engines'
    here, so that `hashSeed` and `hashAlgorithm` need not equal theirs."""
    indexer_config: IndexerConfig = field(default_factory=IndexerConfig)
    """Weights of tiers beside the device in `kvCacheBackendConfigs`, a list of `name` and `weight`, and of
    others in `kvCacheDefaultBackendWeight`; the store in `kvBlockIndexConfig` is memory, and its metrics
    are always on: `inMemoryConfig.size`, in keys, and `costAwareMemoryConfig.size`, "2GiB", lower
    `memoryMaxBytes`."""
    kv_events_config: KvEventsConfig = field(default_factory=KvEventsConfig)
    """How engines are heard: `engineType`, `topicFilter`, `discoverPods`, and
    `podDiscoveryConfig.socketPort`, `.replaySocketPort` and `.dataParallelSize`, without which each
    endpoint is asked;
    `zmqEndpoint`, where engines connect to."""
    speculative_indexing: bool = True
    """What was decided lately counts as held until the engine says so."""
    speculative_ttl: Duration = field(default=Duration(2.0), name="speculativeTTL")
    """How lately."""
    memory_max_bytes: Annotated[int, Meta(ge=1)] = 536_870_912
    """Estimated memory of the whole index; above it what was stored last is not kept."""

    def __post_init__(self) -> None:
        check_above_zero("speculativeTTL", self.speculative_ttl)
        size = self.indexer_config.kv_block_index_config.memory_max_bytes
        if size is not None and size < self.memory_max_bytes:
            # Whoever plans memory, or shows what the index may take, reads one number.
            structs.force_setattr(self, "memory_max_bytes", size)

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, in effect."""
        return self.token_processor_config.block_tokens

    def warnings(self) -> list[str]:
        """What does less here than it says, one sentence each."""
        found: list[str] = []
        processor, events = self.token_processor_config, self.kv_events_config
        if processor.block_size is not None:
            found.append("tokenProcessorConfig.blockSize is deprecated, use blockSizeTokens")
        if self.block_tokens < BLOCK_TOKENS_ADVISED:
            found.append(
                f"blocks of {self.block_tokens} tokens cost much memory, "
                f"{BLOCK_TOKENS_ADVISED} or 64 know as much"
            )
        if processor.hash_seed or processor.hash_algorithm:
            found.append(
                "hashSeed and hashAlgorithm have no effect, keys need not equal those of engines"
            )
        store = self.indexer_config.kv_block_index_config
        if store.in_memory_config is not None and store.in_memory_config.pod_cache_size is not None:
            found.append(
                "podCacheSize has no effect, a key is known of every endpoint that holds it"
            )
        discovery = events.pod_discovery_config
        if discovery.pod_label_selector or discovery.pod_namespace:
            found.append(
                "podLabelSelector and podNamespace have no effect, the endpoints of the pool are "
                "listened to"
            )
        if not (events.discover_pods or events.zmq_endpoint):
            found.append("discoverPods is false: no engine is listened to")
        return found

    def weight_of(self, tier: str) -> float:
        """Of a block in `tier`, beside one on the device."""
        for listed in self.indexer_config.kv_cache_backend_configs:
            if listed.name.lower() == tier:
                return listed.weight
        return 1.0 if tier == DEVICE else self.indexer_config.kv_cache_default_backend_weight
