"""From a model reference to a server that answers, and to its orderly end.

Knows: the order of binding, loading, warm-up and readiness; signals; health. The port answers health checks from the
first moment; it says SERVING only while a request would be taken and answered.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxinfer.assembly import DEFAULT_ENGINE, Assembly, assemble
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.request import Sampling
from jaxinfer_server.bridge import Bridge, BridgeLimits
from jaxinfer_server.grpc_service import DamageInterceptor, InferenceService
from jaxinfer_server.v1 import inference_pb2 as pb
from jaxinfer_server.v1 import inference_pb2_grpc as rpc

SERVICE: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH_PERIOD = 0.2
_LOADER = "jaxinfer-load"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """host, port: where to listen; port 0 takes a free one. longest: seconds that any request may take. grace: seconds
    that running requests get after SIGTERM. receive_bytes: of the largest request message.
    """

    host: str = "127.0.0.1"
    port: int = 50_051
    longest: float = 600.0
    grace: float = 30.0
    receive_bytes: int = 4 * 2**20
    bridge: BridgeLimits = field(default_factory=BridgeLimits)

    def __post_init__(self) -> None:
        for name, low in (("longest", 0), ("grace", 0), ("receive_bytes", 1023)):
            if not getattr(self, name) > low:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number above {low}")
        if not 0 <= self.port < 65_536:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")


DEFAULT_OPTIONS = ServeOptions()


def address(host: str, port: int) -> str:
    """HOST:PORT, with the brackets that an IPv6 host needs."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _print(line: str) -> None:
    print(line, flush=True)


class Server:
    """One gRPC server and its engine thread. Call start, open, drain, close, in this order, in one event loop."""

    def __init__(self, options: ServeOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self.bridge: Bridge | None = None
        self._service = InferenceService(options.longest)
        self._health: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind and answer health checks with NOT_SERVING; returns the port. Raises ConfigError where it cannot."""
        self._server = grpc.aio.server(interceptors=(DamageInterceptor(),), options=_channel_options(self.options))
        rpc.add_InferenceServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)  # pyright: ignore[reportAttributeAccessIssue]
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._say(serving=False)
        place = address(self.options.host, self.options.port)
        try:
            port = self._server.add_insecure_port(place)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {place}: the port is taken, or no address of this machine is called so"
            ) from None
        await self._server.start()
        return port

    async def open(self, assembly: Assembly) -> None:
        """Start the engine thread and take requests."""
        self.bridge = Bridge(assembly.loop, assembly.tokenizer, self.options.bridge)
        self.bridge.start()
        self._service.open(assembly, self.bridge)
        await self._say(serving=True)
        self._watch = asyncio.create_task(self._follow(self.bridge))

    async def drain(self) -> bool:
        """Take no new request, and wait for those that run, `grace` seconds at most; True where all ended."""
        await self._say(serving=False)
        return self.bridge is None or await self.bridge.drain(self.options.grace)

    async def close(self) -> None:
        """End what is left, the engine thread and the listening port."""
        if self._watch is not None:
            self._watch.cancel()
        if self.bridge is not None:
            await self.bridge.close()
        await self._server.stop(1.0)
        self._service.close()

    async def _follow(self, bridge: Bridge) -> None:
        """Keep the health service equal to what the bridge says of itself."""
        said = True
        while True:
            if bridge.ready is not said:
                said = bridge.ready
                await self._say(serving=said)
                _log.warning("the server is %s", "ready again" if said else "not ready")
            await asyncio.sleep(_HEALTH_PERIOD)

    async def _say(self, *, serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, answer.SERVING if serving else answer.NOT_SERVING)


def serve(
    model: str | Callable[[], Assembly],
    engine: EngineConfig = DEFAULT_ENGINE,
    options: ServeOptions = DEFAULT_OPTIONS,
    *,
    say: Callable[[str], None] = _print,
    progress: bool = False,
    sampling: Sampling = "none",
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code of the process.

    The first signal drains: running requests finish within `options.grace` seconds. A second one ends everything at
    once. `model` is a reference, loaded with `engine` and `sampling`, or a function that makes the Assembly. `say` gets
    a line when the port is bound, for each kernel that was chosen, when requests are taken, and when the server drains.
    Raises CheckpointError or ConfigError.
    """
    load = partial(assemble, model, engine, progress=progress, sampling=sampling) if isinstance(model, str) else model
    return asyncio.run(_serve(load, options, say))


async def _serve(load: Callable[[], Assembly], options: ServeOptions, say: Callable[[str], None]) -> int:
    signals = _Signals()
    server = Server(options)
    say(f"listening on {address(options.host, await server.start())}")
    try:
        assembly = await signals.first_or(_in_thread(load))
        if assembly is None:
            return 0
        await server.open(assembly)
        for kernel in assembly.runner.kernels:
            say(f"kernel {kernel.operation}: {kernel.form}, {kernel.why}")
        say(f"ready: {assembly.name}")
        await signals.first.wait()
        say(f"draining: {server.bridge.open_streams if server.bridge else 0} requests are running")
        finished = await signals.second_or(server.drain())
        return 0 if finished else 1
    finally:
        await server.close()


class _Signals:
    """SIGTERM and SIGINT as two events: the first asks to drain, the second to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._arrive)

    def _arrive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def first_or(self, work: Any) -> Any:
        """The result of `work`, or None where the first signal comes before it."""
        return await _race(work, self.first)

    async def second_or(self, work: Any) -> Any:
        """The result of `work`, or None where the second signal comes before it."""
        return await _race(work, self.second)


async def _race(work: Any, event: asyncio.Event) -> Any:
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


def _in_thread(load: Callable[[], Assembly]) -> "asyncio.Future[Assembly]":
    """Run `load` on a daemon thread: a process that is told to end does not wait for a checkpoint to load."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Assembly] = loop.create_future()

    def settle(result: Assembly | None, error: BaseException | None) -> None:
        if loaded.done():
            return
        if error is not None:
            loaded.set_exception(error)
        else:
            loaded.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, failure = None, None
        try:
            result = load()
        except BaseException as error:
            failure = error
        if not loop.is_closed():  # else the process was told to end meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=_LOADER, daemon=True).start()
    return loaded


def loading() -> bool:
    """True while a model is being loaded or compiled in this process, also after `serve` was told to end meanwhile."""
    return any(thread.name == _LOADER for thread in threading.enumerate())


def _channel_options(options: ServeOptions) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a silent half of the traffic
        ("grpc.max_receive_message_length", options.receive_bytes),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.keepalive_time_ms", 30_000),  # a client that vanished without a word is found out
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    )
