"""One step by three ways: `fit`, `TrainingLoop`, and a loop of one's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning


class Recorder(keras.callbacks.Callback):
    """Writes down every event, with the names of the logs."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _note(self, name, index, logs):
        self.events.append((name, index, sorted(logs or {})))


for hook in ("train_begin", "train_end", "test_begin", "test_end"):
    setattr(Recorder, f"on_{hook}", lambda self, logs=None, hook=hook: self._note(hook, None, logs))
for hook in ("epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end", "test_batch_begin", "test_batch_end"):
    setattr(Recorder, f"on_{hook}", lambda self, index, logs=None, hook=hook: self._note(hook, index, logs))


def names(recorder):
    return [event[0] for event in recorder.events]


def dataset(data, batch=8):
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


def own_step(model, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = km.global_mean(tf.square(y - model(x, training=True)))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


def by_fit(model, data, recorder):
    return model.fit(dataset(data), epochs=2, validation_data=dataset(data, 7), verbose=0, callbacks=[recorder]).history


def by_run(model, data, recorder):
    loop = km.TrainingLoop(model, callbacks=[recorder])
    return loop.run(dataset(data), epochs=2, validation_data=dataset(data, 7), verbose=0).history


def by_hand(model, data, recorder):
    loop = km.TrainingLoop(model, callbacks=[recorder])
    train, validation = dataset(data), dataset(data, 7)
    for _ in loop.epochs(2):
        for batch in loop.batches(train):
            loop.train_step(batch)
        loop.evaluate(validation)
    return loop.history.history


@pytest.mark.parametrize("step", [None, own_step])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_same_step_by_three_ways(data, build_fn, replicas, step):
    start, results = None, []
    for way in (by_fit, by_run, by_hand):
        model = km.mirrored_model(build_fn, devices=replicas, step=step)
        start = start or model.get_weights()
        model.set_weights(start)
        recorder = Recorder()
        history = way(model, data, recorder)
        results.append((model.get_weights(), history, recorder.events))
    model = km.mirrored_model(build_fn, devices=replicas, step=step)
    model.set_weights(start)
    strategy = model.distribute_strategy
    run = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(dataset(data)):
            run(batch)
    one = build_fn()
    one.set_weights(start)
    one.fit(dataset(data), epochs=2, verbose=0)
    for weights in (*[result[0] for result in results], model.get_weights()):
        for a, b in zip(one.get_weights(), weights):
            np.testing.assert_allclose(a, b, atol=2e-6)
    for _, history, events in results[1:]:
        assert events == results[0][2]
        assert sorted(history) == sorted(results[0][1])
        for name, values in history.items():
            np.testing.assert_allclose(values, results[0][1][name], rtol=1e-6)


def test_logs_of_a_step_are_those_of_one_device(data, build_fn):
    x, y = data
    one, many = build_fn(), km.mirrored_model(build_fn, devices=4)
    many.set_weights(one.get_weights())
    loop = km.TrainingLoop(many)
    for _ in loop.epochs(1):
        for start in range(0, 29, 5):
            logs = loop.train_step((x[start : start + 5], y[start : start + 5]))  # nobody distributed it: it is split
    expected = one.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
    for name in expected:
        np.testing.assert_allclose(float(logs[name]), expected[name][0], rtol=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_keras_callbacks_work(data, build_fn, tmp_path, whole):
    model = km.mirrored_model(build_fn, devices=2)
    rates = []
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate.numpy()))),
        keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "board"),
        keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=1e9),
        keras.callbacks.ProgbarLogger(),
        km.ReplicaBatchLogger(),
        km.ScopeAuditor("raise"),
    ]
    loop = km.TrainingLoop(model, callbacks=callbacks)
    if whole:
        history = loop.run(dataset(data), epochs=9, verbose=0)
    else:
        for _ in loop.epochs(9):
            for batch in loop.batches(dataset(data)):
                loop.train_step(batch)
        history = loop.history
    assert len(history.history["loss"]) == 2  # EarlyStopping stopped after the second epoch
    np.testing.assert_allclose(rates, [0.1, 0.05], rtol=1e-6)
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == ["1.keras", "2.keras"]
    assert (tmp_path / "log.csv").read_text().count("\n") == 3
    assert history.history["replica_0/examples"] == [15, 15]


def test_a_backup_is_resumed(data, build_fn, tmp_path):
    def train(model, callbacks, epochs=4, stop_after=None):
        loop, seen = km.TrainingLoop(model, callbacks=callbacks), []
        for epoch in loop.epochs(epochs):
            seen.append(epoch)
            for batch in loop.batches(dataset(data)):
                loop.train_step(batch)
            if stop_after == epoch:
                raise KeyboardInterrupt
        return seen

    start = build_fn().get_weights()
    models = [km.mirrored_model(build_fn, devices=2) for _ in range(3)]
    for model in models:
        model.set_weights(start)
    assert train(models[0], []) == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        train(models[1], [keras.callbacks.BackupAndRestore(tmp_path / "backup")], stop_after=1)
    assert train(models[2], [keras.callbacks.BackupAndRestore(tmp_path / "backup")]) == [2, 3]
    for a, b in zip(models[0].get_weights(), models[2].get_weights()):
        np.testing.assert_array_equal(a, b)


