import pytest
import tensorflow as tf

from keras_mirror.batches import PlannedStep, plan_steps, split_bounds, split_sizes


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"),
    [
        (8, 2, [4, 4]),
        (5, 4, [2, 1, 1, 1]),
        (3, 4, [1, 1, 1, 0]),
        (0, 3, [0, 0, 0]),
        (7, 1, [7]),
        (13, 5, [3, 3, 3, 2, 2]),
    ],
)
def test_split_is_as_even_as_whole_rows_allow(rows, replicas, expected):
    assert split_sizes(rows, replicas) == expected


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_bounds_cover_every_row_once_and_in_order(replicas):
    for rows in range(40):
        bounds = [split_bounds(rows, replicas, index) for index in range(replicas)]
        assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
        sizes = [stop - start for start, stop in bounds]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0 or rows < replicas


def test_bounds_of_tensors_are_those_of_ints():
    for rows in (0, 1, 5, 12):
        tensors = [split_bounds(tf.constant(rows, tf.int64), 4, index) for index in range(4)]
        assert [(int(a), int(b)) for a, b in tensors] == [split_bounds(rows, 4, index) for index in range(4)]


def test_plan_groups_equal_steps():
    assert plan_steps([4, 4, 4, 1], 2) == [PlannedStep(3, 4, (2, 2)), PlannedStep(1, 1, (1, 0))]
    assert plan_steps([], 2) == []
