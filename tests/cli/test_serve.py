"""`serve` as a process: what a signal does while the model is still being made ready."""

import signal
import subprocess
import sys

WARMING = """
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from jaxinfer.cli import main
from jaxinfer_server import launch

def assemble(*arguments, **options):
    with ThreadPoolExecutor(1) as pool:  # as XLA compiles: on threads that Python waits for when it ends
        jobs = [pool.submit(sleep, 120), pool.submit(sleep, 120)]
        print("compiling", flush=True)
        return jobs[1].result()

launch.assemble = assemble
main(["serve", "demo", "--port", "0"])
"""


def test_a_signal_during_warm_up_ends_the_process():
    with subprocess.Popen([sys.executable, "-c", WARMING], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("listening on ")
            assert server.stdout.readline() == "compiling\n"
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()
