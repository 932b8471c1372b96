"""What the code of a run is: a hash, so that figures of other code are not taken for its own."""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import epp
import sim
from sim.cluster.policies import PolicySource

_DECIDES: Final = (
    "epp/configuration",
    "epp/core",
    "epp/plugins",
    "sim/cluster",
    "sim/engine",
    "sim/experiments/leaderboard/cell.py",
    "sim/experiments/leaderboard/cases.py",
    "sim/experiments/run.py",
    "sim/measurement",
    "sim/traces",
)
"""What every run goes through; a plugin of another distribution has modules of its own."""
_POLICIES_MAX: Final = 1_024
"""Of which the hash is kept: to load a configuration takes as long as a short run."""
_ARITHMETIC: Final = ("numpy", "xxhash", "msgspec")
"""Distributions by which digits may differ."""


@cache
def code_hash() -> str:
    """Of all that every run goes through, here and now."""
    roots = {"epp": Path(epp.__file__).parent, "sim": Path(sim.__file__).parent}
    files = [
        file for name in _DECIDES for file in _files(roots[name.partition("/")[0]].parent / name)
    ]
    digest = _hash_of(files)
    for name in _ARITHMETIC:
        digest.update(f"{name} {_version(name)}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=_POLICIES_MAX)
def plugins_hash(policy: PolicySource) -> str:
    """Of the modules of the plugins of `policy` that are not hashed with every run."""
    if not policy.text:
        return ""
    config = policy.load()
    plugins = (
        *(named.plugin for named in config.profile.filters),
        *(scorer.plugin for scorer in config.profile.scorers),
        config.profile.picker,
        *config.indexes.values(),
    )
    modules = {type(plugin).__module__ for plugin in plugins}
    return _hash_of(_reached_from(sorted(modules))).hexdigest()


def _reached_from(modules: Iterable[str]) -> list[Path]:
    """Files of these modules, and of those of the same package that they import."""
    waiting = [name for name in modules if _package_of(name)]
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        # What is imported is loaded: a name that is no module, but of one, is not among these.
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in found or file is None:
            continue
        found[name] = Path(file)
        package = _package_of(name)
        tree = ast.parse(found[name].read_bytes())
        waiting += [one for one in _imported(tree) if _package_of(one) == package]
    return [found[name] for name in sorted(found)]


def _package_of(module: str) -> str:
    """In which a module may depend on others; "" if it is hashed with every run."""
    package = module.partition(".")[0]
    return "" if package == epp.__name__ else package


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            # A module may be imported as a name of its package.
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".py", ".toml"))


def _hash_of(files: Iterable[Path]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for file in files:
        # Not the path: that differs between machines.
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
