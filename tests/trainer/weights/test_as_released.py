"""trainer/weights/exported/as_released.py: codes of a merged weight are compared with a second computation."""

import json
import subprocess
import sys


def test_codes_pass_also_if_a_change_nearly_cancels_the_weight():
    """The rounding of the released weight to bf16 is then larger than the trained weight. Other codes are refused."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.ranks.merged_codes"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output.splitlines()[-1]) == {"0.0001": [True, False], "0.9": [True, False]}
