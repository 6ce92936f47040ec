"""Starts real workers on this machine, and always ends them."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent


@functools.cache
def _wall():
    """A command that puts what follows into a network of its own, as TensorFlow listens to all; empty where not allowed."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return []
    tried = subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True, timeout=10)
    return ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if tried.returncode == 0 else []


def free_ports(n):
    """Ports that nobody uses at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def addresses(n):
    """Addresses of n workers on this machine."""
    return [f"127.0.0.1:{port}" for port in free_ports(n)]


def environment(workers=None, index=None, **variables):
    """What a worker is started with; without workers, a process of its own on one device."""
    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    env.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", PYTHONPATH=str(HERE.parent.parent))
    if workers is not None:
        env["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
    return {**env, **variables}


def run(script, commands, timeout):
    """Runs a script of this folder once for each (arguments, environment), all at once; see `run_commands`."""
    return run_commands([([sys.executable, HERE / script, *args], env) for args, env in commands], timeout)


def run_commands(commands, timeout):
    """Runs one process for each (command, environment) at once, in one network, and waits for all.

    Returns:
        A list of (exit status, output); the status is None for a process that had to be ended.
    """
    job = json.dumps([[[str(word) for word in command], env] for command, env in commands])
    group = subprocess.Popen(
        [*_wall(), sys.executable, __file__, str(timeout)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = group.communicate(job, timeout=timeout + 20)
        return [tuple(each) for each in json.loads(out)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()


def _main(timeout):
    """Inside the wall: the processes of one `run`."""
    end = time.monotonic() + timeout
    processes = []
    try:
        for command, env in json.load(sys.stdin):
            processes.append(_started(command, env))
        print(json.dumps([_ended(process, output, end) for process, output in processes]))
    finally:
        for process, _ in processes:
            _end(process)


def _started(command, env):
    output = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would stop a worker, and with it the others
    return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT), output


def _ended(process, output, end):
    try:
        status = process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = None
        _end(process)
    output.seek(0)
    return status, output.read()


def _end(process):
    process.kill()
    process.wait()


if __name__ == "__main__":
    _main(float(sys.argv[1]))
