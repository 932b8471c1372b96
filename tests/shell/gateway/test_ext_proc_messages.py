"""The messages that are declared here against those that are generated from Envoy's own sources."""

import pytest
from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2
from google.protobuf.descriptor import FieldDescriptor

from epp.core.protocol.messages import BodyMode
from epp.shell.gateway import ext_proc_messages as ours

ENVOYS = external_processor_pb2.DESCRIPTOR.message_types_by_name


def refers_to(messages):
    """Every message that one of `messages` has a field of, by the last part of its name."""
    found, pending = {}, list(messages)
    while pending:
        message = pending.pop()
        if message.full_name not in found:
            found[message.full_name] = message
            pending += [field.message_type for field in message.fields if field.message_type]
    return {message.name: message for message in found.values()}


GENERATED = refers_to(ENVOYS.values())
DECLARED = refers_to(
    at.DESCRIPTOR for at in (ours.ProcessingRequest, ours.ProcessingResponse, ours.ProcessingMode)
)


def wire_type(field):
    """What decides how a value is written: an enumeration is written as its number is."""
    number = {FieldDescriptor.TYPE_ENUM: FieldDescriptor.TYPE_INT32}.get(field.type, field.type)
    of = field.message_type and field.message_type.name
    oneof = field.containing_oneof and field.containing_oneof.name
    return field.number, number, field.is_repeated, of, oneof


def test_every_message_is_declared_once_and_used():
    assert set(ours.MESSAGES) <= set(DECLARED)


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_every_field_is_written_as_envoy_writes_it(name):
    """Number, type, how often, and with which others it cannot be together."""
    generated = GENERATED[name].fields_by_name
    for field in DECLARED[name].fields:
        assert wire_type(field) == wire_type(generated[field.name]), field.full_name
    assert DECLARED[name].GetOptions().map_entry == GENERATED[name].GetOptions().map_entry


def test_numbers_of_enumerations_are_envoys():
    assert HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD == ours.OVERWRITE_IF_EXISTS_OR_ADD
    assert ProcessingMode.SEND == ours.SEND
    assert ProcessingMode.BodySendMode.items() == [
        *((mode.name, mode.value) for mode in BodyMode if mode is not BodyMode.UNKNOWN),
        *(
            item
            for item in ProcessingMode.BodySendMode.items()
            if item[0] not in BodyMode.__members__
        ),
    ]


def test_what_is_not_declared_is_carried_and_obeyed_by_nobody():
    """A newer Envoy sends more; a message of ours that came back would be the same."""
    theirs = external_processor_pb2.ProcessingRequest(observability_mode=True)
    theirs.attributes["envoy.filters.http.ext_proc"].fields["request.path"].string_value = "/"
    theirs.request_body.body = b"x"
    read = ours.ProcessingRequest.FromString(theirs.SerializeToString())
    assert (read.WhichOneof("request"), read.request_body.body) == ("request_body", b"x")
    assert external_processor_pb2.ProcessingRequest.FromString(read.SerializeToString()) == theirs
