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
    """Of lists, whose entries may be pairs of a label and a value, the first that differs."""
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1:
        return _sentence(f"the number of {key}s", names, lengths)
    index = next(i for i in range(lengths[0]) if any(value[i] != values[0][i] for value in values))
    entries = [value[index] for value in values]
    labelled = all(isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in entries)
    if labelled and len({entry[0] for entry in entries}) == 1:
        return _sentence(f"{key} {entries[0][0]}", names, [_text(entry[1]) for entry in entries])
    return _sentence(f"{key}[{index}]", names, [" ".join(map(str, entry)) if labelled else str(entry) for entry in entries])


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
