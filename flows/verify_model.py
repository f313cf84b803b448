"""The Prefect flow `verify-model`: checks a written checkpoint folder on its own."""

from typing import Any

from prefect import flow

from flows.pipeline import verify_checkpoint
from tasks.prefect_tasks import call_task, logs_to_prefect


@flow(name="verify-model", flow_run_name="{folder}", persist_result=False)
def verify_model(folder: str, workspace: str = "") -> dict[str, Any]:
    """Check index, headers, scales and JSON files. Returns verify.json; fails when the checkpoint is not sound."""
    with logs_to_prefect():
        return verify_checkpoint(folder, workspace=workspace, call=call_task)
