"""Meaning of the error texts of failed processes, by the table in causes.yaml.

    read(lines) -> Cause | None        the most reliable cause in these lines

Most lines of a failed gang are echoes: one of N ranks has a cause, and the others report that they lost it. The
strength of a cause distinguishes these. The order in which ranks died matters only between causes of equal strength:

    OWN      a failure of this process or its host
    LINK     a failed connection; perhaps the consequence of another process's death
    ECHO     certainly the consequence of another failure: a peer closed, a watchdog ran out, torchrun stops the rest

Kinds: user, memory, data, host, network, storage, preempted, hang, unknown; tasks/gang/diagnosis/classify.py has the
consequence of each. Not covered: texts in other languages than English, errors of AMD's libraries.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

Kind = Literal["user", "memory", "data", "host", "network", "storage", "preempted", "hang", "unknown"]
OWN, LINK, ECHO = 2, 1, 0
STRENGTHS = {"own": OWN, "link": LINK, "echo": ECHO}


@dataclass(frozen=True)
class Cause:
    kind: Kind
    says: str = ""  # the line of the log
    means: str = ""  # its meaning; "" if the line itself is clear
    strength: int = OWN
    retry: bool = True
    blames: bool = False  # later attempts exclude its host
    peer: str = ""  # address of the other end, if the line names one


def _rule(texts: list[str], strength: str = "own", **rest: Any) -> tuple[re.Pattern[str], Cause]:
    return re.compile("|".join(texts)), Cause(strength=STRENGTHS[strength], **rest)


_TABLE = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text("utf-8"))
RULES = [_rule(**rule) for rule in _TABLE["rules"]]
XIDS: dict[int, tuple[str, bool]] = _TABLE["xids"]
XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
# The driver writes Xid 45 for each program that it ends because of another Xid.
CONSEQUENCE = 45
PEER = re.compile(r"(?:peer|from|remote peer|with)? ?\[?((?:\d{1,3}\.){3}\d{1,3}|[0-9a-f:]*:[0-9a-f:]+)[\]<]")


def read(lines: Iterable[str]) -> Cause | None:
    """Return the most reliable cause in the lines; the first of equal causes, as later lines are consequences."""
    causes = filter(None, (_of(line.strip()) for line in lines))
    return max(causes, key=lambda cause: cause.strength, default=None)


def _of(line: str) -> Cause | None:
    if xid := XID.search(line):
        number = int(xid[1])
        if number == CONSEQUENCE:
            return None
        means, blames = XIDS.get(number, (f"the driver reports Xid {number}", False))
        kind: Kind = "host" if blames or number == 94 else "unknown"
        return Cause(kind, line, means, blames=blames)
    for pattern, cause in RULES:
        if pattern.search(line):
            peer = PEER.search(line) if cause.strength < OWN else None
            return replace(cause, says=line, peer=peer[1] if peer else "")
    return None
