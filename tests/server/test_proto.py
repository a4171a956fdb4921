"""The committed generated code is what the proto file says, and every field of the proto file is explained."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from jaxinfer_server.v1 import inference_pb2 as pb
from jaxinfer_server.v1 import inference_pb2_grpc as rpc

SERVER = Path(__file__).parents[2] / "server"
PROTO = SERVER / "protos" / "jaxinfer" / "v1" / "inference.proto"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> FileDescriptorProto:
    """The proto file as the installed compiler reads it, comments included."""
    out = tmp_path_factory.mktemp("proto") / "set.pb"
    virtual = f"jaxinfer_server/v1={PROTO.parent}"
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I", virtual, "--include_source_info"),
            *(f"--descriptor_set_out={out}", "jaxinfer_server/v1/inference.proto"),
        ],
        check=True,
        timeout=60,
    )
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def without_extras(file: FileDescriptorProto) -> FileDescriptorProto:
    """Without comments and derived names, which generated code leaves out."""
    copy = FileDescriptorProto()
    copy.CopyFrom(file)
    copy.ClearField("source_code_info")
    pending = list(copy.message_type)
    while pending:
        message = pending.pop()
        pending += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return copy


def test_generated_messages_are_up_to_date(compiled):
    committed = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    assert without_extras(committed) == without_extras(compiled), "run `make proto` and commit what it writes"


def test_generated_service_is_up_to_date(compiled):
    (service,) = compiled.service
    assert {method.name for method in service.method} == {
        name for name in vars(rpc.InferenceServicer) if not name.startswith("_")
    }


def test_generated_code_runs_on_the_oldest_allowed_protobuf():
    """Generated code refuses runtimes older than its compiler; pyproject.toml allows protobuf 6.33 and grpcio 1.80."""
    source = (SERVER / "jaxinfer_server" / "v1" / "inference_pb2.py").read_text()
    version = next(line for line in source.splitlines() if line.startswith("# Protobuf Python Version:"))
    assert tuple(int(part) for part in version.split(": ")[1].split(".")) <= (6, 33, 0)
    assert tuple(int(part) for part in rpc.GRPC_GENERATED_VERSION.split(".")) <= (1, 80, 0)


def test_every_message_of_the_stream_and_every_sampling_field_is_explained(compiled):
    explained = {tuple(location.path) for location in compiled.source_code_info.location if location.leading_comments}
    by_name = {message.name: index for index, message in enumerate(compiled.message_type)}
    for name in ("GenerateRequest", "SamplingParams", "GetModelInfoResponse", "Complete"):
        message = compiled.message_type[by_name[name]]
        for index, field in enumerate(message.field):
            path = (4, by_name[name], 2, index)
            obvious = field.type_name or field.name in ("stop", "stop_token_id", "name", "family", "page_size")
            assert path in explained or obvious, f"{name}.{field.name} has no comment"
