"""What the gRPC door refuses: by the right status, naming the field, while the next caller is served."""

import math
import threading
from dataclasses import replace

import grpc
import pytest

from jaxinfer.errors import BadSamplingParam, Overloaded, PromptTooLong, RequestError
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer_server.intake import request_of
from jaxinfer_server.v1 import inference_pb2 as pb
from jaxinfer_server.v1 import inference_pb2_grpc as rpc

ENDLESS = SamplingParams(max_tokens=4000, seed=0)


def refusal(call):
    """The error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


BAD_SAMPLING = {
    "max_tokens": [0, -1, 2**31, 2**63 - 1],
    "min_tokens": [-1, 257],
    "temperature": [-0.1, 100.5, math.nan, math.inf],
    "top_k": [-1, 2**31],
    "top_p": [0.0, -1.0, 1.5, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0.0, -1.0, 101.0, math.nan],
    "presence_penalty": [-101.0, 101.0, math.inf],
    "frequency_penalty": [-101.0, 101.0, -math.inf],
    "seed": [-1, -(2**63)],
    "n": [0, -1, 65, 2**40],
    "stop": [[""], ["x"] * 17, ["x" * 257]],
    "stop_token_ids": [[-1], [257], [2**31], [2**32 + 5], [2**63 - 1], [1] * 9],
    "logprobs": [-1, 21],
    "logit_bias": [{-1: 1.0}, {257: 1.0}, {2**32 + 5: 1.0}, {0: math.nan}, {0: 101.0}, dict.fromkeys(range(300), 1.0)],
}


def test_every_sampling_field_has_bad_values_here():
    bounded = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - {"ignore_eos"}
    assert bounded == set(BAD_SAMPLING)


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD_SAMPLING.items() for v in values], ids=str)
def test_a_bad_sampling_field_is_refused_by_name(stub, field, value):
    error = refusal(stub.Generate(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**{field: value}))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.details()


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text=""), "empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "empty"),
        (pb.GenerateRequest(chat=pb.Chat()), "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 4097)), "4097"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[257])), "257"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), "-1"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 + 5])), str(2**32 + 5)),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**63 - 1])), str(2**63 - 1)),
        (pb.GenerateRequest(text="x", priority=2**31), "priority"),
        (pb.GenerateRequest(text="x", request_id="i" * 129), "request_id"),
        (pb.GenerateRequest(text="x", cache_salt="s" * 257), "cache_salt"),
        (pb.GenerateRequest(text="x", delivery=9), "delivery is 9"),  # pyright: ignore[reportArgumentType]
    ],
    ids=str,
)
def test_a_bad_request_is_refused_by_name(stub, request_, names):
    error = refusal(stub.Generate(request_))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert names in error.details()


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(client):
    with pytest.raises(PromptTooLong, match=r"4096.*4096"):
        client.generate("x" * 4096)
    assert client.generate("x" * 4095, SamplingParams(max_tokens=5))[0].finish is FinishReason.LENGTH


def test_errors_come_back_as_the_exceptions_they_were(client):
    with pytest.raises(BadSamplingParam, match="stop_token_ids"):
        client.generate("x", SamplingParams(stop_token_ids=(300,)))
    with pytest.raises(RequestError, match="empty"):
        list(client.stream(""))


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.generate("\ud800"),
        lambda client: client.stream([{"role": "user", "content": "\udcff"}]),
        lambda client: client.stream("x", SamplingParams(stop=("\udcff",))),
        lambda client: client.stream("x", priority=2**63),
        lambda client: client.stream("x", priority=1.5),
        lambda client: client.stream("x", cache_salt="\ud800"),
        lambda client: client.stream("x", request_id="\ud800"),
        lambda client: client.tokenize("\ud800"),
        lambda client: client.detokenize([2**63]),
        lambda client: client.abort("\ud800"),
        lambda client: client.generate("x", concurrency=0),
    ],
)
def test_what_no_message_can_hold_is_refused_before_it_is_sent(client, call):
    with pytest.raises(RequestError):
        call(client)


def test_a_huge_message_is_refused_and_the_next_is_served(client, stub):
    error = refusal(stub.Generate(pb.GenerateRequest(text="x" * 5_000_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.generate("say:alive")[0].text == "alive"


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * 4_000_000,
        [7] * 2_000_000,
        [{"role": "user", "content": "x" * 1000}] * 4000,
        [{"role": "x" * 2_000_000, "content": "x", "name": "x" * 2_000_000}],
    ],
    ids=["text", "ids", "chat", "role"],
)
def test_a_hopeless_prompt_is_refused_by_its_beginning(scripted, client, monkeypatch, prompt):
    sizes = []
    encode = type(scripted.assembly.tokenizer).encode

    def counting(self, text, **options):
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(scripted.assembly.tokenizer), "encode", counting)
    with pytest.raises(PromptTooLong, match="4096"):
        client.generate([prompt])
    assert sum(sizes) <= 8 * 4096
    assert client.generate("say:alive")[0].text == "alive"


def test_control_tokens_in_a_raw_prompt_count_as_one_each(doubles):
    class LongMarker(doubles.ByteTokenizer):
        """One control token, of 40 characters."""

        def encode(self, text, *, bos=True, special=False, sentinel=""):
            return super().encode(text.replace("<" + "m" * 38 + ">", "<eos>") if special else text, special=special)

    assembly = replace(doubles.scripted_assembly(), tokenizer=LongMarker())
    message = pb.GenerateRequest(text=("<" + "m" * 38 + ">") * 1000)
    assert len(message.text) > 8 * assembly.context
    assert len(request_of(assembly, message, None).prompt) == 1000


def test_a_text_that_takes_long_to_tokenise_keeps_nobody_waiting(scripted, client, monkeypatch):
    gate, started = threading.Event(), threading.Event()
    encode = type(scripted.assembly.tokenizer).encode

    def slow(self, text, **options):
        if text == "slow":
            started.set()
            gate.wait(30)
        return encode(self, text, **options)

    monkeypatch.setattr(type(scripted.assembly.tokenizer), "encode", slow)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.tokenize("slow"))),
        threading.Thread(target=lambda: answers.append(client.generate("slow", SamplingParams(max_tokens=1))[0].text)),
    ]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    assert client.generate("say:quick")[0].text == "quick"
    assert client.model_info().name == "scripted"
    assert answers == []
    gate.set()
    for thread in threads:
        thread.join(10)
    assert len(answers) == 2


def test_huge_metadata_is_refused_and_the_next_is_served(client, stub):
    error = refusal(stub.Generate(pb.GenerateRequest(text="x"), metadata=(("x-big", "y" * 40_000),)))
    assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
    assert client.generate("say:alive")[0].text == "alive"


def test_a_message_that_is_no_protobuf_is_refused_and_the_next_is_served(channel, client):
    for method in ("Generate", "Tokenize", "GetModelInfo"):
        error = refusal(channel.unary_stream(f"/jaxinfer.v1.Inference/{method}")(b"\xff\xff\xff\xff"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert client.generate("say:alive")[0].text == "alive"


@pytest.mark.parametrize(
    ("method", "body", "where"),
    [
        ("Generate", pb.GenerateRequest(text="x").SerializeToString() + b"\xf8\x3f\x01", "GenerateRequest"),
        ("Generate", b"\x12\x01x\x2a\x03\xf8\x3f\x01", "sampling"),
        ("Generate", b"\x22\x08\x0a\x06\x12\x01x\xf8\x3f\x01", "chat.messages"),
        ("Abort", b"\x0a\x01x\xf8\x3f\x01", "AbortRequest"),
        ("Tokenize", b"\x0a\x01x\xf8\x3f\x01", "TokenizeRequest"),
        ("Detokenize", b"\xf8\x3f\x01", "DetokenizeRequest"),
        ("GetModelInfo", b"\xf8\x3f\x01", "GetModelInfoRequest"),
        ("GetCapabilities", b"\xf8\x3f\x01", "GetCapabilitiesRequest"),
    ],
)
def test_a_field_of_a_newer_client_is_refused_and_never_dropped(channel, method, body, where):
    raw = channel.unary_stream(f"/jaxinfer.v1.Inference/{method}")
    error = refusal(raw(body))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1023" in error.details()
    assert where in error.details()


def test_a_full_queue_says_when_to_come_back(doubles, serving):
    assembly = doubles.scripted_assembly(slots=1, queue=1)
    gate = threading.Event()
    assembly.runner.before_step = gate.wait
    served = serving(assembly)
    with grpc.insecure_channel(served.target) as channel, served.client() as client:
        request = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=4000))
        calls = []
        for count in (1, 2):
            calls.append(rpc.InferenceStub(channel).Generate(request))
            served.wait_for(lambda count=count: served.server.bridge.open_streams == count)
        with pytest.raises(Overloaded) as caught:
            list(client.stream("x", ENDLESS))
        assert caught.value.retry_after > 0
        gate.set()
        for call in calls:
            call.cancel()
    assert served.wait_idle().free_pages == 1024
