"""Rows of docs/availability.md: requests and streams while something was done to the cluster.

`make test-cluster` leaves them in the folder of the cluster; `python -m tests.cluster page` takes
the whole of them for the page.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.release import Asked


@dataclass(frozen=True, kw_only=True)
class Row:
    """Outcome of one thing that was done, behind one gateway."""

    gateway: str
    done: str
    sent: int
    lost: int
    streams: int
    cut: int
    p99_s: float

    @classmethod
    def of(cls, gateway: str, done: str, asked: Asked) -> "Row":
        """Return the row of what clients were answered while `done` was done.

        A request is lost if its answer is not 200, a stream is cut if it did not come to its end.
        """
        sent, streams = sum(asked.requests.values()), sum(asked.streams.values())
        return cls(
            gateway=gateway,
            done=done,
            sent=sent,
            lost=sent - asked.requests.get("200", 0),
            streams=streams,
            cut=streams - asked.streams.get("whole", 0),
            p99_s=round(asked.told["p99_s"], 3),
        )


class Rows:
    """Folder with a file for each row.

    Tests of several processes write them, the last of each kind counts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, row: Row) -> Row:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{row.gateway} {row.done}".replace(" ", "-").replace("/", "-")
        (self._folder / f"{name}.json").write_text(json.dumps(asdict(row), indent=1))
        return row

    def all(self) -> list[Row]:
        found = (Row(**json.loads(file.read_text())) for file in self._folder.glob("*.json"))
        return sorted(found, key=lambda row: (row.gateway, row.done))

    def write(self, file: Path) -> None:
        """Write all rows to `file`, for `docs.reference`."""
        told = json.dumps([asdict(row) for row in self.all()], indent=1)
        file.write_text(f"{told}\n", encoding="utf-8")
