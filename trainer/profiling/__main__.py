"""Report on how GPUs and hosts spent their time in steps that torch's profiler has recorded.

    python -m trainer.profiling FOLDER [--json]

FOLDER has a file rankN.trace.json.gz of each recorded rank: paths.logs/profile/step-N of a training with
log.profile_every, or the folder of python -m trainer.trial --profile. The command writes profile.json and profile.html
there.
"""

import json
from pathlib import Path

from contract import closed_pipe
from trainer.profiling import report
from trainer.startup import entry


def main() -> int:
    parser = entry.parser("trainer.profiling", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the traces")
    parser.add_argument("--json", action="store_true", help="for programs: one line, with all figures of all ranks")
    options = parser.parse_args()
    with entry.faults_in_one_line():
        answer = report.report(options.folder)
        print(json.dumps(answer) if options.json else "\n".join(report.lines(answer)))
    return 0


if __name__ == "__main__":
    closed_pipe.run(main)
