"""What the field's picker takes, in our words: its types with all their parameters, its samples."""

import json

import pytest

from epp.configuration.build import plugin_tables
from epp.configuration.config import load_config

TABLES = plugin_tables()
HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def load(document):
    return load_config(json.dumps(HEAD | document), "config.yaml", TABLES)


def plugin(type_name, /, name=None, **parameters):
    named = {"type": type_name} | ({"name": name} if name else {})
    return named | ({"parameters": parameters} if parameters else {})


# --- parameters ---

CERTIFICATES = {
    "insecureSkipVerify": False,
    "caCertPath": "/ca.pem",
    "clientCertPath": "/own.pem",
    "clientKeyPath": "/own.key",
    "interval": "5s",
}
SESSIONS = {
    "strategy": "session_id",
    "encodedEndpointHeaderConfig": {"header": "x-session-token"},
    "sessionIdConfig": {
        "sources": [
            {"header": "x-session-id"},
            {"attribute": "SessionIDDataKey", "producer": "session-id-producer"},
        ],
        "evictionTtlSeconds": 300,
        "evictionSweepSeconds": 10,
    },
    "profileName": "",
}
THRESHOLD = {"type": "threshold", "threshold": {"operator": "LessThan", "value": 1}}
PARAMETERS = {
    "active-request-scorer": {
        "requestTimeout": "2m",
        "idleThreshold": 1,
        "maxBusyScore": 0.5,
        "inFlightLoadProducerName": "inflight-load-producer",
    },
    "approx-prefix-cache-producer": {
        "autoTune": True,
        "blockSizeTokens": 64,
        "blockSize": 64,
        "maxPrefixBlocksToMatch": 256,
        "maxPrefixTokensToMatch": 16_384,
        "lruCapacityPerServer": 31_250,
    },
    "burst-prefix-cache-producer": {
        "windowDurationMs": 100,
        "maxPerReplica": -1,
        "blockSizeTokens": 64,
        "maxPrefixTokensToMatch": 16_384,
        "minColocateBlocks": 0,
        "maxBatchSize": -1,
        "balanceBy": "requests",
    },
    "by-label": {"label": "a", "validValues": ["b"], "allowsNoLabel": True},
    "context-length-aware": {"label": "range", "enableFiltering": True},
    "data-parallel-profile-handler": {"primaryPort": 8000},
    "dcgm-data-source": {
        "scheme": "https",
        "path": "/metrics",
        "port": 9400,
        "insecureSkipVerify": True,
        "useNodeAddress": True,
        "interval": "1s",
    },
    "endpoint-attribute-filter": {
        "attribute": "GPUUtilization",
        "producer": "dcgm-extractor",
        "onMissing": "Fail",
        "fallbackOnEmpty": True,
        "algorithm": THRESHOLD,
    },
    "endpoint-attribute-scorer": {
        "attributeKey": "GPUUtilization",
        "producer": "dcgm-extractor",
        "algorithm": {
            "type": "linear_higher_is_better",
            "normalization": {"fixedRange": {"min": 0, "max": 1}},
        },
    },
    "inflight-load-producer": {
        "addEstimatedOutputTokens": True,
        "outputRatio": 1.5,
        "maxEstimatedOutputTokens": 512,
        "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
        "syncCrossReplicaState": True,
    },
    "k8s-notification-source": {"group": "apps", "version": "v1", "kind": "Deployment"},
    "latency-scorer": {
        "ttftWeight": 0.8,
        "tpotWeight": 0.2,
        "headroomSelectionStrategy": "most",
        "compositeKVWeight": 1,
        "compositeQueueWeight": 1,
        "compositePrefixWeight": 1,
        "latencyPredictionInfoProducerName": "predicted-latency-producer",
        "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
    },
    "latency-slo-admitter": {"latencyPredictionInfoProducerName": "predicted-latency-producer"},
    "load-aware-scorer": {"threshold": 128},
    "max-score-picker": {"maxNumOfEndpoints": 1},
    "agent-identity": {"additionalSessionHeaders": ["x-session-id"]},
    "probabilistic-admitter": {
        "queueDepthThreshold": 5,
        "kvCacheUtilThreshold": 0.8,
        "power": 5.0,
        "k": 300.0,
    },
    "metrics-data-source": {"scheme": "https", "path": "/metrics", "port": 9090, **CERTIFICATES},
    "models-data-source": {"scheme": "https", "path": "/v1/models", **CERTIFICATES},
    "no-hit-lru-scorer": {
        "prefixPluginType": "prefix-cache-scorer",
        "prefixPluginName": "prefix-cache-scorer",
        "lruSize": 2_048,
        "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
    },
    "precise-prefix-cache-producer": {
        "tokenProcessorConfig": {
            "blockSize": 64,
            "blockSizeTokens": 64,
            "hashSeed": "42",
            "hashAlgorithm": "xxh64",
        },
        "indexerConfig": {
            "kvBlockIndexConfig": {
                "inMemoryConfig": {"size": 1_000, "podCacheSize": 10},
                "costAwareMemoryConfig": {"size": "2GiB"},
                "enableMetrics": True,
                "metricsLoggingInterval": 60_000_000_000,
            },
            "kvCacheBackendConfigs": [{"name": "gpu", "weight": 1.0}],
        },
        "kvEventsConfig": {
            "zmqEndpoint": "tcp://0.0.0.0:5557",
            "topicFilter": "kv@",
            "concurrency": 4,
            "engineType": "vllm",
            "discoverPods": True,
            "podDiscoveryConfig": {
                "podLabelSelector": "a=b",
                "podNamespace": "models",
                "socketPort": 5557,
                "replaySocketPort": 5558,
            },
        },
        "speculativeIndexing": True,
        "speculativeTTL": "2s",
    },
    "prefix-cache-affinity-filter": {
        "affinityThreshold": 0.8,
        "explorationProbability": 0.01,
        "maxTTFTPenaltyMs": 5_000,
        "ttftSource": "prefillThroughput",
        "peakPrefillThroughput": 20_000,
        "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
        "latencyPredictionInfoProducerName": "predicted-latency-producer",
        "inFlightLoadProducerName": "inflight-load-producer",
    },
    "prefix-cache-scorer": {
        "prefixMatchInfoProducerName": "approx-prefix-cache-producer",
        "matchLengthWeight": 0.5,
        "matchLengthScaleTokens": 8_192,
    },
    "random-picker": {"maxNumOfEndpoints": 1},
    "session-affinity-filter": SESSIONS,
    "session-affinity-scorer": SESSIONS,
    "session-id-producer": {"cookieName": "session"},
    "token-load-scorer": {
        "queueThresholdTokens": 4_194_304,
        "inFlightLoadProducerName": "inflight-load-producer",
    },
    "token-producer": {
        "modelName": "m",
        "vllm": {"url": "http://renderer:8000", "timeout": "5s", "mmTimeout": "30s"},
    },
    "utilization-detector": {
        "queueDepthThreshold": 5,
        "kvCacheUtilThreshold": 0.8,
        "metricsStalenessThreshold": "2s",
        "headroom": 0.2,
    },
    "utilization-filter": {
        "conditions": [{"metric": "active-requests", "maxValue": 8}],
        "fallbackOnEmpty": True,
        "inFlightLoadProducerName": "inflight-load-producer",
    },
    "weighted-random-picker": {"maxNumOfEndpoints": 1},
}
"""Of types that load, every parameter that llm-d-router v0.10 has."""


