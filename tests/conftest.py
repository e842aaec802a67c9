"""Prefect reads its settings when it is imported: no test meets those of the account that runs it."""

import os
import tempfile

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-")
os.environ.pop("PREFECT_API_URL", None)
