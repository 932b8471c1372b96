"""Hashes of the code that a leaderboard run executes, so that results of other code are not
reused.
"""

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
    "sim/caches",
    "sim/cluster",
    "sim/engine",
    "sim/experiments/leaderboard/cell.py",
    "sim/experiments/leaderboard/cases.py",
    "sim/experiments/run.py",
    "sim/measurement",
    "sim/traces",
)
"""Paths of the code that every run executes. Plug-ins of other distributions are not among them;
`plugins_hash` covers these.
"""
_POLICIES_MAX: Final = 1_024
"""Maximum number of policies whose plug-in hash is cached. Computing a hash loads the
configuration, which takes as long as a short run.
"""
_ARITHMETIC: Final = ("numpy", "xxhash", "msgspec")
"""Distributions of which another version may change the last digits of results."""


@cache
def code_hash() -> str:
    """Return the hash of the code that every run executes, and of the versions in `_ARITHMETIC`."""
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
    """Return the hash of the modules that contain the plugins of the policy's profiles and its
    indexes, and of the modules of the same packages that these import. Modules of `epp`, which
    contain all other plugins, are left out, because `code_hash` covers them. "" for a baseline.
    """
    if not policy.text:
        return ""
    config = policy.load()
    plugins: list[object] = [*config.indexes.values()]
    for _, profile in config.stages.profiles():
        named = (*profile.members, *profile.responders)
        plugins += [profile.picker, *(one.plugin for one in named)]
    modules = {type(plugin).__module__ for plugin in plugins}
    return _hash_of(_reached_from(sorted(modules))).hexdigest()


def _reached_from(modules: Iterable[str]) -> list[Path]:
    """Return the files of the named modules, and of all modules of the same top-level package that
    they import, directly or indirectly, by absolute imports. Modules of `epp` are left out, because
    `code_hash` covers them.
    """
    waiting = [name for name in modules if _package_of(name)]
    found: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        # Imported modules are loaded. A name that is a member of a module, and not a module, is not
        # among them.
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in found or file is None:
            continue
        found[name] = Path(file)
        package = _package_of(name)
        tree = ast.parse(found[name].read_bytes())
        waiting += [one for one in _imported(tree) if _package_of(one) == package]
    return [found[name] for name in sorted(found)]


def _package_of(module: str) -> str:
    """Return the top-level package of a module, or "" for a module of `epp`, which `code_hash`
    covers.
    """
    package = module.partition(".")[0]
    return "" if package == epp.__name__ else package


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            # The imported name may itself be a module of the package.
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".py", ".toml"))


def _hash_of(files: Iterable[Path]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for file in files:
        # The path is not hashed, because it differs between machines.
        digest.update(f"{file.name}\n".encode())
        digest.update(file.read_bytes())
    return digest


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
