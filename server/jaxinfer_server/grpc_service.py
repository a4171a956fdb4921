"""The gRPC door: `jaxinfer.v1.Inference` over a Bridge.

Knows: messages, status codes, the caller's deadline and disconnect. Text is tokenised on worker threads, so that one
huge prompt keeps nobody else waiting. Knows nothing of steps and pages.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

import jaxinfer
from jaxinfer.assembly import Assembly
from jaxinfer.errors import Cancelled, DeadlineExceeded, JaxInferError, Overloaded, RequestError, Unavailable
from jaxinfer.output import failure
from jaxinfer.request import Delta, FinishReason, Request
from jaxinfer_server.bridge import Bridge
from jaxinfer_server.convert import delta_to_wire, sampling_to_wire
from jaxinfer_server.delta_stream import joined
from jaxinfer_server.intake import detokenized, request_of, tokenized
from jaxinfer_server.schema import capabilities, check_known
from jaxinfer_server.status import status_of
from jaxinfer_server.v1 import inference_pb2 as pb
from jaxinfer_server.v1 import inference_pb2_grpc as rpc

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_log = logging.getLogger(__name__)
_TEXT_THREADS = 2
UNREAD_SECONDS = 5.0
"""After its deadline a request has ended; so long may its reader take for what is left."""
_OUR_METHODS = f"/{pb.DESCRIPTOR.services_by_name['Inference'].full_name}/"


class InferenceService(rpc.InferenceServicer):
    """Answers UNAVAILABLE until `open` gives it a model.

    `longest` (seconds) caps every request, whatever deadline its caller sets.
    """

    def __init__(self, longest: float = math.inf) -> None:
        self._longest = longest
        self._opened: tuple[Assembly, Bridge] | None = None
        self._calls = 0
        self._text = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="jaxinfer-text")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-aside")  # Tokenize never delays Generate

    def open(self, assembly: Assembly, bridge: Bridge) -> None:
        """Serve this model from now on."""
        self._opened = (assembly, bridge)

    def close(self) -> None:
        """Let the worker threads go."""
        for threads in (self._text, self._aside):
            threads.shutdown(wait=False, cancel_futures=True)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """One request's output, as a stream."""
        await _answered(context, request, lambda: self._generate(request, context))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a running request by its id."""
        return await _answered(context, request, lambda: self._abort(request))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or messages to ids."""
        return await _answered(context, request, lambda: self._tokenize(request))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Ids to text."""
        return await _answered(context, request, lambda: self._detokenize(request))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """What is being served."""
        return await _answered(context, request, lambda: self._model_info(request))

    async def GetCapabilities(self, request: pb.GetCapabilitiesRequest, context: Context) -> pb.GetCapabilitiesResponse:
        """Which request fields are honoured."""
        return await _answered(context, request, lambda: self._capabilities(request))

    # ---- Generate ----------------------------------------------------------------------------------------------------

    async def _generate(self, message: pb.GenerateRequest, context: Context) -> None:
        assembly, bridge = self._model()
        bridge.check_open()
        with self._seat(assembly):
            deadline = self._deadline(context)
            request = await _on_thread(self._text, lambda: request_of(assembly, message, deadline))
            # Apart from the first message: if that write is cut off, gRPC forgets that the head went with it, sends it
            # again before the status, fails, and the client waits for ever.
            await context.send_initial_metadata(())
            async with _read_until(deadline), bridge.stream(request) as deltas:
                await context.write(_accepted(message, request))
                whole = message.delivery == pb.DELIVERY_WHOLE
                await _send(_whole(deltas) if whole else deltas, context)

    @contextmanager
    def _seat(self, assembly: Assembly) -> Iterator[None]:
        """Bounds the calls that wait to be tokenised; the loop's own queue bounds those after it."""
        most = assembly.engine.slots + assembly.engine.queue
        if self._calls >= most:
            raise Overloaded(f"{self._calls} calls are open, as many as may be; try again later")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def _deadline(self, context: Context) -> float | None:
        left = context.time_remaining()
        seconds = self._longest if left is None else min(left, self._longest)
        return time.monotonic() + seconds if math.isfinite(seconds) else None

    # ---- the rest ----------------------------------------------------------------------------------------------------

    async def _abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        check_known(request)
        if not request.request_id:
            raise RequestError("request_id is empty; expected the id of a running request")
        return pb.AbortResponse(aborted=self._model()[1].abort(request.request_id))

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        check_known(request)
        assembly, _ = self._model()
        return pb.TokenizeResponse(token_ids=await _on_thread(self._aside, lambda: tokenized(assembly, request)))

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        check_known(request)
        assembly, _ = self._model()
        return pb.DetokenizeResponse(text=await _on_thread(self._aside, lambda: detokenized(assembly, request)))

    async def _model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        check_known(request)
        assembly, _ = self._model()
        limits = assembly.runner.limits
        return pb.GetModelInfoResponse(
            name=assembly.name,
            family=assembly.config.family,
            server_version=jaxinfer.__version__,
            vocab_size=assembly.vocab_size,
            context=assembly.context,
            eos_token_ids=sorted(assembly.eos_ids),
            bos_token_id=assembly.tokenizer.bos_id,  # pyright: ignore[reportArgumentType]  (None leaves it unset)
            chat=assembly.chat is not None,
            slots=limits.slots,
            pages=limits.pages,
            page_size=limits.page_size,
            recommended_sampling=sampling_to_wire(assembly.sampling),
            dtype=assembly.engine.dtype,
            weights=assembly.runner.weights,
            cache_dtype=assembly.engine.cache.dtype or assembly.engine.dtype,
            kernels=[pb.Kernel(**kernel._asdict()) for kernel in assembly.runner.kernels],
        )

    async def _capabilities(self, request: pb.GetCapabilitiesRequest) -> pb.GetCapabilitiesResponse:
        check_known(request)
        return pb.GetCapabilitiesResponse(generate=capabilities(self._model()[0].defaults))

    def _model(self) -> tuple[Assembly, Bridge]:
        if self._opened is None:
            raise Unavailable("the model is still loading; try again in a while")
        return self._opened


