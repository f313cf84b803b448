"""The Prefect flow `quantize-model`: the pipeline with each stage as a task, its log and report in the UI."""

from typing import Any

from prefect import flow

from flows.parameters import Parameters
from flows.pipeline import run_pipeline
from tasks.prefect_tasks import call_task, logs_to_prefect, show_report


@flow(name="quantize-model", flow_run_name="{parameters.model}-{parameters.recipe}", persist_result=False)
def quantize_model(parameters: Parameters) -> dict[str, Any]:
    """Calibrate, quantize, export, verify and publish a Hugging Face language model. Returns the run's summary."""
    with logs_to_prefect():
        made = run_pipeline(parameters, call_task)
        show_report(made)
    return made.summary
