"""Each private name, pinned to what it does today.

When one of these fails after an upgrade, the function of the same name in `internals` is what
has to change. Each test says what can be deleted once upstream makes the name unnecessary.
"""

import concurrent.futures
import inspect
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import internals


@pytest.fixture
def strategy():
    return km.MirroredStrategy(2)


@pytest.fixture
def model(build_fn):
    return build_fn()


def test_local_updates(strategy):
    """Delete `allow_local_updates`, `local_updates` and `skip_all_reduce` once Keras' optimizers reduce
    before clipping and need no merge inside a condition."""
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.NONE)

    @tf.function
    def run():
        def step():
            with internals.local_updates(strategy.extended):
                assert tf.__internal__.distribute.strategy_supports_no_merge_call()
                strategy.extended.update(variable, lambda v, value: v.assign_add(value), args=(1.0,))
            assert not tf.__internal__.distribute.strategy_supports_no_merge_call()

        strategy.run(step)

    run()
    assert [float(part.numpy()) for part in strategy.experimental_local_results(variable)] == [1.0, 1.0]


def test_is_per_replica_and_container_of(strategy):
    """Delete `container_of` once a copy of a mirrored variable says publicly what it is a copy of."""
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    value = strategy.experimental_distribute_values_from_function(lambda context: tf.ones(2))
    assert internals.is_per_replica(value) and not internals.is_per_replica(tf.ones(2))
    assert not internals.is_per_replica(variable)
    for part in strategy.experimental_local_results(variable):
        assert internals.container_of(part) is variable
    assert internals.container_of(variable) is variable
    plain = tf.Variable(0.0)
    assert internals.container_of(plain) is plain


def test_per_replica_spec(strategy):
    """Delete once `tf.distribute` has a public spec for values with a part per replica."""
    value = strategy.experimental_distribute_values_from_function(lambda context: tf.ones(2))
    assert internals.per_replica_spec([tf.TensorSpec((2,))] * 2).is_compatible_with(value)


def test_clone_tf_function():
    """Delete once a strategy's `run` can be told to lift a `tf.function` around the replicas."""
    function = tf.function(lambda x: x + 1, reduce_retracing=True)
    assert internals.is_tf_function(function) and not internals.is_tf_function(len)
    clone = internals.clone_tf_function(function, lambda x: x + 2)
    assert int(clone(1)) == 3 and internals.is_tf_function(clone)


def test_python_function_of():
    """Delete once replicas can exchange something within a `tf.function` that a step calls."""

    @tf.function
    def doubled(x):
        if x > 0:
            x = 2 * x
        return x

    plain = internals.python_function_of(doubled)
    assert not internals.is_tf_function(plain)
    assert int(tf.function(plain, autograph=False)(tf.constant(2))) == 4
    kept = internals.python_function_of(tf.function(lambda x: x is None, autograph=False))
    assert kept(None) is True


def test_autograph_follows_the_caller():
    """Delete once `strategy.run` converts what a wrapper around the user's function calls."""

    def absolute(x):
        if x < 0:
            x = -x
        return x

    @tf.function
    def converted(x):
        return internals.autograph(absolute)(x)

    assert int(converted(tf.constant(-3))) == 3
    assert internals.autograph(absolute)(-3) == 3


def test_current_graph_and_captured_variables():
    """Delete `captured_variables` once a function's graph lists its variables while it is traced."""
    used, unused = tf.Variable(1.0), tf.Variable(2.0)
    seen = []

    @tf.function
    def step():
        seen.append(internals.inside_tf_function())
        result = tf.cond(tf.constant(True), lambda: used + 1, lambda: used - 1)
        seen.append([v is used for v in internals.captured_variables(internals.current_graph())])
        return result

    concrete = step.get_concrete_function()
    assert seen == [True, [True]] and not internals.inside_tf_function() and internals.current_graph() is None
    assert [v is used for v in internals.captured_variables(concrete.graph)] == [True]
    assert unused.numpy() == 2.0


def test_spec_of_a_part():
    """Delete once the element spec of a distributed dataset tells its parts' types publicly."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    data = strategy.distribute_datasets_from_function(lambda context: tf.data.Dataset.from_tensors((tf.ones([2, 3]), 4)))
    assert [internals.spec_of_a_part(each) for each in data.element_spec] == [tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int32)]
    assert internals.spec_of_a_part(tf.TensorSpec([5])) == tf.TensorSpec([5])


def test_single_variable():
    """Delete once `tf.Variable` has an argument for a variable without copies in the scope of a strategy."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        single, usual = internals.single_variable([1, 2], "single", tf.int64), tf.Variable([1, 2])
    assert len(strategy.experimental_local_results(usual)) == 2
    assert strategy.experimental_local_results(single) == (single,)
    assert single.dtype == tf.int64 and not single.trainable and "CPU:0" in single.device and single.numpy().tolist() == [1, 2]


