"""Templates that take too much time or memory: a line that names the file and the row, within seconds."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conf.schema.data import Data
from contract.faults import Fault
from tests.support import data_folders
from trainer.data.tokens import rendering, templates, tokenizer
from trainer.startup.limited_calls import LimitedCalls

ROOT = Path(__file__).parents[4]
ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]} for text in "bc"]
SAFE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW = {
    "loops": NESTED,
    # Python compares lists in one call, in which it looks for no signal.
    "one call": "{% set ns = namespace(a=[1.5], b=[1.5]) %}{% for i in range(9) %}"
    "{% set ns.a = [ns.a, ns.a, ns.a] * 9 %}{% set ns.b = [ns.b, ns.b, ns.b] * 9 %}{% endfor %}{{ ns.a == ns.b }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
LARGE = {
    "repeated": "{{ 'a' * 3000000000 }}",
    "repeated from a message": "{{ messages[0].content * 3000000000 }}",
    "width": "{{ messages[0].content|center(3000000000) }}",
    "format": "{{ '%3000000000d' | format(1) }}",
    "doubled": "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "joined": "{{ range(99999)|join('a' * 99999) }}",
    "replaced": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
}
LONG = {"long": "{{ messages[0].content * 9000000 }}"}


@pytest.fixture(scope="module", autouse=True)
def limits():
    """Limits of a second and 256 MB."""
    before, rendering._calls = rendering._calls, LimitedCalls(rendering._work, 1, 2**28)
    yield
    rendering._calls = before


@pytest.fixture
def encode(tmp_path):
    def encode(text: str, rows=ROWS, name: str = "auto"):
        folder = data_folders.make(tmp_path / "model", "chatml", text)
        tokens = tokenizer.load(folder, False)
        return templates.choose(Data(seq_length=512, template=name), tokens, "messages").encode(rows)

    return encode


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text, why",
    [
        pytest.param(text, "takes more than 1 s", id=name, marks=[pytest.mark.slow] if name == "macro" else [])
        for name, text in SLOW.items()
    ]
    + [pytest.param(text, "takes more than 268.4 MB of memory", id=name) for name, text in LARGE.items()]
    + [pytest.param(text, "writes 9.0 MB for a request of", id=name) for name, text in LONG.items()],
)
def test_a_template_beyond_its_limits_is_a_line_with_its_file_and_the_row(encode, tmp_path, text, why):
    began = time.monotonic()
    with pytest.raises(Fault) as caught:
        encode(SAFE + "{% if messages[1].content == 'c' %}" + text + "{% endif %}")
    assert str(caught.value).startswith(f"{tmp_path}/model/chat_template.jinja: the template {why}")
    assert str(caught.value).endswith("; fix it") and "\n" not in str(caught.value)
    assert '"content": "a"' in str(caught.value) and time.monotonic() - began < 40


@pytest.mark.timeout(60)
def test_the_next_row_is_rendered_by_a_new_worker(encode, tmp_path):
    with pytest.raises(Fault):
        encode("{% if messages[-1].content == 'b' %}" + SLOW["loops"] + "{% endif %}" + SAFE)
    template = templates.choose(Data(seq_length=512), tokenizer.load(tmp_path / "model", False), "messages")
    (found,) = template.encode(ROWS[1:])
    assert template.tokenizer.decode(found.ids) == "ac"


@pytest.mark.timeout(60)
def test_a_file_that_jinja_computes_while_it_compiles_is_a_line(encode, tmp_path):
    (tmp_path / "mine.jinja").write_text(SAFE + LARGE["repeated"])
    with pytest.raises(Fault, match=r"^.*/mine\.jinja: the template takes more than 268\.4 MB of memory"):
        encode(SAFE, name=str(tmp_path / "mine.jinja"))


def test_the_processes_end_with_their_caller(tmp_path):
    """No worker is left after a caller that was killed."""
    text = (
        "import os, time\nfrom trainer.data.tokens import rendering\nrendering.start()\n"
        "print(rendering._calls.pid, flush=True)\ntime.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True) as caller:
        worker = int(caller.stdout.readline())
        keeper = psutil.Process(worker).parent()
        caller.kill()
    assert not psutil.wait_procs([keeper], timeout=10)[1] and not psutil.pid_exists(worker)
