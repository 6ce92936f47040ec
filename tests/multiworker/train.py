"""What every worker runs, and one process on one device: the same cases, the results as JSON.

    python train.py FILE DIRECTORY CPUS CASE...

The results of each case go to FILE; DIRECTORY is one that all workers share.
"""

import json
import os
import pathlib
import shutil
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_mirror as km

RNG = np.random.RandomState(3)
X = RNG.randn(29, 6).astype("float32")
Y = (X @ RNG.randn(6, 1) + 0.1 * RNG.randn(29, 1)).astype("float32")
WEIGHT = RNG.rand(29).astype("float32")
SHARED = None


def build(optimizer=lambda: "sgd", loss="mse", norm=False):
    """A small model in scope, from the seed that all have; nothing is made before mirrored_model has made the strategy."""
    keras.utils.set_random_seed(7)

    def build_fn():
        layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh")]
        layers += [keras.layers.BatchNormalization()] if norm else []
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(optimizer(), loss, metrics=["mae"], weighted_metrics=["mse"])
        return model

    return km.mirrored_model(build_fn)


def told(model, history=None, **more):
    """What is compared: weights and logs."""
    logs = {} if history is None else history.history
    return {"weights": [w.ravel().tolist() for w in model.get_weights()], **logs, **more}


def arrays():
    """NumPy arrays, shuffled; a tail of 5 rows; Adam, clipping, batch normalisation, validation."""
    model = build(lambda: keras.optimizers.Adam(0.05, clipnorm=0.5), norm=True)
    history = model.fit(X, Y, batch_size=8, epochs=3, verbose=0, validation_data=(X[:13], Y[:13]))
    results = model.evaluate(X[:13], Y[:13], batch_size=6, verbose=0)
    return told(model, history, evaluated=results, predicted=model.predict(X[:9], batch_size=4, verbose=0).ravel().tolist())


def weighted():
    """Sample weights divided by their global sum, accumulated gradients, and the callbacks of this package."""
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    model = build(lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), loss)
    callbacks = [km.ReplicaBatchLogger(), km.ScopeAuditor("raise")]
    history = model.fit(X, Y, sample_weight=WEIGHT, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    return told(model, history)


def unknown_size():
    """A `tf.data` pipeline that shuffles without a seed and does not know how many batches it has; a tail of one row."""
    model = build()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(29).batch(7).filter(lambda x, y: True)
    return told(model, model.fit(data, epochs=2, verbose=0))


class Batches(keras.utils.PyDataset):
    """Four batches; the last has 5 rows."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


def pydataset():
    """A `PyDataset`, shuffled."""
    model = build()
    return told(model, model.fit(Batches(), epochs=2, verbose=0))


def generator():
    """A Python generator that each worker reads for itself."""
    batches = Batches()
    model = build()
    return told(model, model.fit((batches[i] for i in range(4)), epochs=1, verbose=0))


def tokens():
    """An embedding, whose gradient is sparse, and a mask."""
    keras.utils.set_random_seed(7)
    ids = np.random.RandomState(5).randint(0, 9, (11, 5))

    def build_fn():
        layers = [keras.Input((5,)), keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    model = km.mirrored_model(build_fn)
    return told(model, model.fit(ids, ids % 2, batch_size=4, epochs=2, verbose=0, shuffle=False))


def by_hand():
    """A loop over `strategy.run` in a `tf.function` of one's own."""
    model = build(lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5))
    strategy = model.distribute_strategy

    def step(data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = km.global_mean(tf.square(y - model(x, training=True)))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    losses = [float(train(batch)) for _ in range(2) for batch in data]
    rows = strategy.row_counters["train"].read()
    return told(model, loss=losses, all_rows=float(rows.rows.sum()))


def loop():
    """`TrainingLoop` by hand."""
    model = build(lambda: "adam")
    loop = km.TrainingLoop(model)
    for _ in loop.epochs(2):
        for batch in loop.batches((X, Y), batch_size=8):
            loop.train_step(batch)
        loop.evaluate((X[:13], Y[:13]), batch_size=6)
    batch_logs = model.train_on_batch(X[:7], Y[:7])
    return told(model, loop.history, on_batch=[float(each) for each in batch_logs])


def eager():
    """Without graphs."""
    model = build(norm=True)
    model.run_eagerly = True
    return told(model, model.fit(X[:11], Y[:11], batch_size=6, epochs=1, verbose=0))


def files():
    """The callbacks that write, as on one machine, and the chief alone at work."""
    place, model = pathlib.Path(SHARED), build(lambda: keras.optimizers.Adam(0.05), norm=True)
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(place / "best.keras"), monitor="loss", save_best_only=True),
        keras.callbacks.CSVLogger(str(place / "log.csv")),
        keras.callbacks.BackupAndRestore(str(place / "backup"), delete_checkpoint=False),
        keras.callbacks.TensorBoard(str(place / "board")),
    ]
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    model.save(str(place / "model.keras"))
    alone = getattr(model.distribute_strategy, "is_chief", True)
    mae = [float(model.get_metrics_result()["mae"])] if alone else list(history.history["mae"][-1:])  # read by the chief alone
    told_before = told(model, history, alone=mae)
    again = build(lambda: keras.optimizers.Adam(0.05), norm=True)
    restored = again.fit(X, Y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks[2:3])
    return {**told_before, "after": told(again)["weights"], "epochs": [float(epoch) for epoch in restored.epoch]}


