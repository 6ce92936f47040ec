"""A worker that dies, is stuck or never comes gives the others an error within the stated time."""

import json
import signal

import pytest
import tensorflow as tf

import keras_mirror as km
from tests.multiworker.harness import addresses, environment, run

pytestmark = pytest.mark.xdist_group("workers")  # one cluster at a time, started once for all tests of a file


@pytest.fixture(scope="module")
def ended():
    """Small clusters, all at once: a worker is killed, is stuck, never comes, or goes no further than the greeting."""
    commands, places = [], {}
    for what, timeout, started in (("killed", 60, 2), ("stuck", 60, 2), ("missing", 2, 1), ("left", 20, 2), ("silent", 20, 2)):
        workers = addresses(2)
        for index in range(started):
            places[what, index] = len(commands), workers
            longer = 60 if (what, index) == ("silent", 0) else 0
            commands.append(([what], environment(workers, index, KERAS_MIRROR_TIMEOUT_SECONDS=str(timeout + longer))))
    results = run("fail.py", commands, timeout=150)
    return {key: (*results[place], workers) for key, (place, workers) in places.items()}


def test_a_killed_worker_is_named(ended):
    assert ended["killed", 1][0] == -9
    status, output, workers = ended["killed", 0]
    assert status == 3, output
    assert "WorkerLostError after" in output
    assert f"fit on worker:0: worker:1 ({workers[1]}) does not answer any more: that process has ended" in output
    assert "Start all workers again" in output


def test_a_stuck_worker_ends_in_an_error_within_the_timeout(ended):
    status, output, _ = ended["stuck", 0]
    assert status == 3, output
    assert "a worker did not take part within 5 seconds, though every address still answers: one is stuck" in output


def test_a_missing_worker_is_named_before_anything_starts(ended):
    status, output, workers = ended["missing", 0]
    assert status == 3, output
    assert "WorkersMissingError after" in output
    assert f"worker:0: worker:1 ({workers[1]}) did not arrive within 2 seconds (1 of 2 workers are here)" in output


def test_a_worker_that_leaves_after_the_greeting_is_named_and_the_process_ends(ended):
    assert ended["left", 1][0] == 0
    status, output, workers = ended["left", 0]
    assert status == -signal.SIGKILL, output
    sentence = "worker:0: TensorFlow did not connect the workers within 20 seconds; worker:1 ({}) does not answer."
    assert sentence.format(workers[1]) in output, output


def test_a_chief_that_only_listens_after_the_greeting_does_not_hold_the_others(ended):
    assert ended["silent", 0][0] == 0  # once worker 1 was gone
    status, output, _ = ended["silent", 1]
    assert status == -signal.SIGKILL, output
    sentence = "worker:1: TensorFlow did not connect the workers within 20 seconds; all addresses answer, so one of them is stuck."
    assert sentence in output, output


@pytest.fixture
def tf_config(monkeypatch):
    """A TF_CONFIG of two workers, in a process whose TensorFlow runs already."""
    tf.constant(0)
    config = {"cluster": {"worker": addresses(2)}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_says_when_it_is_made_too_late(tf_config, build_fn):
    with pytest.raises(RuntimeError, match="TensorFlow has run something already.*at the top of the script"):
        km.mirrored_model(build_fn)


def test_says_when_nobody_names_the_workers(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="TF_CONFIG does not say which workers there are.*docs/multiworker.md.*MirroredStrategy"):
        km.MultiWorkerMirroredStrategy()


def test_the_plain_strategy_is_refused_with_what_to_write_instead(monkeypatch, build_fn):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    plain = tf.distribute.MultiWorkerMirroredStrategy()  # of one machine, as nothing names others
    with pytest.raises(TypeError, match="Keras 3 cannot fit under.*write strategy=keras_mirror.MultiWorkerMirroredStrategy"):
        km.mirrored_model(build_fn, strategy=plain)


def test_devices_have_no_place_beside_several_workers(tf_config, build_fn):
    with pytest.raises(ValueError, match="TF_CONFIG names 2 workers.*CUDA_VISIBLE_DEVICES.*unset TF_CONFIG"):
        km.mirrored_model(build_fn, devices=2)
