"""Envoy's ext_proc messages as protobuf classes, with the fields that a picker reads or writes.

They are declared here instead of taken from generated modules of Envoy's whole interface. Those are
three thousand files and, in older versions, contain modules of other distributions such as
`opentelemetry-proto`. An undeclared field is carried as bytes and ignored. Names and numbers are
those of `envoy.service.ext_proc.v3` and the messages that it uses; an enumeration is its number.
The messages have their own descriptor pool, so that another package with Envoy's messages may be
installed too.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MessageOptions,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


class Field(NamedTuple):
    """The declaration of one field of a protobuf message."""

    name: str
    number: int
    kind: str
    """Protobuf type of a message's field, or the name of the message that the field contains."""
    oneof: str = ""
    repeated: bool = False


STRUCT: Final = struct_pb2.Struct.DESCRIPTOR.full_name
MESSAGES: Final[Mapping[str, tuple[Field, ...]]] = {
    "ProcessingRequest": (
        Field("request_headers", 2, "HttpHeaders", "request"),
        Field("response_headers", 3, "HttpHeaders", "request"),
        Field("request_body", 4, "HttpBody", "request"),
        Field("response_body", 5, "HttpBody", "request"),
        Field("request_trailers", 6, "HttpTrailers", "request"),
        Field("response_trailers", 7, "HttpTrailers", "request"),
        Field("metadata_context", 8, "Metadata"),
        Field("protocol_config", 11, "ProtocolConfiguration"),
    ),
    "ProtocolConfiguration": (
        Field("request_body_mode", 1, "int32"),
        Field("response_body_mode", 2, "int32"),
    ),
    "HttpHeaders": (Field("headers", 1, "HeaderMap"), Field("end_of_stream", 3, "bool")),
    "HttpBody": (Field("body", 1, "bytes"), Field("end_of_stream", 2, "bool")),
    "HttpTrailers": (Field("trailers", 1, "HeaderMap"),),
    "HeaderMap": (Field("headers", 1, "HeaderValue", repeated=True),),
    "HeaderValue": (
        Field("key", 1, "string"),
        Field("value", 2, "string"),
        Field("raw_value", 3, "bytes"),
    ),
    "Metadata": (Field("filter_metadata", 1, "Metadata.FilterMetadataEntry", repeated=True),),
    "ProcessingResponse": (
        Field("request_headers", 1, "HeadersResponse", "response"),
        Field("response_headers", 2, "HeadersResponse", "response"),
        Field("request_body", 3, "BodyResponse", "response"),
        Field("response_body", 4, "BodyResponse", "response"),
        Field("request_trailers", 5, "TrailersResponse", "response"),
        Field("response_trailers", 6, "TrailersResponse", "response"),
        Field("immediate_response", 7, "ImmediateResponse", "response"),
        Field("dynamic_metadata", 8, STRUCT),
        Field("mode_override", 9, "ProcessingMode"),
        Field("override_message_timeout", 10, "Duration"),
    ),
    "HeadersResponse": (Field("response", 1, "CommonResponse"),),
    "BodyResponse": (Field("response", 1, "CommonResponse"),),
    "TrailersResponse": (),
    "CommonResponse": (
        Field("header_mutation", 2, "HeaderMutation"),
        Field("body_mutation", 3, "BodyMutation"),
        Field("clear_route_cache", 5, "bool"),
    ),
    "HeaderMutation": (
        Field("set_headers", 1, "HeaderValueOption", repeated=True),
        Field("remove_headers", 2, "string", repeated=True),
    ),
    "HeaderValueOption": (
        Field("header", 1, "HeaderValue"),
        Field("append_action", 3, "int32"),
    ),
    "BodyMutation": (
        Field("body", 1, "bytes", "mutation"),
        Field("streamed_response", 3, "StreamedBodyResponse", "mutation"),
    ),
    "StreamedBodyResponse": (Field("body", 1, "bytes"), Field("end_of_stream", 2, "bool")),
    "ImmediateResponse": (
        Field("status", 1, "HttpStatus"),
        Field("headers", 2, "HeaderMutation"),
        Field("body", 3, "bytes"),
        Field("details", 5, "string"),
    ),
    "HttpStatus": (Field("code", 1, "int32"),),
    "Duration": (Field("seconds", 1, "int64"), Field("nanos", 2, "int32")),
    "ProcessingMode": (
        Field("response_body_mode", 4, "int32"),
        Field("response_trailer_mode", 6, "int32"),
    ),
}

_PACKAGE: Final = "homing.ext_proc"


def _message(name: str) -> DescriptorProto:
    message = DescriptorProto(name=name)
    for field in MESSAGES[name]:
        _add(message, field)
    if name == "Metadata":
        entry = message.nested_type.add(
            name="FilterMetadataEntry", options=MessageOptions(map_entry=True)
        )
        _add(entry, Field("key", 1, "string"))
        _add(entry, Field("value", 2, STRUCT))
    return message


def _add(message: DescriptorProto, told: Field) -> None:
    label = FieldDescriptorProto.LABEL_REPEATED if told.repeated else None
    field = message.field.add(
        name=told.name, number=told.number, label=label or FieldDescriptorProto.LABEL_OPTIONAL
    )
    if told.kind.islower() and "." not in told.kind:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{told.kind.upper()}")
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{told.kind}" if told.kind == STRUCT else f".{_PACKAGE}.{told.kind}"
    if told.oneof:
        if not message.oneof_decl:
            message.oneof_decl.add(name=told.oneof)
        field.oneof_index = 0


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    # These functions have no type annotations.
    add: Any = pool.AddSerializedFile
    add(struct_pb2.DESCRIPTOR.serialized_pb)
    file = FileDescriptorProto(
        name="homing/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
        message_type=map(_message, MESSAGES),
    )
    add(file.SerializeToString())
    return pool


_POOL: Final[Any] = _pool()


def _class(name: str) -> Any:
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest: Final = _class("ProcessingRequest")
ProcessingResponse: Final = _class("ProcessingResponse")
BodyMutation: Final = _class("BodyMutation")
BodyResponse: Final = _class("BodyResponse")
CommonResponse: Final = _class("CommonResponse")
Duration: Final = _class("Duration")
HeaderMutation: Final = _class("HeaderMutation")
HeaderValue: Final = _class("HeaderValue")
HeaderValueOption: Final = _class("HeaderValueOption")
HeadersResponse: Final = _class("HeadersResponse")
HttpStatus: Final = _class("HttpStatus")
ImmediateResponse: Final = _class("ImmediateResponse")
ProcessingMode: Final = _class("ProcessingMode")
StreamedBodyResponse: Final = _class("StreamedBodyResponse")
TrailersResponse: Final = _class("TrailersResponse")

OVERWRITE_IF_EXISTS_OR_ADD: Final = 2
"""Number of an action: a header that Envoy sets replaces an existing one (value of
`HeaderValueOption.append_action`).
"""
SEND: Final = 1
"""Number of a processing mode: Envoy sends the response trailers (value of
`ProcessingMode.response_trailer_mode`).
"""
