"""Links to MLflow's pages: of a run, of a training's curves, and of a comparison of trainings.

MLflow shows an experiment of applications unless the address has TRAINING; a tag does not change that. Runs are looked
up with MLflow's HTTP interface, as its client takes 1.3 s to import.
"""

import base64
import json
import os
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from tasks.tracking.address import public

PATIENCE = 3.0  # seconds that a request waits: a report without links is better than a late report
COMPARED = 6  # trainings at most
TRAINING = "workflowType=machine_learning"


@dataclass(frozen=True)
class Pages:
    """Pages of an experiment, and of its trainings of one configuration, the newest first."""

    address: str
    experiment: str
    trainings: dict[str, str]  # MLflow's ids by fingerprint

    def run(self, id: str) -> str:
        return f"{self._experiment}/runs/{id}?{TRAINING}"

    def curves(self, id: str) -> str:
        return f"{self._experiment}/runs/{id}/model-metrics?{TRAINING}"

    def charts(self) -> str:
        """All trainings of the experiment, with their losses in one chart."""
        trainings = quote("tags.finetune.stage = 'train'")
        return f"{self._experiment}/runs?{TRAINING}&compareRunsMode=CHART&searchFilter={trainings}"

    def version(self, model: str, version: str) -> str:
        return f"{self.address}/#/models/{quote(model)}/versions/{version}?{TRAINING}"

    def compared(self, id: str) -> str:
        """Return the page that compares a training with the newest others of its configuration; "" without others."""
        others = [other for other in self.trainings.values() if other != id][: COMPARED - 1]
        runs, experiments = quote(json.dumps([id, *others])), quote(json.dumps([self.experiment]))
        return f"{self.address}/#/compare-runs?runs={runs}&experiments={experiments}&{TRAINING}" if others else ""

    @property
    def _experiment(self) -> str:
        return f"{self.address}/#/experiments/{self.experiment}"


def find(address: str, experiment: str, conf: str) -> Pages | None:
    """Find the pages; None without a server, or if it does not answer."""
    if not address.startswith("http"):
        return None
    try:
        with httpx.Client(base_url=address, headers=authorization(), timeout=PATIENCE) as client:
            name = {"experiment_name": experiment}
            answer = client.get("/api/2.0/mlflow/experiments/get-by-name", params=name).raise_for_status()
            id = answer.json()["experiment"]["experiment_id"]
            trained = f"tags.finetune.stage = 'train' and tags.finetune.conf = '{conf}'"
            search = {"experiment_ids": [id], "filter": trained, "max_results": 50}
            search |= {"order_by": ["attributes.start_time DESC"]}
            answer = client.post("/api/2.0/mlflow/runs/search", json=search).raise_for_status()
            trainings: dict[str, str] = {}
            for run in answer.json().get("runs", ()):
                tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", ())}
                trainings.setdefault(tags.get("finetune.fingerprint", ""), run["info"]["run_id"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return Pages(public(address), id, trainings)


def authorization() -> dict[str, str]:
    """Return headers with credentials from the environment, as in MLflow's client."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if name := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{name}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    return {}
