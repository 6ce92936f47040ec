"""Which row is which: rows are told apart by what they hold, as 8 bytes each."""

import hashlib
import itertools

import numpy as np
import tensorflow as tf


def row_hashes(batch):
    """One number for every row of a batch, made of all its components.

    Two rows with the same number hold the same: the chance that any two of a million different rows
    share one is below one in ten million. Floats count as float32 and integers as int64, because data
    changes its dtype on the way from an array to a device.

    Args:
        batch: Structure of tensors (dense, ragged, sparse) or arrays of any dtype, with rows in their
            first dimension; None is left out, and a number for the whole batch.

    Returns:
        uint64 array, one a row.

    Raises:
        ValueError: If the components differ in their number of rows.
    """
    leaves = [_row_bytes(leaf) for leaf in tf.nest.flatten(batch) if not _is_absent(leaf)]
    if len({len(leaf) for leaf in leaves}) > 1:
        raise ValueError(
            f"audit_data: the components of a batch differ in their number of rows ({', '.join(f'{len(x)}' for x in leaves)}); "
            "every component needs the rows in its first dimension."
        )
    hashes = [_hash(row) for row in zip(*leaves)]
    return np.frombuffer(b"".join(hashes), "<u8")


def _is_absent(leaf):
    return leaf is None or isinstance(leaf, tf.experimental.Optional) or (isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0)


def _hash(components):
    digest = hashlib.blake2b(digest_size=8)
    for component in components:
        digest.update(b"%d:" % len(component))
        digest.update(component)
    return digest.digest()


def _row_bytes(leaf):
    """The bytes of each row of one component."""
    if hasattr(leaf, "tocoo"):  # a SciPy matrix
        leaf = leaf.tocoo()
        leaf = tf.SparseTensor(np.stack([leaf.row, leaf.col], 1).astype("int64"), leaf.data, leaf.shape)
    if isinstance(leaf, tf.RaggedTensor):
        inner, splits = _row_bytes(leaf.values), leaf.row_splits.numpy()
        return [b"%d[" % (stop - start) + b"".join(inner[start:stop]) for start, stop in itertools.pairwise(splits)]
    if isinstance(leaf, tf.SparseTensor):
        return _sparse_bytes(tf.sparse.reorder(leaf))
    return _dense_bytes(np.asarray(leaf))


def _sparse_bytes(leaf):
    indices, values = leaf.indices.numpy(), _dense_bytes(leaf.values.numpy())
    bounds = np.searchsorted(indices[:, 0], np.arange(int(leaf.dense_shape[0]) + 1))
    places = np.ascontiguousarray(indices[:, 1:])
    return [
        places[start:stop].tobytes() + b"=" + b"".join(values[start:stop]) for start, stop in itertools.pairwise(bounds.tolist())
    ]


def _dense_bytes(array):
    if array.ndim == 0:
        raise ValueError("audit_data: a component of a batch has no rows (shape ()); every component needs a first dimension.")
    flat = array.reshape(len(array), int(np.prod(array.shape[1:])))
    if array.dtype.kind in "OSU":
        return [b"".join(b"%d:%s" % (len(text), text) for text in map(_as_bytes, row)) for row in flat]
    return [row.tobytes() for row in flat.astype(_common_dtype(array.dtype))]


def _as_bytes(text):
    return text if isinstance(text, bytes) else str(text).encode()


def _common_dtype(dtype):
    if dtype.kind in "biu":
        return np.int64
    return np.complex64 if dtype.kind == "c" else np.float32


class Source:
    """The rows that should be delivered, and where each of them stands.

    Args:
        hashes: `row_hashes` of all rows, in order.
    """

    def __init__(self, hashes):
        self.hashes = hashes
        self._order = np.argsort(hashes, kind="stable")
        self._known, self._first, self._count = np.unique(hashes[self._order], return_index=True, return_counts=True)

    def __len__(self):
        return len(self.hashes)

    def positions(self, hashes):
        """Where delivered rows stand in the source; -1 where the source does not hold them.

        Equal rows take the places of equal rows in turn, so that a row that the source holds twice
        may be delivered twice.
        """
        if not len(self):
            return np.full(len(hashes), -1)
        place = np.minimum(np.searchsorted(self._known, hashes), len(self._known) - 1)
        position = self._order[self._first[place] + _occurrence(hashes) % self._count[place]]
        return np.where(self._known[place] == hashes, position, -1)


def _occurrence(hashes):
    """How many equal ones stand before each."""
    order = np.argsort(hashes, kind="stable")
    _, first, count = np.unique(hashes[order], return_index=True, return_counts=True)
    found = np.empty(len(hashes), np.int64)
    found[order] = np.arange(len(hashes)) - np.repeat(first, count)
    return found


def in_order_of_appearance(hashes):
    """The different ones of `hashes`, each where it stands first."""
    _, first = np.unique(hashes, return_index=True)
    return hashes[np.sort(first)]
