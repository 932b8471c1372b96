from tests.release import image_sizes
from tests.release.installed_sizes import sizes, table


def distribution(packages, name, files):
    """As pip leaves it: files, and a record of them."""
    info = packages / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    for file, size in files.items():
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        (packages / file).write_bytes(b"x" * size)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_a_file_that_two_distributions_have_counts_once(tmp_path):
    """Else what overwrites another would be twice in the sum; pip is no dependency."""
    distribution(tmp_path, "a", {"a/one.py": 5, "both.py": 3})
    distribution(tmp_path, "b", {"b/two.py": 7, "both.py": 3})
    distribution(tmp_path, "pip", {"pip/pip.py": 100})
    assert sizes(tmp_path) == {"a": 8, "b": 7}


def test_what_is_gone_stays_in_the_table_and_what_is_small_is_added_up():
    before = {"large": 57_000_000, "gone": 121_000_000, "small": 1_000_000}
    now = {"large": 57_000_000, "small": 1_000_000, "tiny": 500_000}
    assert table({"before": before, "now": now}).splitlines() == [
        "| MB | before | now |",
        "| --- | --- | --- |",
        "| `large` | 57 | 57 |",
        "| `gone` | 121 |  |",
        "| 2 more, each below 2 | 1 | 2 |",
        "| together | 179 | 58 |",
    ]


def test_sizes_of_images_are_added_up_by_purpose():
    """Code and metadata of a package belong to one row; the sum is of all rows, whole MiB."""
    rows = {
        "numpy": "numpy",
        "numpy.libs": "numpy",
        "numpy-2.3.1.dist-info": "numpy",
        "opentelemetry_sdk-1.36.0.dist-info": "opentelemetry",
        "_cffi_backend.cpython-311-x86_64-linux-gnu.so": "cryptography, cffi",
        "xxhash": image_sizes.REST,
    }
    assert {name: image_sizes.purpose(name) for name in rows} == rows
    table = image_sizes.table({"epp": {"numpy": 2_560, image_sizes.REST: 600}, "sim": {}})
    lines = table.splitlines()
    assert "| numpy | 2 |  |" in lines
    assert lines[-1] == "| together | 3 |  |"
