"""Check a picker's health and send it one request that reaches no model server: HOST:PORT
tls|plaintext.
"""

import ssl
import sys

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from epp.shell.gateway.ext_proc_messages import ProcessingRequest, ProcessingResponse

TIMEOUT_S = 10
SERVICE = "readiness"
"""Service name of the gRPC health check that a standby picker reports as serving too, because it
can answer.
"""
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEADERS = {":method": "GET", ":path": "/v1/models", ":authority": "helm-test"}


def connect(address: str, security: str) -> grpc.Channel:
    """Return a gRPC channel to the picker at `address` that accepts any certificate, as gateways
    do.
    """
    if security == "plaintext":
        return grpc.insecure_channel(address)
    host, _, port = address.rpartition(":")
    shown = ssl.get_server_certificate((host, int(port)), timeout=TIMEOUT_S).encode()
    names = x509.load_pem_x509_certificate(shown).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    name = names.value.get_values_for_type(x509.DNSName)[0].replace("*", "any")
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(shown),
        options=[("grpc.ssl_target_name_override", name)],
    )


def main(address: str, security: str) -> int:
    request = ProcessingRequest()
    request.request_headers.end_of_stream = True
    for name, value in HEADERS.items():
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    with connect(address, security) as channel:
        check = health_pb2.HealthCheckRequest(service=SERVICE)
        health = HealthStub(channel).Check(check, timeout=TIMEOUT_S, wait_for_ready=True)
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            sys.stdout.write(f"{address} is not serving, expected SERVING\n")
            return 1
        process = channel.stream_stream(
            METHOD, ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )
        stream = process(iter([request]), timeout=TIMEOUT_S)
        answer = next(stream).WhichOneof("response")
        stream.cancel()
    sys.stdout.write(f"{address} serves and answered a request with {answer}\n")
    return 0 if answer in {"request_headers", "immediate_response"} else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
