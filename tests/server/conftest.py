"""A server of the scripted model on a free port, inside this process, so that a test sees both sides."""

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from jaxinfer.assembly import Assembly
from jaxinfer_server.client import Client
from jaxinfer_server.launch import ServeOptions, Server
from jaxinfer_server.v1 import inference_pb2_grpc as rpc


@dataclass
class Running:
    """A server that runs on a thread of its own."""

    server: Server
    assembly: Assembly
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def runner(self) -> Any:
        return self.assembly.runner

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's event loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def client(self, **options: Any) -> Client:
        return Client(self.target, **options)

    def stats(self) -> Any:
        return self.call(self.server.bridge.stats())

    def wait_idle(self) -> Any:
        """The counters once nothing runs any more."""
        self.wait_for(lambda: self.server.bridge.open_streams == 0)
        self.wait_for(lambda: self.stats().running == self.stats().waiting == 0)
        return self.stats()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Return once `condition` holds; fail where it never does."""
        for _ in range(int(seconds / 0.01)):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError(f"still not so after {seconds} seconds")


@contextmanager
def running(assembly: Assembly, options: ServeOptions) -> Iterator[Running]:
    """Serve `assembly` while the block runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    server = Server(options)
    try:
        port = call(server.start())
        try:
            call(server.open(assembly))
            yield Running(server, assembly, port, loop)
        finally:
            call(server.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="session")
def doubles() -> ModuleType:
    """The scripted model (doubles.py)."""
    spec = importlib.util.spec_from_file_location("server_doubles", Path(__file__).with_name("doubles.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serving() -> Iterator[Callable[..., Running]]:
    """`serving(assembly, **options)` starts a server that ends with the test."""
    with ExitStack() as stack:

        def start(assembly: Assembly, **options: Any) -> Running:
            return stack.enter_context(running(assembly, ServeOptions(port=0, **options)))

        yield start


@pytest.fixture(scope="module")
def scripted(doubles: ModuleType) -> Iterator[Running]:
    """A server of the scripted model, shared by the tests of a module."""
    with running(doubles.scripted_assembly(), ServeOptions(port=0)) as served:
        yield served


@pytest.fixture
def client(scripted: Running) -> Iterator[Client]:
    """A client of it."""
    with scripted.client() as connected:
        yield connected


@pytest.fixture
def channel(scripted: Running) -> Iterator[grpc.Channel]:
    """A bare channel to it."""
    with grpc.insecure_channel(scripted.target) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> rpc.InferenceStub:
    """The generated stub on that channel."""
    return rpc.InferenceStub(channel)