def test_see_every_variable(monkeypatch):
    """Delete once TensorFlow has a variable creator for all threads, which `clear_session` keeps."""
    monkeypatch.setattr(internals.of_tensorflow._WatchedGraphs, "creators", list(internals.of_tensorflow._WatchedGraphs.creators))
    seen = []

    def creator(following, **kwargs):
        seen.append(kwargs["name"])
        return following(**kwargs)

    internals.see_every_variable(creator)
    internals.see_every_variable(creator)
    tf.Variable(0, name="here")
    keras.backend.clear_session()
    tf.Variable(0, name="after clear_session")
    thread = threading.Thread(target=lambda: tf.Variable(0, name="in a thread"))
    thread.start()
    thread.join()
    with internals.without_creators():
        tf.Variable(0, name="unseen")
    assert seen == ["here", "after clear_session", "in a thread"]
    monkeypatch.undo()
    keras.backend.clear_session()
    tf.Variable(0, name="no longer")
    assert len(seen) == 3


def test_before_autograph():
    """Delete once AutoGraph runs code under the user's own lines."""
    found = []

    @tf.autograph.experimental.do_not_convert
    def look():
        frame = sys._getframe()
        while "__autograph_generated_file" not in frame.f_code.co_filename:
            frame = frame.f_back
        found.append(internals.before_autograph(frame))

    @tf.function
    def traced(x):
        if x > 0:
            look()
        return x

    traced(tf.constant(1))
    lines, first = inspect.getsourcelines(traced.python_function)
    line = first + next(i for i, text in enumerate(lines) if "look()" in text)
    assert found[0] == (__file__, line, "traced")


def test_is_made_in_a_scope(strategy):
    """Delete once variables tell publicly which strategy they belong to."""
    with strategy.scope():
        inside = tf.Variable(0.0)
    assert internals.is_made_in_a_scope(inside) and not internals.is_made_in_a_scope(tf.Variable(0.0))


def test_layers_of():
    """Delete once Keras lists nested layers publicly."""
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="deep")])
    outer = keras.Sequential([keras.Input((2,)), inner])
    assert internals.layers_of(outer)[0] is outer
    assert "deep" in [layer.name for layer in internals.layers_of(outer)]


def test_symbolic_build(model):
    """Delete once Keras builds from a spec instead of the first batch."""

    class Like:
        def __init__(self, shape, dtype):
            self.shape, self.dtype = shape, dtype

    internals.symbolic_build(model, (Like((None, 6), tf.float32), Like((None, 1), tf.float32)))
    assert model.optimizer.built and internals.compiled_losses(model)
    assert internals.compile_loss(model).built and internals.compile_metrics(model).built


def test_training_strategy(model, strategy):
    """Delete once a model can be given a strategy after it was made."""
    assert internals.training_strategy(model) is None
    internals.set_training_strategy(model, strategy)
    assert internals.training_strategy(model) is strategy and model.distribute_strategy is strategy


def test_losses_and_trackers(model):
    """Delete `replace_compiled_losses` once Keras' losses divide by the global batch."""
    assert internals.compiled_losses(model) == []
    model.fit(np.ones((4, 6)), np.ones((4, 1)), verbose=0)
    assert isinstance(internals.loss_tracker(model), keras.metrics.Mean)
    (loss,) = internals.compiled_losses(model)
    assert isinstance(loss, keras.losses.Loss)
    internals.replace_compiled_losses(model, lambda loss: keras.losses.MeanAbsoluteError())
    assert isinstance(internals.compiled_losses(model)[0], keras.losses.MeanAbsoluteError)
    assert model.loss == "mse" and model.get_compile_config()["loss"] == "mse"
    value = internals.model_loss(model, x=None, y=tf.ones((2, 1)), y_pred=tf.zeros((2, 1)), sample_weight=None, training=True)
    assert float(value) == 1.0


