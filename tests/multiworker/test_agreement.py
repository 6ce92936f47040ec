"""Sentences on what differs between workers, and workers that meet: no TensorFlow needed."""

import json
import socket
import threading

import pytest

from keras_mirror import agreement, cluster
from tests.multiworker.harness import addresses, free_ports

NAMES = ["chief:0", "worker:0", "worker:1"]


def test_workers_that_say_the_same_do_not_differ():
    assert agreement.differences(NAMES, [{"a": 1, "b": [["x", 2]]}] * 3) == []


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ([{"size": 8}, {"size": 8}, {"size": 4}], "size is 8 on chief:0 and worker:0 and 4 on worker:1"),
        ([{"size": 8}, {}, {"size": 8}], "size is 8 on chief:0 and worker:1 and unset on worker:0"),
        (
            [{"weight": ["a", "b"]}] * 2 + [{"weight": ["a"]}],
            "the number of weights is 2 on chief:0 and worker:0 and 1 on worker:1",
        ),
        (
            [{"weight": [["k", "(2,)"], ["b", "(1,)"]]}] * 2 + [{"weight": [["k", "(2,)"], ["b", "(3,)"]]}],
            "weight b is (1,) on chief:0 and worker:0 and (3,) on worker:1",
        ),
        (
            [{"weight": [["k", "(2,)"]]}] * 2 + [{"weight": [["b", "(2,)"]]}],
            "weight[0] is k (2,) on chief:0 and worker:0 and b (2,) on worker:1",
        ),
        (
            [{"array": [[29, 6]]}] * 2 + [{"array": [[28, 6]]}],
            "array[0] is [29, 6] on chief:0 and worker:0 and [28, 6] on worker:1",
        ),
    ],
)
def test_says_who_differs_in_what(said, sentence):
    assert agreement.differences(NAMES, said) == [sentence]
    with pytest.raises(agreement.WorkersDifferError, match="fit: the workers must do the same"):
        agreement.check("fit", NAMES, said)


def config(cluster, task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_reads_tf_config_with_the_chief_first():
    spec = {"worker": ["b:1", "c:2"], "chief": ["a:3"]}
    found = cluster.from_environment(config(spec, {"type": "worker", "index": 1}))
    assert [str(worker) for worker in found.workers] == ["chief:0 (a:3)", "worker:0 (b:1)", "worker:1 (c:2)"]
    assert found.this.name == "worker:1"


@pytest.mark.parametrize("text", ["", "{}", '{"task": {"type": "worker", "index": 0}}'])
def test_no_cluster_in_the_environment(text):
    assert cluster.from_environment({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("environ", "fragment"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG must be JSON such as"),
        (config({"worker": ["a:1"]}, {}), "TF_CONFIG must be JSON such as"),
        (config({"worker": ["a:1"]}, {"type": "worker", "index": 1}), "the cluster names only worker:0"),
        (config({"worker": ["a:1", "a:1"]}, {"type": "worker", "index": 1}), "worker:0 and worker:1 have the same address a:1"),
        (config({"worker": ["a:1"], "ps": ["b:1"]}, {"type": "worker", "index": 0}), "the job 'ps'"),
    ],
)
def test_refuses_a_malformed_tf_config(environ, fragment):
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        cluster.from_environment(environ)
    assert fragment in str(error.value)


def clusters(names, addresses_seen_by):
    """One `Cluster` for each worker, with the addresses that it was given."""
    workers = [tuple(cluster.Worker("worker", i, address) for i, address in enumerate(seen)) for seen in addresses_seen_by]
    return [cluster.Cluster(seen, me) for me, seen in enumerate(workers[:names])]


def meet_all(given, timeout=10.0):
    results = [None] * len(given)

    def one(me):
        try:
            results[me] = cluster.meet(given[me], {"from": me}, timeout)
        except Exception as error:
            results[me] = error

    threads = [threading.Thread(target=one, args=(me,)) for me in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_workers_meet_and_free_their_ports():
    seen = addresses(3)
    assert meet_all(clusters(3, [seen] * 3)) == [[{"from": 0}, {"from": 1}, {"from": 2}]] * 3
    for address in seen:
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()


def test_names_who_does_not_arrive():
    seen = addresses(3)
    results = meet_all(clusters(2, [seen] * 3), timeout=0.3)
    for me, error in enumerate(results):
        assert isinstance(error, cluster.WorkersMissingError)
        assert f"worker:{me}: worker:2 ({seen[2]}) did not arrive within 0.3 seconds (2 of 3 workers are here)" in str(error)


def test_a_wrong_port_is_found_by_the_other_direction():
    seen = addresses(2)
    wrong = [seen[0], addresses(1)[0]]
    assert meet_all(clusters(2, [wrong, seen])) == [[{"from": 0}, {"from": 1}]] * 2  # their facts then say what differs


def test_a_stranger_on_the_port_is_no_worker():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        seen = [*addresses(1), f"127.0.0.1:{stranger.getsockname()[1]}"]
        (error,) = meet_all(clusters(1, [seen]), timeout=0.2)
    assert isinstance(error, cluster.WorkersMissingError) and "worker:1" in str(error)


def test_says_when_its_own_port_is_taken():
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        (error,) = meet_all(clusters(1, [[f"127.0.0.1:{port}", *addresses(1)]]), timeout=0.2)
    assert f"worker:0 cannot listen on port {port}" in str(error)