def leave_by_break(loop, data):
    for _ in loop.epochs(3):
        for batch in loop.batches(data):
            loop.train_step(batch)
        break


def leave_by_error(loop, data):
    for _ in loop.epochs(3):
        for batch in loop.batches(data):
            loop.train_step(batch)
        raise ZeroDivisionError


def leave_in_the_middle(loop, data):
    for _ in loop.epochs(3):
        for batch in loop.batches(data):
            loop.train_step(batch)
            raise KeyboardInterrupt


def leave_from_run(loop, data):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    loop.callbacks.append(Interrupt())
    loop.run(data, epochs=3, verbose=0)


@pytest.mark.parametrize(
    ("leave", "error", "epochs_ended"),
    [
        (leave_by_break, None, 1),
        (leave_by_error, ZeroDivisionError, 1),
        (leave_in_the_middle, KeyboardInterrupt, 0),
        (leave_from_run, KeyboardInterrupt, 1),
    ],
)
def test_leaving_early_ends_the_training_and_loses_no_whole_epoch(data, build_fn, tmp_path, leave, error, epochs_ended):
    recorder = Recorder()
    loop = km.TrainingLoop(km.mirrored_model(build_fn, devices=2), [recorder, keras.callbacks.CSVLogger(tmp_path / "log.csv")])
    if error:
        with pytest.raises(error):
            leave(loop, dataset(data))
    else:
        leave(loop, dataset(data))
    assert names(recorder)[-1] == "train_end"
    assert names(recorder).count("train_end") == 1
    assert names(recorder).count("epoch_end") == epochs_ended
    assert (tmp_path / "log.csv").read_text().count("\n") == (epochs_ended + 1 if epochs_ended else 0)
    leave_by_break(loop, dataset(data))  # and the loop can be used again


def test_two_models_and_two_optimizers(data):
    """A tiny adversarial pair: each step updates both, on 2 replicas as on one device."""
    x, _ = data

    def pair(strategy):
        def make(units, name):
            def build_fn():
                keras.utils.set_random_seed(len(name))
                model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, name=name)])
                model.compile(keras.optimizers.Adam(0.05), "mse")
                return model

            return build_fn if strategy is None else lambda: km.mirrored_model(build_fn, strategy=strategy)

        return make(6, "generator")(), make(1, "critic")()

    def update(generator, critic, real, mean):
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(real)
            critic_loss = mean(tf.square(critic(real) - 1.0)) + mean(tf.square(critic(fake)))
            generator_loss = mean(tf.square(critic(fake) - 1.0))
        for model, loss in ((critic, critic_loss), (generator, generator_loss)):
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"critic": critic_loss, "generator": generator_loss}

    one = pair(None)
    expected = [update(*one, tf.constant(x[i : i + 7]), tf.reduce_mean) for i in range(0, 29, 7)]
    strategy = km.MirroredStrategy(2)
    generator, critic = pair(strategy)
    both = km.mirrored_model(
        lambda: keras.Sequential([keras.Input((6,))]),
        strategy=strategy,
        compile=dict(optimizer=None, loss=None),
        step=lambda model, real: update(generator, critic, real, km.global_mean),
    )
    loop = km.TrainingLoop(both)
    for _ in loop.epochs(1):
        logs = [loop.train_step(x[i : i + 7]) for i in range(0, 29, 7)]
    for a, b in zip(expected, logs):
        for name in a:
            np.testing.assert_allclose(float(a[name]), float(b[name]), rtol=2e-5)
    for a, b in zip((*one[0].weights, *one[1].weights), (*generator.weights, *critic.weights)):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-6)


def test_misuse_is_told(data, build_fn):
    with pytest.raises(TypeError, match="expected a model of keras_mirror.mirrored_model"):
        km.TrainingLoop(build_fn())
    loop = km.TrainingLoop(km.mirrored_model(build_fn, devices=2))
    with pytest.raises(RuntimeError, match="inside `for epoch in loop.epochs"):
        loop.train_step(data)
    with pytest.raises(RuntimeError, match="inside `for epoch in loop.epochs"):
        next(loop.batches(dataset(data)))


def test_steps_that_update_nothing_are_flagged(data, build_fn):
    model = km.mirrored_model(build_fn, devices=2, step=lambda model, batch: {"loss": tf.reduce_mean(model(batch[0]))})
    loop = km.TrainingLoop(model)
    with pytest.warns(MirrorWarning, match="never moved model.optimizer.iterations"):
        for _ in loop.epochs(1):
            loop.train_step(data)


def test_a_deferred_model_is_built_from_the_first_batch(data):
    def build_fn():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    model = km.mirrored_model(build_fn, devices=2)
    loop = km.TrainingLoop(model)
    for _ in loop.epochs(1):
        for batch in loop.batches(data, batch_size=8):
            loop.train_step(batch)
    assert int(model.optimizer.iterations.numpy()) == 4
    assert not km.audit(model)