def test_single_metrics_and_metric_values():
    """Delete once a metric of a function weighs what it returns by rows."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[lambda y, p: keras.ops.mean(keras.ops.abs(y - p))])
    model.evaluate(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    metric = internals.single_metrics(model)[1]
    assert type(metric) is keras.metrics.MeanMetricWrapper
    assert float(internals.metric_values(metric, tf.zeros((2, 1)), tf.ones((2, 1)))) == 1.0


def test_call_with_training():
    """Delete once Keras drops `training` for models whose `call` does not take it."""

    class Without(keras.Model):
        def call(self, inputs):
            return inputs

    class With(keras.Model):
        def call(self, inputs, training=False):
            return inputs + 1.0 if training else inputs

    assert float(internals.call_with_training(Without(), tf.zeros(()), True)) == 0.0
    assert float(internals.call_with_training(With(), tf.zeros(()), True)) == 1.0


def test_layer_state():
    """Delete `own_losses`, `list_of_losses`, `own_variables` and `seed_generators_of` once layers list what is theirs alone."""
    dropout = keras.layers.Dropout(0.5)
    assert [type(g) for g in internals.seed_generators_of(dropout)] == [keras.random.SeedGenerator]
    dense = keras.layers.Dense(2, activity_regularizer="l2")
    dense(tf.ones((1, 2)))
    assert len(internals.own_losses(dense)) == len(internals.list_of_losses(dense)) == 1
    internals.set_list_of_losses(dense, [])
    assert internals.own_losses(dense) == []
    assert [v.name for v in internals.own_trainable_variables(dense)] == ["kernel", "bias"]
    norm = keras.layers.BatchNormalization()
    norm.build((None, 2))
    assert {v.name for v in internals.own_variables(norm)} == {"gamma", "beta", "moving_mean", "moving_variance"}
    assert internals.is_autocast(dense.kernel) and not internals.is_autocast(norm.moving_mean)


def test_set_batch_moments():
    """Delete once `BatchNormalization(synchronized=True)` keeps to masks, empty parts and one device's rounding."""
    norm = keras.layers.BatchNormalization(momentum=0.0, epsilon=0.0)
    norm.build((None, 1))
    internals.set_batch_moments(norm, lambda inputs, mask: (tf.constant([1.0]), tf.constant([4.0])))
    np.testing.assert_allclose(norm(tf.constant([[5.0]]), training=True), [[2.0]])
    np.testing.assert_allclose(norm.moving_variance.numpy(), [4.0])


def test_mask_of():
    """Delete once masks are public."""
    masked = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    np.testing.assert_array_equal(internals.mask_of(masked), [[True, False]])
    assert internals.mask_of(tf.ones(1)) is None


def test_set_attribute_is_not_tracked(model, tmp_path):
    """Delete once Keras has a place for untracked attributes."""
    internals.set_attribute(model, "extra", tf.Variable(1.0))
    assert len(model.weights) == 4
    model.save(tmp_path / "m.keras")


def test_compile_arguments(model):
    """Delete once `get_compile_config` can return live objects."""
    arguments = internals.compile_arguments(model)
    assert arguments["optimizer"] is model.optimizer and arguments["loss"] == "mse" and arguments["metrics"] == ["mae"]
    assert internals.compile_arguments(keras.Sequential()) is None


def test_variables_updated_by(model):
    """Delete once optimizers list the variables that they update."""
    model.optimizer.build(model.trainable_variables)
    assert [a is b for a, b in zip(internals.variables_updated_by(model.optimizer), model.trainable_variables)] == [True] * 4


def test_skip_all_reduce():
    """See `test_local_updates`."""
    optimizer = keras.optimizers.SGD(1.0)
    internals.skip_all_reduce(optimizer)
    pairs = [(tf.ones(1), tf.Variable([0.0]))]
    assert optimizer._all_reduce_sum_gradients(pairs) is pairs


def test_dataset_of(data, build_fn):
    """Delete once `fit` builds from the dataset's spec."""
    from keras_mirror.distribution import ReplicaDataset

    model = km.mirrored_model(build_fn, devices=2)
    seen = []
    build = model._maybe_symbolic_build

    def spy(iterator=None, data_batch=None):
        seen.append(internals.dataset_of(iterator))
        build(iterator=iterator, data_batch=data_batch)

    internals.set_attribute(model, "_maybe_symbolic_build", spy)
    model.fit(*data, verbose=0)
    assert isinstance(seen[0], ReplicaDataset)


