"""The Prefect flow `publish-model`: checks a written checkpoint folder and publishes it."""

from typing import Any

from prefect import flow

from flows.pipeline import publish_checkpoint
from tasks.prefect_tasks import call_task, logs_to_prefect


@flow(name="publish-model", flow_run_name="{folder}", persist_result=False)
def publish_model(folder: str, target: str, overwrite: bool = False, workspace: str = "") -> dict[str, Any]:
    """Publish to a folder, s3://bucket/prefix or hf://org/name. Returns the receipt."""
    with logs_to_prefect():
        return publish_checkpoint(folder, target, overwrite=overwrite, workspace=workspace, call=call_task)
