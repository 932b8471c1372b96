"""A picker under a memory limit, in a process of its own whose memory is measured."""

import asyncio
import json
import sys

SCRIPT = """
import json, random, sys
from epp.app.wiring import EndpointPicker
from epp.flags.command_lines import parse_serve
from epp.core.decision.inputs import Tick
from epp.core.prompt.request import InferenceRequest
from epp.shell.process.memory import resident_bytes

picker = EndpointPicker(parse_serve(sys.argv[1:], {}))
(index,) = picker.scheduler.indexes.values()
dice = random.Random(1)
most = resident_bytes()
for number in range(150_000):
    chains = {256: (dice.randbytes(8),)}
    index.record(InferenceRequest(request_id="", chains=chains), number % 64, number / 10_000)
    if number % 1_000 == 0:
        picker.scheduler.take(Tick(), number / 10_000)
        picker.memory_return.weigh()
        most = max(most, resident_bytes())
print(json.dumps({
    "limit": picker.pressure.limit_bytes,
    "most": most,
    "index": index.bytes_estimated,
    "evicted": index.statistics.evicted_memory,
    "held_max": picker.bodies.bytes_max,
}))
"""


async def told(*flags):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, *flags), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(50):
        written, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(written.splitlines()[-1])


async def test_more_prompts_than_fit_do_not_take_more_than_the_memory_limit(tmp_path):
    """Of what the configuration allows the index takes what the limit leaves."""
    endpoints = tmp_path / "endpoints.yaml"
    endpoints.write_text("endpoints: []")
    shown = await told(
        f"--endpoints-file={endpoints}", "--memory-limit=160Mi", "--request-body-max-bytes=8Mi"
    )
    assert shown["limit"] == 160 * 2**20
    assert shown["held_max"] == 40 * 2**20
    assert shown["most"] < shown["limit"]
    # All of them would be eighty megabytes, beside a hundred of the process.
    assert 0 < shown["index"] <= 8 * 2**20
    assert shown["evicted"] > 100_000
