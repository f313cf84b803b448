"""Take secrets out of text that a server or a client library produced.

Servers echo headers, clients put URLs into exception texts: nothing of that kind is shown or logged before it
went through `scrub`; log handlers get a `SecretFilter`. Known secrets are replaced by value, the usual shapes of
tokens by pattern.
"""

import logging
import os
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

HIDDEN = "***"

_VARIABLES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
)  # fmt: skip
_SHAPES = (
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), HIDDEN),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"(?i)\b(x-amz-[a-z-]+|signature|token)=[^&\s\"']+"), rf"\1={HIDDEN}"),
    (re.compile(r"://[^/\s@]+@"), f"://{HIDDEN}@"),
)  # fmt: skip


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets, those of the environment, and anything that looks like one."""
    known = [*secrets, *(os.environ.get(name, "") for name in _VARIABLES)]
    # A token is also recognised without its public prefix, and a longer secret may contain a shorter one.
    known += [secret.removeprefix("hf_") for secret in known]
    for secret in sorted({s for s in known if len(s) >= 6}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for shape, replacement in _SHAPES:
        text = shape.sub(replacement, text)
    return text


def carries_secret(address: str) -> bool:
    """Whether an address holds a password, a token or a query: addresses are logged and kept in receipts."""
    _, separator, rest = address.rpartition("://")
    if re.match(r"[^/@]*:[^@]*@", rest):  # user:password@, also without a scheme, or with a slash in the password
        return True
    parts = urlsplit(address)
    return bool(separator) and ("@" in parts.netloc or bool(parts.query) or scrub(address) != address)


class SecretFilter(logging.Filter):
    """Scrubs every record of the handler it is added to, the client libraries' own records included."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = scrub(record.getMessage()), None
        return True
