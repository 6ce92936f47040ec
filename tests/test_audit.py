import keras
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import MirrorWarning, OutOfScopeError

forgotten = tf.Variable(0, trainable=False)
LINE = 8  # of the assignment above


class Counting(keras.Model):
    def __init__(self, counter):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.count = counter if callable(counter) else (lambda: counter)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, batch):
        self.count().assign_add(1)
        return super().train_step(batch)


def counting_model(counter, replicas=2):
    def build_fn():
        model = Counting(counter)
        model.compile("sgd", "mse")
        return model

    return km.mirrored_model(build_fn, devices=replicas)


def test_a_forgotten_global_counter_is_found_before_the_first_step(data):
    forgotten.assign(0)
    model = counting_model(forgotten)
    with pytest.raises(OutOfScopeError) as raised:
        model.fit(*data, batch_size=8, verbose=0, callbacks=[km.ScopeAuditor(on_violation="raise")])
    text = str(raised.value)
    assert f"test_audit.py:{LINE}" in text
    assert "counts as many times as there are replicas" in text
    assert "inside build_fn" in text
    assert int(forgotten) == 0, "the step ran"
    assert int(model.optimizer.iterations.numpy()) == 0


def test_warn_says_it_once_and_goes_on(data):
    forgotten.assign(0)
    model = counting_model(forgotten)
    auditor = km.ScopeAuditor()
    with pytest.warns(MirrorWarning, match="test_audit.py") as seen:
        model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=[auditor])
    assert len([w for w in seen if "ScopeAuditor" in str(w.message)]) == 1
    assert int(forgotten) == 2 * 2 * 4  # replicas x epochs x steps: what the report warns of
    (finding,) = auditor.report().findings
    assert finding.owner == "the step" and finding.origin.line == LINE


def test_a_local_counter_is_told_by_its_line(data):
    counter = tf.Variable(0)
    model = counting_model(counter)
    model.fit(*data, batch_size=8, verbose=0)
    (finding,) = km.audit(model).findings
    assert finding.origin.function == "test_a_local_counter_is_told_by_its_line"


def test_a_counter_in_scope_without_aggregation_is_found(data):
    made = []

    def counter():
        return made[0]

    def build_fn():
        made.append(tf.Variable(0, trainable=False, name="mine"))
        model = Counting(counter)
        model.compile("sgd", "mse")
        return model

    model = km.mirrored_model(build_fn, devices=2, view="replica")
    model.fit(*data, batch_size=8, verbose=0)
    (finding,) = km.audit(model).findings
    assert finding.path == "mine" and "only the first one is read" in finding.effect and "ON_READ" in finding.remedy


def test_a_counter_with_aggregation_is_right_and_not_flagged(data):
    made = []

    def build_fn():
        made.append(
            tf.Variable(
                0.0,
                trainable=False,
                aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ,
            )
        )
        model = Counting(lambda: made[0])
        model.compile("sgd", "mse")
        return model

    model = km.mirrored_model(build_fn, devices=2)
    model.fit(*data, batch_size=8, verbose=0)
    assert not km.audit(model)
    assert float(made[0].numpy()) == 2 * 4


def test_layers_metrics_and_optimizers_outside_are_told_with_owner_and_line():
    layer = keras.layers.Dense(2, name="outer")
    layer.build((None, 6))

    class WithMetric(keras.Model):
        def __init__(self):
            super().__init__()
            self.outer, self.inner, self.seen = layer, keras.layers.Dense(1), metric

        def call(self, inputs):
            return self.inner(self.outer(inputs))

    metric = keras.metrics.Mean(name="seen")

    def build_fn():
        model = WithMetric()
        model.compile("sgd", "mse")
        return model

    with pytest.warns(MirrorWarning):
        model = km.mirrored_model(build_fn, devices=2)
    report = km.audit(model)
    assert {(f.path.split("/")[-1], f.owner) for f in report.findings} == {
        ("kernel", "layer outer"),
        ("bias", "layer outer"),
        ("total", "metric seen"),
        ("count", "metric seen"),
    }
    assert all(f.origin.file.endswith("test_audit.py") for f in report.findings)
    assert "4 of" in report.title and "outer/kernel" in str(report)


def test_metric_state_that_is_no_metric_state_is_found(data):
    class Home(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="home")
            self.rows = keras.Variable(0.0, name="rows")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(y_pred)[0], "float32"))

        def result(self):
            return self.rows.value

    def build_fn():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Home()])
        return model

    model = km.mirrored_model(build_fn, devices=2, view="replica")
    model.fit(*data, batch_size=29, verbose=0)
    (finding,) = km.audit(model).findings
    assert finding.owner == "metric home" and "misses rows" in finding.effect and "add_variable" in finding.remedy


def test_a_clean_model_is_clean(data, build_fn):
    model = km.mirrored_model(build_fn, devices=2)
    assert "No step was traced yet" in str(km.audit(model))
    model.fit(*data, batch_size=8, verbose=0, callbacks=[km.ScopeAuditor("raise")])
    report = km.audit(model)
    assert not report and report.findings == []
    assert "variables are in scope" in str(report) and "No step" not in str(report)


def test_a_model_made_in_a_thread_is_flagged(data, build_fn):
    import threading

    made = []

    def build_in_thread():
        thread = threading.Thread(target=lambda: made.append(build_fn()))
        thread.start()
        thread.join()
        return made[0]

    with pytest.warns(MirrorWarning) as seen:
        model = km.mirrored_model(build_in_thread, devices=2)
    assert any("4 of the model's 4 weights" in str(w.message) for w in seen)
    assert len(km.audit(model).findings) >= 4


@pytest.mark.parametrize("what", [3, None, "model"])
def test_only_models_can_be_audited(what):
    with pytest.raises(TypeError, match="expected a keras.Model"):
        km.audit(what)


def test_a_model_without_a_strategy_is_told_what_to_do(build_fn):
    with pytest.raises(ValueError, match="build it with keras_mirror.mirrored_model"):
        km.audit(build_fn())


def test_on_violation_is_checked():
    with pytest.raises(ValueError, match="'warn' or 'raise'"):
        km.ScopeAuditor(on_violation="ignore")


def test_a_report_needs_a_model():
    with pytest.raises(RuntimeError, match="no model yet"):
        km.ScopeAuditor().report()
