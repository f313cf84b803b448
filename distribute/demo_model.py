"""Turn the demo model's GGUF file into a bf16 safetensors checkpoint with its tokenizer.

    python -m distribute.demo_model FILE.gguf FOLDER

The weights are dequantized to fp32 and rounded to bf16; nothing else about them changes. Downloading the file and
publishing the folder is `tasks.demo_model`'s work.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging


def convert(gguf: Path, folder: Path) -> None:
    """Write config, generation config, model.safetensors, tokenizer and chat template into `folder`.

    The tensors are read by the function behind `from_pretrained(gguf_file=...)`. That method itself would need
    the package accelerate, and it leaves a model that thinks it is still quantized and cannot be saved.
    """
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)[
        "tensors"
    ]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(model.all_tied_weights_keys)
    assert set(missing) <= tied and not unexpected, f"{gguf.name}: missing {missing}, unexpected {unexpected}"
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
