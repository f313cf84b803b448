"""The layer-by-layer solver: what it leaves, what the next layer is given, stops, limits, folds and ranks."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from distribute import coded, part_solver, roundings
from distribute.coded import Subject
from distribute.encode import FOLD, PARAMETERS
from distribute.errors import StageError
from distribute.folds import Fold, plan_folds
from distribute.job import Progress
from distribute.layers import QUANTIZE, decide
from distribute.linear import Linear
from distribute.moments import InputMoments, Moments
from distribute.numerics.gptq import Factor
from distribute.ranks import Ranks
from distribute.recipe import Recipe
from distribute.scheme import PRESETS
from distribute.solve import SOLVED, Limits, solve
from distribute.source import Checkpoint
from tests.distribute.test_layerwise import make_custom, token_batches
from tests.distribute.test_observe import one_thread, plain_model
from tests.torchrun import run_ranks
from tests.toy_codec import GROUP, find_toy_codec

Parameters = dict[str, Tensor]


@pytest.fixture(autouse=True)
def toy_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "find_codec", find_toy_codec)


def subject_of(folder: Path, preset: str, dialect: str, **recipe: Any) -> Subject:
    checkpoint = Checkpoint.open(folder)
    chosen = Recipe(preset=preset, dialect=dialect, group_size=GROUP, **recipe)
    decisions = decide(checkpoint, chosen)
    schemes = {
        module: chosen.scheme_of(decision.preset, decision.group_size)
        for module, decision in decisions.items()
        if decision.action == QUANTIZE
    }
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    folds = plan_folds(schemes, shapes, chosen.dialect)
    return Subject(checkpoint, schemes, chosen.dialect, folds, torch.bfloat16, torch.device("cpu"))


def solved(subject: Subject, folder: Path, **options: Any) -> tuple[Parameters, dict[str, Any]]:
    """All parameters, and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    with Ranks.start() as ranks:
        progress = Progress(folder, ranks.rank)
        report = solve(subject, token_batches(), ranks=ranks, folder=folder, progress=progress, **options)
    return read(folder), report


