"""Bytes sent for a file of 64 MB that is interrupted, or killed: tasks/sources/hub/ compared with huggingface_hub."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.libraries.turns import ROOT
from tests.support import stand_in_hub

SIZE = 64 * 10**6
BREAK = 0.6  # of the file
FILE = "model-00001-of-00001.safetensors"
OURS = (
    "import sys; from pathlib import Path; from tasks.sources import hub\n"
    "hub.fetch(hub.resolve('org/toy', 'main'), Path(sys.argv[1]), False, False)"
)
FOLDER = "import sys; from huggingface_hub import {0}; {0}('org/toy', local_dir=sys.argv[1]{1})"
WAYS = {
    "ours": OURS,
    "snapshot_download": FOLDER.format("snapshot_download", ""),
    "hf_hub_download": FOLDER.format("hf_hub_download", f", filename={FILE!r}"),
}


def measure(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (SIZE - 72, SIZE - 72)
    header += b" " * (64 - len(header))
    (model / FILE).write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(SIZE - 72))
    with stand_in_hub.serve(folder / "hub") as hub:
        hub.publish("models/org/toy", model)
        print(f"  a file of {SIZE / 1e6:.0f} MB; MB that the Hub sent in all, and seconds of the last attempt")
        print(
            f"  {'':20}{'undisturbed':>16}{'broken off once':>18}{'and once again, other process':>32}{'SIGKILL':>16}"
        )
        for name, code in WAYS.items():
            run = Run(hub, code, folder / name)
            cells = [run.undisturbed(), run.broken_off(), run.breaking_for_good(), run.killed()]
            widths = (16, 18, 32, 16)
            print(f"  {name:20}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)


class Run:
    def __init__(self, hub: stand_in_hub.Hub, code: str, folder: Path) -> None:
        self.hub, self.code, self.folder = hub, code, folder
        self.number = 0

    def _start(self) -> subprocess.Popen:
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment = os.environ | settings | {"HF_HOME": str(self.folder / "home")}
        command = [sys.executable, "-c", self.code, str(self.folder / str(self.number))]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)

    def _fresh(self) -> None:
        self.number += 1
        self.hub.troubles.clear()
        self.hub.sent.clear()

    def _cell(self, begun: float) -> str:
        return f"{self.hub.sent[FILE] / 1e6:.0f} MB, {time.monotonic() - begun:.1f} s"

    def undisturbed(self) -> str:
        self._fresh()
        begun = time.monotonic()
        assert self._start().wait() == 0
        return self._cell(begun)

    def broken_off(self) -> str:
        """Reset the connection once; the same process continues."""
        self._fresh()
        self.hub.inject("cdn/", drop_after=int(BREAK * SIZE))
        begun = time.monotonic()
        ended = self._start().wait()
        return self._cell(begun) if ended == 0 else "fails"

    def breaking_for_good(self) -> str:
        """Reset the connection, and do not answer for longer than a process waits.

        A second process continues.
        """
        self._fresh()
        self.hub.inject("cdn/", drop_after=int(BREAK * SIZE))
        self.hub.inject("cdn/", status=404, times=100)
        assert self._start().wait() != 0
        return self._again()

    def killed(self) -> str:
        self._fresh()
        self.hub.inject("cdn/", rate=40e6)
        process = self._start()
        while self.hub.sent[FILE] < BREAK * SIZE:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return self._again()

    def _again(self) -> str:
        self.hub.troubles.clear()
        begun = time.monotonic()
        assert self._start().wait() == 0
        return self._cell(begun)
