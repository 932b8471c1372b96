import structlog

from epp.shell.peers.complaints import Complaints


def test_a_sentence_is_said_once_a_minute_with_how_often_it_was_meant():
    """Each sentence for itself; details are those of the last."""
    complaints = Complaints(60.0)
    with structlog.testing.capture_logs() as lines:
        for second in range(130):
            complaints.say("a peer is odd", float(second), address=f"10.0.0.{second}")
        complaints.say("another thing", 130.0)
    told = [(line["event"], line["times"], line.get("address")) for line in lines]
    assert told == [
        ("a peer is odd", 1, "10.0.0.0"),
        ("a peer is odd", 60, "10.0.0.60"),
        ("a peer is odd", 60, "10.0.0.120"),
        ("another thing", 1, None),
    ]
