"""Look-up of a registered version: SQL on MLflow's local database in tasks/stages/promote.py, and MlflowClient."""

from pathlib import Path

from benchmarks.libraries.turns import medians, python, show

OURS = """
import contextlib, sqlite3, sys
from pathlib import Path
database = Path(sys.argv[1])
with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
    there = "SELECT 1 FROM model_versions WHERE name = ? AND version = ? AND current_stage != 'Deleted_Internal'"
    assert connection.execute(there, ("toy", "1")).fetchone()
    query = "SELECT key, value FROM model_version_tags WHERE name = ? AND version = ?"
    print(dict(connection.execute(query, ("toy", "1")).fetchall()))
"""
THEIRS = """
import sys
from mlflow import MlflowClient
uri = f"sqlite:///{sys.argv[1]}"
print(MlflowClient(tracking_uri=uri, registry_uri=uri).get_model_version("toy", "1").tags)
"""
MAKE = """
import sys
from mlflow import MlflowClient
uri = f"sqlite:///{sys.argv[1]}"
client = MlflowClient(tracking_uri=uri, registry_uri=uri)
client.create_registered_model("toy")
client.create_model_version("toy", "s3://bucket/model", tags={"finetune.digest": "abc"})
"""


def measure(folder: Path) -> None:
    database = folder / "mlflow.db"
    python(MAKE, database)
    calls = {"ours": lambda: python(OURS, database), "MlflowClient": lambda: python(THEIRS, database)}
    show(medians(calls, 3))
    print(f"  the same answer: {python(OURS, database) == python(THEIRS, database)}")
