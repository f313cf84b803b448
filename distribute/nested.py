"""Nested values with tensors anywhere in them, taken apart into a JSON tree and a dict of tensors, and back.

JSON stays as it is. Everything else becomes a node {"$": kind, ...}: tensors, tuples, dataclasses, torch dtypes,
floats that JSON lacks, and dicts whose keys are not plain strings. A value that has no faithful form is refused
with its path, never converted. Rebuilding runs no code: a dataclass is looked up among the classes this process
has loaded, and its fields are set without calling its constructor.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from distribute.errors import UserError

MARK = "$"
KEY_TYPES = (str, int, float, bool, type(None))


def flatten(value: Any, path: str = "config") -> tuple[Any, dict[str, torch.Tensor]]:
    """(tree, tensors): `tree` is JSON; tensors are named "0", "1", ... in the order of the tree.

    Raises:
        UserError: something in `value` cannot be sent to another process; names its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(value, path, tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `flatten` took apart; tensors are put in as they are.

    Raises:
        UserError: the tree names a dataclass that this process has not imported.
    """
    put = partial(unflatten, tensors=tensors)
    if isinstance(tree, list):
        return [put(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if MARK not in tree:
        return {key: put(item) for key, item in tree.items()}
    return tensors[tree["name"]] if tree[MARK] == "tensor" else DECODERS[tree[MARK]](tree, put)


def refuse_non_json(value: Any, path: str = "config") -> None:
    """Raise UserError, with the path, when JSON would lose or change something of `value`."""
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise UserError(f"{path} has the key {key!r}, a {_name(key)}; JSON keys are strings")
            refuse_non_json(item, f"{path}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_non_json(item, f"{path}[{index}]")
    elif type(value) not in KEY_TYPES:
        raise UserError(f"{path} is a {_name(value)}; allowed are dict, list, str, int, float, bool and None")
    elif type(value) is float and not math.isfinite(value):
        raise UserError(f"{path} is {value}; JSON has finite numbers only: put it into a tensor or a string")


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:  # noqa: PLR0911  one line a kind
    if type(value) is float and not math.isfinite(value):
        return {MARK: "float", "value": repr(value)}
    if type(value) in KEY_TYPES:
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, tensors)
    if isinstance(value, torch.dtype):
        return {MARK: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):  # a named tuple would lose its names
        items = [_encode(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {MARK: "tuple", "items": items}
    if dataclasses.is_dataclass(type(value)):
        return _encode_dataclass(value, path, tensors)
    raise UserError(
        f"{path} is a {_name(value)}; allowed are tensors, dict, list, tuple, dataclass, "
        "str, int, float, bool, None and torch.dtype"
    )


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    if value.layout != torch.strided or value.is_meta or hasattr(value, "full_tensor"):
        raise UserError(f"{path} is a {_name(value)} that is sparse, sharded or without data; give a dense tensor")
    name = str(len(tensors))
    tensors[name] = value.detach().resolve_neg()
    return {MARK: "tensor", "name": name}


def _encode_dict(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    for key in value:
        if type(key) not in KEY_TYPES:
            raise UserError(f"{path} has the key {key!r}, a {_name(key)}; allowed are str, int, float, bool and None")
    items = [(key, _encode(item, f"{path}[{key!r}]", tensors)) for key, item in value.items()]
    if MARK not in value and all(type(key) is str for key in value):
        return dict(items)
    return {MARK: "dict", "items": [[_encode(key, path, tensors), item] for key, item in items]}


def _encode_dataclass(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if _find_dataclass(name) is not type(value):
        raise UserError(f"{path} is a {name}, which another process cannot find; define the class in a module")
    fields = {
        field.name: _encode(getattr(value, field.name), f"{path}.{field.name}", tensors)
        for field in dataclasses.fields(value)
    }
    return {MARK: "dataclass", "class": name, "fields": fields}


def _find_dataclass(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)  # not imported: data must not decide which code runs
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _new_dataclass(name: str, fields: dict[str, Any]) -> Any:
    cls = _find_dataclass(name)
    if cls is None or set(fields) != {field.name for field in dataclasses.fields(cls)}:
        raise UserError(f"a rank sent a {name}, which this rank has not imported in this form; import it first")
    value: Any = object.__new__(cls)
    for key, item in fields.items():
        object.__setattr__(value, key, item)  # works for frozen classes and those with slots
    return value


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"a rank sent torch.{name}, which is no dtype of torch {torch.__version__}")
    return dtype


#: Node kind -> how its value is made; `put` rebuilds what is inside.
DECODERS: dict[str, Callable[[dict[str, Any], Callable[[Any], Any]], Any]] = {
    "tuple": lambda node, put: tuple(put(item) for item in node["items"]),
    "dict": lambda node, put: {put(key): put(item) for key, item in node["items"]},
    "float": lambda node, put: float(node["value"]),
    "dtype": lambda node, put: _torch_dtype(node["name"]),
    "dataclass": lambda node, put: _new_dataclass(node["class"], {k: put(v) for k, v in node["fields"].items()}),
}


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
