"""What `Resume` refuses, and that it says what differs; and a damaged save."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km

X = np.random.RandomState(3).randn(13, 6).astype("float32")
Y = X[:, :1]


def model_of(units=5, momentum=0.9):
    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=momentum), "mse")
        return model

    return km.mirrored_model(build, devices=1)


def fit(model, directory, x=X, y=Y, epochs=1, callbacks=(), **arguments):
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, epochs=epochs, callbacks=[km.Resume(directory, save_freq=2), *callbacks], **arguments)


def test_arguments():
    for wrong in (0, -1, 2.5, True, "batch", None):
        with pytest.raises(ValueError, match="save_freq must be 'epoch' or a positive number of steps, and got"):
            km.Resume("here", save_freq=wrong)


def test_another_run_is_refused_by_what_differs(tmp_path, monkeypatch):
    saved = model_of()
    fit(saved, tmp_path)
    before = saved.get_weights()
    for text, differs in [
        ("dense/kernel of shape \\(6, 5\\).* where this model has .*dense/kernel of shape \\(6, 4\\)", {"model": model_of(4)}),
        ("its optimizer was made with .*momentum=0.9.*where this one has .*momentum=0.5",
         {"model": model_of(momentum=0.5)}),
        ("the batch size of its data was 4 and is 5", {"batch_size": 5}),
        ("the number of rows of its data was 13 and is 12", {"x": X[:12], "y": Y[:12]}),
        ("the steps_per_epoch of its data was None and is 2", {"steps_per_epoch": 2}),
    ]:  # fmt: skip
        model = differs.pop("model", saved)
        with pytest.raises(ValueError, match=f"Resume: .*save-0000000. is of another run: .*{text}.*a directory of its own"):
            fit(model, tmp_path, **differs)
    monkeypatch.setattr(keras, "__version__", "9.9")
    with pytest.raises(ValueError, match="it was saved with Keras .* and this is Keras 9.9"):
        fit(saved, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(before, saved.get_weights()))


def test_other_seeds_and_none_are_refused(tmp_path):
    def data(**arguments):
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(13, **arguments).batch(4)

    model = model_of()
    tf.random.set_seed(None)
    with pytest.raises(ValueError, match=r"shuffled without a seed.*shuffle\(buffer_size, seed=...\).*set_random_seed"):
        fit(model, tmp_path, data(), None, batch_size=None)
    assert not list(tmp_path.iterdir())
    fit(model, tmp_path, data(seed=1), None, batch_size=None)
    with pytest.raises(ValueError, match=r"the seeds of the shuffling .* and is"):
        fit(model, tmp_path, data(seed=2), None, batch_size=None)
    noisy = data(seed=1).map(lambda x, y: (x + tf.random.normal([]), y))
    with pytest.warns(km.MirrorWarning, match="KM602 Resume: the training dataset draws random numbers without a seed"):
        fit(model, tmp_path / "noisy", noisy, None, batch_size=None)


def test_company_and_foreign_models(tmp_path):
    with pytest.raises(ValueError, match="takes the place of BackupAndRestore"):
        fit(model_of(), tmp_path, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")])
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match="not built by keras_mirror"):
        fit(plain, tmp_path)


def test_a_damaged_save_gives_way_to_the_one_before(tmp_path, capsys):
    model = model_of()
    fit(model, tmp_path / "whole", epochs=2)
    right = model.get_weights()
    for name in ("arrays.npz", "state.json", "checksums.json"):
        directory = tmp_path / name
        shutil.copytree(tmp_path / "whole", directory)
        before, newest = sorted(directory.iterdir())
        (newest / name).write_bytes((newest / name).read_bytes()[:-9])
        with pytest.warns(km.MirrorWarning, match=f"KM601 Resume: {newest.name}/.*goes on from the save before, .*{before.name}"):
            fit(model, directory, epochs=2, verbose=2)
        assert f"Resume: going on with epoch 2, step 5 ({before}, saved 20" in capsys.readouterr().out
        assert all(np.array_equal(a, b) for a, b in zip(right, model.get_weights()))
    for path in directory.iterdir():
        (path / "state.json").unlink()
    with pytest.raises(OSError, match="every save in .* is damaged .*delete it to start over"):
        fit(model, directory, epochs=2)


def test_a_run_that_had_ended_does_not_train_and_goes_on_with_more_epochs(tmp_path, capsys):
    model = model_of()
    history = fit(model, tmp_path, epochs=2).history
    ended = model.get_weights()
    again = fit(model, tmp_path, epochs=2, verbose=2)
    assert "Resume: the run had ended (" in capsys.readouterr().out
    assert again.history == history
    assert all(np.array_equal(a, b) for a, b in zip(ended, model.get_weights()))
    assert fit(model, tmp_path, epochs=3).history["loss"][:2] == history["loss"]
    assert int(model.optimizer.iterations.numpy()) == 12
    model.fit(X, Y, batch_size=4, verbose=0)  # without Resume: from its own beginning
    assert int(model.optimizer.iterations.numpy()) == 16


def test_a_variable_of_nobodys_is_named(tmp_path):
    def step(model, data):
        outside.assign_add(1.0)
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.reduce_mean(tf.square(y - model(x, training=True)), -1))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    strategy = km.MirroredStrategy(1)
    with strategy.scope():
        outside = tf.Variable(0.0, name="steps_so_far")

    def build():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])

    model = km.mirrored_model(build, strategy=strategy, step=step, compile={"optimizer": "sgd"})
    with pytest.warns(km.MirrorWarning, match="KM603 Resume: the step uses the variable steps_so_far.*is not saved"):
        fit(model, tmp_path)


@pytest.mark.parametrize("kind", ["dataset", "arrays"])
def test_new_data_in_each_epoch_by_hand_is_refused(tmp_path, kind):
    """A resumed run would take its first dataset for that of the first epoch, and train on the same rows again."""

    def make():
        x, y = X.copy(), Y.copy()
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(4) if kind == "dataset" else (x, y)

    model = model_of()
    loop, trained = km.TrainingLoop(model, [km.Resume(tmp_path, save_freq=1)]), []
    with pytest.raises(ValueError, match="Resume: epoch 2 trains on data that is another object.*make the data once.*loop.epochs"):
        for epoch in loop.epochs(3):
            for _ in range(2):  # two within one epoch can be told apart by their order
                for batch in loop.batches(make(), **({} if kind == "dataset" else {"batch_size": 4})):
                    loop.train_step(batch)
                    trained.append(epoch)
    assert trained == [0] * 8


def test_by_hand(tmp_path):
    def train(model, directory, stop=None):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(13, seed=1).batch(4)
        seen = 0
        loop = km.TrainingLoop(model, [km.Resume(directory, save_freq=1)] if directory else [])
        for _ in loop.epochs(2):
            for batch in loop.batches(data):
                loop.train_step(batch)
                seen += 1
                if seen == stop:
                    return None
        return model.get_weights(), loop.history.history, seen

    keras.utils.set_random_seed(7)
    right, history, _ = train(model_of(), None)
    keras.utils.set_random_seed(7)
    assert train(model_of(), tmp_path, stop=3) is None
    keras.utils.set_random_seed(7)
    found, its_history, seen = train(model_of(), tmp_path)
    assert seen == 5 and its_history == history
    assert all(np.array_equal(a, b) for a, b in zip(right, found))
