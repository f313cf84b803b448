"""Perplexity and greedy continuation, on models whose answer is known."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from distribute.ask import load_model
from distribute.errors import SourceError
from distribute.perplexity import continue_greedily, perplexity
from tasks.demo_model import DemoText
from tests.models import SENTENCES


class Successor(nn.Module):
    """Says that after token n comes n + 1, with logit `sure` against 0 for each of the others of `vocab` tokens."""

    def __init__(self, vocab: int, sure: float):
        super().__init__()
        self.table = nn.Parameter(torch.roll(torch.eye(vocab), 1, dims=1) * sure)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def test_uniform_model_has_perplexity_of_its_vocabulary() -> None:
    windows = [torch.tensor([0, 3, 1]), torch.tensor([2, 2])]
    assert perplexity(Successor(10, sure=0.0), windows) == pytest.approx(10)


def test_mean_is_taken_over_tokens_not_windows() -> None:
    model = Successor(4, sure=2.0)
    hit, miss = math.log(math.exp(2) + 3) - 2, math.log(math.exp(2) + 3)
    windows = [torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2])]
    assert perplexity(model, windows) == pytest.approx(math.exp((3 * hit + miss) / 4))


def test_perplexity_of_a_real_architecture_is_its_own_loss(tiny_model: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    ids = torch.arange(40)
    loss = model(input_ids=ids[None], labels=ids[None]).loss
    assert perplexity(model, [ids]) == pytest.approx(math.exp(loss.item()), rel=1e-5)


def test_continuation_follows_the_model_until_stop() -> None:
    model = Successor(10, sure=1.0)
    assert continue_greedily(model, torch.tensor([5, 2]), num_tokens=4) == [3, 4, 5, 6]
    assert continue_greedily(model, torch.tensor([2]), num_tokens=9, stop=5) == [3, 4]


def test_dialect_that_transformers_cannot_run_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"modelopt dialect.*compressed-tensors"):
        load_model(tmp_path)


def test_ask_prints_one_json_object(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(SENTENCES * 40))
    model = tiny_model("llama", positions=512)
    ended = _ask(model, "The library", tmp_path / "t.txt", "--tokens", "1024", "--new-tokens", "3")
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["tokens"] == 2 * 511
    assert 100 < answer["perplexity"] < 5000, "an untrained model knows nothing of 384 tokens"
    assert isinstance(answer["answer"], str)


def test_ask_explains_a_mistake_in_one_line(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    ended = _ask(tiny_model("llama", positions=512), "The", tmp_path / "no.txt")
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.splitlines()[-1].startswith("error: ") and "no.txt does not exist" in ended.stderr


@pytest.mark.slow
def test_demo_model_is_the_trained_one(demo_model: Path, demo_text: DemoText) -> None:
    ended = _ask(demo_model, "The capital of France is", demo_text.heldout, "--tokens", "1024", "--new-tokens", "4")
    answer = json.loads(ended.stdout)
    assert answer["answer"].startswith(" Paris")
    assert 10 < answer["perplexity"] < 50


def _ask(model: Path, prompt: str, heldout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distribute.ask", str(model), "--prompt", prompt, "--heldout", str(heldout)]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False)
