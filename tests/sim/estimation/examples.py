"""Example configurations, whole or changed."""

import json
from pathlib import Path

from sim.estimation.model_config import read_config

MODELS = Path(__file__).parents[3] / "docs" / "examples" / "models"


def config_of(model):
    return MODELS / f"{model}.json"


def shape_of(model, quantization=""):
    return read_config(config_of(model), quantization=quantization).shape


def changed(folder, model, **keys):
    """A copy of an example with other keys; None: without the key."""
    config = json.loads(config_of(model).read_text()) | keys
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return file
