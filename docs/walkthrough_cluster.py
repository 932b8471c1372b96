"""Play docs/walkthrough-cluster.md in the cluster of `make cluster`, and write the page.

The command is `python -m docs.walkthrough_cluster`. Kubernetes, the chart, `epp serve` and Envoy in
its pods, HTTP and time are real. kwok plays the nodes of the model servers, and simulated engines
answer at their addresses. The page shows the real output of the commands. The run takes half an
hour, or less with `--minutes`.
"""

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from bench.termination import end_in_order
from docs.walkthrough import GUESS, SPACE, Walk, comparison, drive, until, without_bars
from sim.engine.profiles import find_profile
from sim.output import TUNED_CONFIG_MAP
from tests.chart.rendering import ROOT
from tests.chart.tools import HELM_3, tools_of
from tests.cluster.daemons import INSIDE
from tests.cluster.fake_nodes import fake_engines, fake_models, fake_nodes
from tests.cluster.images import HOMING
from tests.cluster.many import define_pools
from tests.cluster.node import Node, missing
from tests.cluster.place import Place
from tests.cluster.release import MODELS, NAME, Namespace

PAGE: Final = Path(__file__).with_name("walkthrough-cluster.md")
NAMESPACE: Final = "walk"
PODS: Final = 3
PROFILE: Final = "qwen3-32b-h100-tp2"
MINUTES: Final = 10.0
TRIALS: Final = 40
WAIT_S_MAX: Final = 60.0
IN_FORCE: Final = (
    f"kubectl get events -n {NAMESPACE} --field-selector reason=ConfigApplied "
    "-o custom-columns=REASON:.reason,MESSAGE:.message"
)


def main(arguments: list[str] | None = None) -> int:
    """Play the walkthrough, write the page and return 0. Return 2 if this machine lacks a program."""
    parser = argparse.ArgumentParser(prog="python -m docs.walkthrough_cluster")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="minutes of captured traffic"
    )
    parser.add_argument("--trials", type=int, default=TRIALS, help="trials of sim tune")
    parser.add_argument("--out", type=Path, default=PAGE, help="file of the page")
    options = parser.parse_args(arguments)
    end_in_order()
    if lacking := missing():
        print(lacking, file=sys.stderr)
        return 2
    node = Node(Place.of(os.environ), os.environ, print)
    with node.kept_up():
        define_pools(node)
        node.kubectl("create", "namespace", NAMESPACE)
        try:
            with tempfile.TemporaryDirectory(prefix="homing-walk-") as folder:
                typed = _typed(Path(folder))
                walk = Walk(Path(folder), typed, KUBECONFIG=str(node.place.kubeconfig))
                asyncio.run(_played(walk, node, 60.0 * options.minutes, options.trials))
        finally:
            node.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    options.out.write_text("\n".join(walk.page).rstrip() + "\n")
    return 0


def _typed(folder: Path) -> str:
    """Return a PATH on which `kubectl`, `helm` and `sim` run inside the network of the cluster."""
    here = Path(sys.executable).parent
    programs = {name: tools_of(HELM_3) / name for name in ("kubectl", "helm")} | {
        "sim": here / "sim"
    }
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, program in programs.items():
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(INSIDE)} {program} "$@"\n')
        script.chmod(0o755)
    (folder / "charts").symlink_to(ROOT / "charts")
    return f"{bin_folder}:{here}:{os.environ['PATH']}"


async def _played(walk: Walk, node: Node, captured_s: float, trials: int) -> None:
    space = Namespace(node, NAMESPACE)
    async with (
        fake_nodes(node, PODS),
        fake_engines(space, f"--profile={PROFILE}"),
        fake_models(space, PODS),
    ):
        space.rolled_out(f"deployment/{MODELS}")
        # Other processes run the engines and nodes.
        _walk(walk, captured_s, trials)


