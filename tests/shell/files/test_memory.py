import os

import pytest

from epp.shell.files.memory import memory_limit_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("told", "expected"),
    [("104857600\n", 104_857_600), ("max\n", MACHINE), ("9223372036854771712\n", MACHINE)],
)
def test_the_limit_of_the_container_counts(name, told, expected, tmp_path):
    """In either version of control groups; without a limit it is what the machine has."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(told)
    assert memory_limit_bytes(tmp_path) == expected


def test_without_control_groups_it_is_what_the_machine_has(tmp_path):
    """No file is there to be read."""
    assert memory_limit_bytes(tmp_path / "none") == MACHINE
