import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.zeros((4 if index < 2 else 1, 6)), np.zeros((4 if index < 2 else 1, 1))


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (lambda: 29, {"batch_size": 8}, [(3, 8, (4, 4)), (1, 5, (3, 2))]),
        (lambda: (np.zeros((33, 6)), np.zeros(33)), {}, [(1, 32, (16, 16)), (1, 1, (1, 0))]),
        (lambda: {"a": np.zeros((5, 2))}, {"batch_size": 5}, [(1, 5, (3, 2))]),
        (lambda: tf.data.Dataset.range(9).batch(4), {}, [(2, 4, (2, 2)), (1, 1, (1, 0))]),
        (lambda: tf.data.Dataset.range(9).batch(4).repeat(), {"steps": 4}, [(2, 4, (2, 2)), (1, 1, (1, 0)), (1, 4, (2, 2))]),
        (lambda: Rows(), {}, [(2, 4, (2, 2)), (1, 1, (1, 0))]),
    ],
)
def test_every_step_is_predicted(data, options, expected):
    plan = km.plan(data(), 2, **options)
    assert [(step.count, step.rows, step.per_replica) for step in plan.steps] == expected


def test_what_was_planned_is_what_the_replicas_get(data, build_fn):
    model = km.mirrored_model(build_fn, devices=4)
    logger = km.ReplicaBatchLogger()
    model.fit(*data, batch_size=9, verbose=0, callbacks=[logger])
    plan = km.plan(data, model, batch_size=9)
    planned = [sum(step.count * step.per_replica[index] for step in plan.steps) for index in range(4)]
    assert planned == [row["rows"] for row in logger.report().rows]


def test_it_reads_as_a_table():
    expected = """\
Batch plan: 29 rows in 4 steps on 4 replicas (an epoch)
steps   global batch   replica 0   replica 1   replica 2   replica 3
────────────────────────────────────────────────────────────────────
    3              9           3           2           2           2
    1              2           1           1           0           0
4 of 4 steps are uneven; results stay those of one device.
In 1 a replica has no rows and only waits: the batch is smaller than the number of replicas."""
    assert str(km.plan(29, 4, batch_size=9)) == expected


@pytest.mark.parametrize(
    ("data", "target", "error", "fragment"),
    [
        (lambda: (x for x in range(3)), 2, TypeError, "planning would use it up"),
        (lambda: tf.data.Dataset.range(4).batch(2).repeat(), 2, ValueError, "steps=10"),
        (lambda: tf.data.Dataset.range(0).batch(2), 2, ValueError, "empty"),
        (lambda: np.zeros((0, 3)), 2, ValueError, "empty"),
        (lambda: "rows", 2, TypeError, "expected a dataset, arrays or a number of rows"),
        (lambda: 29, "model", TypeError, "expected a model, a strategy or a number of replicas"),
    ],
)
def test_bad_input_is_told(data, target, error, fragment):
    with pytest.raises(error) as raised:
        km.plan(data(), target)
    assert fragment in str(raised.value)


def test_the_demonstration_ends_as_one_device_does(capsys):
    from keras_mirror import demo

    assert demo.main(["--epochs", "1"]) < 1e-4
    out = capsys.readouterr().out
    assert "Batch plan: 1797 rows in 29 steps" in out and "variables are in scope" in out and "accuracy on 2 replicas" in out
