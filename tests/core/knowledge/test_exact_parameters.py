import msgspec
import pytest

from epp.configuration.document import decode
from epp.core.knowledge.exact_parameters import PrecisePrefixCacheParameters


def read(**parameters):
    return msgspec.convert(parameters, PrecisePrefixCacheParameters, dec_hook=decode)


@pytest.mark.parametrize(
    ("processor", "tokens"),
    [
        ({}, 16),
        ({"blockSize": 64}, 64),
        ({"blockSizeTokens": 32}, 32),
        ({"blockSizeTokens": 32, "blockSize": 64, "hashSeed": "42", "hashAlgorithm": "xxh64"}, 32),
    ],
)
def test_the_newer_name_of_the_block_size_counts(processor, tokens):
    assert read(tokenProcessorConfig=processor).block_tokens == tokens


def test_all_that_the_samples_of_the_field_write_is_read():
    """Durations as text, or in nanoseconds."""
    parameters = read(
        tokenProcessorConfig={"blockSize": 16},
        kvEventsConfig={
            "zmqEndpoint": "tcp://0.0.0.0:5557",
            "topicFilter": "kv@",
            "concurrency": 4,
            "engineType": "sglang",
            "discoverPods": False,
            "podDiscoveryConfig": {
                "socketPort": 5557,
                "replaySocketPort": 5558,
                "podLabelSelector": "a=b",
                "podNamespace": "default",
            },
        },
        indexerConfig={
            "kvBlockIndexConfig": {
                "enableMetrics": True,
                "metricsLoggingInterval": 60_000_000_000,
                "inMemoryConfig": {"size": 100, "podCacheSize": 10},
                "costAwareMemoryConfig": {"size": "2GiB"},
            },
            "kvCacheBackendConfigs": [{"name": "disk", "weight": 0.3}],
        },
        speculativeIndexing=False,
        speculativeTTL="5s",
    )
    assert parameters.speculative_ttl == 5.0
    assert parameters.kv_events_config.pod_discovery_config.replay_socket_port == 5558
    assert parameters.kv_events_config.binds == ("", 5557)
    read(indexerConfig={"kvBlockIndexConfig": {"metricsLoggingInterval": "1m"}})


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"indexerConfig": {"kvBlockIndexConfig": {"redisConfig": {}}}}, "remove `redisConfig`"),
        ({"indexerConfig": {"tokenizersPoolConfig": {}}}, "token-producer"),
        ({"speculativeTTL": "0s"}, "speculativeTTL is 0.0s; it must be finite and above 0s"),
        ({"kvEventsConfig": {"engineType": "other"}}, "other"),
        (
            {"kvEventsConfig": {"zmqEndpoint": "tcp://picker:5557"}},
            "zmqEndpoint is 'tcp://picker:5557'; expected",
        ),
        ({"kvEventsConfig": {"zmqEndpoint": "ipc:///tmp/x"}}, "expected tcp://ADDRESS:PORT"),
        ({"kvEventsConfig": {"zmqEndpoint": "tcp://*:70000"}}, "expected tcp://ADDRESS:PORT"),
        ({"kvEventsConfig": {"zmqEndpoint": "tcp://*"}}, "expected tcp://ADDRESS:PORT"),
        ({"indexerConfig": {"kvBlockIndexConfig": {"metricsLoggingInterval": "x"}}}, "duration"),
        (
            {"indexerConfig": {"kvBlockIndexConfig": {"costAwareMemoryConfig": {"size": "much"}}}},
            "size is 'much'; expected a number of bytes such as 2GiB",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_a_sentence(parameters, sentence):
    with pytest.raises(msgspec.ValidationError, match=sentence):
        read(**parameters)


@pytest.mark.parametrize(
    ("store", "bytes_max"),
    [
        ({}, 536_870_912),
        ({"inMemoryConfig": {"size": 1_000}}, 184_000),
        ({"inMemoryConfig": {"size": 100_000_000}}, 536_870_912),
        ({"inMemoryConfig": {"podCacheSize": 10}}, 536_870_912),
        ({"costAwareMemoryConfig": {"size": "1.5 MiB"}}, 1_572_864),
        ({"costAwareMemoryConfig": {"size": "100kb"}}, 100_000),
        ({"costAwareMemoryConfig": {"size": "2G"}}, 536_870_912),
        ({"inMemoryConfig": {"size": 10}, "costAwareMemoryConfig": {"size": "1000"}}, 1_000),
    ],
)
def test_the_size_of_a_store_bounds_the_memory_of_the_index(store, bytes_max):
    """Both in keys and in bytes; the lowest counts, also where the plan of memory lowers it further."""
    parameters = read(indexerConfig={"kvBlockIndexConfig": store})
    assert parameters.memory_max_bytes == bytes_max
    assert msgspec.structs.replace(parameters, memory_max_bytes=7).memory_max_bytes == 7


def test_what_has_no_effect_is_told():
    said = " ".join(read(tokenProcessorConfig={"blockSizeTokens": 64, "hashSeed": "42"}).warnings())
    assert "hashSeed and hashAlgorithm have no effect" in said
    sizes = {"inMemoryConfig": {"size": 10, "podCacheSize": 2}}
    said = " ".join(read(indexerConfig={"kvBlockIndexConfig": sizes}).warnings())
    assert "podCacheSize has no effect" in said
    assert read(tokenProcessorConfig={"blockSizeTokens": 64}).warnings() == []


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("", None),
        ("tcp://*:5557", ("", 5557)),
        ("tcp://[::]:5557", ("", 5557)),
        ("tcp://10.0.0.1:1", ("10.0.0.1", 1)),
        ("tcp://[fe80::1]:1", ("fe80::1", 1)),
    ],
)
def test_where_engines_connect_to_is_an_address_of_the_picker(endpoint, binds):
    assert read(kvEventsConfig={"zmqEndpoint": endpoint}).kv_events_config.binds == binds


def test_a_tier_that_is_not_listed_is_worth_less_than_the_device():
    parameters = read(indexerConfig={"kvCacheBackendConfigs": [{"name": "CPU", "weight": 0.7}]})
    weights = [parameters.weight_of(tier) for tier in ("gpu", "cpu", "storage")]
    assert weights == [1.0, 0.7, 0.5]
    assert [read().weight_of(tier) for tier in ("gpu", "cpu")] == [1.0, 0.8]
