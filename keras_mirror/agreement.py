"""What the workers say of themselves, compared: sentences that name who differs. No TensorFlow."""


def differences(names, said):
    """Sentences on what is not the same on all workers.

    Args:
        names: Names of the workers, the chief's first.
        said: One dict a worker; values that JSON can hold.

    Returns:
        A list of strings such as `"batch_size is 8 on worker:0 and 16 on worker:1"`.
    """
    keys = list(dict.fromkeys(key for facts in said for key in facts))
    return [_sentence(key, names, [facts.get(key) for facts in said]) for key in keys if _differ(key, said)]


def _differ(key, said):
    return any(facts.get(key) != said[0].get(key) for facts in said)


def _sentence(key, names, values):
    if all(isinstance(value, list) for value in values):
        return _first_difference(key, names, values)
    groups = {}
    for name, value in zip(names, values):
        groups.setdefault(_text(value), []).append(name)
    return f"{key} is " + " and ".join(f"{value} on {_list(group)}" for value, group in groups.items())


def _first_difference(key, names, values):
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        return _sentence(f"the number of {key}", names, lengths)
    index = next(i for i in range(lengths[0]) if any(value[i] != values[0][i] for value in values))
    labels = [value[index] if isinstance(value[index], list) else [None, value[index]] for value in values]
    what = f"{key}[{index}]" if labels[0][0] is None else f"{labels[0][0]} of the {key}"
    if labels[0][0] is not None and any(label[0] != labels[0][0] for label in labels):
        return _sentence(f"{key}[{index}]", names, [" ".join(map(str, label)) for label in labels])
    return _sentence(what, names, [label[1] for label in labels])


def _text(value):
    return "unset" if value is None else str(value)


def _list(group):
    return group[0] if len(group) == 1 else f"{', '.join(group[:-1])} and {group[-1]}"


class WorkersDifferError(RuntimeError):
    """The workers of one training were given different models, data, arguments or versions."""


def check(what, names, said):
    """Refuses to go on if the workers differ; every worker raises the same sentence.

    Raises:
        WorkersDifferError: With who differs, and in what.
    """
    found = differences(names, said)
    if found:
        raise WorkersDifferError(
            f"{what}: the workers must do the same, and differ: {'; '.join(found)}. Give every worker the same script, "
            "data and arguments."
        )
