"""What each worker reads of data of its own, against slices of the rows made by hand."""

import numpy as np
import pytest
import tensorflow as tf

from keras_mirror.own_rows import AutoShardPolicy, OwnRows, policy_of


def with_policy(dataset, policy=AutoShardPolicy.OFF):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def rows(dataset, steps):
    """The rows of the first batches of `OwnRows.parts`."""
    return [np.asarray(batch).ravel().tolist() for batch in dataset.take(steps)]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        # 7 rows are pieces of 3, 2 and 2; the tail of 2 rows is 1, 1 and no piece.
        (0, [[0, 1, 2], [3, 4], [5, 6], [7], [8], []]),
        (1, [[3, 4], [5, 6], [0, 1, 2], [8], [7], []]),
        (2, [[5, 6], [0, 1, 2], [3, 4], [7], [8], []]),
    ],
)
def test_pieces_of_a_worker(worker, expected):
    data = with_policy(tf.data.Dataset.range(9).batch(7))
    own = OwnRows(worker, 3)
    assert own.wanted(data)
    parts = own.parts(data)
    assert rows(parts, 6) == expected
    assert parts.cardinality() == tf.data.UNKNOWN_CARDINALITY and policy_of(parts) == AutoShardPolicy.OFF
    assert own.holds(parts) and own.holds(parts.map(lambda x: x + 1)) and not own.holds(data)


def test_every_batch_is_as_large_as_a_global_batch():
    """29 rows on each of 4 workers: full batches of 7 make steps of 7 rows, though 7 does not divide by 4."""
    steps = zip(*(rows(OwnRows(worker, 4).parts(with_policy(tf.data.Dataset.range(29).batch(7))), 16) for worker in range(4)))
    assert [sum(map(len, step)) for step in steps] == [7] * 16


@pytest.mark.parametrize("replicas", [1, 2])
def test_elements_for_several_replicas_make_one_part(replicas):
    data = tf.data.Dataset.range(9)
    data = tf.data.Dataset.zip(data, {"a": data}).batch(2)
    parts = OwnRows(1, 2).parts_of_replicas(data, replicas).take(6)
    expected = {1: [[0, 1], [2, 3], [4, 5], [6, 7], [8], []], 2: [[0, 1, 2, 3], [4, 5, 6, 7], [8], [], [], []]}[replicas]
    assert [x.numpy().tolist() for x, y in parts] == [y["a"].numpy().tolist() for x, y in parts] == expected
    single = OwnRows(1, 2).parts_of_replicas(tf.data.Dataset.range(9).batch(2), replicas)
    assert rows(single, 6) == expected


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.DATA])
def test_otherwise_every_worker_reads_all(policy):
    assert not OwnRows(0, 2).wanted(with_policy(tf.data.Dataset.range(9).batch(4), policy))


def test_one_worker_reads_all():
    assert not OwnRows(0, 1).wanted(with_policy(tf.data.Dataset.range(9).batch(4)))


def test_hint():
    hint = tf.data.experimental.SHARD_HINT
    data = with_policy(tf.data.Dataset.range(9).shard(hint, hint).batch(4), AutoShardPolicy.HINT)
    assert rows(OwnRows(1, 2).parts(data), 3) == [[5, 7], [1, 3], []]


def test_files(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(f"{name}0\n{name}1\n")
    names = tf.data.Dataset.from_tensor_slices([str(tmp_path / name) for name in "abc"])
    data = with_policy(names.flat_map(tf.data.TextLineDataset).batch(2), AutoShardPolicy.FILE)
    read = [[line for batch in rows(OwnRows(worker, 2).parts(data), 5) for line in batch] for worker in range(2)]
    assert [sorted(map(bytes.decode, lines)) for lines in read] == [["a0", "a1", "c0", "c1"], ["b0", "b1"]]


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (
            tf.data.Dataset.range(9),
            ["FILE: the dataset does not read from a list of files", "DATA (every worker reads all)", "OFF"],
        ),
        (
            tf.data.Dataset.from_tensor_slices(["one"]).flat_map(tf.data.TextLineDataset),
            ["FILE: the dataset reads 1 file(s), not one for each of the 2 workers", "more files", "DATA"],
        ),
    ],
)
def test_what_has_no_files_to_share_out_is_refused(data, fragments):
    with pytest.raises(ValueError) as error:
        OwnRows(0, 2).parts(with_policy(data.batch(2), AutoShardPolicy.FILE))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_batches_without_rows_look_like_the_others():
    """Structure, dtypes, ragged and sparse components, and sizes that the dataset does not say."""

    def generate():
        yield {"image": np.ones([3, 5, 7, 1], "float16"), "words": np.array([b"a", b"b", b"c"])}, np.ones([3, 2])

    spec = {"image": tf.TensorSpec([None, None, None, 1], tf.float16), "words": tf.TensorSpec([None], tf.string)}
    dense = tf.data.Dataset.from_generator(generate, output_signature=(spec, tf.TensorSpec([None, 2])))
    ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3], []]))
    sparse = tf.data.Dataset.from_tensors(tf.sparse.from_dense(np.eye(3, 4)))
    data = tf.data.Dataset.zip(dense, ragged, sparse)
    *_, (dense, ragged, sparse) = OwnRows(0, 2).parts(with_policy(data)).take(4)
    (x, y) = dense
    assert x["image"].shape == (0, 5, 7, 1) and x["image"].dtype == tf.float16
    assert x["words"].shape == (0,) and x["words"].dtype == tf.string and y.shape == (0, 2)
    assert ragged.shape.as_list() == [0, None] and ragged.dtype == tf.int32
    assert sparse.dense_shape.numpy().tolist() == [0, 4] and sparse.dtype == tf.float64