def test_kinds_of_datasets():
    """Delete once `tf.data` says publicly what a dataset is made of."""
    dataset = tf.data.Dataset.range(4).shard(2, 0).map(lambda x: x).batch(2)
    assert {"Range", "Shard", "Batch"} <= internals.kinds_of_datasets(dataset)
    assert "Shard" not in internals.kinds_of_datasets(tf.data.Dataset.range(4).batch(2))


def test_kind_inputs_and_settings_of_a_dataset():
    """Delete once `tf.data` says publicly what a stage of a pipeline is and was made with."""
    source = tf.data.Dataset.range(9)
    shuffle = source.shuffle(5, seed=3, reshuffle_each_iteration=False)
    shard = shuffle.shard(4, 1)
    repeat = shard.repeat(2)
    batch = repeat.batch(2, drop_remainder=True, num_parallel_calls=2, deterministic=False)
    kinds = [internals.kind_of_dataset(stage) for stage in (source, shuffle, shard, repeat, batch)]
    assert kinds == ["Range", "Shuffle", "Shard", "Repeat", "ParallelBatch"]
    assert internals.inputs_of_dataset(batch) == [repeat] and internals.inputs_of_dataset(source) == []
    settings = {"buffer_size": 5, "seed2": 3, "reshuffle_each_iteration": False}
    assert {name: internals.setting_of_dataset(shuffle, name) for name in settings} == settings
    assert [internals.setting_of_dataset(shard, name) for name in ("num_shards", "index")] == [4, 1]
    assert internals.setting_of_dataset(repeat, "count") == 2
    assert [internals.setting_of_dataset(batch, name) for name in ("batch_size", "drop_remainder")] == [2, True]
    assert internals.setting_of_dataset(batch, "deterministic") == "false"
    assert internals.setting_of_dataset(source, "seed") is None


def test_epoch_iterator_and_logs(data, build_fn):
    """Delete once `fit`'s iterator over data is public."""
    model = km.mirrored_model(build_fn, devices=2)
    iterator = internals.epoch_iterator(model, *data, None, 8, None, False, None)
    assert iterator.num_batches == 4
    assert internals.restored_epoch(model) is None
    assert not internals.is_built(model)
    model.fit(*data, verbose=0)
    assert internals.is_built(model)
    assert set(internals.metrics_or_logs(model, {"own": 1.0})) == {"own"}
    assert set(internals.metrics_or_logs(model, {"loss": 1.0, "mae": 1.0})) == {"loss", "mae"}


def test_random_states_can_be_put_back():
    """Delete `eager_seeds` and `set_global_seed_generator` once TensorFlow and Keras tell and take their random state publicly."""
    tf.random.set_seed(3)
    before = internals.eager_seeds()
    tf.random.normal([2])
    assert internals.eager_seeds() != before
    internals.set_eager_seeds(before)
    assert internals.eager_seeds() == before

    internals.set_global_seed_generator(None)
    assert internals.global_seed_generator() is None
    keras.random.normal((2,))
    assert internals.global_seed_generator() is not None


def test_is_distributed(strategy):
    """Delete once TensorFlow has a public class for variables with copies."""
    with strategy.scope():
        assert internals.is_distributed(tf.Variable(0.0))
        summed = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
        assert internals.is_distributed(summed)
    assert not internals.is_distributed(tf.Variable(0.0))


def test_attributes_come_off_again():
    """Keras refuses to delete what it did not track; `unset_attribute` does not ask."""
    layer = keras.layers.Dense(1)
    internals.set_attribute(layer, "call", "shadow")
    internals.unset_attribute(layer, "call")
    assert "call" not in vars(layer)


def test_own_non_trainable_variables():
    """Delete once layers tell their own variables without those of sublayers publicly."""
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    assert [v.name for v in internals.own_non_trainable_variables(layer)] == ["moving_mean", "moving_variance"]


def test_counters_of_names():
    """Delete both once Keras has a public way to leave its counters of names alone."""
    keras.layers.Dense(1)
    before = internals.counters_of_names()
    name = keras.layers.Dense(1).name
    internals.set_counters_of_names(before)
    assert keras.layers.Dense(1).name == name
    internals.set_counters_of_names({})
    assert keras.layers.Dense(1).name == "dense"


