"""Examples per second, over rows that the replicas got, and waiting told from stepping."""

import math
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror.engine import engine_of
from keras_mirror.pacing import looks_at_batches
from keras_mirror.throughput_report import ThroughputReport
from keras_mirror.timing import Span, SpanTimer, Timers


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


class Ticking:
    """A clock that goes on by a second each time somebody looks."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def call(clock, timer, since_trace, spent, steps, waiting=0.0, stepping=0.0, rows=None, counter=None):
    timer.begin(since_trace)
    clock.now += spent
    if counter is not None:
        counter[:] = [a + b for a, b in zip(counter, rows)]
    timer.end(steps, waiting, stepping)


def test_the_arithmetic_of_a_span():
    clock, counter = Clock(), [0, 0]

    def take():
        taken, counter[:] = list(counter), [0, 0]
        return taken

    timer = SpanTimer(take, 2, clock)
    call(clock, timer, 0, 9.0, 1, rows=[3, 2], counter=counter)  # traced: left out
    call(clock, timer, 1, 5.0, 1, rows=[3, 2], counter=counter)  # second step of the warm-up
    clock.now += 0.5  # a callback
    call(clock, timer, 2, 1.5, 2, waiting=0.5, stepping=0.75, rows=[6, 4], counter=counter)
    clock.now += 100.0  # a validation in between
    timer.resume()
    timer.wait(0.25)
    call(clock, timer, 4, 2.0, 3, stepping=1.0, rows=[9, 1], counter=counter)
    call(clock, timer, 0, 7.0, 1, rows=[1, 1], counter=counter)  # traced again
    span = timer.span(0, "training")
    assert span == Span(0, "training", 5, 3, (15, 5), 4.0, 0.75, 1.75)
    assert span.examples_per_second == 5.0 and span.per_replica == [3.75, 1.25]
    assert span.waiting_share == 0.1875 and span.per_step(span.stepping) == 350.0


def test_time_in_python_counts_only_for_those_who_listen():
    timers, clock = Timers(), Clock()
    assert not timers
    timers.listening.append(SpanTimer(lambda: [0], 1, clock))
    with timers.waiting(clock):
        clock.now += 2.0
    timers.begin(1)
    clock.now += 1.0
    timers.end(1, 0.5, 0.25)
    (timer,) = timers.listening
    assert timer.span(0, "training") == Span(0, "training", 1, 0, (0,), 3.0, 2.5, 0.25)


SPANS = [
    Span(0, "training", 2, 2, (1000, 600), 2.0, 1.3, 0.5),
    Span(0, "validation", 1, 0, (200, 200), 0.5, 0.1, 0.35),
    Span(1, "training", 4, 0, (2000, 1200), 3.0, 2.0, 0.9),
]


def test_the_report():
    expected = """\
