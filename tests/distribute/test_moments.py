"""Moments of inputs against plain sums, and experts that see every token against brute force."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from distribute.errors import StageError
from distribute.inputs import watching
from distribute.layerwise import LayerwiseModel
from distribute.moments import InputMoments, Moments
from distribute.ranks import Ranks
from distribute.source import Checkpoint
from tests.distribute.test_layerwise import token_batches
from tests.distribute.test_observe import one_thread, plain_model


def moments_of(folder: Path, *, all_experts: bool = False) -> tuple[dict[str, Moments], dict[str, int], list[Tensor]]:
    """Of every linear layer of all decoder layers; and the hidden states at the end."""
    model = LayerwiseModel.open(Checkpoint.open(folder))
    states: list[Tensor] = []
    found: dict[str, Moments] = {}
    routed: dict[str, int] = {}
    with Ranks.start() as ranks:
        for part in model.parts(token_batches(), states):
            observer = InputMoments(second=True)
            with watching(part.model, part.projections, observer, all_experts=all_experts):
                part.run()
            own, counts = observer.reduced(ranks, torch.device("cpu"))
            found |= own
            routed |= counts
    return found, routed, states


def test_moments_of_shared_inputs(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    found, routed, _ = moments_of(folder)
    model, inputs = plain_model(folder), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, []).append(args[0]))
    with one_thread():
        for batch in token_batches():
            model(input_ids=batch)
    assert found.keys() == inputs.keys() - {"lm_head"}
    for name, own in found.items():
        x = torch.cat([part.flatten(0, 1) for part in inputs[name]]).double()
        assert own.rows == routed[name] == len(x) == 65
        assert torch.equal(own.absmax, x.abs().amax(dim=0).float())
        torch.testing.assert_close(own.mean, x.abs().mean(dim=0).float(), rtol=1e-6, atol=0)
        assert own.second is not None
        assert own.second.dtype == torch.float32
        torch.testing.assert_close(own.second, (x.T @ x).float(), rtol=1e-5, atol=1e-4)
    layer = "model.layers.0"
    assert found[f"{layer}.self_attn.q_proj"] is found[f"{layer}.self_attn.v_proj"]
    assert found[f"{layer}.mlp.gate_proj"] is found[f"{layer}.mlp.up_proj"]
    assert found[f"{layer}.mlp.gate_proj"] is not found[f"{layer}.self_attn.q_proj"]


@pytest.mark.parametrize(("kind", "block"), [("mixtral", "block_sparse_moe.experts"), ("qwen3_moe", "mlp.experts")])
def test_every_expert_sees_every_token(kind: str, block: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(kind)
    routed_only, counts, plain = moments_of(folder)
    everyone, same_counts, states = moments_of(folder, all_experts=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, states, strict=True)), "outputs stay those of the router"
    assert same_counts == counts
    experts = [name for name in everyone if ".experts." in name]
    assert {everyone[name].rows for name in experts} == {65}
    assert any(routed_only[name].rows < 65 for name in experts if name in routed_only)
    gate = "w1" if kind == "mixtral" else "gate_proj"
    first, second = (everyone[f"model.layers.0.{block}.{index}.{gate}"] for index in (0, 3))
    assert torch.equal(first.absmax, second.absmax), "all tokens are the same tokens"
    dense = [name for name in everyone if ".experts." not in name]
    assert all(torch.equal(everyone[name].second, routed_only[name].second) for name in dense)


def test_input_that_is_not_finite_is_named() -> None:
    observer = InputMoments(second=False)
    observer.see(("a.b",), torch.tensor([[1.0, float("nan")]]))
    with Ranks.start() as ranks, pytest.raises(StageError, match=r"a\.b is not finite"):
        observer.reduced(ranks, torch.device("cpu"))
