"""The gRPC door over the real bridge and loop, with a model whose answers the test decides."""

import math
import threading
import time
from dataclasses import replace
from itertools import islice

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxinfer.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unavailable,
)
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer_server.intake import request_of
from jaxinfer_server.v1 import inference_pb2 as pb
from jaxinfer_server.v1 import inference_pb2_grpc as rpc

ENDLESS = SamplingParams(max_tokens=4000, seed=0)


def events(call):
    """Every response of a call, by the name of its event."""
    return [(response.WhichOneof("event"), response) for response in call]


def refusal(call):
    """The error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


# ---- the stream ------------------------------------------------------------------------------------------------------


def test_a_stream_is_one_accepted_then_chunks_then_one_complete_a_choice(stub):
    request = pb.GenerateRequest(text="letters", sampling=pb.SamplingParams(max_tokens=9, n=5, seed=3))
    found = events(stub.Generate(request))
    kinds = [kind for kind, _ in found]
    assert kinds[0] == "accepted"
    assert kinds.count("accepted") == 1
    assert kinds.count("complete") == 5
    ended = set()
    for kind, response in found[1:]:
        choice = getattr(response, kind).choice
        assert choice not in ended, "output after the end of its choice"
        if kind == "complete":
            ended.add(choice)
    assert ended == set(range(5))


def test_accepted_says_id_prompt_and_seed(stub):
    sampling = pb.SamplingParams(max_tokens=1, seed=77)
    request = pb.GenerateRequest(request_id="mine", text="ab", sampling=sampling, return_prompt_ids=True)
    accepted = events(stub.Generate(request))[0][1].accepted
    assert (accepted.request_id, accepted.prompt_tokens, accepted.seed) == ("mine", 2, 77)
    assert list(accepted.prompt_token_ids) == [97, 98]


def test_the_seed_that_accepted_returns_gives_the_same_text(client, stub):
    unseeded = pb.GenerateRequest(text="letters", sampling=pb.SamplingParams(max_tokens=20))
    found = events(stub.Generate(unseeded))
    text = "".join(response.chunk.text for kind, response in found if kind == "chunk")
    seed = found[0][1].accepted.seed
    assert client.generate("letters", SamplingParams(max_tokens=20, seed=seed))[0].text == text


@pytest.mark.parametrize("text", ["hello", "🙂é한", "안녕하세요 세계 🙂🙂", "a b  c", " leading", "\n\n"])
def test_streamed_text_equals_whole_text(client, text):
    streamed = list(client.stream(f"say:{text}"))
    assert "".join(delta.text for delta in streamed) == text
    assert all("�" not in delta.text for delta in streamed)
    (whole,) = client.generate(f"say:{text}")
    assert whole.text == text
    assert whole.token_ids == tuple(token for delta in streamed for token in delta.token_ids)
    assert whole.finish is FinishReason.STOP


@pytest.mark.parametrize("stop", ["lo w", "o", "world", "h"])
def test_nothing_of_a_stop_string_is_sent(client, stop):
    params = SamplingParams(stop=(stop,))
    streamed = list(client.stream("say:hello world", params))
    expected = "hello world".split(stop)[0]
    assert "".join(delta.text for delta in streamed) == expected
    assert [delta.finish for delta in streamed if delta.finish] == [FinishReason.STOP]
    assert streamed[-1].stop_reason == stop
    (whole,) = client.generate("say:hello world", params)
    assert (whole.text, whole.finish, whole.stop_reason) == (expected, FinishReason.STOP, stop)


def test_a_stop_id_is_named_and_an_end_of_text_is_not(client):
    (stopped,) = client.generate("say:hello", SamplingParams(stop_token_ids=(ord("l"),)))
    assert (stopped.finish, stopped.stop_reason) == (FinishReason.STOP, ord("l"))
    (ended,) = client.generate("say:hello")
    assert (ended.finish, ended.stop_reason) == (FinishReason.STOP, None)


def test_whole_delivery_is_one_chunk_a_choice(stub):
    sampling = pb.SamplingParams(max_tokens=30, n=3, seed=1, logprobs=2)
    request = pb.GenerateRequest(text="letters", sampling=sampling, delivery=pb.DELIVERY_WHOLE)
    chunks = [response.chunk for kind, response in events(stub.Generate(request)) if kind == "chunk"]
    assert sorted(chunk.choice for chunk in chunks) == [0, 1, 2]
    assert all(len(chunk.token_ids) == len(chunk.logprobs) == 30 for chunk in chunks)


def test_logprobs_come_one_a_token_with_the_alternatives(client):
    (out,) = client.generate("say:hello", SamplingParams(logprobs=3))
    assert [entry.token for entry in out.logprobs] == list(out.token_ids)
    assert all(entry.logprob == -0.5 and len(entry.top) == 3 for entry in out.logprobs)
    assert b"".join(entry.bytes for entry in out.logprobs).startswith(b"hello")


def test_usage_and_timing_add_up(stub):
    request = pb.GenerateRequest(text="letters", sampling=pb.SamplingParams(max_tokens=12, seed=0))
    complete = events(stub.Generate(request))[-1][1].complete
    assert complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (7, 12)
    timing = complete.timing
    assert 0 <= timing.queue_s <= timing.ttft_s
    assert timing.itl.count == len(timing.itl_s) == 11
    assert math.isclose(timing.itl.mean_s, sum(timing.itl_s) / 11, rel_tol=1e-5)
    assert min(timing.itl_s) <= timing.itl.p50_s <= timing.itl.p99_s
    assert math.isclose(timing.itl.p99_s, max(timing.itl_s), rel_tol=1e-5)


def test_chat_and_ids_and_text_are_three_doors_to_one_request(client):
    prompts = [
        "say:same",
        list(b"say:same"),
        [{"role": "system", "content": "say:"}, {"role": "user", "content": "same"}],
    ]
    outputs = client.generate(prompts)
    assert len({(out.prompt_token_ids, out.token_ids, out.text) for out in outputs}) == 1


def test_concurrent_streams_of_mixed_parameters_equal_their_solo_runs(client):
    each = [
        SamplingParams(max_tokens=5 + 3 * i, seed=i, n=1 + i % 3, stop=("xyz",) if i % 4 == 0 else ())
        for i in range(32)
    ]
    prompts = [f"prompt {'x' * (i * 5)}" for i in range(32)]
    together = client.generate(prompts, each, concurrency=32)
    for prompt, params, out in zip(prompts, each, together, strict=True):
        (alone,) = client.generate(prompt, params)
        assert [choice.text for choice in alone.choices] == [choice.text for choice in out.choices]
        assert [choice.token_ids for choice in alone.choices] == [choice.token_ids for choice in out.choices]


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def paced(doubles, serving):
    """A server whose endless requests take half a minute, unless they are stopped."""
    return serving(doubles.paced_assembly(0.005))


def was_stopped(served):
    """True where the engine gave up what ran, and holds nothing more."""
    stats = served.wait_idle()
    return stats.free_pages == stats.total_pages and 0 < stats.output_tokens < ENDLESS.max_tokens // 2


def test_abort_by_id_ends_every_choice_and_then_the_call(paced):
    with grpc.insecure_channel(paced.target) as channel, paced.client() as client:
        sampling = pb.SamplingParams(max_tokens=4000, n=3, seed=0)
        call = rpc.InferenceStub(channel).Generate(pb.GenerateRequest(request_id="target", text="x", sampling=sampling))
        next(call)
        assert next(call).HasField("chunk")
        assert client.abort("target")
        ends = []
        error = refusal(ends.append(r.complete) for r in call if r.HasField("complete"))
        assert error.code() is grpc.StatusCode.CANCELLED
        assert sorted(end.choice for end in ends) == [0, 1, 2]
        assert {end.finish_reason for end in ends} == {pb.FINISH_REASON_CANCELLED}
    assert was_stopped(paced)


def test_abort_of_an_unknown_request_says_so(client, stub):
    assert client.abort("nobody") is False
    with pytest.raises(grpc.RpcError) as caught:
        stub.Abort(pb.AbortRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stop_string_stops_the_engine_too(paced):
    with paced.client() as client:
        (out,) = client.generate("x", replace(ENDLESS, stop=("def",)))
    assert (out.text, out.finish) == ("abc", FinishReason.STOP)
    assert out.usage.completion_tokens == len(out.token_ids) == 6
    assert was_stopped(paced)


def test_the_client_raises_cancelled_when_another_aborts(paced):
    with paced.client() as client:
        deltas = client.stream("x", ENDLESS, request_id="mine")
        next(deltas)
        assert client.abort("mine")
        with pytest.raises(Cancelled):
            list(deltas)
    assert was_stopped(paced)


def test_a_dropped_iterator_stops_its_request(paced):
    with paced.client() as client:
        deltas = client.stream("x", ENDLESS)
        assert len(list(islice(deltas, 2))) == 2
        deltas.close()
        assert was_stopped(paced)


def test_a_closed_channel_stops_its_requests(paced):
    with paced.client() as client:
        streams = [client.stream("x", ENDLESS) for _ in range(3)]
        for deltas in streams:
            next(deltas)
    assert was_stopped(paced)


def test_a_failed_generate_cancels_the_rest(paced):
    with paced.client() as client, pytest.raises(PromptTooLong):
        client.generate(["x" * 5000, "x", "x"], ENDLESS)
    stats = paced.wait_idle()
    assert stats.output_tokens < ENDLESS.max_tokens


def test_the_callers_deadline_reaches_the_engine(paced):
    with paced.client() as client:
        with pytest.raises(DeadlineExceeded):
            list(client.stream("x", ENDLESS, timeout=0.5))
        assert was_stopped(paced)
        seen = []
        paced.assembly.loop.add = seen.append  # takes the request and never runs it
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            list(client.stream("x", ENDLESS, timeout=0.5))
        assert start < seen[0].deadline <= time.monotonic() + 0.5


def test_the_servers_own_limit_on_time_ends_a_request(doubles, serving):
    served = serving(doubles.paced_assembly(0.005), longest=0.5)
    with served.client() as client, pytest.raises(DeadlineExceeded):
        list(client.stream("x", ENDLESS))
    assert was_stopped(served)


def test_an_engine_that_broke_answers_everybody_and_readiness_fails(doubles, serving, caplog):
    assembly = doubles.scripted_assembly()
    gate, broken = threading.Event(), RuntimeError("/secret/path is gone")

    def before_step():
        gate.wait()
        raise broken

    assembly.runner.before_step = before_step
    served = serving(assembly)
    with served.client() as client:
        client.wait_until_ready(10)
        failures = []

        def run():
            with pytest.raises(EngineFault) as caught:
                list(client.stream("x", ENDLESS))
            failures.append(str(caught.value))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        served.wait_for(lambda: served.server.bridge.open_streams == 4)
        gate.set()
        for thread in threads:
            thread.join(10)
        assert len(failures) == 4
        assert not any("secret" in text or "Traceback" in text for text in failures)
        with pytest.raises(Unavailable):
            client.generate("x")
        served.wait_for(lambda: not client.ready())
        assert client.model_info().name == "scripted"  # the process is alive and says so
    assert "secret" in caplog.text


def test_a_reader_that_stops_reading_is_cut_off_and_slows_nobody(doubles, serving):
    served = serving(doubles.scripted_assembly(context=60_000, pages=4096))
    narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    params = SamplingParams(max_tokens=50_000, seed=0, logprobs=20)
    with served.client(options=narrow) as slow, served.client() as quick:
        stuck = slow.stream("x", params)  # not even the first message is read: that write may be the one cut off
        served.wait_for(lambda: served.stats().output_tokens > 0)
        assert quick.generate("say:quick")[0].text == "quick"
        served.wait_for(lambda: served.server.bridge.running == 0)  # cut off without a word from its reader
        assert served.stats().output_tokens < 50_000
        with pytest.raises(Overloaded, match="behind"):
            list(stuck)


def test_output_that_is_never_read_is_given_up_after_the_deadline(doubles, serving, monkeypatch):
    monkeypatch.setattr("jaxinfer_server.grpc_service.UNREAD_SECONDS", 0.1)
    served = serving(doubles.scripted_assembly(), longest=2.0)
    narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    with served.client(options=narrow) as slow:
        stuck = slow.stream("x", SamplingParams(max_tokens=2000, seed=0, logprobs=20))
        next(stuck)
        served.wait_for(lambda: served.server.bridge.running == 0)
        assert served.server.bridge.open_streams == 1  # all of it is made and fits the buffer
        served.wait_for(lambda: served.server.bridge.open_streams == 0)
        with pytest.raises(DeadlineExceeded, match="read"):
            list(stuck)


def test_a_connection_lost_in_the_middle_of_a_write_is_no_fault_of_ours(doubles, serving, caplog):
    served = serving(doubles.scripted_assembly())
    narrow = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    with served.client(options=narrow) as slow:
        next(slow.stream("x", SamplingParams(max_tokens=2000, seed=0, logprobs=20)))
        served.wait_for(lambda: served.server.bridge.running == 0)
    served.wait_for(lambda: served.server.bridge.open_streams == 0)
    assert caplog.text == ""


# ---- the rest of the service -----------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_a_round_trip(client):
    ids = client.tokenize("héllo 🙂")
    assert client.detokenize(ids) == "héllo 🙂"
    assert client.tokenize([{"role": "user", "content": "ab"}]) == [97, 98]
    assert client.detokenize([97, 256]) == "a"
    assert client.detokenize([97, 256], skip_special=False) == "a<eos>"


@pytest.mark.parametrize("token", [-1, 257, 2**32 + 5])
def test_detokenize_refuses_ids_out_of_the_vocabulary(client, token):
    with pytest.raises(RequestError, match=str(token)):
        client.detokenize([token])


def test_tokenize_refuses_what_it_cannot_honour(stub):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    for request in (pb.TokenizeRequest(), pb.TokenizeRequest(chat=chat, bos=True)):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Tokenize(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_model_info_says_what_is_served(client):
    info = client.model_info()
    assert (info.name, info.family, info.vocab_size, info.context) == ("scripted", "scripted", 257, 4096)
    assert list(info.eos_token_ids) == [256]
    assert not info.HasField("bos_token_id")
    assert (info.chat, info.slots, info.pages, info.page_size) == (True, 8, 1024, 16)
    assert not info.recommended_sampling.ListFields()
    assert (info.dtype, info.weights, info.cache_dtype) == ("float32", "int8 by channel", "float32")
    assert [(kernel.operation, kernel.form, kernel.why) for kernel in info.kernels] == [
        ("kv_write", "scripted", "a double has no other")
    ]


def test_a_recommendation_is_shown_and_changes_nothing_unasked(doubles, serving):
    assembly = replace(doubles.scripted_assembly(), sampling={"temperature": 0.25, "top_k": 3})
    with serving(assembly).client() as client:
        shown = client.model_info().recommended_sampling
        assert {field.name for field, _ in shown.ListFields()} == {"temperature", "top_k"}
        assert (shown.temperature, shown.top_k) == (0.25, 3)
        assert defaults_of(client)["sampling.temperature"] == "1.0"


def test_what_a_request_leaves_unset_comes_from_the_assembly(doubles, serving):
    """A field that is set, be it to our own default, is the caller's; the others are the operator's choice."""
    recommended = {"temperature": 0.25, "top_p": 0.5}
    assembly = replace(doubles.scripted_assembly(), sampling=recommended, defaults=SamplingParams(**recommended))
    message = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(temperature=1.0, stop=["s"]))
    params = request_of(assembly, message, None).params
    assert params == SamplingParams(temperature=1.0, top_p=0.5, stop=("s",))
    assert request_of(assembly, pb.GenerateRequest(text="x"), None).params == SamplingParams(**recommended)
    with serving(assembly).client() as client:
        found = defaults_of(client)
    assert (found["sampling.temperature"], found["sampling.top_p"], found["sampling.top_k"]) == ("0.25", "0.5", "0")


def defaults_of(client):
    return {capability.field: capability.default_json for capability in client.capabilities().values()}


def test_reflection_lists_the_services(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"jaxinfer.v1.Inference", "grpc.health.v1.Health"} <= names


def test_only_the_engine_thread_calls_the_runner(scripted, client):
    client.generate(["say:a", "say:b"])
    assert len(scripted.runner.threads) == 1
    assert threading.get_ident() not in scripted.runner.threads
