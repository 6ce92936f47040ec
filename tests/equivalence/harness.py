"""Trains the same thing on one device and on several replicas, and compares everything.

The right values come from plain Keras on one device, without any strategy.
"""

import dataclasses
import warnings

import keras
import numpy as np

import keras_mirror as km

SEED = 7
ROWS = 29  # with batches of 7 the tail is one row: every case has uneven parts and an empty replica
BATCH = 7

_random = np.random.RandomState(3)
X = _random.randn(ROWS, 6).astype("float32")
Y = ((X @ _random.randn(6, 1) + _random.randn(ROWS, 1)) * 2).astype("float32")
LABELS = _random.randint(0, 3, ROWS)
WEIGHTS = (_random.rand(ROWS) + 0.1).astype("float32")
XV = _random.randn(11, 6).astype("float32")
YV = _random.randn(11, 1).astype("float32")
TOKENS = _random.randint(1, 9, (ROWS, 5))
TOKENS[::3, 3:] = 0
TOKENS[1::4, 2:] = 0
IMAGES = _random.rand(ROWS, 6, 6, 1).astype("float32")
SERIES = _random.randn(ROWS, 5, 3).astype("float32")


def mlp(optimizer=lambda: keras.optimizers.SGD(0.05), loss="mse", outputs=1, activation=None, dense=None, **compile):
    """A function that builds and compiles a small dense network; `loss` may be a function without arguments."""

    def build():
        layers = keras.layers
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="tanh", **(dense or {})), layers.Dense(outputs, activation=activation)]
        )
        arguments = {name: value() if callable(value) else value for name, value in compile.items()}
        model.compile(optimizer(), loss() if getattr(loss, "__name__", "") == "<lambda>" else loss, **arguments)
        return model

    return build


class LogsOfBatches(keras.callbacks.Callback):
    """Keeps what each batch logged, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("train", batch, _numbers(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(("test", batch, _numbers(logs)))


def trained(model, *args, callbacks=(), epochs=2, **kwargs):
    """`model.fit`; returns all that was logged: after each epoch and after each batch."""
    batches = LogsOfBatches()
    if "batch_size" not in kwargs and len(args) > 0 and isinstance(keras.tree.flatten(args[0])[0], np.ndarray):
        kwargs["batch_size"] = BATCH
    kwargs = {"shuffle": False, "verbose": 0, **kwargs}
    history = model.fit(*args, callbacks=[*callbacks, batches], epochs=epochs, **kwargs)
    return {"history": history.history, "epoch": history.epoch, "batches": batches.seen}


def fit(*args, **kwargs):
    """`trained` without its first argument: what `assert_equal` takes."""
    return lambda model: trained(model, *args, **kwargs)


@dataclasses.dataclass
class Runs:
    one: keras.Model
    many: keras.Model
    of_one: object
    of_many: object


def run_both(build, use, replicas=2, policy="float32", traced=False, **options):
    """Builds and uses a model on one device, and on `replicas` replicas from the same seed.

    The one device runs eagerly, which costs less than to trace its steps and gives the same numbers.
    `traced`: whether to trace them nevertheless, where Keras logs other numbers in eager steps: with
    several outputs it weighs the loss of each by the rows of a batch then, and not in a graph.
    """

    def run(make):
        keras.backend.clear_session()  # so that the names of layers are the same
        keras.mixed_precision.set_dtype_policy(policy)
        keras.utils.set_random_seed(SEED)
        model = make()
        keras.utils.set_random_seed(SEED)
        return model, use(model)

    def plain():
        model = build()
        if options.get("compile"):
            model.compile(**options["compile"]())
        model.jit_compile = False
        model.run_eagerly = model.run_eagerly or not (traced or model.steps_per_execution > 1)
        return model

    def mirrored():
        arguments = {name: value() if name == "compile" else value for name, value in options.items()}
        return km.mirrored_model(build, devices=[f"CPU:{i}" for i in range(replicas)], **arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, of_one = run(plain)
        many, of_many = run(mirrored)
    return Runs(one, many, of_one, of_many)


def assert_equal(build, use, replicas=2, tol=2e-5, policy="float32", steps=None, traced=False, **options):
    """Asserts that weights, optimizer state, logs and what `use` returns equal one device's; see `run_both`.

    `steps`: the right number of optimizer steps, where one device counts wrong. Where Keras does not know
    the number of batches it also counts the attempt to get one more, with every optimizer.
    """
    runs = run_both(build, use, replicas, policy, traced, **options)
    if steps is not None:
        assert runs.many.optimizer.iterations.numpy() == steps
        runs.one.optimizer.iterations.assign(steps)
    assert_same_models(runs.one, runs.many, tol)
    assert_same(runs.of_one, runs.of_many, max(tol, 1e-4))
    return runs


def assert_same_models(one, many, tol=2e-5):
    """Asserts equal weights and optimizer states, and that no two replicas differ in any of them."""
    found = []
    ours, theirs = _state(one), _state(many)
    assert [variable.shape for _, variable in ours] == [variable.shape for _, variable in theirs]
    for (name, right), (_, variable) in zip(ours, theirs):
        right = _array(right)
        copies = [_array(copy) for copy in copies_of(many, variable)]
        if any(not np.array_equal(copies[0], copy, equal_nan=True) for copy in copies[1:]):
            found.append(f"{name}: the replicas' copies differ")
        difference = _difference(right, copies[0], tol)
        if difference:
            found.append(f"{name}: {difference}")
    assert not found, "; ".join(found)
    if one.optimizer is not None:
        assert many.optimizer.iterations.numpy() == one.optimizer.iterations.numpy()


def copies_of(model, variable):
    """A variable's copies on all replicas."""
    return model._distribute_strategy.experimental_local_results(variable.value)


