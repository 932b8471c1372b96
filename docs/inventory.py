"""The inventory docs/evidence.toml: for each measured figure of the documentation, its command and
its sources.

`docs.evidence` measures by it, and `docs.reference` makes the table of docs/evidence.md from it.
"""

import ast
import hashlib
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from docs.site import slug
from sim.output import write_whole

ROOT: Final = Path(__file__).parent.parent
INVENTORY: Final = "docs/evidence.toml"
PAGE: Final = "docs/evidence.md"
OTHER_PAGES: Final = ("README.md", "bench/README.md", "charts/homing/README.md", "deploy/README.md")
SUFFIXES: Final = frozenset({".md", ".svg", ".json", ".png", ".webp"})
NEEDS: Final = frozenset(
    {"6-gb", "chromium", "cluster", "envoy", "go", "kube-apiserver", "network", "npm", "quiet"}
)
"""Names of what a measuring command may need. `docs.evidence` checks those that it can detect on
this machine.
"""
_FENCE: Final = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_RULE: Final = re.compile(r"^([a-z0-9-]+):(?!=).*\n(?:\t.*\n)*", re.MULTILINE)
_FIGURES: Final = re.compile(r"docs/[\w-]+\.(?:md|json)")
_MARKS: Final = re.compile(r"(<!-- begin evidence -->\n).*?(<!-- end evidence -->)", re.DOTALL)
_MISSING: Final = "missing"


class EvidenceError(Exception):
    """The error of the inventory, or of a measurement by it; its text is one sentence for the user."""


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the inventory: a measurement, and the pages that show its figures."""

    name: str
    shows: str
    pages: list[str]
    """Paths of pages relative to the repository, with `#anchor` if only this section shows the
    figures.
    """
    command: str = ""
    """Command that measures the figures: steps `make TARGET` or `python -m MODULE` with ` && `
    between them; "" if there is no command.
    """
    duration_s: int = 0
    by_hand: bool = False
    """True if a person copies the figures from the command's output to the page."""
    needs: list[str] = []
    sources: list[str] = []
    """Files and folders on which the figures depend."""
    stale_after_days: int = 0
    """Age in days above which a reading of other projects is stale; 0 if age does not make the
    entry stale.
    """
    commit: str
    """Commit whose tree was measured."""
    date: date
    digest: str = ""
    """Digest of `sources` in the measured tree."""


