"""The settings of latency prediction in a configuration document."""

from epp.configuration.declared_plugins import DeclaredPlugins
from epp.core.decision.stages import Stages
from epp.core.knowledge.latency import LatencyPrediction
from epp.plugins.added_time import AddedTime
from epp.plugins.latency import (
    PREDICTED_READS,
    PRODUCER_TYPE,
    Latency,
    LatencySloAdmitter,
    PredictedLatency,
)


def latency_prediction(declared: DeclaredPlugins, stages: Stages) -> LatencyPrediction | None:
    """Return the settings of latency prediction. Return None if no plugin needs it, or, with a
    warning, if more than one profile takes part in decisions (`Stages.alone` is False).

    It is on if the producer or the admitter is declared, or if a plugin of the profile reads the
    predictions. Problems are recorded.
    """
    plugins = declared.plugins.values()
    producer = declared.only(PredictedLatency)
    refuses = any(isinstance(one.plugin, LatencySloAdmitter) for one in plugins)
    reads = any(
        PREDICTED_READS.intersection(member.plugin.abilities.reads or ())
        for member in stages.decode.members
    )
    asked = refuses or reads or any(isinstance(one.plugin, PredictedLatency) for one in plugins)
    if not asked:
        return None
    _check_names(declared)
    if not stages.alone:
        declared.findings.warn(
            "latencies are not predicted, because requests are split into stages"
        )
        return None
    scorers = (scorer.plugin for scorer in stages.decode.scorers)
    estimator = next((one for one in scorers if isinstance(one, AddedTime)), None)
    if estimator is None:
        name = producer.prefix_match_info_producer_name
        estimator = AddedTime(prefix_match_info_producer_name=name)
    return LatencyPrediction(estimator=estimator, refuses=refuses)


def _check_names(declared: DeclaredPlugins) -> None:
    known = {"", PRODUCER_TYPE}
    known |= {
        name for name, one in declared.plugins.items() if isinstance(one.plugin, PredictedLatency)
    }
    for one in declared.plugins.values():
        if isinstance(one.plugin, Latency | LatencySloAdmitter):
            name = one.plugin.latency_prediction_info_producer_name
            if name not in known:
                declared.findings.problem(
                    f"{one.where}: latencyPredictionInfoProducerName {name} names no declared "
                    f"{PRODUCER_TYPE}"
                )
