"""Evidence from a host's kernel and driver that ranks do not have: GPUs, killed processes, broken hardware.

    host = Host()               when a member begins; later evidence covers the time from here on
    host.evidence()             {"oom_kills": 1, "kernel": ("NVRM: Xid (PCI:0000:02:00): 79, ...",)}, of a Member

The kernel's log covers the whole machine, a cgroup only this container. Killed processes are therefore counted with the
cgroup, and only lines on GPUs, disks and machine checks are taken from the log. If one of them cannot be read (a
container without CAP_SYSLOG), its part of the evidence is empty.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from contract.processes import memory_files

# NVIDIA's driver, file systems, disks, machine checks
CONCERNS = re.compile(r"NVRM: |EXT4-fs error|XFS \(|blk_update_request|I/O error|nfs: server|Hardware Error|NVLink")
MOST = 50  # lines
RECORD = 8192  # bytes of /dev/kmsg's longest record


class Host:
    def __init__(self, root: Path = Path("/")):
        self.root = root
        self.kills = oom_kills(root)
        self.log: int | None = None
        with contextlib.suppress(OSError):
            self.log = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.log, 0, os.SEEK_END)

    def evidence(self) -> dict[str, Any]:
        return {"oom_kills": max(0, oom_kills(self.root) - self.kills), "kernel": tuple(self._kernel())}

    def _kernel(self) -> list[str]:
        lines: list[str] = []
        while self.log is not None:
            try:
                record = os.read(self.log, RECORD)
            except BrokenPipeError:  # the kernel has overwritten older records
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            line = record.decode(errors="replace").partition(";")[2].partition("\n")[0]
            if CONCERNS.search(line):
                lines.append(line)
        return lines[-MOST:]


def oom_kills(root: Path = Path("/")) -> int:
    """Number of processes of this cgroup that the kernel has killed for lack of memory."""
    kills = 0
    with contextlib.suppress(OSError):
        for files in memory_files("memory.events", "memory.oom_control", root):
            for file in files[:1]:  # inside a container its cgroup is the top one, whatever its name outside
                counted = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
                kills = max(kills, int(counted[1]) if counted else 0)
    return kills
