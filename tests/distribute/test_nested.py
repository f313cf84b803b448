"""Nested values taken apart and rebuilt: nothing is lost, changed or executed."""

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import StrEnum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distribute.errors import UserError
from distribute.nested import flatten, refuse_non_json, unflatten

Pair = namedtuple("Pair", "a b")


class Colour(StrEnum):
    RED = "red"


@dataclass
class Leaf:
    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    leaves: dict[str, Leaf] = field(default_factory=dict)
    shape: tuple[int, ...] = ()

    def __post_init__(self):
        assert self.name != "forbidden", "a constructor must not run when a value is rebuilt"


def same(first, second):
    """Equality that looks into tensors and tells types and NaN apart."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second)) and type(first) is type(second)
    return type(first) is type(second) and repr(first) == repr(second)


def round_trip(value):
    tree, tensors = flatten(value)
    return unflatten(json.loads(json.dumps(tree)), tensors)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars | st.builds(torch.tensor, st.integers(-9, 9)) | st.sampled_from([torch.bfloat16, torch.bool]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("$") | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_everything_survives(value):
    assert same(value, round_trip(value))


def test_dataclasses_survive_without_their_constructor():
    layer = Layer("a", {"x.y": Leaf(torch.ones(2))}, (1, 2))
    object.__setattr__(layer, "name", "forbidden")
    result = round_trip([layer])[0]
    assert (type(result), result.name, result.shape) == (Layer, "forbidden", (1, 2))
    assert torch.equal(result.leaves["x.y"].weight, torch.ones(2))
    assert result.leaves["x.y"].bias is None


def test_parameters_become_plain_tensors():
    result = round_trip({"w": torch.nn.Parameter(torch.ones(2))})["w"]
    assert type(result) is torch.Tensor
    assert not result.requires_grad


def test_ordered_dict_keeps_its_order():
    assert list(round_trip(OrderedDict(b=1, a=2))) == ["b", "a"]


@dataclass
class Hidden:
    inner: object = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [0, {1, 2}]}, r"config\['a'\]\[1\] is a set; allowed are"),
        ({"a.b": Hidden(b"x")}, r"config\['a.b'\].inner is a bytes"),
        ([Pair(1, 2)], r"config\[0\] is a tests.distribute.test_nested.Pair"),
        ({"c": Colour.RED}, r"config\['c'\] is a tests.distribute.test_nested.Colour"),
        ({(1, 2): 0}, r"config has the key \(1, 2\), a tuple"),
        ([torch.zeros(2, device="meta")], r"config\[0\] is a torch.Tensor that is sparse, sharded or without data"),
        ([torch.eye(2).to_sparse()], r"config\[0\] is a torch.Tensor that is sparse"),
    ],
)
def test_what_cannot_be_sent_is_named(value, text):
    with pytest.raises(UserError, match=text):
        flatten(value)


def test_local_class_is_refused():
    @dataclass
    class Local:
        a: int

    with pytest.raises(UserError, match="Local, which another process cannot find"):
        flatten(Local(1))


@pytest.mark.parametrize("name", ["antigravity:Nothing", "os:system", "tests.distribute.test_nested:Layer.name"])
def test_data_cannot_name_other_code(name):
    with pytest.raises(UserError, match="not imported in this form"):
        unflatten({"$": "dataclass", "class": name, "fields": {}}, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": [0, object()]}}, r"config\['a'\]\['b'\]\[1\] is a object"),
        ({"a": (1, 2)}, r"config\['a'\] is a tuple"),
        ({"a": {1: 2}}, r"config\['a'\] has the key 1, a int"),
        ({"a": float("nan")}, r"config\['a'\] is nan; JSON has finite numbers only"),
        ({"a": torch.ones(1)}, r"config\['a'\] is a torch.Tensor"),
    ],
)
def test_non_json_is_named(value, text):
    with pytest.raises(UserError, match=text):
        refuse_non_json(value)


def test_json_passes():
    refuse_non_json({"a": [1, 2.5, None, True, "ü", {"b.c/d": []}]})