def _walk(walk: Walk, captured_s: float, trials: int) -> None:
    walk.say(
        "# From nothing to tuned, in a cluster",
        "",
        "This page repeats the walkthrough [A day with Homing](walkthrough.md) in a Kubernetes cluster with one real node ([`make cluster`](availability.md#seen-in-a-cluster)). "
        "Follow this page to install the chart, capture traffic and tune the weights in a cluster.",
        "The chart's picker and Envoy run in pods of this cluster.",
        f"The {PODS} model servers are on a node without a GPU that [kwok](https://kwok.sigs.k8s.io) plays; "
        "a simulated engine of Qwen3-32B on two H100s answers at the address of each model server.",
        "`python -m docs.walkthrough_cluster` writes this page; each command is followed by its real output.",
    )
    walk.say("## A picker for a pool")
    walk.run(f"kubectl get nodes; kubectl get pods -n {NAMESPACE} -o wide")
    walk.say(
        "The first `values.yaml` is a guess: load counts twelve times as much as cached prefixes:"
    )
    text = yaml.safe_dump(chart_values(), sort_keys=False)
    (walk.folder / "values.yaml").write_text(text)
    (walk.folder / "guess.yaml").write_text(GUESS)
    walk.show(text, "yaml")
    walk.run(
        f"helm install {NAME} charts/homing -n {NAMESPACE} -f values.yaml --wait",
        shown=lambda told: told.partition("NOTES:")[0],
    )
    walk.run(f"kubectl get inferencepool,configmap -n {NAMESPACE}")
    walk.say(
        "## Traffic",
        "",
        "Two kinds of traffic run at once: questions about documents, some of which are much more popular than others, "
        "and assistants with a long system prompt each.",
        "The clients (`sim drive`) run inside the cluster's network, so that the clients reach the cluster's Services.",
    )
    _drive(walk, "before", captured_s, seed=1)
    _tune(walk, trials)
    if (walk.folder / "tuned" / TUNED_CONFIG_MAP).exists():
        _apply(walk, captured_s)
    else:
        walk.say("The guess stays, because no tried configuration is better.")
    walk.say("## Leave")
    walk.run(
        f"helm uninstall {NAME} -n {NAMESPACE}; "
        f"kubectl get deployment,service,inferencepool,configmap,lease -n {NAMESPACE}"
    )


def chart_values() -> dict[str, Any]:
    """Return the Helm values with which the page installs the chart."""
    repository, _, tag = HOMING.rpartition(":")
    return {
        "image": {"repository": repository, "tag": tag},
        "pool": {"create": True, "matchLabels": {"app": MODELS}},
        "standalone": {"enabled": True},
        "capture": {"enabled": True},
        "config": yaml.safe_load(GUESS),
    }


def _drive(walk: Walk, when: str, duration_s: float, seed: int) -> None:
    address = f"$(kubectl get service {NAME}-envoy -n {NAMESPACE} -o jsonpath={{.spec.clusterIP}})"
    drive(
        *(walk, when, duration_s, seed),
        url="$gateway",
        model=find_profile(PROFILE).model,
        before=f"gateway=http://{address}:8081\n",
    )


def _tune(walk: Walk, trials: int) -> None:
    walk.say(
        "## Better weights, tried on what was captured",
        "",
        "The capture is copied from the picker's pod; the capture contains the sizes and endpoints of requests, without any text:",
    )
    walk.run(
        f"pod=$(kubectl get pods -n {NAMESPACE} -l app.kubernetes.io/name=homing -o jsonpath={{.items[0].metadata.name}})\n"
        f"kubectl cp -n {NAMESPACE} -c epp $pod:/capture/$pod captured\n"
        "du -sh captured",
        shown=lambda told: "\n".join(
            line for line in told.splitlines() if not line.startswith("tar: ")
        ),
    )
    (walk.folder / "space.toml").write_text(SPACE)
    walk.say("The file `space.toml` lets `sim tune` vary the weights of the three scorers only:")
    walk.show(SPACE, "toml")
    walk.run(
        f"sim tune captured --pods {PODS} --profile {PROFILE} --config guess.yaml --space space.toml "
        f"--trials {trials} --out tuned",
        shown=without_bars,
    )


def _apply(walk: Walk, driven_s: float) -> None:
    walk.say("## Into the cluster")
    walk.run(f"epp check-config tuned/{TUNED_CONFIG_MAP} --diff guess.yaml")
    before = _applied(walk)
    walk.run(f"kubectl apply -n {NAMESPACE} -f tuned/{TUNED_CONFIG_MAP}")
    until(lambda: len(_applied(walk)) > len(before), WAIT_S_MAX, "the pool has an Event of it")
    walk.say("An Event on the pool shows that the tuned configuration is in force:")
    walk.run(IN_FORCE)
    walk.say(
        "The same kinds of traffic run again after the change of the weights, for as long as before, from other random draws:"
    )
    _drive(walk, "after", driven_s, seed=3)
    walk.say("The table compares the clients' results before and after the change of the weights:")
    walk.page += [*comparison(walk.folder), ""]
    walk.say(
        "The documents and system prompts after the change differ from those before, so each was computed at least once in either run.",
    )


def _applied(walk: Walk) -> list[Any]:
    page = list(walk.page)
    told = walk.run(IN_FORCE)
    walk.page[:] = page
    return told.splitlines()


if __name__ == "__main__":
    sys.exit(main())
