"""The workers of a training, and how they meet before TensorFlow starts: sockets alone, no TensorFlow."""

import dataclasses
import json
import os
import socket
import threading
import time

_HELLO = "keras_mirror worker"
_LONGEST = 1 << 20  # bytes of a greeting
_PATIENCE = 2.0  # seconds for one connection


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process of a training.

    Attributes:
        job: `"chief"` or `"worker"`, as in `TF_CONFIG`.
        index: int, which of that job.
        address: `"host:port"`.
    """

    job: str
    index: int
    address: str

    @property
    def name(self):
        """As in TensorFlow's own messages, e.g. `"worker:1"`."""
        return f"{self.job}:{self.index}"

    def __str__(self):
        return f"{self.name} ({self.address})"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """All workers of a training, the chief first, and which of them this process is."""

    workers: tuple
    me: int

    @property
    def this(self):
        """This process's `Worker`."""
        return self.workers[self.me]


def cluster_of(spec, task_type, task_id):
    """The `Cluster` of a dict of job to addresses, and this process's place in it.

    Raises:
        ValueError: For parameter servers and evaluators, a place that does not exist, or an address that is named twice.
    """
    spec = {job: list(addresses.values()) if isinstance(addresses, dict) else list(addresses) for job, addresses in spec.items()}
    strange = sorted(set(spec) - {"chief", "worker", "master"})
    if strange or task_type not in spec:
        what = f"the job {strange[0]!r}" if strange else f"no job {task_type!r}, which this process claims to be of"
        raise ValueError(
            f"TF_CONFIG: its cluster has {what}; MultiWorkerMirroredStrategy trains with the jobs 'chief' (at most one) "
            "and 'worker'."
        )
    jobs = sorted(spec, key=lambda job: job == "worker")
    workers = tuple(Worker(job, index, address) for job in jobs for index, address in enumerate(spec[job]))
    here = [place for place, worker in enumerate(workers) if (worker.job, worker.index) == (task_type, task_id)]
    if not here:
        raise ValueError(
            f"TF_CONFIG: this process is {task_type}:{task_id}, but the cluster names only "
            f"{', '.join(worker.name for worker in workers)}; give each process an index of its own, from 0."
        )
    addresses = [worker.address for worker in workers]
    twice = [worker for worker in workers if addresses.count(worker.address) > 1]
    if twice:
        raise ValueError(f"TF_CONFIG: {twice[0].name} and {twice[1].name} have the same address {twice[0].address}.")
    return Cluster(workers, here[0])


def from_environment(environ=None):
    """The `Cluster` that the environment variable `TF_CONFIG` describes, or None where it describes none.

    Raises:
        ValueError: If `TF_CONFIG` is not JSON of the form that TensorFlow documents.
    """
    text = (os.environ if environ is None else environ).get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
        spec, task = config.get("cluster") or {}, config.get("task") or {}
        if not spec:
            return None
        place = str(task["type"]), int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", '
            f'"index": 0}}}}, and is {text[:200]!r} ({type(error).__name__}: {error}).'
        ) from None
    return cluster_of(spec, *place)


class WorkersMissingError(RuntimeError):
    """Some workers did not arrive within the stated time, or cannot be reached at the addresses in `TF_CONFIG`."""


def meet(cluster, facts, timeout, clock=time.monotonic):
    """Waits until all workers have greeted each other, and returns what each says about itself.

    Every worker listens at its own address, which TensorFlow's server takes over afterwards, and
    greets the others at theirs until each was met once, in either direction.

    Args:
        cluster: The `Cluster`.
        facts: Dict for JSON, told to the others.
        timeout: Seconds to wait.
        clock: Function that returns seconds.

    Returns:
        A list of the workers' facts, in the order of `cluster.workers`.

    Raises:
        WorkersMissingError: With the names of those who did not arrive.
        OSError: If this worker's own port is taken.
    """
    greeting = {"hello": _HELLO, "worker": cluster.me, "of": len(cluster.workers), "facts": facts}
    met = {cluster.me: facts}
    end = clock() + timeout
    with _Listener(cluster, greeting, met):
        while len(met) < len(cluster.workers):
            for place in range(len(cluster.workers)):
                if place not in met:
                    _greet(cluster.workers[place], greeting, met)
            if len(met) < len(cluster.workers):
                if clock() >= end:
                    raise WorkersMissingError(_who_is_missing(cluster, met, timeout))
                time.sleep(0.05)
    return [met[place] for place in range(len(cluster.workers))]


def _who_is_missing(cluster, met, timeout):
    missing = [worker for place, worker in enumerate(cluster.workers) if place not in met]
    return (
        f"{cluster.this.name}: {', '.join(str(worker) for worker in missing)} did not arrive within {timeout:g} seconds "
        f"({len(met)} of {len(cluster.workers)} workers are here). Is each of them running with the same addresses in TF_CONFIG, "
        "and are these reachable from here? timeout_seconds= of MultiWorkerMirroredStrategy sets how long to wait."
    )


def answers(worker, patience=1.0):
    """Whether something accepts connections at the worker's address."""
    try:
        with socket.create_connection(_host_and_port(worker.address), patience):
            return True
    except (OSError, ValueError):
        return False


def _host_and_port(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _greet(worker, greeting, met):
    try:
        with socket.create_connection(_host_and_port(worker.address), _PATIENCE) as connection:
            connection.settimeout(_PATIENCE)
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            _note(connection.makefile("rb").readline(_LONGEST), met, greeting["of"])
    except OSError:
        pass  # not there yet


def _note(line, met, of):
    try:
        said = json.loads(line)
        if said["hello"] == _HELLO and said["of"] == of and 0 <= said["worker"] < of:
            met[said["worker"]] = said["facts"]
            return True
    except (ValueError, KeyError, TypeError):
        pass  # somebody else
    return False


class _Listener:
    """Answers greetings at this worker's address while entered."""

    def __init__(self, cluster, greeting, met):
        self._answer = json.dumps(greeting).encode() + b"\n"
        self._met, self._of = met, greeting["of"]
        self._server = _listen(cluster.this)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.settimeout(_PATIENCE)
                    if _note(connection.makefile("rb").readline(_LONGEST), self._met, self._of):
                        connection.sendall(self._answer)
                except OSError:
                    pass

    def __enter__(self):
        self._server.settimeout(0.1)  # closing a socket does not wake a thread that waits in accept
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._server.close()
        self._thread.join()


def _listen(worker):
    host, port = _host_and_port(worker.address)
    try:
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError:
            return socket.create_server(("", port), backlog=128)  # a name of this machine that only others can resolve
    except OSError as error:
        raise OSError(
            f"{worker.name} cannot listen on port {port}, which TF_CONFIG gives it ({error.strerror}); another process, perhaps "
            "of an earlier run, holds it."
        ) from None
