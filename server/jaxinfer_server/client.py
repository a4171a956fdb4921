"""A synchronous Python client with the ease of `jaxinfer.LLM`.

Knows: the wire and its errors. Holds one channel; safe to share between threads. Needs neither JAX nor a model.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxinfer.errors import RequestError, Unavailable
from jaxinfer.output import Output, collect, failure
from jaxinfer.request import Delta, Request, SamplingParams
from jaxinfer_server.convert import Prompt, chat_to_wire, delta_from_wire, params_to_wire, prompt_to_wire
from jaxinfer_server.status import error_of
from jaxinfer_server.v1 import inference_pb2 as pb
from jaxinfer_server.v1 import inference_pb2_grpc as rpc

SERVICE = "jaxinfer.v1.Inference"
MAX_RECEIVE_BYTES = 64 * 2**20
_QUICK_SECONDS = 30.0


class Client:
    """Talks to a jaxinfer server at `target`, such as `localhost:50051`.

        with Client("localhost:50051") as client:
            for delta in client.stream("Once upon a time", SamplingParams(seed=7)):
                print(delta.text, end="")

    Failed calls raise the exceptions of `jaxinfer.errors`: RequestError, Overloaded (with `retry_after`), Unavailable,
    Cancelled, DeadlineExceeded, EngineFault.
    """

    def __init__(self, target: str, *, options: Sequence[tuple[str, Any]] = ()) -> None:
        sizes = (("grpc.max_receive_message_length", MAX_RECEIVE_BYTES), ("grpc.max_send_message_length", -1))
        self._channel = grpc.insecure_channel(target, options=(*sizes, *options))
        self._stub = rpc.InferenceStub(self._channel)
        self._check: Any = health_pb2_grpc.HealthStub(self._channel).Check  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what runs and close the channel."""
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[Delta]:
        """The output of one request while it is being made; closing the iterator cancels the request.

        `timeout` (seconds) is the request's deadline. With `n` above 1 the choices come mixed; see `Delta.choice`.
        """
        request = _request(prompt, params, request_id, priority, cache_salt)
        return _deltas(self._stub.Generate(request, timeout=timeout))

    def generate(
        self,
        prompts: str | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        concurrency: int = 64,
    ) -> list[Output]:
        """One Output per prompt, in order; up to `concurrency` of them run at a time.

        `params` is one for all or one each; `timeout` (seconds) is each request's deadline. Raises the first failure,
        and cancels the rest.
        """
        if concurrency < 1:
            raise RequestError(f"concurrency is {concurrency}; expected 1 or more")
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = _one_each(params, len(listed))
        waiting = deque(zip(listed, each, strict=True))
        running: deque[tuple[Any, SamplingParams]] = deque()
        outputs: list[Output] = []
        try:
            while waiting or running:
                while waiting and len(running) < concurrency:
                    prompt, one = waiting.popleft()
                    running.append((self._start_whole(prompt, one, timeout), one))
                outputs.append(_output(*running[0]))
                running.popleft()
        finally:
            for call, _ in running:
                call.cancel()
        return outputs

    def _start_whole(self, prompt: Prompt, params: SamplingParams, timeout: float | None) -> Any:
        request = _request(prompt, params)
        request.delivery = pb.DELIVERY_WHOLE
        request.return_prompt_ids = True
        return self._stub.Generate(request, timeout=timeout)

    def abort(self, request_id: str) -> bool:
        """End a running request by its id; False where no such request was running."""
        with _writing():
            request = pb.AbortRequest(request_id=request_id)
        return self._call(self._stub.Abort, request).aborted

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], *, bos: bool = True) -> list[int]:
        """Token ids of a text or of chat messages, the way `stream` makes them; `bos=False` leaves a text's BOS out."""
        request = pb.TokenizeRequest()
        with _writing():
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.chat.CopyFrom(chat_to_wire(prompt))
        if not bos:
            request.bos = False
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        with _writing():
            request = pb.DetokenizeRequest(token_ids=ids, skip_special=skip_special)
        return self._call(self._stub.Detokenize, request).text

    def model_info(self) -> pb.GetModelInfoResponse:
        """What is being served, and how much of it fits."""
        return self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    def capabilities(self) -> dict[str, pb.Capability]:
        """Every request field that the server honours, by its dotted path."""
        found = self._call(self._stub.GetCapabilities, pb.GetCapabilitiesRequest()).generate
        return {capability.field: capability for capability in found}

    def ready(self) -> bool:
        """True where the server is up, warm and taking requests."""
        try:
            answer = self._check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5.0)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the server takes requests. Raises Unavailable after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.ready():
            if time.monotonic() > deadline:
                raise Unavailable(f"the server was not ready within {timeout} seconds")
            time.sleep(0.1)

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=_QUICK_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from None


def _request(
    prompt: Prompt,
    params: SamplingParams | None,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str = "",
) -> pb.GenerateRequest:
    with _writing():
        request = pb.GenerateRequest(request_id=request_id, priority=priority, cache_salt=cache_salt)
        prompt_to_wire(prompt, request)
        if params is not None:
            request.sampling.CopyFrom(params_to_wire(params))
    return request


@contextmanager
def _writing() -> Iterator[None]:
    """Turns protobuf's refusal of a value (half a surrogate pair, a number of 65 bits) into a RequestError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RequestError(f"the request does not fit its message: {error}") from None


def _deltas(call: Any) -> Iterator[Delta]:
    try:
        for response in call:
            delta = delta_from_wire(response)
            if delta is not None and failure(delta) is None:  # after a failed choice comes the status, which raises
                yield delta
    except grpc.RpcError as error:
        raise error_of(error) from None
    finally:
        call.cancel()


def _output(call: Any, params: SamplingParams) -> Output:
    try:
        accepted = next(call).accepted
        deltas = [delta for response in call if (delta := delta_from_wire(response)) is not None]
    except grpc.RpcError as error:
        raise error_of(error) from None
    request = Request(accepted.request_id, tuple(accepted.prompt_token_ids), params, accepted.seed)
    return collect(request, deltas)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts; expected one for all or one each")
    return params