class Inventory(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of docs/evidence.toml."""

    unmeasured: list[str]
    """Paths of pages that show no measured figures."""
    evidence: list[Entry]


def read(root: Path = ROOT) -> Inventory:
    """Return the inventory of the tree at `root`. Raise `EvidenceError` if the file cannot be read."""
    try:
        return msgspec.toml.decode((root / INVENTORY).read_bytes(), type=Inventory)
    except (OSError, ValueError) as problem:
        raise EvidenceError(f"{INVENTORY}: {problem}") from problem


def entry_named(root: Path, name: str) -> Entry:
    """Return the entry `name` as the file has it now. Raise `EvidenceError` if the inventory has
    none.
    """
    for entry in read(root).evidence:
        if entry.name == name:
            return entry
    raise EvidenceError(f"{INVENTORY} has no entry {name}; `python -m docs.evidence` lists them")


def write_entry(root: Path, entry: Entry) -> None:
    """Replace the entry of the same name in docs/evidence.toml, and rewrite the table of
    docs/evidence.md.
    """
    path = root / INVENTORY
    head = path.read_text(encoding="utf-8").partition("[[evidence]]")[0]
    entries = [entry if one.name == entry.name else one for one in read(root).evidence]
    write_whole(path, (head + "\n".join(map(as_toml, entries))).encode())
    page = root / PAGE
    if page.exists():
        text = page.read_text(encoding="utf-8")
        anew = _MARKS.sub(lambda found: f"{found[1]}\n{table(entries)}\n\n{found[2]}", text)
        write_whole(page, anew.encode())


def as_toml(entry: Entry) -> str:
    """Return an entry as TOML: one line for each value; a long list has one line for each item."""
    lines = ["[[evidence]]"]
    defaults = {
        "command": "",
        "duration_s": 0,
        "by_hand": False,
        "stale_after_days": 0,
        "digest": "",
    }
    for name, value in msgspec.structs.asdict(entry).items():
        # A JSON string is a basic string of TOML too.
        text = str(value) if isinstance(value, date) else json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and len(text) > 100:
            lines += [f"{name} = [", *(f"  {json.dumps(one)}," for one in value), "]"]
        elif value != [] and value != defaults.get(name):
            lines.append(f"{name} = {text}")
    return "\n".join(lines) + "\n"


def steps(command: str) -> list[list[str]]:
    """Return the words of each step of a command. Raise `ValueError` if a step is neither `make`
    nor `python -m`.
    """
    found = [shlex.split(step) for step in command.split(" && ")] if command else []
    for words in found:
        match words:
            case ["make", _, *_] | ["python", "-m", _, *_]:
                continue
        raise ValueError(f"{shlex.join(words)} is neither `make TARGET` nor `python -m MODULE`")
    return found


# --- the page ---------------------------------------------------------------------------------------


def table(entries: Iterable[Entry]) -> str:
    """Return the table of docs/evidence.md. Equal entries give equal text."""
    lines = ["| evidence | figures | command | takes | commit | date |", "| --- " * 6 + "|"]
    for entry in entries:
        first, *others = [f"`{step}`" for step in entry.command.split(" && ")]
        more = (
            f" and {len(others)} more steps"
            if len(others) > 1
            else "".join(f", {one}" for one in others)
        )
        by_hand = "; copied by hand" if entry.by_hand else ""
        cells = (
            f"`{entry.name}`",
            f"{entry.shows}: {', '.join(map(_link, entry.pages))}",
            f"{first}{more}{by_hand}" if entry.command else "none: repeated by hand",
            duration(entry.duration_s) if entry.command else "",
            f"`{entry.commit[:9]}`",
            f"{entry.date}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _link(page: str) -> str:
    path, _, anchor = page.partition("#")
    near = page.removeprefix("docs/") if page.startswith("docs/") else f"../{page}"
    return (
        f"[{path.removeprefix('docs/')}{': ' if anchor else ''}{anchor.replace('-', ' ')}]({near})"
    )


def duration(seconds: int) -> str:
    """Return a duration as text, such as `90 s` or `12 min`."""
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"


# --- staleness --------------------------------------------------------------------------------------


def git(root: Path, *words: str, given: str = "") -> str | None:
    """Return the output of a git command, with `given` as its input. None if it fails, or if git is
    not installed.
    """
    typed = ["git", *words]
    try:
        done = subprocess.run(  # noqa: S603, PLW1510 - our own words
            typed, cwd=root, input=given, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout


def objects(root: Path, names: Sequence[str]) -> dict[str, str] | None:
    """Return the id of the tree or blob of each `REVISION:PATH` in `names`, or "missing".

    None if `root` is not the top folder of a git repository.
    """
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != root.resolve():
        return None
    told = git(root, "cat-file", "--batch-check=%(objectname)", given="\n".join([*names, ""]))
    ids = [line.rpartition(" ")[2] for line in (told or "").splitlines()]
    return dict(zip(names, ids, strict=True)) if told is not None else None


def digest(ids: Mapping[str, str], sources: Iterable[str], revision: str = "HEAD") -> str:
    """Return the digest of `sources` in the tree of `revision`; "" if there are no sources.

    `ids` are those of `objects`.
    """
    told = "".join(f"{source} {ids[f'{revision}:{source}']}\n" for source in sorted(sources))
    return hashlib.sha256(told.encode()).hexdigest()[:16] if told else ""


def stale(root: Path, entries: Sequence[Entry], today: date) -> tuple[dict[str, str], bool]:
    """Return why each stale entry is stale, by its name, and whether a git repository was read.

    A source counts as unchanged if only docstrings and comments of its Python files differ.
    """
    paths = {(at, one) for e in entries for at in ("HEAD", e.commit) for one in ("", *e.sources)}
    ids = objects(root, sorted(f"{at}:{one}" for at, one in paths))
    reasons = {}
    code = _CodeComparison(root)
    for entry in entries:
        age_days, sources, commit = (today - entry.date).days, entry.sources, entry.commit
        if entry.stale_after_days and age_days > entry.stale_after_days:
            reasons[entry.name] = f"{age_days} days old, more than {entry.stale_after_days}"
        elif ids is not None and digest(ids, sources) != entry.digest:
            # A shallow clone does not have the commit: then git cannot say which sources changed.
            known = ids[f"{commit}:"] != _MISSING
            changed = [one for one in sources if known and code.differs(commit, one)]
            if changed or not known:
                reasons[entry.name] = f"changed since: {', '.join(changed) or 'its sources'}"
    return reasons, ids is not None


class _CodeComparison:
    """A comparison of sources at two commits that ignores docstrings and comments of Python files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._same: dict[tuple[str, str], bool] = {}
        """(git id, git id) of two blobs -> True if they contain the same code."""

    def differs(self, commit: str, source: str) -> bool:
        """Return whether the code of `source`, a file or a folder, differs between `commit` and HEAD."""
        words = ("--raw", "--no-renames", "--abbrev=40", "-z", commit, "HEAD", "--", source)
        fields = (git(self._root, "diff", *words) or "").split("\0")
        for about, path in zip(fields[::2], fields[1::2], strict=False):
            _, _, before, after, status = about.split(" ")
            if status != "M" or not path.endswith(".py") or not self._same_code(before, after):
                return True
        return False

    def _same_code(self, before: str, after: str) -> bool:
        if (before, after) not in self._same:
            texts = [git(self._root, "cat-file", "blob", blob) or "" for blob in (before, after)]
            try:
                same = code_of(texts[0]) == code_of(texts[1])
            except SyntaxError:
                same = False
            self._same[before, after] = same
        return self._same[before, after]


def code_of(text: str) -> str:
    """Return the syntax tree of a Python module as a text, without docstrings, which include the
    texts after attributes. Raises `SyntaxError`.
    """
    module = ast.parse(text)
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(module)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


# --- agreement with the tree ------------------------------------------------------------------------


def pages(root: Path) -> list[str]:
    """Return the paths of all pages and pictures of the documentation that may show figures."""
    found = (path for path in (root / "docs").rglob("*") if path.suffix in SUFFIXES)
    there = (path for path in OTHER_PAGES if (root / path).is_file())
    return sorted([*there, *(path.relative_to(root).as_posix() for path in found)])


def problems(root: Path, inventory: Inventory) -> Iterator[str]:
    """Yield a sentence for each disagreement between the inventory and the tree at `root`."""
    entries, unmeasured = inventory.evidence, inventory.unmeasured
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    rules = {found[1]: found[0] for found in _RULE.finditer(makefile)}
    names = Counter(entry.name for entry in entries)
    yield from (f"entry {name} is there {n} times" for name, n in names.items() if n > 1)
    measured = {page.partition("#")[0] for entry in entries for page in entry.pages}
    for page in pages(root):
        if page not in measured and page not in unmeasured:
            yield f"{page} is in no entry; add it to one, or to `unmeasured` if nothing is measured"
    yield from (
        f"{one} is in an entry and in `unmeasured`" for one in unmeasured if one in measured
    )
    for page in unmeasured:
        if not (root / page).is_file():
            yield f"`unmeasured` names {page}, which does not exist"
    typed = [step for entry in entries for step in entry.command.split(" && ")]
    made = {word for step in typed if step.startswith("make ") for word in step.split()}
    for target, rule in rules.items():
        if _FIGURES.search(rule) and target not in made:
            yield f"make {target} writes figures to a page, and no entry has it as its command"
    for entry in entries:
        for problem in (*_false_paths(root, entry), *_false_steps(root, entry, rules)):
            yield f"entry {entry.name}: {problem}"


def _false_paths(root: Path, entry: Entry) -> Iterator[str]:
    for page in entry.pages:
        path, _, anchor = page.partition("#")
        if not (root / path).is_file():
            yield f"page {path} does not exist"
        elif anchor and anchor not in _anchors(root / path):
            yield f"page {path} has no heading #{anchor}"
        for source in entry.sources:
            if f"{path}/".startswith(f"{source}/"):
                yield f"source {source} contains the page {path}, which each measurement changes"
    yield from (
        f"source {one} does not exist" for one in entry.sources if not (root / one).exists()
    )
    if not entry.sources and not entry.stale_after_days:
        yield "it has neither `sources` nor `stale_after_days`, so that it never becomes stale"


def _anchors(page: Path) -> set[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading, "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def _false_steps(root: Path, entry: Entry, targets: Iterable[str]) -> Iterator[str]:
    yield from (
        f"need {one} is none of {', '.join(sorted(NEEDS))}" for one in {*entry.needs} - NEEDS
    )
    try:
        found = steps(entry.command)
    except ValueError as problem:
        yield f"`command` cannot be parsed: {problem}"
        return
    for program, *words in found:
        if program == "make":
            yield from (f"there is no make target {one}" for one in words if one not in targets)
            continue
        module = root / words[1].replace(".", "/")
        if not module.with_suffix(".py").is_file() and not (module / "__main__.py").is_file():
            yield f"there is no module {words[1]}"
