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
WORKER = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index")


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


def step_by_hand(model, x, y):
    """One step of a loop of one's own."""
    with tf.GradientTape() as tape:
        loss = km.global_mean(tf.square(y - model(x, training=True)))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def by_hand():
    """A loop over `strategy.run` in a `tf.function` of one's own."""
    model = build(lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5))
    strategy = model.distribute_strategy

    def step(data):
        return step_by_hand(model, *data)

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    rows = strategy.row_counters["train"].window()
    losses = [float(train(batch)) for _ in range(2) for batch in data]
    return told(model, loss=losses, all_rows=float(rows.read().rows.sum()))


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


class Contrast(keras.Model):
    """Compares the rows of a batch with each other, in a step of its own, with a queue of rows."""

    def __init__(self):
        super().__init__()
        norm = keras.layers.BatchNormalization()
        self.encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), norm, keras.layers.Dense(4)])
        self.queue = self.add_weight(shape=(9, 4), initializer="ones", trainable=False, name="queue")
        self.tracker = keras.metrics.Mean("mean")

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            z = self.encoder(x, training=True)
            loss = tf.reduce_mean(tf.reduce_logsumexp(z @ tf.transpose(z), 1) + tf.reduce_max(z @ tf.transpose(self.queue), 1))
        gradients = [tf.clip_by_norm(each, 0.5) for each in tape.gradient(loss, self.trainable_weights)]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.queue.assign(tf.concat([z, self.queue.value], 0)[:9])
        self.tracker.update_state(loss)
        return {"mean": self.tracker.result(), "rows": tf.shape(x)[0]}


def whole_batch():
    """A step, a loss and a metric that take the batch as a whole."""
    keras.utils.set_random_seed(7)

    def build_fn():
        model = Contrast()
        model.compile(keras.optimizers.SGD(0.02))
        return model

    model = km.mirrored_model(build_fn)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    other = build(loss=lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)))
    logs = other.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return told(model, history, other=[w.ravel().tolist() for w in other.get_weights()], losses=logs["loss"])


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
    return stopped_and_gone_on_with("resumed", lambda: (X, Y), batch_size=8, validation_data=(X[:13], Y[:13]))


def resumed_apart():
    """The same with data that each worker reads for itself, stopped after one of them had no rows any more."""
    return stopped_and_gone_on_with("resumed_apart", lambda: (apart(),))


def stopped_and_gone_on_with(name, data, **arguments):
    """What the second run ends with. `data` makes the first arguments of `fit`."""
    place = pathlib.Path(SHARED) / name

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == 6:
                raise KeyboardInterrupt

    def run(*callbacks):
        model = build(lambda: keras.optimizers.Adam(0.05), norm=True)
        return model, model.fit(*data(), callbacks=[*callbacks, km.Resume(place, save_freq=1)], epochs=3, verbose=0, **arguments)

    try:
        run(Stop())
    except KeyboardInterrupt:
        pass
    if WORKER == 1:
        shutil.rmtree(max((place / "worker-1").glob("save-*")))  # as if this worker had been killed in its last save
    model, history = run()
    return told(model, history, epochs=[float(epoch) for epoch in history.epoch])


def with_policy(data, policy):
    """The dataset with an `AutoShardPolicy`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def read_apart(own, together, policy):
    """What each worker reads of its own with a policy; on one device, the batches that this makes, worked out on paper."""
    if WORKER is not None:
        return with_policy(own(WORKER), policy)
    batches = [(X[rows], Y[rows]) for rows in together]
    spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)


# Worker 0 has rows 0 to 18 and worker 1 has rows 19 to 28. Batches of 8 are cut in two, the first piece first on worker 0
# and the second first on worker 1; 3 rows make pieces of 2 and 1, 2 rows pieces of 1 and 1. Worker 1 has nothing for two steps.
APART = [[0, 1, 2, 3, 23, 24, 25, 26], [4, 5, 6, 7, 19, 20, 21, 22], [8, 9, 10, 11, 28], [12, 13, 14, 15, 27], [16, 17], [18]]


def apart():
    """`AutoShardPolicy.OFF`: a dataset of each worker's own; one has 6 batches and the other 4."""
    rows = ((X[:19], Y[:19]), (X[19:], Y[19:]))
    own = lambda worker: tf.data.Dataset.from_tensor_slices(rows[worker]).batch(8)  # noqa: E731
    return read_apart(own, APART, tf.data.experimental.AutoShardPolicy.OFF)


def ends_earlier():
    """`fit`, `evaluate`, `predict` and `TrainingLoop` with a dataset of each worker's own."""
    model = build(lambda: keras.optimizers.Adam(0.05, clipnorm=0.5), norm=True)
    data = apart()
    history = model.fit(data, epochs=2, verbose=0, validation_data=data)
    predicted = np.sort(model.predict(data, verbose=0).ravel()).tolist()
    loop = km.TrainingLoop(model)
    for _ in loop.epochs(1):
        for batch in loop.batches(data):
            loop.train_step(batch)
    return told(model, history, predicted=predicted, looped=loop.history.history["loss"])


