"""The right answers are arithmetic: 29 rows, batches of 8, 3 replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror.fingerprints import Source, row_hashes

Dataset = tf.data.Dataset
X, Y = np.arange(58, dtype="float32").reshape(29, 2), np.arange(29)
SIGNATURE = (tf.TensorSpec((None, 2)), tf.TensorSpec((None,), tf.int64))


@pytest.fixture
def unseeded():
    tf.random.set_seed(None)


@pytest.fixture
def strategy():
    return km.MirroredStrategy(3)


def batches():
    for start in range(0, 29, 8):
        yield X[start : start + 8], Y[start : start + 8]


class Rows(keras.utils.PyDataset):
    def __init__(self, length, change=False):
        super().__init__()
        self.length, self.change, self.reads = length, change, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += self.change
        start = (index * 8 + self.reads) % 29 if self.change else index * 8
        return X[start : start + 8], Y[start : start + 8]


def codes(report):
    return {finding.code for finding in report.findings}


def the(report, code):
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


def test_it_reads_as_a_table():
    expected = """\
Data audit: every one of 29 rows reaches exactly one replica in each of 2 epochs
epoch   steps   rows   replica 0   replica 1   replica 2   not delivered   repeated
───────────────────────────────────────────────────────────────────────────────────
    1       4     29          11          11           7               0          0
    2       4     29          11          11           7               0          0"""  # 3 x (3, 3, 2) and (2, 2, 1)
    report = km.audit_data(Dataset.range(29).batch(8), 3, epochs=2)
    assert str(report) == expected
    assert not report and report.findings == []


@pytest.mark.parametrize("data", [(X, Y), batches, lambda: batches(), Dataset.from_tensor_slices((X, Y)).batch(8)])
def test_all_that_fit_takes_reaches_one_replica_each(data, strategy):
    report = km.audit_data(data, strategy, 2, batch_size=8)
    assert [epoch.rows for epoch in report.epochs] == [[11, 11, 7]] * 2 and not report.findings


def test_every_delivery_is_listed_with_its_place(strategy):
    report = km.audit_data(Dataset.from_tensor_slices((X, Y)).batch(8), strategy)
    got = [(d["step"], d["replica"], d["row"]) for d in report.deliveries[:8]]
    assert got == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 3), (0, 1, 4), (0, 1, 5), (0, 2, 6), (0, 2, 7)]


def test_a_model_and_a_plain_strategy_will_do(build_fn):
    dataset = Dataset.from_tensor_slices((X, Y)).batch(8)
    model = km.mirrored_model(build_fn, devices=2)
    plain = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for target in (model, plain):
        report = km.audit_data(dataset, target)
        assert [epoch.rows for epoch in report.epochs] == [[15, 14]]  # 3 x (4, 4) and (3, 2)


def test_equal_rows_of_the_source_are_no_repetition():
    assert not km.audit_data(Dataset.from_tensor_slices([1, 2, 1, 1, 3]).batch(3), 2).findings


def test_rows_of_strings_ragged_sparse_and_bool_are_told_apart():
    data = {
        "s": tf.constant(["a", "b", "a"]),
        "r": tf.ragged.constant([[1], [1, 2], []]),
        "p": tf.sparse.from_dense([[1, 0], [0, 1], [1, 0]]),
        "b": [True, False, True],
    }
    report = km.audit_data(Dataset.from_tensor_slices(data).batch(3), 2, 2)
    assert not report.findings and report.epochs[0].rows == [2, 1]
    assert len(set(row_hashes(data | {"b": tf.constant(data["b"])}))) == 3  # rows 0 and 2 differ in "r" alone


def test_hashes_know_what_differs_and_what_does_not():
    a, b = row_hashes(np.array([1.0, 2.0])), row_hashes(tf.constant([1.0, 2.0]))
    assert a.tolist() == b.tolist() and a[0] != a[1]
    texts = row_hashes(np.array([["ab", "c"], ["a", "bc"]]))
    assert texts[0] != texts[1]
    ragged = row_hashes(tf.ragged.constant([[[1], [2, 3]], [[1, 2], [3]]]))
    assert ragged[0] != ragged[1]


def test_positions_count_equal_rows():
    source = Source(np.array([5, 7, 5], np.uint64))
    assert source.positions(np.array([5, 5, 9, 7, 5], np.uint64)).tolist() == [0, 2, -1, 1, 0]


def test_a_shard_by_hand_is_found_with_the_rows_that_nobody_sees(strategy):
    report = km.audit_data(Dataset.range(29).shard(2, 0).batch(8), strategy)
    assert the(report, "KM305").rows == tuple(range(1, 29, 2)) and report
    assert "14 of 29 rows reach no replica" in report.title and codes(report) == {"KM305"}
    with pytest.warns(km.MirrorWarning, match="sharded by hand"):  # training still says it
        strategy.experimental_distribute_dataset(Dataset.range(4).shard(2, 0).batch(2))


def test_a_shard_below_a_map_is_found_by_counting():
    report = km.audit_data(Dataset.range(29).shard(4, 1).map(lambda v: v * 2).batch(8), 3)
    assert the(report, "KM305").rows == tuple(row for row in range(29) if row % 4 != 1)


def test_against_a_given_source_lost_rows_are_lost():
    report = km.audit_data(Dataset.range(5, 29).batch(8), 3, source=Dataset.range(29).batch(8))
    finding = the(report, "KM301")
    assert finding.rows == (0, 1, 2, 3, 4) and "5 of 29 rows reach no replica" in finding.what and "rows 0-4" in str(report)
    report = km.audit_data(Dataset.range(29).batch(8).repeat(2), 3, source=Dataset.range(29).batch(8))
    assert the(report, "KM302").rows == tuple(range(29)) and "on replicas 0-2" in str(report)


def test_many_rows_are_shortened():
    report = km.audit_data(Dataset.range(0, 60, 2).batch(8), 3, source=Dataset.range(60).batch(8))
    assert "rows 1, 3, 5, 7, 9, 11 and 24 more" in the(report, "KM301").what


def test_repeat_and_drop_remainder_are_noted():
    report = km.audit_data(Dataset.range(29).repeat(2).batch(8), 2)
    assert codes(report) == {"KM313"} and not report and report.epochs[0].repeated.tolist() == list(range(29))
    report = km.audit_data(Dataset.range(29).batch(8, drop_remainder=True), 2, 2)
    assert the(report, "KM312").rows == (24, 25, 26, 27, 28) and not report
    assert "5 rows in each of 2 epochs" in str(report)


def test_a_shuffle_without_seed_is_noted(unseeded):
    assert codes(km.audit_data(Dataset.range(29).shuffle(29).batch(8), 2)) == {"KM307"}
    assert not codes(km.audit_data(Dataset.range(29).shuffle(29, seed=3).batch(8), 2))


def test_shuffles_that_do_less_than_they_seem_to():
    assert codes(km.audit_data(Dataset.range(29).batch(8).shuffle(4), 2)) == {"KM308"}
    assert "buffer of 5 and 29 rows" in the(km.audit_data(Dataset.range(29).shuffle(5).batch(8), 2), "KM309").what
    once = Dataset.range(29).shuffle(29, reshuffle_each_iteration=False).batch(8)
    assert "reshuffle_each_iteration=False" in the(km.audit_data(once, 2, 2), "KM310").what
    assert "cached" in the(km.audit_data(Dataset.range(29).shuffle(29).batch(8).cache(), 2, 2), "KM310").what


def test_rows_that_change_sides_are_named():
    shuffled = Dataset.range(29).shuffle(29, seed=1)
    report = km.audit_data(shuffled.take(20).batch(8), 2, epochs=2)
    seen = [set(report.deliveries["row"][report.deliveries["epoch"] == epoch].tolist()) for epoch in (1, 2)]
    assert all(len(rows) == 20 for rows in seen) and report
    assert set(the(report, "KM306").rows) >= seen[0] ^ seen[1] and seen[0] != seen[1]
    fixed = Dataset.range(29).shuffle(29, seed=1, reshuffle_each_iteration=False).skip(20).batch(8)
    assert "KM306" not in codes(km.audit_data(fixed, 2, epochs=2))


def test_data_that_can_be_read_once_is_found():
    one = batches()
    report = km.audit_data(Dataset.from_generator(lambda: one, output_signature=SIGNATURE), 3, 2)
    assert codes(report) == {"KM311"} and "29 rows when it is read first and 0" in str(report)
    assert [sum(epoch.rows) for epoch in report.epochs] == [29, 0]
    other = batches()
    assert codes(km.audit_data(lambda: other, 3)) == {"KM311"}


def test_a_bare_generator_is_used_up(strategy):
    report = km.audit_data(batches(), strategy)
    assert codes(report) == {"KM321"} and not report
    report = km.audit_data(batches(), strategy, 2)  # Keras keeps the two batches that it looked at
    assert the(report, "KM311").rows == tuple(range(16, 29)) and "13 of 29 rows reach no replica in epoch 2" in report.title
    assert codes(km.audit_data(batches(), strategy, 2, steps=2)) == {"KM321"}


def test_plain_keras_loses_batches_of_a_generator():
    report = km.audit_data(batches(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert set(the(report, "KM320").rows) <= set(range(16, 29)) and report


def test_py_datasets(strategy):
    assert not km.audit_data(Rows(4), strategy, 2).findings
    report = km.audit_data(Rows(3), strategy)
    assert "5 rows more" in the(report, "KM318").what and "5 rows more are never read" in report.title
    assert "KM319" in codes(km.audit_data(Rows(4, change=True), strategy))


def test_unbatched_and_empty_batches():
    report = km.audit_data(Dataset.from_tensor_slices((X, Y)), 3)
    assert codes(report) == {"KM314"} and "cannot be split" in report.title and len(report.deliveries) == 0
    report = km.audit_data(Dataset.range(16).batch(8).map(lambda batch: batch[batch < 8]), 3)
    assert codes(report) == {"KM315"} and "Batch 1 of epoch 1 has no rows" in str(report)


def test_batches_smaller_than_the_replicas():
    report = km.audit_data(Dataset.range(29).batch(2), 3)
    assert report.epochs[0].empty_parts == 14 + 2 and codes(report) == {"KM316"}


def test_random_content_and_free_order(unseeded):
    report = km.audit_data(Dataset.range(29).map(lambda row: tf.random.uniform(())).batch(8), 3)
    assert codes(report) == {"KM304"} and report.epochs[0].unknown == 29 and not report
    free = Dataset.range(29).map(lambda row: row, num_parallel_calls=2, deterministic=False).batch(8)
    assert codes(km.audit_data(free, 3)) == {"KM317"}


def augmented(dataset, seed=None):
    return dataset.map(lambda row: tf.cast(row, tf.float32) + tf.random.normal((), seed=seed))


@pytest.mark.parametrize(("shuffled", "seed"), [(False, None), (True, None), (True, 1)])
def test_rows_that_a_random_map_changes_are_counted_and_not_called_lost(shuffled, seed, unseeded):
    rows = Dataset.range(29).shuffle(29, seed=2) if shuffled else Dataset.range(29)
    report = km.audit_data(augmented(rows, seed).batch(8), 3, 2)
    assert [sum(epoch.rows) for epoch in report.epochs] == [29, 29] and not report
    told = the(report, "KM304")
    assert told.severity == "note" and "Seed" not in str(report) and codes(report) == {"KM304"}
    assert "the replicas get 29 rows, as many as one device, in each of 2 epochs; which ones cannot be told" in report.title
    assert [row[name] for row in report.rows for name in ("not delivered", "repeated")] == ["?"] * 4
    assert not km.audit_data(rows.batch(8), 3, 2).findings  # what the remedy says
    assert not km.audit_data(augmented(Dataset.range(29), 1).batch(8), 3, 2).findings  # without a shuffle a seed repeats itself


def test_what_is_known_of_random_rows_is_still_said(unseeded):
    report = km.audit_data(augmented(Dataset.range(29)).shard(2, 0).batch(8), 3)
    assert the(report, "KM305").rows == tuple(range(1, 29, 2)) and "14 of the 29 elements" in str(report) and report
    report = km.audit_data(augmented(Dataset.range(29)).batch(8, drop_remainder=True), 3)
    assert codes(report) == {"KM304", "KM312"} and report.rows[0]["rows"] == 24 and "fewer than 8 rows" in str(report)
    report = km.audit_data(augmented(Dataset.range(29).shuffle(29, seed=1).repeat()).batch(8), 3, 2, steps=2)
    assert "16 rows, as many as one device, in each of 2 epochs of 2 steps" in report.title and codes(report) == {"KM304"}
    report = km.audit_data(augmented(Dataset.range(29).shuffle(29, seed=1).take(20)).batch(8), 3)
    assert codes(report) == {"KM306"} and report


def test_a_selection_before_a_map_is_named_as_the_cause():
    report = km.audit_data(Dataset.range(29).shuffle(29, seed=1).take(20).map(lambda row: row * 2).batch(8), 3)
    assert codes(report) == {"KM306"} and set(the(report, "KM306").rows) <= set(range(29))


def test_rows_that_a_given_source_does_not_hold(unseeded):
    report = km.audit_data(augmented(Dataset.range(29)).batch(8), 3, source=Dataset.range(29).batch(8))
    assert codes(report) == {"KM322"} and report and "29 rows of an epoch are not in the source" in report.title
    other = Dataset.range(10).concatenate(Dataset.range(100, 102)).batch(6)  # 10 of 29, and 2 that may be any of the 19 others
    report = km.audit_data(other, 2, source=Dataset.range(29).batch(8))
    assert "at least 17 of 29 rows reach no replica" in the(report, "KM301").what and codes(report) == {"KM301", "KM322"}


def leaving_out_others():
    """Of 24 rows, those of one remainder by 5 are left out, another one each time: 20, 19, 19, 19, 19, 20 rows."""
    calls = [0]

    def rows():
        calls[0] += 1
        yield from (row for row in range(24) if (row + calls[0]) % 5)

    return rows


def test_a_generator_that_leaves_out_other_rows_each_time_is_not_called_used_up():
    data = Dataset.from_generator(leaving_out_others(), output_signature=tf.TensorSpec((), tf.int64)).batch(5)
    rows = leaving_out_others()
    for each in (data, lambda: ((np.array([row]),) for row in rows())):
        report = km.audit_data(each, 3, 3)
        assert [sum(epoch.rows) for epoch in report.epochs] == [20, 19, 19]
        assert the(report, "KM304").severity == "warning" and codes(report) - {"KM316"} == {"KM304"}
        assert "20 rows in epoch 1, 19 in epochs 2-3, 19 on one device" in str(report) and "not as many" in report.title


def test_data_that_yields_less_after_the_first_reading_is_used_up():
    rows = iter(range(24))
    gone = Dataset.from_generator(lambda: rows, output_signature=tf.TensorSpec((), tf.int64))
    report = km.audit_data(gone.concatenate(Dataset.range(100, 110)).batch(5), 3)
    assert "34 rows when it is read first and 10 when it is read again" in the(report, "KM311").what


class Other(Rows):
    """Four batches of 8, 8, 8 and 5 rows that differ each time, by `how`."""

    def __init__(self, how):
        super().__init__(4)
        self.how, self.order, self.random = how, np.arange(29), np.random.RandomState(0)

    def __getitem__(self, index):
        if self.how == "shuffled":
            self.random.shuffle(self.order)
        rows = self.order[index * 8 : index * 8 + 8]
        noise = self.random.choice([-1.0, 1.0], (len(rows), 1)) if self.how == "flipped" else 1.0
        return (X[rows] + 1) * noise, Y[rows]


def test_a_py_dataset_that_shuffles_while_it_is_read_is_told_from_one_that_augments():
    report = km.audit_data(Other("shuffled"), 3, 2)
    assert codes(report) == {"KM319"} and report and "(indices 0-2)" in str(report)
    assert codes(km.audit_data(Other("flipped"), 3, 2, steps=2)) == {"KM304"}
    report = km.audit_data(Other("flipped"), 3, 2)
    assert codes(report) == {"KM304"} and not report and [sum(epoch.rows) for epoch in report.epochs] == [29, 29]


def test_functions_of_an_input_context(strategy):
    good = km.audit_data(lambda context: Dataset.range(30).batch(context.get_per_replica_batch_size(9)), strategy)
    assert not good and good.epochs[0].rows == [12, 9, 9]  # 10 batches of 3 in turn
    shards = km.audit_data(lambda context: Dataset.range(30).shard(context.num_replicas_in_sync, 0).batch(3), strategy)
    assert "one replica alone is given 30 rows, 3 replicas together 10" in the(shards, "KM303").what

    def same(context):
        return Dataset.range(6).batch(3).flat_map(lambda batch: Dataset.from_tensors(batch).repeat(context.num_replicas_in_sync))

    finding = the(km.audit_data(same, strategy), "KM303")
    assert "6 rows are given to several replicas in one step" in finding.what and "replicas 0-2" in finding.what


def test_the_pipeline_in_a_function_of_an_input_context_is_looked_at(strategy, unseeded):
    report = km.audit_data(lambda context: Dataset.range(24).shard(2, 0).batch(context.get_per_replica_batch_size(9)), strategy)
    assert "12 of 24 rows reach no replica" in report.title and report
    assert the(report, "KM305").rows == tuple(range(1, 24, 2)) and codes(report) == {"KM305", "KM316"}  # 12 rows are 4 batches of 3
    pipelines = km.audit_data(lambda c: Dataset.range(24).shard(c.num_input_pipelines, c.input_pipeline_id).batch(8), strategy)
    assert not pipelines.findings
    assert "KM307" in codes(km.audit_data(lambda context: Dataset.range(24).shuffle(24).batch(8), strategy))
    assert codes(km.audit_data(lambda context: Dataset.range(24).batch(8).shuffle(3, seed=1), strategy)) == {"KM308"}
    random = km.audit_data(lambda c: augmented(Dataset.range(24).shard(c.num_replicas_in_sync, 0)).batch(8), strategy)
    assert "one replica alone is given 24 rows, 3 replicas together 8" in the(random, "KM303").what
    assert "the replicas get 8 rows and one device 24 in one epoch" in random.title
    with pytest.raises(TypeError, match="made a NoneType; it has to return a tf.data.Dataset"):
        km.audit_data(lambda context: None, strategy)


def test_a_distributed_dataset_needs_a_source(strategy):
    distributed = strategy.experimental_distribute_dataset(Dataset.range(29).batch(8))
    assert not km.audit_data(distributed, strategy, source=Dataset.range(29).batch(5)).findings
    with pytest.raises(ValueError, match="source=dataset"):
        km.audit_data(distributed, strategy)


def test_steps_of_an_endless_dataset():
    report = km.audit_data(Dataset.range(29).repeat().batch(8), 3, 2, steps=2)
    assert not report.findings and "rows of one device in each of 2 epochs of 2 steps" in report.title
    assert [epoch.rows for epoch in report.epochs] == [[6, 6, 4]] * 2


def test_random_states_are_left_alone(strategy):
    np.random.seed(1)
    expected = np.random.RandomState(1).rand()
    km.audit_data(lambda: (batch for batch in [(np.random.rand(4, 2),)]), strategy)
    assert np.random.rand() == expected


def test_codes_can_be_left_out():
    report = km.audit_data(Dataset.range(29).shard(2, 0).batch(8), 3, ignore=["KM305"])
    assert not report and report.findings == []


def endless():
    while True:
        yield X[:8], Y[:8]


@pytest.mark.parametrize(
    ("data", "target", "options", "error", "fragment"),
    [
        (lambda: Dataset.range(4).repeat().batch(2), 2, {}, ValueError, "steps=10"),
        (endless, 2, {}, ValueError, "seems to have no end"),
        (lambda: Dataset.range(4).batch(2), "two", {}, TypeError, "expected a strategy, a model or a number of replicas"),
        (lambda: Dataset.range(4).batch(2), 0, {}, ValueError, "at least 1"),
        (lambda: Dataset.range(4).batch(2), 2, {"epochs": 0}, ValueError, "epochs must be a positive int"),
        (lambda: Dataset.range(4).batch(2), 2, {"ignore": "KM305"}, TypeError, "expected a tuple of codes"),
        (lambda: Dataset.range(4).batch(2), 2, {"ignore": ["KM101"]}, ValueError, "no code 'KM101'; the codes are KM301, KM302,"),
        (lambda: Dataset.range(4).batch(2), 2, {"source": Dataset.range(4).batch(2).repeat()}, ValueError, "source has no end"),
        (lambda: Dataset.range(0).batch(2), 2, {}, ValueError, "data is empty"),
        (lambda: "rows", 2, {}, TypeError, "expected a tf.data.Dataset"),
        (lambda: lambda context: None, 2, {}, ValueError, "belongs to a strategy"),
    ],
)
def test_bad_input_is_told(data, target, options, error, fragment):
    with pytest.raises(error) as raised:
        km.audit_data(data(), target, **options)
    assert fragment in str(raised.value)


def test_the_plot_stacks_the_deliveries_of_each_row():
    import matplotlib

    matplotlib.use("Agg")
    for rows, bars in ((29, 29), (500, 60)):
        report = km.audit_data(Dataset.range(rows).repeat(2).batch(8), 3, epochs=2)
        heights = np.zeros(bars)
        for container in report.plot().containers:
            heights += [bar.get_height() for bar in container]
        assert heights == pytest.approx([4.0] * bars)  # epochs x passes


def test_every_code_has_its_page():
    import pathlib
    import re

    root = pathlib.Path(km.__file__).parent
    text = "".join((root / f"{name}.py").read_text() for name in ("data_findings", "pipeline_findings"))
    for code in set(re.findall(r"KM3\d\d", text)):
        page = (root.parent / "docs" / "codes" / f"{code}.md").read_text()
        assert all(heading in page for heading in ("## Symptom", "## Cause", "## Cure")), code
