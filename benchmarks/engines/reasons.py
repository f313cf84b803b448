"""Why an engine refuses: what its message means, in a sentence. The page shows both, the message as it came."""

import re

#: (pattern of the message, sentence); the first that is found in the message explains it.
REASONS: tuple[tuple[str, str], ...] = (
    ("quantized in the modelopt dialect, which inference engines run", "transformers has no code for that dialect."),
    ("ignore_mismatched_sizes", "transformers looks for unpacked zero points; the reference packs them, too."),
    ("ha(s|ve) no [a-z-]+ form", "This project writes only what some engine reads."),
    ("unflatten: Provided sizes", "transformers wants inputs in whole groups of 128; the demo model has 576."),
    (r"in sglang\.|only supports regular FP8", "SGLang reads FP8, NVFP4 and MXFP8 of that dialect, and mixtures."),
    ("ModelOpt currently only supports", "vLLM reads those algorithms of that dialect; TensorRT-LLM has the others."),
    (
        "unsupported ModelOpt mixed algorithm|no supported FP8 or NVFP4 groups|unsupported compressed-tensors FP8",
        "mistral.rs reads FP8 (weights, rows, blocks) and NVFP4, and no other format.",
    ),
    ("No compressed-tensors compatible scheme|Activation-quantized float4 is only",
     "SGLang knows no such combination of formats in that dialect."),
    ("is not divisible by weight quantization block_n|requires in divisible by 128",
     "vLLM wants whole blocks of 128, and the demo model has sizes of 192 and 576."),
    ("_C::static_scaled_fp8_quant", "GPUs have that operation; the CPU build has not."),
    ("requires AMX tile", "The kernel for CPUs needs one with AMX, which this machine has not."),
    ("WNA16 linear layer", "The CPU build has kernels for int4 weights only."),
    ("Failed to find a kernel|Forced NVFP4 kernel", "GPUs have kernels for that format; the CPU build has none."),
    ("^not done in", "Too slow without a kernel for CPUs."),
)  # fmt: skip
UNKNOWN = "Not looked into yet."


def explain(message: str) -> str:
    """The sentence for a message."""
    return next((why for pattern, why in REASONS if re.search(pattern, message)), UNKNOWN)
