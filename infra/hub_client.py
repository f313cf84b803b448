"""How a call to the Hub ends: retried, or explained in one sentence without secrets.

`huggingface_hub` retries uploads but most single calls not, and its error texts repeat what the server said.
Nothing here knows what is published.
"""

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    parse_ratelimit_headers,
)

from distribute.errors import NogatherError, StageError, TargetError
from infra.redact import scrub

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ATTEMPTS = 8
_LONGEST_WAIT_S = 600.0

#: What the client raises; failures of one file come as RuntimeError, of a batch as ValueError.
CLIENT_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)

_REASONS = {
    401: "the token is missing or wrong; set HF_TOKEN or run `hf auth login`",
    403: "the token may not write there; use one with write access to this repository",
    404: "it does not exist or the token cannot see it; check the name and the token",
}


class HubCalls:
    """Calls on behalf of one address."""

    def __init__(self, address: str, *, secrets: list[str], attempts: int = ATTEMPTS):
        self._address, self._secrets, self._attempts = address, secrets, attempts

    def retried(self, doing: str, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call the client; wait out rate limits and server failures, explain everything else."""
        for attempt in range(1, self._attempts + 1):
            try:
                return function(*args, **kwargs)
            except CLIENT_ERRORS as error:
                self.wait_or_raise(error, doing, attempt)
        raise AssertionError("the last attempt raises")

    def wait_or_raise(self, error: Exception, doing: str, attempt: int) -> None:
        """Sleep when another attempt makes sense after `attempt` (from 1); otherwise raise the explained error."""
        wait = wait_s(error, attempt) if attempt < self._attempts else None
        if wait is None:
            # `from None`: the original's text may hold what `scrub` took out.
            raise self.explain(error, doing) from None
        _log.warning(
            "the Hub answered %s to %s; attempt %d of %d in %.0f s",
            status_of(error) or type(error).__name__, doing, attempt + 1, self._attempts, wait,
        )  # fmt: skip
        time.sleep(wait)

    def explain(self, error: Exception, doing: str) -> NogatherError:
        status = status_of(error)
        if status in _REASONS:
            return TargetError(f"the Hub refused {doing} on {self._address} ({status}): {_REASONS[status]}")
        if isinstance(error, LocalTokenNotFoundError):
            return TargetError(f"there is no Hub token for {self._address}; {_REASONS[401]}")
        text = scrub(f"{type(error).__name__}: {error}".split("\n\n")[0], self._secrets)
        return StageError(f"the Hub failed at {doing} on {self._address} ({status or 'no answer'}): {text}")


def _response(error: BaseException | None) -> Any:
    """The HTTP response behind an error; the client wraps failures of single files into RuntimeError."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            return error.response
        error = error.__cause__
    return None


def status_of(error: BaseException) -> int | None:
    response = _response(error)
    return response.status_code if response is not None else None


def wait_s(error: Exception, attempt: int) -> float | None:
    """Seconds to wait after the failure of `attempt` (from 1); None when another would be pointless."""
    response = _response(error)
    passing = (
        response.status_code in (408, 429) or response.status_code >= 500
        if response is not None
        else isinstance(error, (HTTPError, ConnectionError, TimeoutError))
    )
    if not passing:
        return None
    wait = min(2.0 ** (attempt - 1), 60.0)
    if response is not None:
        limit = parse_ratelimit_headers(response.headers)
        after = response.headers.get("Retry-After", "")
        if after.isdecimal():
            wait = float(after)
        elif limit is not None and limit.remaining == 0:
            wait = float(limit.reset_in_seconds)
    return wait if wait <= _LONGEST_WAIT_S else None


@contextmanager
def no_bars() -> Iterator[None]:
    """The client draws a bar for every file on stderr; progress is reported by `on_progress` alone."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def is_xet_used() -> bool:
    """Whether the client sends large files through Xet storage rather than LFS."""
    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None