def test_what_decides_the_order_of_a_dataset():
    """Delete `datasets_below`, `functions_of_dataset`, `shuffle_seeds` and `batch_size_of` once `tf.data` tells of
    shuffles and their seeds publicly."""
    tf.random.set_seed(None)
    plain = tf.data.Dataset.range(4)
    shuffled = plain.shuffle(2)
    dataset = shuffled.map(lambda x: x + 1).batch(3)
    found = list(internals.datasets_below(dataset))
    assert [above for _, above in found] == [(), ("Batch",), ("Batch", "Map"), ("Batch", "Map", "Shuffle")]
    assert found[0][0] is dataset and found[-1][0] is plain
    assert internals.shuffle_seeds(shuffled) == (0, 0) and internals.shuffle_seeds(plain) is None
    assert internals.shuffle_seeds(plain.shuffle(2, seed=5))[1] == 5
    assert internals.batch_size_of(dataset) == 3 and internals.batch_size_of(plain) is None
    (graph,) = internals.functions_of_dataset(found[1][0])
    assert any(node.op == "AddV2" for node in graph.node)


def test_global_generators():
    """Delete `global_tf_generator` and `global_seed_generator` once they can be asked for without being made."""
    keras.backend.clear_session()
    assert internals.global_seed_generator() is None
    keras.random.uniform(())
    assert internals.global_seed_generator().state.shape == (2,)
    made = tf.random.get_global_generator()
    assert internals.global_tf_generator() is made


def test_the_global_generator_is_of_one_thread():
    """Delete `set_global_seed_generator` and `shared_seeds.py` once replicas, in threads of their own, draw from one generator."""
    generator = keras.random.SeedGenerator(3)
    internals.set_global_seed_generator(generator)
    assert internals.global_seed_generator() is generator
    keras.random.uniform(())
    assert generator.state.value.numpy()[1] != 0
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(internals.global_seed_generator).result() is None
    keras.backend.clear_session()


def test_scratch_graph():
    """Delete once a layer's operations can be told without calling it."""
    with internals.scratch_graph().as_default() as graph:
        tf.zeros([1, 2])
        assert graph.get_operations() and internals.current_graph() is graph
    assert internals.current_graph() is None


def test_masks_can_be_attached():
    """Delete `set_mask` once Keras has a public name for it."""
    tensor = tf.zeros([2, 3])
    internals.set_mask(tensor, tf.constant([[True, False, True]] * 2))
    assert internals.mask_of(tensor).shape == (2, 3)


def test_positions_of_an_epoch_iterator(data, build_fn):
    """Delete `set_dataset_of`, `replace_enumeration`, `steps_taken`, `set_steps_taken`, `present_iterator`,
    `set_present_iterator`, `set_restored_epoch` and `rows_and_batch_size` once Keras can begin in the middle of an epoch."""
    model = km.mirrored_model(build_fn, devices=2)
    iterator = internals.epoch_iterator(model, *data, None, 8, 2, False, None)
    assert internals.rows_and_batch_size(iterator.data_adapter) == (29, 8)
    steps = []
    internals.replace_enumeration(iterator, lambda epoch: (steps.append(step[0]) or step for step in epoch))
    internals.set_dataset_of(iterator, internals.dataset_of(iterator))
    for *_, batches in iterator:
        next(batches)
    assert steps == [0, 1]
    assert internals.steps_taken(iterator) == 2 and internals.present_iterator(iterator) is not None
    internals.set_steps_taken(iterator, 4)
    internals.set_present_iterator(iterator, None)
    assert (internals.steps_taken(iterator), internals.present_iterator(iterator)) == (4, None)
    internals.set_restored_epoch(model, 3)
    assert internals.restored_epoch(model) == 3


