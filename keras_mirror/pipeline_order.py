"""What in a `tf.data` pipeline decides the order of its rows: shuffles, their seeds, Python code."""

import dataclasses

import tensorflow as tf

from keras_mirror import internals

# Datasets that make one iterator of what they read from, so that a shuffle below them draws once per pass.
_ONE_TO_ONE = {
    "Batch", "ParallelBatch", "PaddedBatch", "Map", "ParallelMap", "Prefetch", "Options", "Take", "Skip", "Filter", "Zip",
    "Shuffle", "Enumerate", "MapAndBatch", "Unbatch", "Rebatch",
}  # fmt: skip
_PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless", "GeneratorDataset"}


@dataclasses.dataclass
class Pipeline:
    """What `inspect_pipeline` found.

    Attributes:
        seeds: List of `[op, seed, seed2]` of everything random, in a fixed order.
        unseeded_shuffle: Whether a shuffle has no seed, so that the next process has another order.
        unseeded_numbers: Whether other random numbers have no seed.
        unordered: Whether elements, or the random numbers drawn for them, come in an order that threads decide.
        python: Whether Python code runs in it, so that Python's and NumPy's random states belong to it.
        passes_matter: Whether the order of a pass depends on the passes before it.
        exactly_read: Whether it depends on how far those were read, and not only on their number.
        batch_size: Rows of a batch, or None where it is not plain.
    """

    seeds: list = dataclasses.field(default_factory=list)
    unseeded_shuffle: bool = False
    unseeded_numbers: bool = False
    unordered: bool = False
    python: bool = False
    passes_matter: bool = False
    exactly_read: bool = False
    batch_size: object = None


def inspect_pipeline(dataset):
    """Looks through a `tf.data.Dataset`, and the functions in it, for what decides the order of its rows.

    Nothing is read from the dataset.
    """
    found = Pipeline()
    found.unordered = dataset.options().deterministic is False
    for each, above in internals.datasets_below(dataset):
        kind = type(each).__name__.strip("_").removesuffix("Dataset")
        found.batch_size = found.batch_size or internals.batch_size_of(each)
        if internals.shuffle_seeds(each) is not None and kind in ("Shuffle", "Random"):
            _add_shuffle(found, kind, internals.shuffle_seeds(each), not set(above) <= _ONE_TO_ONE)
        for graph in internals.functions_of_dataset(each):
            _add_functions(found, kind, graph)
    return found


def _add_shuffle(found, kind, seeds, read):
    found.seeds.append([kind, *seeds])
    found.unseeded_shuffle |= seeds == (0, 0)
    found.passes_matter = True
    found.exactly_read |= read


def _add_functions(found, kind, graph):
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    for nodes in bodies:
        constants = {node.name: tf.make_ndarray(node.attr["value"].tensor) for node in nodes if node.op == "Const"}
        for node in nodes:
            found.python |= node.op in _PYTHON_OPS
            if node.op.startswith("ShuffleDataset"):
                seeds = tuple(int(constants.get(name.split(":")[0], 1)) for name in node.input[2:4])
                _add_shuffle(found, node.op, seeds, True)
            elif "seed2" in node.attr and "seed" in node.attr:
                _add_numbers(found, kind, node)


def _add_numbers(found, kind, node):
    seeds = node.attr["seed"].i, node.attr["seed2"].i
    found.seeds.append([node.op, *seeds])
    if node.op == "RandomShuffle":
        found.unseeded_shuffle |= seeds == (0, 0)
    else:
        found.unseeded_numbers |= seeds == (0, 0)
    found.unordered |= kind.startswith("Parallel")
