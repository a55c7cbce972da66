"""The configuration as a checkpoint's ``training_args.bin`` can hold it.

HF pickles ``args`` with every save. A part given as an object travels in them, and lambdas, closures and objects of local classes
cannot be pickled. In the file such a part stands under its name; the run itself keeps the object, and a resume gets its parts from
the script that resumes, as it always does. Whoever loads the file and trains with it is told which part it lacks.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from grpo_lab.trainer.settings.parse import OUR_FIELDS, named_by


def picklable(args: Any) -> Any:
    """``args``, or where a part of ours cannot be pickled a copy in which its name stands in for it."""
    changed = {name: _picklable(getattr(args, name)) for name in OUR_FIELDS if getattr(args, name, None) is not None}
    changed = {name: value for name, value in changed.items() if value is not getattr(args, name)}
    if not changed:
        return args
    record = copy.copy(args)
    vars(record).update(changed)
    return record


def _picklable(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _picklable(item) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own pickling raises
        return named_by(value)
    return value


__all__ = ["picklable"]
