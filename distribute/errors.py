"""Every error a caller may want to catch. Torch-free.

NogatherError
├── UserError (also a ValueError): what the user gave cannot work     exit code 2
│   ├── RecipeError      recipe, preset, pattern, option
│   ├── SourceError      the source checkpoint
│   ├── DataError        calibration or evaluation text
│   ├── TargetError      where the result should go
│   └── WorkspaceError   the workspace folder: space, permissions, already in use
└── StageError: a stage failed for another reason                      exit code 1
    ├── RankError        one or more ranks failed; maps rank -> reason
    ├── LaunchError      the ranks could not be started, or were ended
    └── VerifyError      the written checkpoint is not what the plan says
"""

from collections.abc import Mapping


class NogatherError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UserError(NogatherError, ValueError):
    """The message says what was given, what is allowed and what to do."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe, preset, pattern or option is wrong."""


class SourceError(UserError):
    """The source checkpoint is damaged, incomplete or of a kind that cannot be quantized."""


class DataError(UserError):
    """The calibration text cannot be used."""


class TargetError(UserError):
    """The target address is wrong or cannot be written."""


class WorkspaceError(UserError):
    """The workspace folder cannot be used."""


class StageError(NogatherError):
    """A stage failed for a reason that is not the user's input."""


class LaunchError(StageError):
    """The ranks could not be started, or were ended before they finished."""


class VerifyError(StageError):
    """The written checkpoint differs from its plan."""


class RankError(StageError):
    """One or more ranks failed. `reasons` maps rank -> one line; every rank raises the same error."""

    def __init__(self, step: str, reasons: Mapping[int, str]):
        self.step = step
        self.reasons = dict(sorted(reasons.items()))
        lines = "; ".join(f"rank {rank}: {reason}" for rank, reason in self.reasons.items())
        super().__init__(f"{step} failed on {lines}")


#: Error class by name, for errors that cross a process boundary as JSON.
BY_NAME: dict[str, type[NogatherError]] = {
    cls.__name__: cls
    for cls in (
        UserError, RecipeError, SourceError, DataError, TargetError, WorkspaceError, StageError, LaunchError,
        VerifyError,
    )
}  # fmt: skip
