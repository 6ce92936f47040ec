"""A process beside this one that ends it where it waits without end: no TensorFlow, and started as a script."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading


@contextlib.contextmanager
def watched(cluster, timeout):
    """Kills this process, after a line on who does not answer, if the body takes longer than `timeout` seconds.

    For TensorFlow's constructor, which waits for ever for a worker that leaves in that moment. No
    thread or signal handler of Python's runs meanwhile, as it holds the interpreter's lock.

    Args:
        cluster: The `Cluster` whose workers TensorFlow connects.
        timeout: Seconds.
    """
    job = {
        "name": cluster.this.name,
        "timeout": timeout,
        "others": [[worker.job, worker.index, worker.address] for worker in cluster.workers if worker is not cluster.this],
    }
    command = [sys.executable, "-S", str(pathlib.Path(__file__).resolve()), json.dumps(job), str(os.getpid())]
    beside = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        beside.stdin.close()  # it ends with this, and so it does if this process dies
        beside.wait()


def _main(job, pid):
    from cluster import Worker, answers  # a script's own folder comes first

    def give_up():
        silent = [str(worker) for worker in (Worker(*each) for each in job["others"]) if not answers(worker)]
        who = f"{', '.join(silent)} does not answer." if silent else "all addresses answer, so one of them is stuck."
        sentence = f"{job['name']}: TensorFlow did not connect the workers within {job['timeout']:g} seconds; {who}"
        print(sentence, file=sys.stderr, flush=True)
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    timer = threading.Timer(job["timeout"], give_up)
    timer.daemon = True
    timer.start()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), int(sys.argv[2]))
