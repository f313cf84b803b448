"""Why an engine refuses: what its message means, in a sentence. The page shows both, the message as it came."""

import re

#: (pattern of the message, sentence); the first that is found in the message explains it.
REASONS: tuple[tuple[str, str], ...] = (
    (r"quantized in the modelopt dialect, which inference engines run", "transformers has no code for that dialect."),
    (r"_C::static_scaled_fp8_quant|no attribute '\w*fp8_quant'", "The CPU build has no such operation; GPUs have."),
    (r"^not done in", "The CPU build multiplies fp8 matrices one number at a time: too slow to wait for."),
    (r"requires AMX tile", "The kernel needs a processor with AMX."),
    (r"Failed to find a kernel|Failed to find .* kernel", "The CPU build has no kernel for that format; GPUs have."),
    (r"ModelOpt currently only supports", "That vLLM reads no such algorithm of that dialect."),
)
UNKNOWN = "Not looked into yet."


def explain(message: str) -> str:
    """The sentence for a message."""
    return next((why for pattern, why in REASONS if re.search(pattern, message)), UNKNOWN)
