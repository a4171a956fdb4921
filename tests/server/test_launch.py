"""A server process and its signals: the scripted model behind the real `serve`."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from jaxinfer.errors import CheckpointError, ConfigError, Unavailable
from jaxinfer.request import FinishReason, SamplingParams
from jaxinfer_server.bridge import BridgeLimits
from jaxinfer_server.client import Client
from jaxinfer_server.launch import ServeOptions, Server, address, serve

DOUBLES = Path(__file__).with_name("doubles.py")
LONG = SamplingParams(max_tokens=60, seed=0)
ENDLESS = SamplingParams(max_tokens=4000, seed=0)


@contextmanager
def process(grace: float):
    """A server process of the scripted model, 10 ms a step; yields it and its address."""
    command = [sys.executable, str(DOUBLES), str(grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        try:
            lines = iter(server.stdout.readline, "")
            target = next(line for line in lines if line.startswith("listening on ")).split()[-1]
            assert next(lines).startswith("kernel kv_write: scripted")
            assert next(lines).startswith("ready: scripted")
            yield server, target
        finally:
            server.kill()


def test_sigterm_lets_streams_finish_refuses_new_ones_and_exits_with_0():
    with process(grace=30) as (server, target), Client(target) as client, Client(target) as late:
        late.wait_until_ready(10)
        deltas = client.stream("letters", LONG)
        found = [next(deltas)]
        server.send_signal(signal.SIGTERM)
        while late.ready():
            time.sleep(0.01)
        with pytest.raises(Unavailable):
            late.generate("x")
        found += deltas
        assert found[-1].finish is FinishReason.LENGTH
        assert sum(len(delta.token_ids) for delta in found) == 60
        assert server.wait(20) == 0


def test_grace_ends_what_does_not_finish():
    with process(grace=0.2) as (server, target), Client(target) as client:
        deltas = client.stream("letters", ENDLESS)
        next(deltas)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(Unavailable, match="stopped"):
            list(deltas)
        assert server.wait(20) == 1


def test_a_second_signal_ends_at_once():
    with process(grace=600) as (server, target), Client(target) as client:
        deltas = client.stream("letters", ENDLESS)
        next(deltas)
        server.send_signal(signal.SIGINT)
        while client.ready():
            time.sleep(0.01)
        server.send_signal(signal.SIGINT)
        with pytest.raises(Unavailable):
            list(deltas)
        assert server.wait(20) == 1


def test_an_idle_server_ends_at_once():
    with process(grace=600) as (server, _):
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_a_killed_client_frees_its_pages(doubles, serving):
    served = serving(doubles.paced_assembly(0.01))
    script = (
        "import sys; from jaxinfer_server.client import Client; from jaxinfer.request import SamplingParams\n"
        "for delta in Client(sys.argv[1]).stream('x', SamplingParams(max_tokens=4000)): print(delta.text, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", script, served.target], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline()
        assert served.stats().running == 1
        os.kill(client.pid, signal.SIGKILL)
    stats = served.wait_idle()
    assert stats.free_pages == 1024
    assert stats.output_tokens < 2000  # of 4000


def test_health_answers_not_serving_while_the_model_loads(doubles):
    loading, loaded = threading.Event(), threading.Event()
    ports, lines = [], []

    def load():
        loading.set()
        loaded.wait(30)
        return doubles.scripted_assembly()

    def say(line):
        lines.append(line)
        if line.startswith("listening"):
            ports.append(int(line.rpartition(":")[2]))

    def client():
        loading.wait(30)
        with Client(f"127.0.0.1:{ports[0]}") as early:
            answers.append(early.ready())
            try:
                early.generate("x")
            except Unavailable as error:
                answers.append(str(error))
            loaded.set()
            early.wait_until_ready(10)
            answers.append(early.generate("say:warm")[0].text)
        os.kill(os.getpid(), signal.SIGTERM)

    answers = []
    thread = threading.Thread(target=client)
    thread.start()
    assert serve(load, options=ServeOptions(port=0), say=say) == 0
    thread.join(10)
    assert answers[0] is False
    assert "loading" in answers[1]
    assert answers[2] == "warm"
    assert [line.split(":")[0].split()[0] for line in lines] == ["listening", "kernel", "ready", "draining"]
    assert lines[1] == "kernel kv_write: scripted, a double has no other"


def test_a_signal_while_loading_ends_the_process_at_once():
    forever = threading.Event()
    try:

        def load():
            os.kill(os.getpid(), signal.SIGTERM)
            forever.wait(60)

        assert serve(load, options=ServeOptions(port=0), say=lambda line: None) == 0
    finally:
        forever.set()


def test_an_unknown_model_is_the_callers_error():
    def load():
        raise CheckpointError("no model is called nothing")

    with pytest.raises(CheckpointError, match="nothing"):
        serve(load, options=ServeOptions(port=0), say=lambda line: None)


def test_a_port_that_is_taken_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(lambda: None, options=ServeOptions(port=port), say=lambda line: None)


def test_a_host_that_is_not_here_is_said():
    with pytest.raises(ConfigError, match=r"cannot listen on nowhere\.invalid:0: .*no address of this machine"):
        serve(lambda: None, options=ServeOptions(host="nowhere.invalid", port=0), say=lambda line: None)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_is_spelled_either_way(host):
    assert address(host, 5) == "[::1]:5"


def test_the_default_is_this_machine_only():
    assert ServeOptions().host == "127.0.0.1"
    assert ServeOptions().port == 50_051


@pytest.mark.parametrize("bad", [{"port": -1}, {"port": 65_536}, {"longest": 0}, {"grace": -1}, {"receive_bytes": 0}])
def test_options_are_checked(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ServeOptions(**bad)


def test_health_follows_the_bridge(doubles, serving):
    assembly = doubles.scripted_assembly()
    gate = threading.Event()
    assembly.runner.before_step = gate.wait
    served = serving(assembly, bridge=BridgeLimits(stall=0.1))
    with served.client() as client:
        client.wait_until_ready(10)
        call = threading.Thread(target=lambda: client.generate("x", LONG))
        call.start()
        served.wait_for(lambda: not client.ready())
        gate.set()
        served.wait_for(client.ready)
        call.join(10)


def test_a_second_server_on_a_port_is_refused(doubles, serving):
    served = serving(doubles.scripted_assembly())
    other = Server(ServeOptions(port=served.port))
    with pytest.raises(ConfigError, match="cannot listen"):
        served.call(other.start())
    with grpc.insecure_channel(served.target) as channel:
        grpc.channel_ready_future(channel).result(10)
