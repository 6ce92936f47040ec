"""Everything that a step can change: remembered, and put back."""

from keras_mirror import internals
from keras_mirror.random_states import generator_variables, host_state, set_host_state


def copies_of(variable):
    """The variable's copies, one per local replica; the variable itself if there is one of it."""
    value = getattr(variable, "value", variable)
    value = internals.container_of(value if internals.is_distributed(value) or hasattr(value, "handle") else variable)
    return list(value.values) if internals.is_distributed(value) else [value]


class Snapshot:
    """The values of variables, copy by copy, and of the random generators of Python, NumPy, Keras and TensorFlow.

    Args:
        variables: `keras.Variable`s and `tf.Variable`s, distributed or not; more can be added later
            with `add`, before they change.
    """

    def __init__(self, variables=()):
        self._values = {}
        self._host = host_state()
        self._eager = internals.eager_seeds()
        self._had_global_seed = internals.global_seed_generator() is not None
        self.add([*variables, *generator_variables()])

    def add(self, variables):
        """Remembers the values of more variables; those known already keep their first value."""
        for variable in variables:
            for copy in copies_of(variable):
                if id(copy) not in self._values:
                    self._values[id(copy)] = (copy, copy.numpy())

    def restore(self):
        """Puts every value back."""
        for copy, value in self._values.values():
            copy.assign(value)
        set_host_state(self._host)
        internals.set_eager_seeds(self._eager)
        if not self._had_global_seed:
            internals.set_global_seed_generator(None)