@pytest.mark.parametrize("type_name", sorted(PARAMETERS))
def test_every_parameter_of_the_field_is_taken(type_name):
    """Those that mean nothing here are at least no mistake."""
    beside = [plugin("approx-prefix-cache-producer")] * (
        type_name != "approx-prefix-cache-producer"
    )
    document = {"plugins": [plugin(type_name, **PARAMETERS[type_name]), *beside]}
    assert load(document).source == "config.yaml"


# --- samples ---


def wired(*pairs):
    return {
        "sources": [
            {"pluginRef": source, "extractors": [{"pluginRef": one} for one in extractors]}
            for source, extractors in pairs
        ]
    }


def profile(name, /, *entries):
    """Of names, each with a weight or None."""
    plugins = [
        {"pluginRef": ref} | ({} if weight is None else {"weight": weight})
        for ref, weight in entries
    ]
    return {"name": name, "plugins": plugins}


def sample(plugins, *profiles, **sections):
    return {"plugins": plugins, "schedulingProfiles": list(profiles)} | sections


def staged(*more):
    """Profiles of several stages, as disaggregation has them."""
    stages = ("prefill", "decode")
    return [
        profile(stage, (f"{stage}-filter", None), *more, ("queue-scorer", 1)) for stage in stages
    ]


ONE = plugin("single-profile-handler")
DECODE = plugin("decode-filter")
BEST = plugin("max-score-picker")
QUEUE = plugin("queue-scorer")
METRICS = [plugin("metrics-data-source"), plugin("core-metrics-extractor")]
RENDERED = plugin("token-producer", modelName="m", vllm={"url": "http://localhost:8000"})
BY_EVENTS = plugin(
    "prefix-cache-scorer", prefixMatchInfoProducerName="precise-prefix-cache-producer"
)
TOLD = plugin(
    "precise-prefix-cache-producer",
    tokenProcessorConfig={"blockSize": 64},
    indexerConfig={"kvBlockIndexConfig": {"enableMetrics": True}},
)


