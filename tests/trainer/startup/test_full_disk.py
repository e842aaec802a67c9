"""trainer/startup/full_disk.py: a full disk is named by its folder."""

import errno

import pytest

from contract.faults import Fault
from trainer.startup import full_disk


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota")])
def test_a_full_disk_is_named_by_the_folder_with_the_least_room(error, tmp_path):
    said = rf"^{tmp_path}: .*(No space left|quota).*; .* are free there$"
    with pytest.raises(Fault, match=said), full_disk.named(tmp_path / "not" / "there"):
        raise error


def test_other_errors_stay_what_they_are(tmp_path):
    with pytest.raises(OSError, match="/data/x"), full_disk.named(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")  # it names its file
