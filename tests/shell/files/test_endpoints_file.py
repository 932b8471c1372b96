import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from epp.core.types import MetricsTarget
from epp.shell.files.endpoints_file import EndpointsFileError, load_endpoints
from epp.shell.found import Found


def load(text):
    return load_endpoints(text.encode(), "pods.yaml")


def problems_of(text):
    with pytest.raises(EndpointsFileError) as caught:
        load(text)
    return caught.value.problems


def test_everything_the_file_can_say_is_read():
    """Names, addresses, labels, metrics and objectives."""
    file = load(
        "endpoints:\n"
        "- {name: a, address: 10.0.0.7, port: 8000, labels: {app: llama}}\n"
        '- {name: b, address: "FD00:0::8", port: 8001,'
        " metrics: {port: 9000, path: /m?x=1, scheme: https}}\n"
        "- {name: c, address: 10.0.0.8, port: 8000, metrics: null}\n"
        "- {name: d, address: 10.0.0.9, port: 8000, metrics: false}\n"
        "- {name: e, address: 10.0.0.9, port: 8001, metrics: {path: /own}}\n"
        "objectives: {interactive: 10, batch: -1}\n"
    )
    a, b, c, d, e = file.endpoints
    assert (a.endpoint_id, a.name, a.address) == ("a:8000", "a", "10.0.0.7:8000")
    assert a.labels == {"app": "llama"}
    assert a.metrics == MetricsTarget(port=8000, path="/metrics", scheme="http")
    assert a.ready_after_s == 5.0
    assert b.address == "[fd00::8]:8001"
    assert b.metrics == MetricsTarget(port=9000, path="/m?x=1", scheme="https")
    assert c.metrics is None
    assert d.metrics is None
    assert e.metrics == MetricsTarget(port=8001, path="/own")
    assert file.objectives == {"interactive": 10, "batch": -1}


def test_a_file_that_llm_d_reads_is_read():
    """Ports may be text, and a name is unique within its namespace, which is `default` if unsaid."""
    file = load(
        "endpoints:\n"
        '- {name: vllm-0, namespace: default, address: "10.0.0.1", port: "8000"}\n'
        '- {name: vllm-0, namespace: batch, address: "10.0.0.2", port: "8000"}\n'
        '- {name: vllm-1, address: "10.0.0.3", port: "8000", metrics: {port: "9000"}}\n'
    )
    assert [(e.name, e.endpoint_id, e.address) for e in file.endpoints] == [
        ("vllm-0", "vllm-0:8000", "10.0.0.1:8000"),
        ("batch/vllm-0", "batch/vllm-0:8000", "10.0.0.2:8000"),
        ("vllm-1", "vllm-1:8000", "10.0.0.3:8000"),
    ]
    assert [e.metrics.port for e in file.endpoints] == [8000, 8000, 9000]
    assert (
        "a:1 is already endpoints[0]"
        in problems_of(
            "endpoints: [{name: a, address: '::1', port: 1},"
            " {name: a, namespace: default, address: '::2', port: '1'}]"
        )[0]
    )


