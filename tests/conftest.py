"""No test meets the account's own Prefect; processes that tests start use one thread each; tests run side by side.

Prefect reads its settings when it is imported. Models of tests are too small for two threads to gain anything, and
threads that wait for one another by spinning take the time of what else runs. Byte code is kept, whatever the caller's
PYTHONDONTWRITEBYTECODE says: each worker and each of the hundreds of processes would compile the tree anew.
"""

import atexit
import os
import shutil
import sys
import tempfile

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import s3_server

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


LITTLE = ("tests/benchmarks/", "tests/conf/", "tests/contract/")  # folders whose files take seconds each


def pytest_collection_modifyitems(items: list) -> None:
    """Put what takes little last: the workers end together, where one else sits out another's last long file."""
    items.sort(key=lambda item: item.nodeid.startswith(LITTLE))


@pytest.fixture(scope="session")
def s3_url():
    """Address of one S3 server for all tests of this process; each makes a bucket of its own."""
    with s3_server.running() as (url, _):
        yield url


class BySetup(LoadScopeScheduling):
    """Scheduling that keeps tests in one process that share a slow setup: a file's, and all that use flows' servers."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/flows" if file.startswith("tests/flows/") else file


def pytest_xdist_make_scheduler(config, log) -> BySetup:
    return BySetup(config, log)
