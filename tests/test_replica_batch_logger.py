import csv

import keras
import pytest

import keras_mirror as km
from keras_mirror.rows_report import MostReadings

# 29 rows in batches of 9 on 4 replicas: [3,2,2,2] three times, then [1,1,0,0].
EPOCH = {0: (10, 2.5), 1: (7, 1.75), 2: (6, 1.5), 3: (6, 1.5)}


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs, self.batches = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))


@pytest.mark.parametrize("place", ["first", "last"])
def test_logs_reach_history_csv_and_every_callback_wherever_the_logger_stands(data, build_fn, tmp_path, place):
    model = km.mirrored_model(build_fn, devices=4)
    others = [Seen(), keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.TensorBoard(tmp_path / "board")]
    logger = km.ReplicaBatchLogger()
    history = model.fit(
        *data, batch_size=9, epochs=2, verbose=0, callbacks=[logger, *others] if place == "first" else [*others, logger]
    )
    rows = list(csv.DictReader(open(tmp_path / "log.csv")))
    for replica, (examples, size) in EPOCH.items():
        for epoch in range(2):
            assert history.history[f"replica_{replica}/examples"][epoch] == examples
            assert history.history[f"replica_{replica}/batch_size"][epoch] == size
            assert float(rows[epoch][f"replica_{replica}/examples"]) == examples
            assert others[0].epochs[epoch][f"replica_{replica}/batch_size"] == size
    assert list((tmp_path / "board").rglob("*events*"))


def test_training_and_validation_are_kept_apart(data, build_fn):
    x, y = data
    model = km.mirrored_model(build_fn, devices=4)
    logger = km.ReplicaBatchLogger()
    model.fit(x, y, batch_size=9, epochs=2, verbose=0, callbacks=[logger], validation_data=(x[:5], y[:5]))
    rows = logger.report().rows
    assert [(r["epoch"], r["phase"], r["replica"]) for r in rows[:8]] == [
        (1, phase, replica) for phase in ("training", "validation") for replica in range(4)
    ]
    training, validation = rows[3], rows[4]
    assert (training["rows"], training["least"], training["most"], training["empty steps"]) == (6, 0, 2, 1)
    assert (training["steps"], training["uneven steps"]) == (4, 4)
    assert (validation["rows"], validation["steps"], validation["uneven steps"]) == (2, 1, 1)
    assert "validation" in str(logger.report()) and "<table>" in logger.report()._repr_html_()


def test_evaluate_alone_is_reported(data, build_fn):
    model = km.mirrored_model(build_fn, devices=2)
    logger = km.ReplicaBatchLogger()
    model.evaluate(*data, batch_size=8, verbose=0, callbacks=[logger])
    assert [(r["epoch"], r["phase"], r["rows"]) for r in logger.report().rows] == [
        (None, "validation", 15),
        (None, "validation", 14),
    ]


@pytest.mark.parametrize(
    ("log_freq", "expected"),
    [
        (1, [(5, 5), (5, 5), (4, 4)]),
        (2, [None, (10, 5), None]),
    ],
)
def test_batches_are_logged_as_often_as_asked(data, build_fn, log_freq, expected):
    x, y = data
    model = km.mirrored_model(build_fn, devices=2)
    seen = Seen()
    model.fit(x[:28], y[:28], batch_size=10, verbose=0, callbacks=[seen, km.ReplicaBatchLogger(log_freq)])
    found = [
        (logs["replica_0/examples"], logs["replica_0/batch_size"]) if "replica_0/examples" in logs else None
        for logs in seen.batches
    ]
    assert found == expected
    assert seen.epochs[0]["replica_0/examples"] == 14


def test_the_line_stands_below_the_bar_and_the_bar_stays_short(data, build_fn, capsys):
    model = km.mirrored_model(build_fn, devices=4)
    model.fit(*data, batch_size=9, verbose=2, callbacks=[km.ReplicaBatchLogger()])
    out = capsys.readouterr().out
    assert "rows per step: replica 0 2.5, replica 1 1.75, replica 2 1.5, replica 3 1.5 (4 of 4 steps uneven, 2 empty parts)" in out
    assert "replica_0/examples" not in out
    assert out.index("mae") < out.index("rows per step")


