"""Address of MLflow that a flow uses, and its public form without the password."""

import os
import re
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract.faults import Fault
from contract.waits import limited

ANSWERS_WITHIN = 60.0  # seconds for a server's answer, including retries of MLflow's client
SCHEMES = {"http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks"}


def resolve(uri: str | None, runs: Path) -> str:
    """Return `uri`, else the address in the environment, else a database in the folder of runs."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs.absolute() / 'mlflow.db'}"
    if urlsplit(uri).scheme.partition("+")[0] not in SCHEMES:
        raise Fault(
            f"tracking address {public(uri)}: not one of http, https, sqlite or another database; "
            "examples: http://HOST:5000, sqlite:////folder/mlflow.db"
        )
    return uri.rstrip("/")


def registry(uri: str) -> Any:
    """Return MLflow's client. Its methods raise a Fault if a server does not answer in time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries that MLflow imports
        from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    if not uri.startswith("http"):
        return client
    return limited(client, ANSWERS_WITHIN, f"MLflow at {public(uri)}", "then this command fails")


def public(uri: str) -> str:
    """Return the address without user and password."""
    head, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return head + separator + host.rpartition("@")[2] + slash + path


def with_password(uri: str) -> str:
    """Return the address with the environment's password, if the environment has the same address."""
    known = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    return known if public(known) == uri else uri


def clean(text: str) -> str:
    """Return the text without passwords in addresses and in MLflow's environment variables."""
    text = re.sub(r"://[^/\s]*@", "://", text)
    for name in ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        secret = os.environ.get(name, "")
        text = text.replace(secret, "***") if len(secret) > 3 else text
    return text