def told_centrally(**processor):
    return plugin(
        "precise-prefix-cache-producer",
        tokenProcessorConfig={"blockSize": 16, **processor},
        kvEventsConfig={"zmqEndpoint": "tcp://0.0.0.0:5557"},
        indexerConfig={
            "kvBlockIndexConfig": {
                "enableMetrics": False,
                "metricsLoggingInterval": 60_000_000_000,
            }
        },
    )


def prefix_only(weight):
    # The picker need not come last.
    return profile(
        "default",
        ("decode-filter", None),
        ("max-score-picker", None),
        ("prefix-cache-scorer", weight),
    )


LIMITED = plugin(
    "approx-prefix-cache-producer", maxPrefixTokensToMatch=16_384, lruCapacityPerServer=31_250
)
DISAGGREGATED = [
    LIMITED,
    plugin("prefix-cache-scorer"),
    QUEUE,
    plugin("prefill-filter"),
    DECODE,
    BEST,
    plugin("disagg-profile-handler", deciders={"prefill": "prefix-based-pd-decider"}),
    plugin("prefix-based-pd-decider", nonCachedTokens=16),
]

SAMPLES = {
    "dp-epp": sample(
        [
            plugin("prefix-cache-scorer"),
            DECODE,
            BEST,
            plugin("data-parallel-profile-handler", primaryPort=8000),
        ],
        prefix_only(2),
    ),
    "epp": sample([plugin("prefix-cache-scorer"), DECODE, BEST, ONE], prefix_only(2)),
    "epp-burst-prefix-cache": sample(
        [
            plugin(
                "token-producer",
                modelName="hf-repo/model-name",
                vllm={"url": "http://<vllm-service>.<namespace>.svc.cluster.local:8000"},
            ),
            ONE,
            DECODE,
            plugin(
                "burst-prefix-cache-producer",
                windowDurationMs=100,
                maxPerReplica=-1,
                minColocateBlocks=0,
            ),
            plugin(
                "prefix-cache-scorer", prefixMatchInfoProducerName="burst-prefix-cache-producer"
            ),
            plugin("load-aware-scorer"),
            BEST,
        ],
        profile(
            "default",
            ("decode-filter", None),
            ("prefix-cache-scorer", 2.0),
            ("load-aware-scorer", 1.0),
            ("max-score-picker", None),
        ),
    ),
    "epp-estimate-prefix-cache": sample(
        [ONE, DECODE, plugin("prefix-cache-scorer"), plugin("load-aware-scorer"), BEST],
        profile(
            "default",
            ("decode-filter", None),
            ("prefix-cache-scorer", 1.0),
            ("load-aware-scorer", 1.0),
            ("max-score-picker", None),
        ),
    ),
    "epp-mm-embeddings-cache": sample(
        [
            RENDERED,
            plugin("endpoint-notification-source"),
            *METRICS,
            plugin("mm-embeddings-cache-producer", cacheSizeInMB=2048),
            plugin("mm-embeddings-cache-scorer"),
            TOLD,
            BY_EVENTS,
            QUEUE,
            BEST,
            ONE,
            DECODE,
        ],
        profile(
            "default",
            ("decode-filter", None),
            ("prefix-cache-scorer", 10),
            ("mm-embeddings-cache-scorer", 4),
            ("queue-scorer", 1),
            ("max-score-picker", None),
        ),
        dataLayer=wired(
            ("metrics-data-source", ["core-metrics-extractor"]),
            (
                "endpoint-notification-source",
                ["mm-embeddings-cache-producer", "precise-prefix-cache-producer"],
            ),
        ),
    ),
    "epp-precise-prefix-cache": sample(
        [
            RENDERED,
            plugin("endpoint-notification-source"),
            *METRICS,
            ONE,
            DECODE,
            TOLD,
            BY_EVENTS,
            plugin("kv-cache-utilization-scorer"),
            QUEUE,
            BEST,
        ],
        profile(
            "default",
            ("decode-filter", None),
            ("prefix-cache-scorer", 2.0),
            ("kv-cache-utilization-scorer", 1.0),
            ("queue-scorer", 1.0),
            ("max-score-picker", None),
        ),
        dataLayer=wired(
            ("metrics-data-source", ["core-metrics-extractor"]),
            ("endpoint-notification-source", ["precise-prefix-cache-producer"]),
        ),
    ),
    "pd-epp": sample(DISAGGREGATED, *staged(("prefix-cache-scorer", 2))),
    "pd-topology-epp": sample(
        [
            *DISAGGREGATED,
            plugin("topology-extractor"),
            plugin("topology-affinity-filter"),
            plugin("topology-affinity-scorer"),
        ],
        *staged(("topology-affinity-scorer", 1)),
    ),
    "probabilistic-admitter-epp": sample(
        [
            plugin("probabilistic-admitter"),
            plugin("random-picker"),
            plugin(
                "utilization-detector", queueDepthThreshold=999_999_999, kvCacheUtilThreshold=1.0
            ),
        ],
        profile("default", ("random-picker", None)),
        flowControl={"saturationDetector": {"pluginRef": "utilization-detector"}},
    ),
    "sim-e-p-d-epp": sample(
        [
            plugin("encode-filter"),
            plugin("always-disagg-multimodal-decider"),
            *DISAGGREGATED,
        ],
        *staged(),
    ),
    "sim-e-pd-epp": sample(
        [
            plugin("encode-filter"),
            DECODE,
            BEST,
            plugin("always-disagg-multimodal-decider"),
            plugin(
                "disagg-profile-handler", deciders={"encode": "always-disagg-multimodal-decider"}
            ),
        ],
        profile("encode", ("encode-filter", None)),
        profile("decode", ("decode-filter", None)),
    ),
    "sim-epp": sample([LIMITED, plugin("prefix-cache-scorer"), DECODE, BEST, ONE], prefix_only(2)),
    "sim-epp-gpu": sample(
        [
            plugin("dcgm-data-source", "dcgm-source", port=9400, interval="1s"),
            plugin("dcgm-extractor", "dcgm-extractor"),
            plugin(
                "endpoint-attribute-filter",
                "gpu-utilization-filter",
                attribute="GPUUtilization",
                producer="dcgm-extractor",
                onMissing="Pass",
                fallbackOnEmpty=True,
                algorithm={
                    "type": "threshold",
                    "threshold": {"operator": "LessThanOrEqual", "value": 0.9},
                },
            ),
            plugin(
                "endpoint-attribute-scorer",
                "gpu-utilization-scorer",
                attributeKey="GPUUtilization",
                producer="dcgm-extractor",
                algorithm={
                    "type": "linear_lower_is_better",
                    "normalization": {"fixedRange": {"min": 0.0, "max": 1.0}},
                },
            ),
            plugin("kv-cache-utilization-scorer"),
            BEST,
            ONE,
            DECODE,
        ],
        profile(
            "default",
            ("decode-filter", None),
            ("gpu-utilization-filter", None),
            ("gpu-utilization-scorer", 2.0),
            ("kv-cache-utilization-scorer", 1.0),
            ("max-score-picker", None),
        ),
        dataLayer=wired(("dcgm-source", ["dcgm-extractor"])),
    ),
    "sim-epp-kvcache": sample(
        [RENDERED, told_centrally(), BY_EVENTS, DECODE, BEST, ONE], prefix_only(10)
    ),
    "sim-epp-no-hit-lru": sample(
        [
            plugin("precise-prefix-cache-producer", tokenProcessorConfig={"blockSizeTokens": 5}),
            BY_EVENTS,
            plugin("no-hit-lru-scorer", lruSize=2048),
            DECODE,
            BEST,
            ONE,
        ],
        profile(
            "default",
            ("decode-filter", None),
            ("max-score-picker", None),
            ("prefix-cache-scorer", 2),
            ("no-hit-lru-scorer", 1),
        ),
    ),
    "sim-epp-tokenizer-vllm-http": sample(
        [
            plugin(
                "token-producer", modelName="${MODEL_NAME}", vllm={"url": "http://localhost:8000"}
            ),
            told_centrally(hashSeed="42"),
            BY_EVENTS,
            DECODE,
            BEST,
            ONE,
        ],
        prefix_only(10),
    ),
    "sim-pd-epp": sample(DISAGGREGATED, *staged(("prefix-cache-scorer", 2))),
    "sim-program-aware": sample(
        [plugin("program-aware-fairness"), QUEUE, BEST, ONE],
        profile("default", ("queue-scorer", None), ("max-score-picker", None)),
        featureGates=["flowControl"],
        flowControl={"defaultPriorityBand": {"fairnessPolicyRef": "program-aware-fairness"}},
    ),
    "soft-reflective-ceiling-epp": sample(
        [
            QUEUE,
            plugin("kv-cache-utilization-scorer"),
            plugin("prefix-cache-scorer"),
            plugin("soft-reflective-ceiling-policy"),
        ],
        profile(
            "default",
            ("queue-scorer", 2.0),
            ("kv-cache-utilization-scorer", 2.0),
            ("prefix-cache-scorer", 3.0),
        ),
        featureGates=["flowControl"],
        flowControl={"usageLimitPolicyPluginRef": "soft-reflective-ceiling-policy"},
    ),
}
"""What the sample documents of llm-d-router v0.10 say, by their names there."""


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_sample_loads(name):
    assert len(SAMPLES) == 19
    assert load(SAMPLES[name]).stages


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sim-epp-tokenizer-vllm-http", "has a literal ${"),
        ("sim-epp-no-hit-lru", "only prompts that arrive as token ids are looked up"),
        ("sim-epp-kvcache", "blockSize is deprecated"),
    ],
)
def test_a_sample_that_means_less_than_it_says_warns(name, said):
    """In a sentence."""
    assert any(said in warning for warning in load(SAMPLES[name]).warnings)