def resumed():
    """Stopped in the middle of an epoch, and gone on with by another model, from a save that all workers have."""
    place = pathlib.Path(SHARED) / "resumed"

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == 6:
                raise KeyboardInterrupt

    def run(*callbacks):
        model = build(lambda: keras.optimizers.Adam(0.05), norm=True)
        arguments = dict(batch_size=8, epochs=3, verbose=0, validation_data=(X[:13], Y[:13]))
        return model, model.fit(X, Y, callbacks=[*callbacks, km.Resume(place, save_freq=1)], **arguments)

    try:
        run(Stop())
    except KeyboardInterrupt:
        pass
    if json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index") == 1:
        shutil.rmtree(max((place / "worker-1").glob("save-*")))  # as if this worker had been killed in its last save
    model, history = run()
    return told(model, history, epochs=[float(epoch) for epoch in history.epoch])


def refused():
    """What differs is named on all workers, before a step, and training goes on afterwards."""
    model = build()
    me = model.distribute_strategy.cluster.me
    sentences = {}

    def note(name, call):
        try:
            call()
            sentences[name] = "nothing was raised"
        except Exception as error:
            sentences[name] = f"{type(error).__name__}: {error}"

    note("batch", lambda: model.fit(X, Y, batch_size=8 * (me + 1), verbose=0))
    note("arrays", lambda: model.fit(X[: 29 - me], Y[: 29 - me], batch_size=8, verbose=0))
    sizes = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(4 - me)
    note("size", lambda: model.fit(sizes, verbose=0))
    note("ended", lambda: model.fit((Batches()[i] for i in range(4 - me)), verbose=0))
    np.random.seed(me)
    keras.utils.set_random_seed(me)
    note("seed", lambda: model.fit(X, Y, batch_size=8, verbose=0))
    keras.utils.set_random_seed(7)
    before = model.get_weights()
    model.set_weights([w + me for w in before])
    note("weights", lambda: model.fit(X, Y, batch_size=8, verbose=0))
    model.set_weights(before)
    note("model", lambda: build(norm=me == 1))
    note("goes on", lambda: model.fit(X, Y, batch_size=8, verbose=0))
    return sentences


def read_together():
    """Collectives of a graph that reads all metrics, and what it reads."""
    model = build()
    history = model.fit(X, Y, batch_size=8, verbose=0)
    read = tf.function(model.get_metrics_result)
    operations = read.get_concrete_function().graph.get_operations()
    collectives = [operation.type for operation in operations if operation.type.startswith("CollectiveReduce")]
    results = {name: float(value) for name, value in read().items()}
    return {"collectives": collectives, "results": results, "logs": {name: value[-1] for name, value in history.history.items()}}


def main(file, shared, cpus, *cases):
    """Runs the cases, one after the other."""
    global SHARED
    SHARED = shared
    if "TF_CONFIG" in os.environ:
        km.virtual_cpus(int(cpus))
    results = {}
    for case in cases:
        start = time.monotonic()
        results[case] = globals()[case]()
        print(f"{case}: {time.monotonic() - start:.1f} s", flush=True)
        pathlib.Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