def test_no_endpoints_is_a_valid_file():
    """An empty pool serves 503, it is not an error."""
    assert load("endpoints: []") == Found()
    assert load('{"endpoints":\t[]}') == Found()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "pods.yaml: empty, expected `endpoints: [...]`"),
        ("objectives: {}", "pods.yaml: needs field `endpoints`"),
        ("endpoint: []\nendpoints: []", "pods.yaml: has unknown field `endpoint`"),
        ("endpoints: {}", "pods.yaml: endpoints: expected a list, got a mapping"),
        ("- a", "pods.yaml: expected a mapping, got a list"),
        ("endpoints: [\n", "pods.yaml: line 2: did not find expected node content"),
        ("a: b: c", "pods.yaml: line 1: mapping values are not allowed in this context"),
        ("\x00", "pods.yaml: not UTF-8 text in YAML or JSON"),
        ("[" * 100_000, "pods.yaml: line 1: is nested more than 32 levels deep"),
        ("endpoints: &all [*all]", "pods.yaml: line 1: alias *all is not supported"),
        ("endpoints: []\nendpoints: []", "pods.yaml: line 2: key `endpoints` appears twice"),
        (
            "endpoints: []\nobjectives: {a: x}",
            "pods.yaml: objectives[...]: expected a whole number",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(text, problem):
    """One sentence with file, place and what was expected."""
    (sentence,) = problems_of(text)
    assert sentence.startswith(problem)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{name: a, address: pod-a.example, port: 1}", "address 'pod-a.example' is not an IP"),
        ("{name: a, address: '10.0.0.1:80', port: 1}", "address '10.0.0.1:80' is not an IP"),
        ("{name: a, address: 'fe80::1%eth0', port: 1}", "address 'fe80::1%eth0' is not an IP"),
        (
            "{name: a, address: 10.0.0.1, port: 0}",
            "endpoints[0].port: expected a whole number of at least 1",
        ),
        ("{name: a, address: 10.0.0.1, port: 65536}", "expected a whole number of at most 65535"),
        (
            "{name: a, address: 10.0.0.1, port: 1, metrics: {port: x}}",
            "endpoints[0].metrics.port: expected a whole number, got a text",
        ),
        ("{name: a, address: 10.0.0.1, port: http}", "expected a whole number, got a text"),
        ("{name: a, address: 10.0.0.1, port: '65536'}", "expected a whole number of at most 65535"),
        ("{name: a, address: 10.0.0.1, port: true}", "expected a whole number, got true or false"),
        (
            "{name: a, address: 10.0.0.1, port: 1, namespace: ''}",
            "expected a text of at least 1 character",
        ),
        ("{name: '', address: 10.0.0.1, port: 1}", "expected a text of at least 1 character"),
        ("{address: 10.0.0.1, port: 1}", "needs field `name`"),
        ("{name: a, address: 10.0.0.1, port: 1, weight: 2}", "has unknown field"),
        (
            "{name: a, address: 10.0.0.1, port: 1, labels: {a: 1}}",
            "expected a text, got a whole number",
        ),
        (
            "{name: a, address: 10.0.0.1, port: 1, metrics: {scheme: ftp}}",
            "expected http or https, got 'ftp'",
        ),
        (
            "{name: a, address: 10.0.0.1, port: 1, metrics: {path: m}}",
            "expected a text that matches",
        ),
        (
            '{name: a, address: 10.0.0.1, port: 1, metrics: {path: "/ x"}}',
            "expected a text that match",
        ),
        (
            "{name: a, address: 10.0.0.1, port: 1, metrics: 8080}",
            "expected true or false, a mapping",
        ),
    ],
)
def test_a_wrong_endpoint_is_refused_with_its_place(entry, problem):
    """The sentence begins with the file and the position in the list."""
    (sentence,) = problems_of(f"endpoints: [{entry}]")
    assert sentence.startswith("pods.yaml: endpoints[0]")
    assert problem in sentence


def test_every_problem_is_told_at_once():
    """One look mends the whole file; duplicates by name and port or by address are problems."""
    assert problems_of(
        "endpoints:\n"
        "- {name: a, address: 10.0.0.1, port: 80}\n"
        "- {name: a, address: 10.0.0.2, port: 80}\n"
        "- {name: b, address: 10.0.0.1, port: 80}\n"
        "- {name: c, address: nowhere, port: 80}\n"
        "- {name: a, address: 10.0.0.1, port: 81}\n"
    ) == (
        "pods.yaml: endpoints[1]: a:80 is already endpoints[0]; names and addresses must be unique",
        "pods.yaml: endpoints[2]: 10.0.0.1:80 is already endpoints[0]; names and addresses must be unique",
        "pods.yaml: endpoints[3]: address 'nowhere' is not an IP address such as 10.0.0.7 or ::1",
    )


def test_two_spellings_of_one_ipv6_address_are_one():
    """Duplicates are found after the address was normalised."""
    (sentence,) = problems_of(
        'endpoints: [{name: a, address: "::1", port: 1}, {name: b, address: "0:0::1", port: 1}]'
    )
    assert "[::1]:1 is already endpoints[0]" in sentence


def test_a_name_may_look_like_the_address_of_another():
    """Names are compared with names, addresses with addresses."""
    rows = "{name: 10.0.0.2, address: 10.0.0.1, port: 80}, {name: b, address: 10.0.0.2, port: 80}"
    assert len(load(f"endpoints: [{rows}]").endpoints) == 2


def test_deep_nesting_is_refused():
    """A file that would exhaust the stack is a problem like any other."""
    assert problems_of("[" * 5000)
    assert problems_of("[" * 5000 + "]" * 5000)


ENTRIES = st.lists(
    st.tuples(st.ip_addresses(), st.integers(1, 65535), st.text("abc-", min_size=1)),
    max_size=6,
    unique_by=(lambda row: row[:2], lambda row: row[1:]),
)


@given(ENTRIES, st.booleans())
def test_what_is_written_is_read_back(rows, as_json):
    """YAML and JSON of the same endpoints give the same endpoints."""
    entries = [{"name": n, "address": str(a), "port": p} for a, p, n in rows]
    text = (json.dumps if as_json else yaml.safe_dump)({"endpoints": entries})
    endpoints = load(text).endpoints
    assert [e.endpoint_id for e in endpoints] == [f"{n}:{p}" for _, p, n in rows]
    assert [e.address.rpartition(":")[0].strip("[]") for e in endpoints] == [
        str(a) for a, _, _ in rows
    ]


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(text):
    """Any bytes give a file or an `EndpointsFileError`, nothing else."""
    try:
        load_endpoints(text, "x")
    except EndpointsFileError as problem:
        assert all("\n" not in sentence for sentence in problem.problems)  # noqa: PT017