def test_learning_rate_schedule():
    """Delete `learning_rate_schedule` once an optimizer hands out its schedule."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    assert internals.learning_rate_schedule(keras.optimizers.SGD(schedule)) is schedule
    assert internals.learning_rate_schedule(keras.optimizers.SGD(0.1)) is None


def test_tensorflow_started_and_global_seed():
    """Delete once TensorFlow says publicly whether it has started, and which seed was set."""
    tf.constant(0)
    assert internals.tensorflow_started()
    tf.random.set_seed(11)
    assert internals.global_seed() == 11


def test_is_read_together():
    """Delete once the public `tf.Variable` tells that its copies are added up when they are read."""
    with km.MirroredStrategy(2).scope():
        metric, weight = keras.metrics.Mean(), keras.Variable(1.0)
    assert internals.is_read_together(metric.variables[0].value)
    assert not internals.is_read_together(weight.value)


def test_collective_extended():
    """Delete once `tf.distribute.MultiWorkerMirroredStrategy` takes several CPUs a worker and compares before it broadcasts."""

    class Strategy(tf.distribute.MultiWorkerMirroredStrategy):
        def __init__(self):
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
            options = tf.distribute.experimental.CommunicationOptions()
            tf.distribute.Strategy.__init__(self, internals.collective_extended(self, resolver, options, 3))

    strategy = Strategy()  # without TF_CONFIG it is alone, and starts no server
    assert strategy.num_replicas_in_sync == 3
    with internals.made_alone(strategy.extended), strategy.scope():
        assert tf.Variable(2.0).numpy() == 2.0
    assert not strategy.extended.keras_mirror_alone


def test_set_initial_epoch(data, build_fn):
    """Delete once a callback can say publicly at which epoch to go on."""
    model = km.mirrored_model(build_fn, devices=2)
    internals.set_initial_epoch(model, 2)
    assert internals.restored_epoch(model) == 2
    assert model.fit(*data, epochs=3, verbose=0).epoch == [2]


# --- what code sees that has the whole batch; delete all of it once a strategy of TensorFlow's has a global view -----------------


def test_merging_updates_takes_local_updates_back():
    extended = km.MirroredStrategy(2).extended
    with internals.local_updates(extended):
        assert not extended._use_merge_call()
        with internals.merging_updates(extended):
            assert extended._use_merge_call()
        assert not extended._use_merge_call()


def test_regrouped_hands_out_a_part_each():
    strategy = km.MirroredStrategy(2)
    parts = internals.regrouped([tf.constant(1), tf.constant(2)])
    assert [int(part) for part in strategy.experimental_local_results(parts)] == [1, 2]


def test_random_operations_ask_for_their_seeds_where_they_are_said_to(monkeypatch):
    module, name = internals.seeds_of_operations()
    monkeypatch.setattr(module, name, lambda seed: (3, 4))
    drawn = [tf.function(lambda: tf.random.normal([3]))().numpy() for _ in range(2)]
    assert (drawn[0] == drawn[1]).all()  # each a new operation, whose stream begins with these seeds
    one, other = internals.seeds_by_chance(), internals.seeds_by_chance()
    assert one != other and 0 not in (*one, *other)


def test_tf_functions_are_called_through_their_class():
    assert "__call__" in vars(internals.class_of_tf_functions())
    assert isinstance(tf.function(lambda: 1), internals.class_of_tf_functions())


def test_the_python_function_of_a_method_keeps_its_object():
    class Holder:
        two = 2

        @tf.function
        def doubled(self, x):
            return self.two * x

    holder = Holder()  # which TensorFlow binds weakly
    assert internals.python_function_of(holder.doubled)(3) == 6


def test_every_read_of_a_variable_goes_through_its_class(monkeypatch):
    reads = []
    for holder, name in internals.reads_of_variables():
        original = getattr(holder, name)
        monkeypatch.setattr(
            holder,
            name,
            lambda self, *args, original=original, name=name, **kw: (reads.append(name), original(self, *args, **kw))[1],
        )
    variable = tf.Variable([[1.0], [2.0]])
    tf.identity(variable), variable.read_value(), variable.sparse_read([1])
    assert reads == ["_read_variable_op", "_read_variable_op", "sparse_read"]


def test_definitions_of_operations():
    assert internals.definition_of_operation("AssignVariableOp").is_stateful
    assert not internals.definition_of_operation("MatMul").is_stateful
    assert internals.definition_of_operation("__inference_step_17") is None


def test_metrics_and_training_of_layers():
    class Watching(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.watched = keras.metrics.Mean()

        def call(self, x, training=False):
            return x

    watching = Watching()
    assert internals.metrics_of(watching) == [watching.watched]
    assert internals.takes_training(watching) and not internals.takes_training(keras.layers.InputLayer((1,)))


def test_function_of_metric():
    def error(y_true, y_pred):
        return y_true - y_pred

    assert internals.function_of_metric(keras.metrics.MeanMetricWrapper(error)) is error


def test_trainable_flags():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    before = internals.trainable_flags(internals.layers_of(model))
    model.trainable = False
    assert not model.trainable_variables
    internals.set_trainable_flags(before)
    assert len(model.trainable_variables) == 2


def test_logits_of():
    logits = tf.constant([[200.0]])
    probabilities = keras.activations.sigmoid(logits)
    assert internals.logits_of(probabilities) is not None
    internals.set_logits(plain := tf.constant([[1.0]]), logits)
    assert float(keras.ops.binary_crossentropy([[0.0]], plain)[0, 0]) == 200.0