@asynccontextmanager
async def _read_until(deadline: float | None) -> AsyncIterator[None]:
    """Give up a reader who stopped reading: the loop ends a request at its deadline, but not what waits to be read."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic() + UNREAD_SECONDS):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the output was read; read faster") from None


async def _on_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


class DamageInterceptor(grpc.aio.ServerInterceptor):
    """Hands a message that is no protobuf on as None, which is refused as bad input; gRPC itself answers UNKNOWN."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wrap the deserializer of our own methods."""
        handler = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(_OUR_METHODS):
            return handler
        return handler._replace(request_deserializer=partial(_parsed, handler.request_deserializer))


def _parsed(parse: Callable[[bytes], Message], data: bytes) -> Message | None:
    try:
        return parse(data)
    except DecodeError:
        return None


async def _answered(context: Context, request: Message | None, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, or the call's end with the status of what it raised."""
    try:
        if request is None:
            raise RequestError("the request is no message of this method; expected protobuf as the proto file has it")
        return await work()
    except JaxInferError as error:
        status = status_of(error)
    except grpc.aio.InternalError:  # a write to a connection that is gone
        status = status_of(Cancelled("the connection was lost"))
    except Exception as error:
        _log.exception("a call failed")
        status = status_of(error)
    await context.abort(status.code, status.details, status.metadata)
    raise AssertionError("abort raises")


def _accepted(message: pb.GenerateRequest, request: Request) -> pb.GenerateResponse:
    accepted = pb.Accepted(request_id=request.id, prompt_tokens=len(request.prompt), seed=request.seed)
    if message.return_prompt_ids:
        accepted.prompt_token_ids.extend(request.prompt)
    return pb.GenerateResponse(accepted=accepted)


async def _send(deltas: AsyncIterator[Delta], context: Context) -> None:
    """Write every Delta; once all choices have ended, raise what ended any of them early."""
    failed: JaxInferError | None = None
    async for delta in deltas:
        failed = failed or failure(delta)
        if delta.finish is FinishReason.ERROR and failed is not None:
            raise failed
        for message in delta_to_wire(delta):
            await context.write(message)
    if failed is not None:
        raise failed


async def _whole(deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    """One Delta a choice, when it ends."""
    parts: defaultdict[int, list[Delta]] = defaultdict(list)
    async for delta in deltas:
        parts[delta.choice].append(delta)
        if delta.finish is not None:
            yield joined(parts.pop(delta.choice))
