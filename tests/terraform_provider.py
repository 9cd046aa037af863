"""A provider for Terraform that has AWS's schema and makes nothing, so that the real Terraform validates and plans.

Terraform speaks to it by gRPC (protocol 5, `tfplugin5.proto` of Terraform), by an address in TF_REATTACH_PROVIDERS as
for debugging a provider. Messages are few, so they are written by hand: a field is its number, its kind and its bytes.
`tests/fixtures/aws_provider.json` has the arguments and results of what infra/terraform/aws uses, as CDKTF publishes
them of AWS's provider 6 (21.22.1); that a bucket's name may be made is added by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgpack

SCHEMA = json.loads((Path(__file__).parent / "fixtures/aws_provider.json").read_text())
NAME = "registry.terraform.io/hashicorp/aws"
UNKNOWN = msgpack.ExtType(0, b"\x00")
"""A value that is known after apply, as cty writes it."""
ZONES = ["us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"]
LIST, TEXT = 2, 2
"""The nesting of a block in a list; the wire type of texts and messages."""


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(number: int, value: bytes | str | int) -> bytes:
    """One field of a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | TEXT) + varint(len(content)) + content


def fields(message: bytes) -> dict[int, bytes]:
    """The texts and messages in a message, by their numbers."""
    found: dict[int, bytes] = {}
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        key = number()
        size = number()
        if key & 7 == TEXT:
            found[key >> 3] = message[place : place + size]
            place += size
    return found


def block(schema: Mapping[str, Any]) -> bytes:
    """`Schema.Block`."""
    made = b""
    for name, about in schema["attributes"].items():
        required, computed = bool(about.get("required")), bool(about.get("computed"))
        optional = "required" in about and not required
        flags = field(4, required) + field(5, optional) + field(6, computed)
        made += field(2, field(1, name) + field(2, json.dumps(about["type"])) + flags)
    for name, inner in schema["blocks"].items():
        nested = field(1, name) + field(2, block(inner)) + field(3, LIST) + field(4, int(inner["required"]))
        made += field(3, nested)
    return made


def schema(found: Mapping[str, Any]) -> bytes:
    return field(1, 0) + field(2, block(found))


def get_schema(_: bytes) -> bytes:
    made = field(1, schema(SCHEMA["provider"]))
    for number, kind in ((2, "resource"), (3, "data")):
        for name, found in SCHEMA[kind].items():
            made += field(number, field(1, name) + field(2, schema(found)))
    return made


def planned(request: bytes) -> bytes:
    """`PlanResourceChange`: what is asked for, and what only AWS knows as unknown."""
    given = fields(request)
    found = SCHEMA["resource"][given[1].decode()]["attributes"]
    wanted = value_of(given[3])
    if wanted is not None:
        for name, about in found.items():
            if about.get("computed") and wanted.get(name) is None:
                wanted[name] = UNKNOWN
    return field(1, dynamic(wanted)) + field(5, 1)


def read(request: bytes) -> bytes:
    """`ReadDataSource`: zones, and a policy as the text of its arguments."""
    given = fields(request)
    name, found = given[1].decode(), value_of(given[2])
    if name == "aws_availability_zones":
        found["names"] = ZONES
    else:
        found["json"] = json.dumps({key: value for key, value in found.items() if value is not None})
    return field(1, dynamic(found))


def value_of(message: bytes) -> Any:
    """The content of a `DynamicValue`."""
    return msgpack.unpackb(fields(message)[1], strict_map_key=False)


def dynamic(value: Any) -> bytes:
    return field(1, msgpack.packb(value))


ANSWERS: Mapping[str, Callable[[bytes], bytes]] = {
    "GetSchema": get_schema,
    "PrepareProviderConfig": lambda request: field(1, fields(request)[1]),
    "PlanResourceChange": planned,
    "ReadDataSource": read,
}
"""Answers by method; every other method is answered with an empty message: nothing is wrong."""


class Methods(grpc.GenericRpcHandler):
    """All methods of the service, and none of what go-plugin offers besides."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        service, method = handler_call_details.method.strip("/").split("/")
        if service != "tfplugin5.Provider":
            return None
        answer = ANSWERS.get(method, lambda request: b"")
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answer(request))


@contextlib.contextmanager
def provider() -> Iterator[dict[str, str]]:
    """A provider that runs. Yields the variables by which Terraform finds it."""
    server = grpc.server(ThreadPoolExecutor(8), handlers=[Methods()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    place = {
        "Protocol": "grpc",
        "ProtocolVersion": 5,
        "Pid": os.getpid(),
        "Test": True,
        "Addr": {"Network": "tcp", "String": f"127.0.0.1:{port}"},
    }
    try:
        yield {"TF_REATTACH_PROVIDERS": json.dumps({NAME: place}), "CHECKPOINT_DISABLE": "1"}
    finally:
        server.stop(None).wait()