def assert_same(right, found, tol=1e-4):
    """Asserts that two structures of numbers are equal; the first one is right."""
    differences = list(_differences(right, found, "", tol))
    assert not differences, "; ".join(differences[:4])


def _state(model):
    variables = [(w.path, w) for w in model.weights if "seed_generator" not in w.path]
    for optimizer in (value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)):
        used = optimizer.iterations.numpy() or optimizer is not model.optimizer
        variables += [(v.path, v) for v in optimizer.variables] if used else []
    return variables


def _array(value):
    value = value.numpy() if hasattr(value, "numpy") else value
    array = np.asarray(value)
    return array.astype("float64") if array.dtype.kind not in "OSU" else array


def _numbers(logs):
    return {name: float(value) if np.ndim(value) == 0 else np.array(value) for name, value in (logs or {}).items()}


def _differences(right, found, where, tol):
    if isinstance(right, dict):
        if not isinstance(found, dict) or sorted(right) != sorted(found):
            yield f"{where}: {list(right)} against {list(found) if isinstance(found, dict) else found}"
            return
        for name in right:
            yield from _differences(right[name], found[name], f"{where}/{name}", tol)
    elif isinstance(right, (list, tuple)):
        if len(right) != len(found):
            yield f"{where}: {len(right)} entries against {len(found)}"
            return
        for index, (a, b) in enumerate(zip(right, found)):
            yield from _differences(a, b, f"{where}/{index}", tol)
    elif right is None or isinstance(right, str):
        if right != found:
            yield f"{where}: {right!r} against {found!r}"
    else:
        difference = _difference(_array(right), _array(found), tol)
        if difference:
            yield f"{where}: {difference}"


def _difference(right, found, tol):
    if right.shape != found.shape:
        return f"shape {right.shape} against {found.shape}"
    if right.dtype.kind in "OSU":
        return "" if (right == found).all() else "other strings"
    if not np.isfinite(right).all():
        return "" if np.array_equal(np.isnan(right), np.isnan(found)) else "not finite in other places"
    if not np.isfinite(found).all():
        return "not finite"
    off = np.max(np.abs(right - found), initial=0.0)
    if off <= tol * max(1.0, np.max(np.abs(right), initial=0.0)):
        return ""
    at = np.unravel_index(np.argmax(np.abs(right - found)), right.shape)
    return f"{right[at]:.6g} on one device, {found[at]:.6g} on replicas"
