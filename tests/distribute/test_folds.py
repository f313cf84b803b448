"""Which tensor takes up a smoothing, by names and shapes of the architectures that people have."""

import pytest

from distribute.folds import Fold, folds, layer_of, plan_folds
from distribute.scheme import PRESETS, Dialect, Scheme

Shapes = dict[str, tuple[int, ...]]
LAYER = "model.layers.0"
H, INNER = 64, 128


def vectors(*names: str) -> Shapes:
    return {f"{LAYER}.{name}": (H,) for name in names}


def attention(extra: Shapes | None = None, *, values: int = H) -> Shapes:
    shapes: Shapes = {f"{LAYER}.self_attn.{leaf}_proj.weight": (H, H) for leaf in "qo"}
    shapes |= {f"{LAYER}.self_attn.{leaf}_proj.weight": (values, H) for leaf in "kv"}
    return shapes | {f"{LAYER}.self_attn.{name}": shape for name, shape in (extra or {}).items()}


def gated(parent: str = "mlp", leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = (f"{LAYER}.{parent}.{leaf}.weight" for leaf in leaves)
    return {gate: (INNER, H), up: (INNER, H), down: (H, INNER)}


LLAMA = attention(values=32) | gated() | vectors("input_layernorm.weight", "post_attention_layernorm.weight")


def modules_of(shapes: Shapes) -> list[str]:
    routers = ("gate", "router", "shared_expert_gate")
    names = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    return [name for name in names if name.rpartition(".")[2] not in routers]


def found(shapes: Shapes, **options: bool) -> dict[str, tuple[str, str]]:
    """Leaves of the consumers -> (kind, producer), within the layer."""
    result = folds(modules_of(shapes), shapes, **options)
    assert sorted(module for fold in result for module in fold.consumers) == sorted(modules_of(shapes))
    return {
        "+".join(module.removeprefix(f"{LAYER}.") for module in fold.consumers): (
            fold.kind,
            fold.producer.removeprefix(f"{LAYER}."),
        )
        for fold in result
    }


QKV = "self_attn.k_proj+self_attn.q_proj+self_attn.v_proj"
GATE_UP = "mlp.gate_proj+mlp.up_proj"
KEPT = ("kept", "")


def test_norms_and_producers_of_grouped_queries() -> None:
    assert found(LLAMA) == {
        QKV: ("norm", "input_layernorm"),
        "self_attn.o_proj": KEPT,
        GATE_UP: ("norm", "post_attention_layernorm"),
        "mlp.down_proj": ("linear", "mlp.up_proj"),
    }


def test_values_of_every_head_take_up_the_smoothing_of_the_output() -> None:
    assert found(LLAMA | attention())["self_attn.o_proj"] == ("linear", "self_attn.v_proj")


def test_norms_of_queries_and_keys_do_not_lie_between() -> None:
    inner: Shapes = {"q_norm.weight": (16,), "k_norm.weight": (16,)}
    assert found(LLAMA | attention(inner))["self_attn.o_proj"] == ("linear", "self_attn.v_proj")
    assert found(LLAMA | attention({"attn_sub_norm.weight": (H,)}))["self_attn.o_proj"] == KEPT


def test_norm_right_before_the_mlp_is_taken() -> None:
    names = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
    assert found(LLAMA | vectors(*names))[GATE_UP] == ("norm", "pre_feedforward_layernorm")


@pytest.mark.parametrize(
    "norms",
    [
        pytest.param(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"), id="after only"),
        pytest.param(("input_layernorm.weight",), id="one for both"),
    ],
)
def test_norm_that_others_read_takes_up_nothing(norms: tuple[str, ...]) -> None:
    kinds = found(attention() | gated() | vectors(*norms))
    assert kinds[QKV] == kinds[GATE_UP] == KEPT


def test_router_reads_the_norm_of_experts() -> None:
    shapes = attention() | vectors("input_layernorm.weight", "post_attention_layernorm.weight")
    shapes |= {f"{LAYER}.mlp.gate.weight": (4, H)}
    for index in range(2):
        shapes |= gated(f"mlp.experts.{index}")
    shapes |= gated("mlp.shared_expert")
    kinds = found(shapes)
    assert kinds[QKV] == ("norm", "input_layernorm")
    for expert in ("mlp.experts.0", "mlp.experts.1", "mlp.shared_expert"):
        assert kinds[f"{expert}.gate_proj+{expert}.up_proj"] == KEPT
        assert kinds[f"{expert}.down_proj"] == ("linear", f"{expert}.up_proj")


def test_experts_that_keep_a_vector_share_it() -> None:
    shapes: Shapes = {f"{LAYER}.block_sparse_moe.gate.weight": (4, H)}
    for index in range(2):
        shapes |= gated(f"block_sparse_moe.experts.{index}", ("w1", "w3", "w2"))
    block = f"{LAYER}.block_sparse_moe.experts"
    first = Fold(tuple(f"{block}.{index}.{leaf}" for index in range(2) for leaf in ("w1", "w3")), "kept")
    down = Fold((f"{block}.0.w2", f"{block}.1.w2"), "kept")
    modules = modules_of(shapes)
    assert set(folds(modules, shapes, into_linears=False, experts_together=True)) == {first, down}
    own = folds(modules, shapes, experts_together=True)
    assert [(fold.kind, fold.consumers) for fold in own if fold.kind == "linear"] == [
        ("linear", (f"{block}.0.w2",)),
        ("linear", (f"{block}.1.w2",)),
    ]


def test_without_a_gate_an_activation_lies_between() -> None:
    shapes = LLAMA.copy()
    del shapes[f"{LAYER}.mlp.gate_proj.weight"]
    kinds = found(shapes)
    assert kinds["mlp.up_proj"] == ("norm", "post_attention_layernorm")
    assert kinds["mlp.down_proj"] == KEPT


def test_only_a_quantized_layer_takes_up_a_smoothing() -> None:
    modules = [module for module in modules_of(LLAMA) if not module.endswith(("gate_proj", "up_proj"))]
    kinds = {fold.consumers: fold.kind for fold in folds(modules, LLAMA)}
    assert kinds[f"{LAYER}.mlp.down_proj",] == "kept"


def test_group_of_which_a_reader_is_left_out_is_not_folded() -> None:
    modules = [module for module in modules_of(LLAMA) if not module.endswith("q_proj")]
    kinds = {fold.consumers[0]: fold.kind for fold in folds(modules, LLAMA)}
    assert kinds[f"{LAYER}.self_attn.k_proj"] == "kept"


def test_dialect_may_keep_all_vectors() -> None:
    assert set(found(LLAMA, into_norms=False, into_linears=False).values()) == {KEPT}


def test_tensors_that_change_as_a_whole_are_named() -> None:
    shapes = LLAMA | vectors("input_layernorm.bias", "post_attention_layernorm.bias") | attention()
    shapes |= {f"{LAYER}.self_attn.v_proj.bias": (H,), f"{LAYER}.mlp.down_proj.bias": (H,)}
    absorbing = {fold.consumers[0].rpartition(".")[2]: fold.absorbing for fold in folds(modules_of(shapes), shapes)}
    assert absorbing == {
        "k_proj": (f"{LAYER}.input_layernorm.weight", f"{LAYER}.input_layernorm.bias"),
        "o_proj": (f"{LAYER}.self_attn.v_proj.bias",),
        "gate_proj": (f"{LAYER}.post_attention_layernorm.weight", f"{LAYER}.post_attention_layernorm.bias"),
        "down_proj": (),
    }


def test_layer_of_a_name() -> None:
    assert layer_of("language_model.model.layers.11.mlp.experts.3.w1") == "language_model.model.layers.11"
    assert layer_of("lm_head") == ""


@pytest.mark.parametrize(
    ("preset", "dialect", "expected"),
    [
        ("int4_awq", "modelopt", {QKV: "norm", "self_attn.o_proj": "kept", GATE_UP: "norm", "mlp.down_proj": "kept"}),
        ("nvfp4_awq", "modelopt", {QKV: "norm", "self_attn.o_proj": "linear", GATE_UP: "norm", "mlp.down_proj": "linear"}),
        ("int8_smoothquant", "modelopt", {QKV: "kept", "self_attn.o_proj": "kept", GATE_UP: "kept", "mlp.down_proj": "kept"}),
        ("int8_smoothquant", "compressed-tensors", {QKV: "norm", "self_attn.o_proj": "linear", GATE_UP: "norm", "mlp.down_proj": "linear"}),
        ("int4_gptq", "compressed-tensors", {}),
    ],
)  # fmt: skip
def test_what_each_dialect_folds(preset: str, dialect: Dialect, expected: dict[str, str]) -> None:
    shapes = LLAMA | attention()
    schemes = dict.fromkeys(modules_of(shapes), PRESETS[preset].for_dialect(dialect))
    kinds = {
        "+".join(module.removeprefix(f"{LAYER}.") for module in fold.consumers): fold.kind
        for fold in plan_folds(schemes, shapes, dialect)
    }
    assert kinds == expected


def test_values_that_are_cached_with_a_scale_are_left_alone() -> None:
    shapes = LLAMA | attention()
    schemes = dict.fromkeys(modules_of(shapes), PRESETS["int4_awq"].scheme)
    found = {fold.consumers[0].rpartition(".")[2]: fold.kind for fold in _cached(schemes, shapes)}
    assert found == {"k_proj": "norm", "o_proj": "kept", "gate_proj": "norm", "down_proj": "linear"}


def _cached(schemes: dict[str, Scheme], shapes: Shapes) -> list[Fold]:
    return plan_folds(schemes, shapes, "compressed-tensors", kv_cache=True)
