"""A Dockerfile as instructions, and its steps carried out in roots of our own.

Only the part of the language that `deploy/Dockerfile` uses is known. Anything else is an error, so
that a step which is not carried out is not taken for one that works.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tests.release.roots import Root

_SAID: Final = frozenset({"LABEL", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD", "USER", "ARG"})
"""Instructions that change no file; what they say is read where it matters."""
_FROM_STAGE: Final = re.compile(r"--from=(\S+)")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Instruction(NamedTuple):
    name: str
    text: str


class AnyRoot(Protocol):
    """A root file system that steps are carried out in."""

    def at(self, path: str | Path) -> Path: ...

    def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], folder: str = "/"
    ) -> subprocess.CompletedProcess[str]: ...


class Image(NamedTuple):
    """The result of a stage: its root, its environment and its other instructions."""

    root: AnyRoot
    environment: dict[str, str]
    said: dict[str, str]
    """Text of the last instruction of each name that changes no file."""


def instructions(text: str) -> Iterator[Instruction]:
    """Yield each instruction with its continued lines joined; comments are left out."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\s*\\\n\s*", " ", kept).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield Instruction(name.upper(), rest.strip())


def build(
    dockerfile: Path,
    context: Path,
    folder_of_roots: Path,
    environment: Mapping[str, str],
    *,
    target: str = "",
    based: Callable[[Path], AnyRoot] = Root,
) -> Image:
    """Carry out the stage `target`, or the last one, and those it copies from; return its image.

    Each stage has a root below `folder_of_roots`. `environment` is that of the base image, and
    `based` makes a root with the content of the base image.

    Raises `subprocess.CalledProcessError` when a step fails.
    """
    told = stages_of(dockerfile.read_text(encoding="utf-8"))
    wanted = target or list(told)[-1]
    stages: dict[str, Image] = {}
    image = None
    folder = "/"
    for name, text in _needed(told, wanted):
        if name == "FROM":
            stage = _alias(text)
            image = Image(based(folder_of_roots / stage), dict(environment), {})
            stages[stage] = image
            folder = "/"
            continue
        if image is None:
            assert name == "ARG", f"{name} before the first FROM"
            continue
        if name in _SAID:
            image.said[name] = text
        elif name == "ENV":
            for pair in shlex.split(text):
                variable, _, value = pair.partition("=")
                image.environment[variable] = _expanded(value, image.environment)
        elif name == "WORKDIR":
            folder = text
            image.root.at(folder).mkdir(parents=True, exist_ok=True)
        elif name == "RUN":
            done = image.root.run(
                ["/bin/sh", "-c", text], environment=image.environment, folder=folder
            )
            if done.stdout:
                print(done.stdout)
        elif name == "COPY":
            _copy(text, image.root, folder, context, stages)
        else:
            raise AssertionError(f"the instruction {name} is not known here")
    return stages[wanted]


def stages_of(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each stage by its name, its `FROM` first.

    A stage that starts from another stage has the instructions of that one after its `FROM`.
    Instructions before every stage belong to the first one.
    """
    before: list[Instruction] = []
    found: dict[str, list[Instruction]] = {}
    for each in instructions(text):
        if each.name == "FROM":
            inherited = found.get(each.text.partition(" AS ")[0], [])
            steps = [step for step in inherited if step.name not in {"FROM", "ARG"}]
            found[_alias(each.text)] = [*before, each, *steps]
            before = []
        elif found:
            found[next(reversed(found))].append(each)
        else:
            before.append(each)
    assert found, "no FROM"
    return found


def _alias(text: str) -> str:
    return text.partition(" AS ")[2] or "last"


def _needed(told: Mapping[str, list[Instruction]], wanted: str) -> Iterator[Instruction]:
    """Yield the instructions of the stage `wanted`, after those of stages that it copies from."""
    needed, pending = set(), [wanted]
    while pending:
        stage = pending.pop()
        needed.add(stage)
        copied = (each.text for each in told[stage] if each.name == "COPY")
        pending += [found[1] for found in map(_FROM_STAGE.match, copied) if found]
    for stage, steps in told.items():
        if stage in needed:
            yield from steps


def _copy(
    text: str, root: AnyRoot, folder: str, context: Path, stages: Mapping[str, Image]
) -> None:
    words = text.split()
    source = context
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root.at("/")
    *names, target = words
    for name in names:
        origin = source / name.strip("/")
        place = root.at(f"{folder}/{target}" if not target.startswith("/") else target)
        if origin.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__") if source == context else None
            shutil.copytree(origin, place, symlinks=True, dirs_exist_ok=True, ignore=unwanted)
        else:
            place = place / origin.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, place)


def _expanded(value: str, environment: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: environment.get(found[1] or found[2], ""), value)
