"""Two real workers with two replicas each give the weights and logs of one device, on each worker."""

import json

import keras
import numpy as np
import pytest

from tests.multiworker.harness import addresses, environment, run

pytestmark = pytest.mark.xdist_group("workers")  # one cluster at a time, started once for all tests of a file

EQUAL = (
    "arrays", "weighted", "unknown_size", "pydataset", "generator",
    "tokens", "by_hand", "loop", "whole_batch", "eager", "files", "resumed",
    "ends_earlier", "files_of_rows", "ends_earlier_unknown_sizes", "by_hand_ends_earlier", "resumed_apart", "from_function",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one device and each of the workers had, all started at once."""
    place = tmp_path_factory.mktemp("workers")
    workers = addresses(2)
    for name in ("alone", "shared"):
        (place / name).mkdir()
    commands = [([place / "one.json", place / "alone", 1, *EQUAL], environment())]
    for index in range(2):
        cases = (*EQUAL, "refused", "read_together")
        commands.append(([place / f"worker{index}.json", place / "shared", 2, *cases], environment(workers, index)))
    ended = run("train.py", commands, timeout=560)
    for status, output in ended:
        print(output)  # how long each case took
        assert status == 0, output[-5000:]
    read = [json.loads((place / name).read_text()) for name in ("one.json", "worker0.json", "worker1.json")]
    return {"place": place, "output": [output for _, output in ended], "one": read[0], "workers": read[1:]}


def assert_equal(worker, one, case):
    """Weights and logs, but for those of single replicas."""
    one, worker = ({name: value for name, value in each[case].items() if not name.startswith("replica_")} for each in (one, worker))
    assert one["weights"]
    assert set(worker) == set(one)
    for name in one:
        for a, b in zip(worker[name], one[name]) if isinstance(one[name], list) else [(worker[name], one[name])]:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=f"{case} {name}")


@pytest.mark.parametrize("case", EQUAL)
def test_every_worker_equals_one_device(results, case):
    for worker in results["workers"]:
        assert_equal(worker, results["one"], case)


def test_three_workers_equal_one_device(results, tmp_path):
    """One replica each: tails of 5 rows (2, 2, 1) and of a single one, which leaves two workers without rows."""
    workers, cases = addresses(3), ("arrays", "unknown_size")
    commands = [([tmp_path / f"{index}.json", tmp_path, 1, *cases], environment(workers, index)) for index in range(3)]
    for index, (status, output) in enumerate(run("train.py", commands, timeout=300)):
        assert status == 0, output[-5000:]
        assert f"trains on the rows of replica {index} (3 replicas on 3 workers)" in output
        worker = json.loads((tmp_path / f"{index}.json").read_text())
        for case in cases:
            assert_equal(worker, results["one"], case)


def test_every_replica_of_every_worker_has_its_rows_in_the_logs(results):
    # 8, 8, 8 and 5 rows on 4 replicas: 2, 2, 2 and then 2, 1, 1, 1.
    for worker in results["workers"]:
        assert [worker["weighted"][f"replica_{i}/examples"] for i in range(4)] == [[8.0] * 2, [7.0] * 2, [7.0] * 2, [7.0] * 2]


def test_all_metrics_are_read_in_one_message(results):
    for worker in results["workers"]:
        read = worker["read_together"]
        assert len(read["collectives"]) == 2, read["collectives"]  # one message: an operation for each of the worker's replicas
        assert set(read["results"]) == {"loss", "mae", "mse"}
        assert read["results"] == pytest.approx(read["logs"], rel=1e-6)


def test_says_which_strategy_and_which_rows(results):
    for index, output in enumerate(results["output"][1:]):
        assert f"training with MultiWorkerMirroredStrategy, because TF_CONFIG names 2 workers; this is worker:{index}" in output
        assert f"worker:{index} reads all of the data and trains on the rows of replica {2 * index} to {2 * index + 1}" in output


def test_says_who_reads_rows_of_its_own(results):
    for index, output in enumerate(results["output"][1:]):
        assert f"worker:{index} reads the dataset that it made itself (AutoShardPolicy.OFF) and trains on its rows" in output
        assert "KM207" not in output  # some of it is sharded by hand, as it should be


def test_the_chief_leaves_one_complete_file_of_each_kind(results):
    place = results["place"] / "shared"
    for name in ("best.keras", "model.keras"):
        saved = keras.saving.load_model(place / name)
        saved_weights = [w.ravel() for w in saved.get_weights()]
        for a, b in zip(saved_weights, results["one"]["files"]["weights"]):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    lines = (place / "log.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("epoch,")
    assert json.loads((place / "backup" / "training_metadata.json").read_text())["epoch"] == 3
    alone = results["place"] / "alone"
    assert len(list(place.rglob("*tfevents*"))) == len(list(alone.rglob("*tfevents*"))) > 0
    files = [{p.name for p in folder.iterdir() if not p.name.startswith("rows-")} for folder in (place, alone)]
    assert files[0] == files[1]  # beside the rows that each worker reads in `files_of_rows`


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("batch", ["WorkersDifferError: fit: ", "batch_size is 8 on worker:0 and 16 on worker:1"]),
        ("arrays", ["WorkersDifferError: fit: ", "array[0] is [29, 6] on worker:0 and [28, 6] on worker:1"]),
        ("size", ["WorkersDifferError: ", "number of batches is 4 on worker:0 and 3 on worker:1"]),
        ("policy", ["WorkersDifferError: ", "AutoShardPolicy is AUTO on worker:0 and OFF on worker:1"]),
        ("no files", ["ValueError: AutoShardPolicy.FILE: the dataset does not read from a list of files", "AutoShardPolicy.DATA"]),
        ("one file", ["ValueError: AutoShardPolicy.FILE: the dataset reads 1 file(s)", "the 2 workers", "more files"]),
        ("ended", ["WorkersDifferError: the data ended on worker:1 while there was more on worker:0"]),
        ("seed", ["WorkersDifferError: fit: ", "keras.utils.set_random_seed", "on worker:0 and", "on worker:1"]),
        ("weights", ["WorkersDifferError: fit: ", "checksum of weight sequential", "/kernel is", "on worker:0 and", "on worker:1"]),
        ("model", ["WorkersDifferError: building the model: ", "the number of weights is 4 on worker:0 and 8 on worker:1"]),
        ("check", ["ValueError: check: the model was made for several workers", "in one process", "build_fn, devices=4), batch)."]),
        ("audit_data", ["ValueError: audit_data: this process holds 2 of 4 replicas", "as in audit_data(data, 4)."]),
        ("goes on", ["nothing was raised"]),
    ],
)
def test_what_differs_is_named_on_every_worker(results, name, fragments):
    sentences = [worker["refused"][name] for worker in results["workers"]]
    assert sentences[0] == sentences[1]
    for fragment in fragments:
        assert fragment in sentences[0]
