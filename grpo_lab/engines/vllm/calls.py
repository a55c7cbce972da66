"""What a server's workers may be told over HTTP: our own methods and NCCL's transfer, with arguments of the kinds they take.

vLLM's `/collective_rpc` calls any method of a worker by name, also `save_sharded_state(path)`, and other backends of its weight transfer
take pickles. Each body is read here and written again from what was read, so that nothing else comes along.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

#: a folder that `weight_files` makes; `trusted_folder` looks at it once more in the worker
FOLDER = re.compile(r"/dev/shm/grpo-lab-weights-[A-Za-z0-9_]{1,64}")
LONGEST_TEXT = 4096


class CallRefused(ValueError):
    """A call that is not in the list, or with other arguments."""


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _folder(value: Any) -> bool:
    return isinstance(value, str) and FOLDER.fullmatch(value) is not None


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _shapes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(shape, list) and all(map(_number, shape)) for shape in value)


Kinds = Mapping[str, Callable[[Any], bool]]
OWNER: Kinds = {"pid": _number, "started": _text, "place": _text, "host": _text, "folder": _text}


def _owner(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == OWNER.keys() and all(OWNER[key](value[key]) for key in OWNER)


#: method of `server_worker.WeightLoading` -> its arguments, all of which must be there
METHODS: dict[str, Kinds] = {
    "grpo_lab_load_weights": {"folder": _folder, "version": _text},
    "grpo_lab_sees": {"folder": _folder},
    "grpo_lab_describe": {},
    "grpo_lab_claim": {"owner": _owner},
    "grpo_lab_release": {"owner": _owner},
    "grpo_lab_note_version": {"version": _text},
    "grpo_lab_weights_version": {},
    "grpo_lab_differing_tensors": {"folder": _folder},
    "grpo_lab_clear_cache": {},
}
RENDEZVOUS: Kinds = {
    "master_address": _text, "master_port": _number, "rank_offset": _number, "world_size": _number, "packed": _switch,
}  # fmt: skip
ANNOUNCED: Kinds = {"names": _texts, "dtype_names": _texts, "shapes": _shapes, "packed": _switch}
MAY_MISS = {"packed"}


def remote_call(body: Any) -> dict[str, Any]:
    """The body of `/collective_rpc`. Raises CallRefused."""
    inside = _inside(body, {"method", "kwargs"})
    method = inside.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise CallRefused("no method of grpo_lab's worker")
    return {"method": method, "kwargs": _checked(inside.get("kwargs", {}), METHODS[method])}


def rendezvous(body: Any) -> dict[str, Any]:
    """The body of `/init_weight_transfer_engine`: where the trainer waits with NCCL. Raises CallRefused."""
    return {"init_info": _checked(_inside(body, {"init_info"}).get("init_info"), RENDEZVOUS)}


def announced(body: Any) -> dict[str, Any]:
    """The body of `/update_weights`: the tensors that come over NCCL. Raises CallRefused."""
    return {"update_info": _checked(_inside(body, {"update_info"}).get("update_info"), ANNOUNCED)}


def nothing(body: Any) -> dict[str, Any]:
    """The body of a call without arguments. Raises CallRefused."""
    return _inside(body, set())


CHECKED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/collective_rpc": remote_call,
    "/init_weight_transfer_engine": rendezvous,
    "/update_weights": announced,
    "/start_weight_update": nothing,
    "/finish_weight_update": nothing,
}


def _inside(body: Any, allowed: set[str]) -> dict[str, Any]:
    if not isinstance(body, dict) or not body.keys() <= allowed:
        raise CallRefused(f"its body may hold {sorted(allowed) or 'nothing'} and nothing else")
    return body


def _checked(given: Any, kinds: Kinds) -> dict[str, Any]:
    if not isinstance(given, dict) or not kinds.keys() - MAY_MISS <= given.keys() <= kinds.keys():
        raise CallRefused(f"it takes {sorted(kinds)}")
    for name, value in given.items():
        if not kinds[name](value):
            raise CallRefused(f"{name} is of another kind than it takes")
    return given
