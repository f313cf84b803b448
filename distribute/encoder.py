"""A checkpoint's tokenizer: text and rows become token ids, never padded. Only read, never saved.

Knows no files of text and no choice among samples; that is `distribute.dataset`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distribute.errors import DataError
from distribute.job import read_json

#: Where a row's text is looked for, in this order; the last one is a conversation.
FIELDS = ("text", "content", "messages")
#: Names of the class that reads any tokenizer.json as it is (transformers 4 and 5).
GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint's folder. Nothing is fetched and nobody is asked.

    Raises:
        DataError: there is none, or it needs code that may not be run.
    """
    # The auto class takes the model's usual tokenizer even where the checkpoint names the general one.
    auto = PreTrainedTokenizerFast if _named_class(model) in GENERAL_CLASSES else AutoTokenizer
    try:
        return auto.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever strangers' tokenizer files and their code can raise
        if "trust_remote_code" in str(error):
            reason = "it needs its own code; read that code, then allow it with trust_remote_code"
        else:
            reason = f"there is none or it is damaged ({' '.join(str(error).split())[:200]})"
        raise DataError(
            f"{model} has no tokenizer that can be loaded: {reason}. Measuring text needs a tokenizer; "
            "recipes with dynamic inputs, like fp8_dynamic, do not"
        ) from None


def _named_class(model: Path) -> str | None:
    """The class that tokenizer_config.json names, when it can be read and brings no code of its own."""
    try:
        config = read_json(model / "tokenizer_config.json")
        return None if "auto_map" in config else config.get("tokenizer_class")
    except (OSError, ValueError, TypeError, AttributeError):
        return None


class Encoder:
    """Gives at most `length` token ids, which begin as the tokenizer begins a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int):
        self.tokenizer = tokenizer
        self.length = length
        # A first token decides much: engines always send it, and its activations are the largest of all.
        first = self._ids("", special=True)[:1]
        self._start = first if first == [tokenizer.bos_token_id] else []

    def windows(self, texts: Iterable[str]) -> list[list[int]]:
        """All consecutive windows of exactly `length` ids; the rest of the last text is left out."""
        ids = [token for text in texts for token in self._ids(text, special=False)]
        step = max(self.length - len(self._start), 1)
        return [(self._start + ids[at : at + step])[: self.length] for at in range(0, len(ids) - step + 1, step)]

    def text(self, text: str) -> list[int]:
        """The first ids of a text."""
        return self._ids(text, special=True)[: self.length]

    def row(self, record: dict[str, Any]) -> list[int]:
        """The first ids of a row; none when it has no text."""
        *text_fields, chat_field = FIELDS
        for field in text_fields:
            if isinstance(text := record.get(field), str) and text.strip():
                return self.text(text)
        messages = record.get(chat_field)
        return self._chat(messages) if isinstance(messages, list) and messages else []

    def _chat(self, messages: list[Any]) -> list[int]:
        if self.tokenizer.chat_template:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
            return self._ids(text, special=False)[: self.length]  # the template writes special tokens itself
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        text = "\n\n".join(content for content in contents if isinstance(content, str))
        return self.text(text) if text.strip() else []

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # verbose=False: a text longer than the model's positions is cut by us.
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
