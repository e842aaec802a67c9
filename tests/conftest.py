"""No test meets the account's own Prefect; and processes that tests start use one thread each.

Prefect reads its settings when it is imported. Models of tests are too small for two threads to gain anything, and
threads that wait for one another by spinning take the time of what else runs.
"""

import atexit
import os
import shutil
import tempfile

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