def files_of_rows():
    """`AutoShardPolicy.FILE`: of three files of 10, 10 and 9 rows the first worker has two, and the second one."""
    model = build()
    place = pathlib.Path(SHARED) / f"rows-{WORKER}"
    place.mkdir()
    for index in range(3):
        rows = np.concatenate([X, Y], 1)[10 * index : 10 * index + 10]
        (place / str(index)).write_text("".join(",".join(map(repr, map(float, row))) + "\n" for row in rows))

    def parse(line):
        numbers = tf.strings.to_number(tf.strings.split(line, ","))
        return tf.ensure_shape(numbers[:6], [6]), tf.ensure_shape(numbers[6:], [1])

    def own(worker):
        names = tf.data.Dataset.from_tensor_slices([str(place / str(index)) for index in range(3)])
        return names.flat_map(tf.data.TextLineDataset).map(parse).batch(5, drop_remainder=True)

    # Worker 0: 0-9 and 20-28, without the last 4. Pieces of 3 and 2 on worker 0, and of 2 and 3 on worker 1.
    together = [[0, 1, 2, 13, 14], [3, 4, 10, 11, 12], [5, 6, 7, 18, 19], [8, 9, 15, 16, 17], [20, 21, 22], [23, 24]]
    data = read_apart(own, together, tf.data.experimental.AutoShardPolicy.FILE)
    return told(model, model.fit(data, epochs=2, verbose=0))


def ends_earlier_unknown_sizes():
    """Rows of a size that the dataset does not say, which a convolution needs to be large enough, and no more on one worker."""
    keras.utils.set_random_seed(7)

    def build_fn():
        layers = [keras.Input((None, 2)), keras.layers.Conv1D(3, 5), keras.layers.GlobalMaxPooling1D(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    model = km.mirrored_model(build_fn)
    series = np.random.RandomState(5).randn(13, 7, 2).astype("float32")
    own = [[range(0, 4), range(4, 8)], [range(8, 10), range(10, 13)]]
    # 4 rows, 4 rows; 2 rows and 3 rows: pieces of 2, 2, 2, 2 and, beginning with the second, of 1, 1, 1, 2.
    together = [[0, 1, 9], [2, 3, 8], [4, 5, 12], [6, 7, 10, 11]]
    batches = together if WORKER is None else own[WORKER]
    spec = tf.TensorSpec([None, None, 2]), tf.TensorSpec([None, 1])
    rows = [(series[list(batch)], series[list(batch), 0, :1]) for batch in batches]
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    if WORKER is not None:
        data = with_policy(data if WORKER else data.repeat(2), tf.data.experimental.AutoShardPolicy.OFF)
    else:  # worker 0 reads its rows once more, alone
        rows += [(series[each], series[each, 0, :1]) for each in ([0, 1], [2, 3], [4, 5], [6, 7])]

    return told(model, model.fit(data, epochs=2, verbose=0))


def by_hand_ends_earlier():
    """A loop over `strategy.run` on data of each worker's own, in a `tf.function` and out of it."""
    model = build()
    strategy = model.distribute_strategy
    data = strategy.experimental_distribute_dataset(apart())

    def step(x, y):
        return step_by_hand(model, x, y)

    @tf.function
    def epoch():
        total = 0.0
        for x, y in data:
            total += strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
        return total

    in_graph = float(epoch())
    one_by_one = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in data]
    return told(model, in_graph=in_graph, one_by_one=one_by_one)


def from_function():
    """`distribute_datasets_from_function`, with a dataset that ends earlier on the second worker; by hand and in `fit`."""
    model = build()
    strategy = model.distribute_strategy

    def make(context):
        own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.take(5 if context.input_pipeline_id else -1).batch(context.get_per_replica_batch_size(8))

    if WORKER is not None:
        data = strategy.distribute_datasets_from_function(make)
    else:  # worker 0 has the 15 even rows and worker 1 the first 5 odd ones; 2 rows for each of their 2 replicas a step
        batches = [[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 14, 9], [16, 18, 20, 22], [24, 26, 28]]
        spec = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
        parts = [(X[rows], Y[rows]) for rows in batches]
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec))

    @tf.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(lambda x, y: step_by_hand(model, x, y), args=batch), axis=None)

    losses = [float(train(batch)) for batch in data]
    return told(model, model.fit(data, epochs=2, verbose=0), by_hand=losses)


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
    slices = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    note("policy", lambda: model.fit(with_policy(slices, tf.data.experimental.AutoShardPolicy.OFF) if me else slices, verbose=0))
    by_file = tf.data.experimental.AutoShardPolicy.FILE
    note("no files", lambda: model.fit(with_policy(slices, by_file), verbose=0))
    one_file = tf.data.Dataset.from_tensor_slices([__file__]).flat_map(tf.data.TextLineDataset).batch(8)
    note("one file", lambda: model.fit(with_policy(one_file, by_file), verbose=0))
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
    note("check", lambda: km.check(model, (X, Y)))
    note("audit_data", lambda: km.audit_data((X, Y), model))
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