Throughput
epoch   phase        steps   rows   examples/s   per replica   ms per step   waiting   stepping   waiting %
───────────────────────────────────────────────────────────────────────────────────────────────────────────
1       training         2   1600          800   500, 300             1000       650        250          65
1       validation       1    400          800   400, 400              500       100        350          20
2       training         4   3200         1067   667, 400              750       500        225       66.67
all     training         6   4800          960   600, 360            833.3       550      233.3          66
waiting and stepping are in ms per step; the rest of a step's time is Python, callbacks, and starting an epoch's data.
Steps left out as warm-up: 2 of training.
The replicas wait 66% of the time for data in training: add .prefetch(tf.data.AUTOTUNE) to the dataset, or \
num_parallel_calls=tf.data.AUTOTUNE to its map."""
    assert str(ThroughputReport(SPANS)) == expected
    assert "<script" not in ThroughputReport(SPANS)._repr_html_()


def test_reports_of_nothing_of_warm_up_alone_and_of_slow_callbacks():
    assert "Nothing was trained or evaluated yet." in str(km.Throughput().report())
    warm_up = ThroughputReport([Span(0, "training", 0, 3, (0, 0), 0.0, 0.0, 0.0)])
    assert warm_up.rows[0]["examples/s"] is None and "left out as warm-up: 3 of training" in str(warm_up)
    slow = ThroughputReport([Span(0, "training", 1, 0, (4, 4), 1.0, 0.1, 0.2)])
    assert "starting the data of each epoch take 70% of the time in training" in str(slow)
    many = ThroughputReport([Span(0, "training", 1, 0, (800,) * 7 + (400,), 1.0, 0.1, 0.8)])
    assert many.rows[0]["per replica"] == "8 x 400 to 800"


def test_the_plot():
    import matplotlib

    matplotlib.use("Agg")
    training, validation = ThroughputReport(SPANS).plot().lines
    assert training.get_xydata().tolist() == [[1, 800], [2, 3200 / 3]]
    assert validation.get_xydata().tolist() == [[1, 800]] and validation.get_linestyle() == "--"


class Looks(keras.callbacks.Callback):
    """Sees every batch, so that `fit` runs one step a call."""

    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize("first", ["throughput", "rows"])
def test_in_fit_beside_a_batch_logger(data, build_fn, first):
    x, y = data
    throughput, rows = km.Throughput(warmup=3, clock=Ticking()), km.ReplicaBatchLogger(log_freq=2)
    model = km.mirrored_model(build_fn, devices=2)
    history = model.fit(
        *data,
        batch_size=5,
        epochs=2,
        verbose=0,
        shuffle=False,
        validation_data=(x[:7], y[:7]),
        validation_batch_size=2,
        callbacks=[Looks(), throughput, rows] if first == "throughput" else [Looks(), rows, throughput],
    ).history
    # 29 rows in batches of 5 on 2 replicas: [3, 2] five times, then [2, 2].
    _, first, validation, second = throughput.spans
    assert [(s.epoch, s.phase, s.steps, s.left_out, s.rows) for s in throughput.spans] == [
        (0, "validation", 1, 3, (1, 0)),  # validation ends before its epoch
        (0, "training", 3, 3, (8, 6)),
        (1, "validation", 4, 0, (4, 3)),
        (1, "training", 6, 0, (17, 12)),
    ]
    assert history["replica_0/examples"] == [17, 17] and history["replica_1/examples"] == [12, 12]
    assert second.seconds == 6.0  # one look at the clock a call
    assert history["examples_per_second"] == [14 / first.seconds, 29 / 6]
    assert history["replica_1/examples_per_second"][1] == 2.0 and history["seconds_per_step"][1] == 1.0
    assert 0 < history["waiting_share"][1] < 1 and history["val_examples_per_second"][1] == 7 / validation.seconds
    assert engine_of(model).timers["train"].listening == engine_of(model).timers["test"].listening == []
    model.evaluate(*data, batch_size=29, verbose=0, callbacks=[throughput])
    assert throughput.report().rows[4]["epoch"] is None and throughput.report().rows[4]["rows"] == 29


def test_many_steps_stay_in_one_call_and_weights_stay_the_same(data, build_fn, capsys):
    weights = []
    for callbacks in ([], [km.Throughput()]):
        keras.utils.set_random_seed(3)
        model = km.mirrored_model(build_fn, devices=2)
        model.fit(*data, batch_size=2, epochs=3, verbose=2, shuffle=False, callbacks=callbacks)
        weights.append(model.get_weights())
    timer = SpanTimer(lambda: [0, 0], 1, time.perf_counter)
    engine_of(model).timers["train"].listening.append(timer)
    model.train_function.seconds_per_step = 0.001  # however busy the machine is
    model.fit(*data, batch_size=2, verbose=0, shuffle=False)
    assert not looks_at_batches(km.Throughput())
    assert timer.calls == 1 and timer.span(0, "training").steps == 15
    for plain, timed in zip(*weights):
        np.testing.assert_array_equal(plain, timed)
    out = capsys.readouterr().out
    assert out.count("throughput: ") == 3 and "waiting for data" in out and "examples_per_second" not in out


def test_a_step_ends_when_every_replica_has_handed_over_a_number(data, build_fn):
    """As on GPUs, on CPU replicas."""
    throughput, model = km.Throughput(), km.mirrored_model(build_fn, devices=2)
    model.make_train_function()
    clock = model.train_function._clock()
    assert clock.hands_over is False
    clock.hands_over = True
    model.fit(*data, batch_size=10, epochs=2, verbose=0, callbacks=[throughput])
    assert clock._handed_over.numpy() > 0 and throughput.spans[1].stepping > 0


def test_an_epoch_of_warm_up_alone_logs_nan(data, build_fn):
    throughput = km.Throughput()
    model = km.mirrored_model(build_fn, devices=2)
    history = model.fit(*data, batch_size=29, verbose=0, callbacks=[throughput]).history
    assert math.isnan(history["examples_per_second"][0]) and throughput.line() == "throughput: all 1 steps were warm-up"
    again = model.fit(*data, batch_size=29, verbose=0, callbacks=[km.Throughput(log=False)], shuffle=False).history
    assert "examples_per_second" not in again


def test_in_a_loop_by_hand(data, build_fn):
    throughput = km.Throughput()
    loop = km.TrainingLoop(km.mirrored_model(build_fn, devices=2), callbacks=[throughput, km.ReplicaBatchLogger()])
    for rows in (19, 29):  # used again; at first the tail of the first epoch is traced, and the step after it is warm-up
        for _ in loop.epochs(2):
            for batch in loop.batches(data, batch_size=10):
                loop.train_step(batch)
            loop.evaluate(data, batch_size=10)
        training = [span for span in throughput.spans if span.phase == "training"]
        assert [sum(span.rows) for span in training][1] == rows and len(training) == 2
        assert all(0 < span.waiting + span.stepping <= span.seconds for span in training if span.steps)


def test_eagerly(data, build_fn):
    def build():
        model = build_fn()
        model.run_eagerly = True
        return model

    throughput = km.Throughput()
    km.mirrored_model(build, devices=2).fit(*data, batch_size=10, epochs=2, verbose=0, callbacks=[throughput])
    assert [(span.steps, sum(span.rows)) for span in throughput.spans][1] == (3, 29)
    assert throughput.spans[1].waiting > 0 and throughput.spans[1].stepping > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_of_ones_own_is_measured_as_far_as_it_can_be(data, build_fn, compiled):
    model, throughput = km.mirrored_model(build_fn, devices=2), km.Throughput()
    strategy = model.distribute_strategy

    def run(batch):
        return strategy.run(model.train_step, args=(batch,))

    run = tf.function(run, reduce_retracing=True) if compiled else run
    with km.observe(model, callbacks=[throughput]):
        for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(data).batch(10)):
            run(batch)
    (span,) = throughput.spans
    assert (span.left_out, span.steps) == ((0, 3) if compiled else (1, 2))
    assert sum(span.rows) == (29 if compiled else 19) and span.waiting is None
    assert "waiting and stepping cannot be told apart" in str(throughput.report())
    assert throughput.line().endswith("ms a step") and not strategy.listeners


def test_keras_fit_in_the_scope_alone(data):
    x, y = data
    strategy = km.MirroredStrategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    throughput = km.Throughput()
    model.fit(x[:28], y[:28], batch_size=4, epochs=2, verbose=0, callbacks=[throughput])
    assert throughput.spans[1].rows == (14, 14) and throughput.spans[1].waiting is None


def test_waiting_and_stepping_go_where_the_time_went(data):
    """The only test that sleeps: 10 ms a batch in the data, then 10 ms in the step; only lower bounds are asserted."""

    def asleep(x):
        time.sleep(0.01)
        return x

    class Slow(keras.layers.Layer):
        def call(self, x):
            return x + 0 * tf.stop_gradient(tf.ensure_shape(tf.py_function(asleep, [x], x.dtype), x.shape))

    def build(slow):
        model = keras.Sequential([keras.Input((6,)), *([Slow()] if slow else []), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    fast = tf.data.Dataset.from_tensor_slices(data).batch(4, drop_remainder=True)
    slow = fast.map(lambda x, y: (tf.ensure_shape(tf.py_function(asleep, [x], x.dtype), x.shape), y))
    spans = []
    for dataset, slow_step in ((slow, False), (fast, True)):
        throughput = km.Throughput()
        model = km.mirrored_model(lambda slow_step=slow_step: build(slow_step), devices=2)
        loop = km.TrainingLoop(model, callbacks=[throughput])
        loop.run(dataset, epochs=2, verbose=0)
        spans.append(throughput.spans[1])
    waits, steps = spans
    assert waits.steps == steps.steps == 7
    assert waits.waiting + waits.stepping >= 0.07 and waits.waiting > waits.stepping
    assert steps.stepping >= 7 * 2 * 0.01 and steps.stepping > steps.waiting


@pytest.mark.parametrize("warmup", [0, -1, 1.5, True])
def test_warmup_is_checked(warmup):
    with pytest.raises(ValueError, match="warmup must be a positive number of steps"):
        km.Throughput(warmup=warmup)


def test_a_model_that_nobody_counts_is_refused(data, build_fn):
    with pytest.raises(TypeError, match="Throughput: the model was not built by keras_mirror"):
        build_fn().fit(*data, verbose=0, callbacks=[km.Throughput()])
