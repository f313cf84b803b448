"""What the machine decides, not the run: defaults read from `NOGATHER_*` variables.

Nothing here changes a byte of the result. Secrets are not kept here: the Hub and S3 clients read their own.
"""

import os
from pathlib import Path

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from distribute.errors import WorkspaceError


def _default_workspace() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "nogather"


class Settings(BaseSettings):
    """Read from the environment; `NOGATHER_WORKSPACE=/nfs/quantized` and so on."""

    model_config = SettingsConfigDict(env_prefix="NOGATHER_", extra="ignore")

    workspace: Path = Field(
        default_factory=_default_workspace,
        description="folder of stage artifacts, fetched models and reports; shared by all ranks (local disk or NFS)",
    )
    nproc: int | None = Field(default=None, ge=1, description="ranks on this host; see infra.launch.default_nproc")
    lock_wait_s: float = Field(default=60, ge=0, description="how long to wait for another run at the same stage")
    stage_limit_s: float | None = Field(default=None, gt=0, description="a stage that runs longer is ended")
    stall_limit_s: float | None = Field(default=None, gt=0, description="a stage without progress so long is ended")


def load_settings() -> Settings:
    """The settings of this process.

    Raises:
        WorkspaceError: a NOGATHER_* variable has a value that cannot be used.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = f"NOGATHER_{'_'.join(map(str, first['loc'])).upper()}"
        raise WorkspaceError(f"{name}={first['input']!r} cannot be used: {first['msg']}") from None