def test_verbose_0_is_silent(data, build_fn, capsys):
    km.mirrored_model(build_fn, devices=2).fit(*data, batch_size=8, verbose=0, callbacks=[km.ReplicaBatchLogger()])
    assert capsys.readouterr().out == ""


def test_under_keras_fit_in_the_scope_alone(data):
    """Without `mirrored_model` the strategy itself counts; batches here are even, which plain Keras can train."""
    x, y = data
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    logger = km.ReplicaBatchLogger()
    model.fit(x[:28], y[:28], batch_size=4, verbose=0, callbacks=[logger], validation_data=(x[:8], y[:8]))
    assert [(r["phase"], r["rows"]) for r in logger.report().rows] == [
        ("training", 14),
        ("training", 14),
        ("validation", 4),
        ("validation", 4),
    ]


def test_a_model_that_nobody_counts_is_refused(data, build_fn):
    with pytest.raises(TypeError, match="build it with keras_mirror.mirrored_model"):
        build_fn().fit(*data, verbose=0, callbacks=[km.ReplicaBatchLogger()])


@pytest.mark.parametrize("log_freq", [0, -1, 1.5, "batch", None, True])
def test_log_freq_is_checked(log_freq):
    with pytest.raises(ValueError, match="'epoch' or a positive number of batches"):
        km.ReplicaBatchLogger(log_freq)


def test_an_unused_logger_says_so():
    assert "Nothing was trained or evaluated yet." in str(km.ReplicaBatchLogger().report())


def test_a_logger_can_be_used_again(data, build_fn):
    logger = km.ReplicaBatchLogger()
    for _ in range(2):
        km.mirrored_model(build_fn, devices=2).fit(*data, batch_size=8, verbose=0, callbacks=[logger])
    assert len(logger.report().rows) == 2


def drawn(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_the_plot_is_over_epochs_or_over_steps(data, build_fn):
    import matplotlib

    matplotlib.use("Agg")
    x, y = data
    model = km.mirrored_model(build_fn, devices=2)
    epochs, steps = km.ReplicaBatchLogger(), km.ReplicaBatchLogger(2)
    model.fit(*data, batch_size=10, epochs=2, verbose=0, validation_data=(x[:7], y[:7]), callbacks=[epochs, steps])
    # 29 rows in batches of 10 on 2 replicas: [5, 5] twice, then [5, 4]; 7 rows are [4, 3].
    assert drawn(epochs.report().plot()) == {
        "replica 0, training": [[1, 5], [2, 5]],
        "replica 1, training": [[1, 14 / 3], [2, 14 / 3]],
        "replica 0, validation": [[1, 4], [2, 4]],
        "replica 1, validation": [[1, 3], [2, 3]],
    }
    assert drawn(steps.report().plot()) == {
        "replica 0, training": [[1, 5], [2.5, 5], [4, 5], [5.5, 5]],
        "replica 1, training": [[1, 5], [2.5, 4], [4, 5], [5.5, 4]],
        "replica 0, validation": [[3, 4], [6, 4]],
        "replica 1, validation": [[3, 3], [6, 3]],
    }
    assert {line.get_linestyle() for line in steps.report().plot().lines} == {"-", "--"}
    assert not km.ReplicaBatchLogger().report().plot().lines


def test_a_long_training_is_kept_small():
    readings = MostReadings(most=8)
    for step in range(100):
        readings.add("training", 1, [step, 1])
    assert len(readings.readings) <= 8
    assert sum(steps for _, _, _, steps, _ in readings.readings) == 100
    assert sum(rows[0] for *_, rows in readings.readings) == sum(range(100))
    x, y = readings.curve("training", 0)
    assert all(mean == middle - 0.5 for middle, mean in zip(x, y))  # the mean of first to last - 1