def read(folder: Path) -> Parameters:
    found: Parameters = {}
    for path in sorted((folder / PARAMETERS).glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def model_with(folder: Path, changes: Mapping[str, Tensor]) -> PreTrainedModel:
    """The source model with other values of some tensors on disk; names in memory are the same."""
    model = plain_model(folder)
    state = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in changes.items():
            state[name].copy_(value)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with one_thread():
        return torch.cat([model(input_ids=batch).logits.flatten(0, 1).float() for batch in token_batches()])


def changes_of(subject: Subject, parameters: Parameters, *, coded: bool) -> dict[str, Tensor]:
    linears = {module: subject._linear(module) for module in subject.schemes}
    return subject.changes(linears, parameters, coded=coded)


def distance(first: Tensor, second: Tensor) -> float:
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("heads", [2, 4])
def test_smoothing_folded_without_a_vector_changes_no_output(
    heads: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama", num_key_value_heads=heads)
    subject = subject_of(folder, "int4_awq", "compressed-tensors")
    parameters, report = solved(subject, tmp_path)
    assert not [name for name in parameters if name.endswith("pre_quant_scale")]
    folded = [name.removeprefix(FOLD) for name in parameters if name.startswith(FOLD)]
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    assert sorted(folded) == [f"model.layers.{layer}.{norm}" for layer in range(2) for norm in norms]
    scaled = sorted(name.rsplit(".", 2)[1] for name in parameters if name.endswith(".row_scale"))
    assert scaled == (["up_proj"] * 2 if heads == 2 else ["up_proj"] * 2 + ["v_proj"] * 2)
    source = logits(plain_model(folder))
    smoothed = logits(model_with(folder, changes_of(subject, parameters, coded=False)))
    quantized = logits(model_with(folder, changes_of(subject, parameters, coded=True)))
    assert distance(smoothed, source) < 0.02 < distance(quantized, source)
    assert any(how["alpha"] for how in report["layers"]["model.layers.0"]["smoothing"].values())


def test_vector_is_kept_where_the_dialect_has_one(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("llama", num_key_value_heads=4)
    subject = subject_of(folder, "int4_awq", "modelopt")
    parameters, _ = solved(subject, tmp_path)
    kept = sorted(name.removesuffix(".pre_quant_scale") for name in parameters if name.endswith("pre_quant_scale"))
    leaves = ("mlp.down_proj", "self_attn.o_proj")
    assert kept == [f"model.layers.{layer}.{leaf}" for layer in range(2) for leaf in leaves]
    assert not [name for name in parameters if name.endswith("row_scale")]
    for module in kept:
        vector, smooth = parameters[f"{module}.pre_quant_scale"], parameters[f"{module}.smooth"]
        assert vector.dtype == torch.bfloat16
        assert torch.equal((1 / smooth).bfloat16(), vector)
    source = logits(plain_model(folder))
    assert distance(logits(model_with(folder, changes_of(subject, parameters, coded=False))), source) < 0.02


def test_smoothquant_leaves_one_range_of_inputs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    subject = subject_of(folder, "int8_smoothquant", "modelopt")
    parameters, report = solved(subject, tmp_path)
    assert not [name for name in parameters if name.startswith(FOLD)]
    for module in subject.schemes:
        # alpha 1: every channel of the smoothed inputs has absmax 1, up to the rounding of the model's dtype
        assert abs(float(parameters[f"{module}.input_absmax"]) - 1) < 0.01
        assert parameters[f"{module}.pre_quant_scale"].shape == parameters[f"{module}.smooth"].shape
        assert parameters[f"{module}.absmax"].shape == ()
    assert report["layers"]["model.layers.0"]["errors"] == {}, "ranges are all that it needs"


def test_zero_centred_norms_take_up_a_smoothing(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "m")
    subject = subject_of(tmp_path / "m", "int4_awq", "compressed-tensors")
    parameters, _ = solved(subject, tmp_path / "out")
    name = "model.layers.0.pre_feedforward_layernorm.weight"
    factor = (1 / parameters["model.layers.0.mlp.up_proj.smooth"]).bfloat16().float()
    before = load_file(tmp_path / "m" / "model.safetensors")[name].float()
    assert torch.equal(parameters[f"{FOLD}{name}"], ((before + 1) * factor - 1).bfloat16())
    source = logits(plain_model(tmp_path / "m"))
    assert distance(logits(model_with(tmp_path / "m", changes_of(subject, parameters, coded=False))), source) < 0.03


def test_gptq_costs_less_than_nearest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    subject = subject_of(tiny_model("llama"), "int4_gptq", "compressed-tensors")
    parameters, report = solved(subject, tmp_path)
    for layer in report["layers"].values():
        assert len(layer["errors"]) == 7
        assert all(cost["solved"] < 0.7 * cost["nearest"] for cost in layer["errors"].values())
    for module, linear in ((m, subject._linear(m)) for m in subject.schemes):
        assert parameters[f"{module}.codes"].shape == linear.weight.shape
        assert parameters[f"{module}.low"].shape == (linear.weight.shape[0], linear.weight.shape[1] // GROUP)


def test_awq_clips_ranges_where_asked(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    clip = {"name": "awq", "clip": True}
    subject = subject_of(tiny_model("llama"), "int4_awq", "modelopt", algorithm=clip)
    parameters, report = solved(subject, tmp_path / "a")
    _, plain = solved(subject_of(tiny_model("llama"), "int4_awq", "modelopt"), tmp_path / "b")
    assert len([name for name in parameters if name.endswith(".low")]) == 14
    first, second = (r["layers"]["model.layers.0"]["errors"] for r in (report, plain))
    assert sum(c["solved"] for c in first.values()) < sum(c["solved"] for c in second.values())


@pytest.mark.parametrize("sequential", [True, False])
def test_next_layer_is_calibrated_on_what_it_will_get(
    sequential: bool, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    subject = subject_of(
        folder, "int4_gptq", "compressed-tensors", algorithm={"name": "gptq", "sequential": sequential}
    )
    seen: dict[str, Moments | None] = {}
    inner = roundings.solve_roundings

    def spy(linears: Mapping[str, Linear], ranks: Ranks) -> Any:
        seen.update({module: linear.moments for module, linear in linears.items()})
        return inner(linears, ranks)

    monkeypatch.setattr(part_solver, "solve_roundings", spy)
    parameters, _ = solved(subject, tmp_path)
    first = {name: value for name, value in changes_of(subject, parameters, coded=True).items() if ".0." in name}
    model = model_with(folder, first if sequential else {})
    name, inputs = "model.layers.1.self_attn.q_proj", []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1).float()))
    logits(model)
    moments = seen[name]
    assert moments is not None
    assert torch.equal(moments.absmax, torch.cat(inputs).abs().amax(dim=0))


@pytest.mark.parametrize("preset", ["int4_awq", "int8_smoothquant"])
def test_stopped_run_goes_on_after_its_last_layer(
    preset: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(tiny_model("llama", layers=3), preset, "compressed-tensors")
    whole, report = solved(subject, tmp_path / "whole")
    stopped = Path(shutil.copytree(tmp_path / "whole", tmp_path / "stopped"))
    (stopped / SOLVED / "2.json").unlink()  # the parameters of the last layer may be there or not
    (stopped / PARAMETERS / "00001.safetensors").touch()
    (stopped / SOLVED / "1.json").unlink()
    (stopped / "hidden" / "7").mkdir(parents=True)  # of a run of more ranks
    worked: list[str] = []
    inner = part_solver.PartSolver.solve

    def spy(self: part_solver.PartSolver, *args: Any, **kwargs: Any) -> None:
        worked.append(self.part.path)
        inner(self, *args, **kwargs)

    monkeypatch.setattr(part_solver.PartSolver, "solve", spy)
    again, same = solved(subject, stopped)
    assert worked == ["model.layers.1", "model.layers.2"]
    assert_equal(again, whole)
    assert same == report
    assert not list((stopped / "hidden").glob("*"))
    worked.clear()
    solved(subject_of(tiny_model("llama", layers=3), preset, "modelopt"), stopped)
    assert len(worked) == 3, "layers of other arguments are solved anew"


def test_limits_of_memory_change_nothing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("mixtral", num_key_value_heads=4)
    subject = subject_of(folder, "int4_awq", "compressed-tensors")
    roomy, _ = solved(subject, tmp_path / "a")
    tight, _ = solved(subject, tmp_path / "b", limits=Limits(moments_bytes=1, activation_bytes=1))
    assert_equal(roomy, tight)
    assert not list(tmp_path.glob("*/hidden/*")), "what was spilled is removed"


def test_searched_smoothing_is_not_worse_than_the_fixed_one(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    search = {"name": "smoothquant", "alpha": "search"}
    subject = subject_of(tiny_model("llama"), "int8_smoothquant", "compressed-tensors", algorithm=search)
    _, report = solved(subject, tmp_path)
    layer = report["layers"]["model.layers.0"]
    alphas = {how["alpha"] for how in layer["smoothing"].values()}
    assert alphas <= {step / 10 for step in range(11)}
    assert alphas != {1.0}
    assert all(cost["nearest"] > 0 for cost in layer["errors"].values())


def test_range_of_smoothed_inputs(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    subject = subject_of(folder, "w4a8", "modelopt", algorithm={"name": "awq", "sequential": False})
    parameters, _ = solved(subject, tmp_path)
    model, inputs = plain_model(folder), dict[str, list[Tensor]]()
    for name in subject.schemes:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].flatten(0, 1).float())
        )
    logits(model)
    for name, seen in inputs.items():
        expected = (torch.cat(seen) / parameters[f"{name}.smooth"]).abs().amax()
        torch.testing.assert_close(parameters[f"{name}.input_absmax"], expected, rtol=0.01, atol=0)


def test_model_that_runs_as_a_whole_is_solved_at_once(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    plain = "hidden = layer(hidden, position_embeddings=positions)"
    split = make_custom(tiny_model("llama"), tmp_path / "split", plain)
    whole = make_custom(tiny_model("llama"), tmp_path / "whole", f"{plain}.clone()")
    options = {"algorithm": {"name": "gptq", "sequential": False}}
    found = [
        solved(subject_of(folder, "int4_gptq", "modelopt", **options), folder / "out", trust_remote_code=True)
        for folder in (split, whole)
    ]
    assert_equal(found[0][0], found[1][0])
    assert list(found[1][1]["layers"]) == ["model"]


def test_moments_are_watched_as_far_as_memory_allows() -> None:
    scheme, toy = PRESETS["int4_awq"].scheme, find_toy_codec("")
    linears = {name: Linear(name, torch.empty(8, 100), scheme, toy) for name in ("a.q", "a.k", "a.o", "b.up")}
    units = [Fold(("a.q", "a.k"), "kept"), Fold(("a.o",), "kept"), Fold(("b.up",), "kept")]
    one = 8 * 100 * 100
    for limit, counts in ((1, [1, 1, 1]), (2 * one, [2, 1]), (3 * one, [3])):
        assert [len(group) for group in part_solver.passes(units, linears, limit)] == counts


def test_experts_without_tokens_stay_neutral(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"].zero_()  # every token is a tie, which two experts win
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    parameters, report = solved(subject_of(folder, "int4_gptq", "compressed-tensors"), tmp_path / "out")
    block = "model.layers.1.mlp.experts"
    table = report["layers"]["model.layers.1"]["coverage"][block]
    dead = [index for index, tokens in enumerate(table["tokens"]) if tokens == 0]
    assert (table["none"], table["least"], len(dead)) == (2, 0, 2)
    coded = {name.rsplit(".", 3)[1] for name in parameters if name.startswith(block) and name.endswith(".codes")}
    assert coded == {str(index) for index in range(4) if index not in dead}
    assert "6 layers of experts saw no token" in report["warnings"][0]
    every = {"name": "gptq", "all_experts": True}
    parameters, _ = solved(subject_of(folder, "int4_gptq", "compressed-tensors", algorithm=every), tmp_path / "all")
    assert f"{block}.{dead[0]}.gate_proj.codes" in parameters


def test_experts_share_the_vector_that_is_kept(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    parameters, _ = solved(subject_of(tiny_model("mixtral"), "int4_awq", "modelopt"), tmp_path)
    block = "model.layers.0.block_sparse_moe.experts"
    for leaves in (("w1", "w3"), ("w2",)):
        vectors = [parameters[f"{block}.{index}.{leaf}.pre_quant_scale"] for index in range(4) for leaf in leaves]
        assert all(torch.equal(vector, vectors[0]) for vector in vectors)


def test_fold_that_does_not_fit_the_model_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    subject = subject_of(tiny_model("llama"), "int4_awq", "compressed-tensors")
    layer = "model.layers.0"
    queries = tuple(f"{layer}.self_attn.{leaf}_proj" for leaf in "kqv")
    norm = f"{layer}.post_attention_layernorm"
    subject = Subject(**vars(subject) | {"folds": [Fold(queries, "norm", norm, (f"{norm}.weight",))]})
    with pytest.raises(StageError, match=r"linear layers of model\.layers\.0 moves its outputs"):
        solved(subject, tmp_path)


def test_too_many_layers_that_gptq_gave_up_on(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give_up(moments: Tensor, **_: Any) -> Factor:
        return Factor(torch.eye(len(moments)), torch.arange(len(moments)), 1.0, None)

    monkeypatch.setattr(roundings, "prepare", give_up)
    subject = subject_of(tiny_model("llama"), "int4_gptq", "compressed-tensors")
    with pytest.raises(StageError, match="GPTQ could not solve 7 of 14 layers"):
        solved(subject, tmp_path / "a")
    parameters, report = solved(subject, tmp_path / "b", limits=Limits(most_fallen=1.0))
    assert not [name for name in parameters if name.endswith(".codes")]
    assert "GPTQ could not solve 14 layers" in report["warnings"][0]


KINDS_BY_PRESET = {"int4_gptq": "llama", "int4_awq": "mixtral"}


def solve_on_ranks(folders: dict[str, str], out: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Runs on each rank: the reports by preset, and a histogram of inputs."""
    coded.find_codec = find_toy_codec  # type: ignore[assignment]
    batches = token_batches()  # two: one of three ranks has none
    reports = []
    with Ranks.start() as ranks:
        for preset, folder in folders.items():
            own = Path(out, preset)
            own.mkdir(parents=True, exist_ok=True)
            subject = subject_of(Path(folder), preset, "compressed-tensors")
            reports.append(solve(subject, batches, ranks=ranks, folder=own, progress=Progress(own, ranks.rank)))
        observer = InputMoments(second=False, histograms=True)
        for batch in batches[ranks.rank :: ranks.world]:
            observer.see(("a.b",), batch[:, :16] / 100 * len(batch))
        histogram = observer.reduced(ranks, ranks.device)[0]["a.b"].histogram
        assert histogram is not None
        return reports, [histogram.exponent, *histogram.counts.tolist()]


def test_world_size_does_not_change_what_is_found(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folders = {preset: str(tiny_model(kind)) for preset, kind in KINDS_BY_PRESET.items()}
    alone, histogram = solve_on_ranks(folders, str(tmp_path / "1"))
    ranks = run_ranks(solve_on_ranks, 3, folders, str(tmp_path / "3"))
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][1] == histogram
    assert sum(histogram[1:]) == sum(batch[:, :16].numel() for batch in token_batches())
    for preset, own, many in zip(folders, alone, ranks[0][0], strict=True):
        assert own["layers"].keys() == many["layers"].keys()
        assert own["layers"]["model.layers.0"]["coverage"] == many["layers"]["model.layers.0"]["coverage"]
        # Sums over batches are made in another order, in fp64: at most single bits may differ, and here none do.
        assert_equal(read(tmp_path / "1" / preset), read(tmp_path / "3" / preset))
