"""Ctrl-C while a plugin runs: the command ends, and the plugin is not blamed."""

import os
import signal
import subprocess
import sys

import pytest

ENDLESS = """
import sys
from pathlib import Path

from epp.plugins.contract import Parameters

class Endless(Parameters, frozen=True):
    type_name = "endless-scorer"

    def score(self, request, candidates, /):
        print("scoring", flush=True)
        while True:
            pass
"""
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: endless-scorer
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("epp", "check-config", "{folder}/config.yaml"),
        ("epp", "serve", "--config-file={folder}/config.yaml", "--endpoints-file={folder}/none"),
        ("sim", "replay", "--config={folder}/config.yaml", "{folder}/trace.jsonl"),
    ],
)
def test_ctrl_c_ends_a_command_whose_plugin_runs(arguments, tmp_path, offer):
    """Before the loop of `epp serve` takes signals, and wherever there is no loop."""
    offer("plugin_endless", ENDLESS, "plugin_endless:Endless")
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "trace.jsonl").write_text(
        '{"time_s": 0, "prompt_tokens": 100, "output_tokens": 4}\n'
    )
    module, *rest = (argument.format(folder=tmp_path) for argument in arguments)
    with subprocess.Popen(
        [sys.executable, "-m", module, *rest],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert "scoring\n" in command.stdout
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=30)
    assert command.returncode == 130
    assert "endless-scorer" not in errors
    assert "Traceback" not in errors
