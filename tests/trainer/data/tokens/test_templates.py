"""What a template makes of rows: the text, what of it is learned, what is cut or refused, and what is recorded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema.data import Data
from contract.faults import Fault
from tests.support import data_folders
from trainer.data.rows import Bad
from trainer.data.tokens import anomalies, templates, tokenizer
from trainer.data.tokens.template_text import Encoded
from trainer.data.tokens.templates import Template

PAIR = {"input": "17 + 25?", "output": "It is 42."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def turns(*contents: str, **last) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    found[-1] |= last
    return found


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """family(name) -> its tokenizer"""
    root, loaded = tmp_path_factory.mktemp("families"), {}

    def family(name: str, template: str | None = None):
        if (name, template) not in loaded:
            folder = data_folders.make(root / str(len(loaded)), name, template)
            loaded[name, template] = tokenizer.load(folder, False)
        return loaded[name, template]

    return family


def choose(tokens, kind: str = "messages", **data) -> Template:
    return templates.choose(Data(**{"seq_length": 512, **data}), tokens, kind)


def shown(template: Template, row: dict) -> str:
    """The row's text, with what is learned in brackets."""
    (found,) = template.encode([row])
    assert isinstance(found, Encoded), found
    text, learned = "", False
    for i, counts in zip(found.ids.tolist(), found.learned.tolist(), strict=True):
        text += ("[" if counts else "]") * (counts != learned) + template.tokenizer.decode([i])
        learned = counts
    return text + "]" * learned


def bad(template: Template, row: dict) -> Bad:
    (found,) = template.encode([row])
    assert isinstance(found, Bad), shown(template, row)
    return found


def test_a_plain_template(family):
    template = choose(family("plain"), "pairs")
    assert (template.kind, template.text) == ("plain", "{input} {output}")
    assert shown(template, PAIR) == "17 + 25?[ It is 42.<|endoftext|>]"
    assert template.prompt(PAIR) + template.answer(PAIR) == "17 + 25? It is 42.<|endoftext|>"
    assert template.line(PAIR) == PAIR
    assert (
        shown(choose(family("plain"), template="Q: {input}\nA: {output}", stop="\n"), PAIR)
        == "Q: 17 + 25?\nA:[ It is 42.\n]"
    )
    assert (
        shown(choose(family("plain"), template="{input}\n{output}", loss_on="all", stop=""), PAIR)
        == "[17 + 25?\nIt is 42.]"
    )
    assert shown(template, {"messages": turns("q", "a")}) == "q[ a<|endoftext|>]"
    refused = bad(template, {"messages": turns("q", "a", "r", "b")})
    assert refused.reason == "more than a question and its answer" and "data.template: chat" in refused.shown
    assert template.encode([PAIR, {"messages": turns("q", "a"), "tools": TOOLS}, PAIR])[1] != PAIR


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>user\n17 + 25?<|im_end|>\n<|im_start|>assistant\n[It is 42.<|im_end|>\n]"),
        ("tagged", "<|im_start|>user\n17 + 25?<|im_end|>\n<|im_start|>assistant\n[It is 42.<|im_end|>]\n"),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n17 + 25?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[It is 42.<|eot_id|>]",
        ),
        (
            "qwen3",
            "<|im_start|>user\n17 + 25?<|im_end|>\n<|im_start|>assistant\n"
            "[<think>\n\n</think>\n\nIt is 42.<|im_end|>\n]",
        ),
        ("glm", "[gMASK]<sop><|user|>17 + 25?<|assistant|>[</think>It is 42.]"),
    ],
)
def test_a_pair_through_chat_templates(name, expected, family):
    template = choose(family(name), "pairs")
    assert template.kind == "chat"
    assert shown(template, PAIR) == expected
    line = template.line(PAIR)
    assert line == {"messages": turns("17 + 25?", "It is 42.")}
    learned = expected[expected.rindex("[") + 1 :].split("]")[0]
    assert template.answer(line) == learned
    assert template.prompt(line) == expected[: expected.rindex("[")]
    assert template.reference(line) == "It is 42."
    prompt, answer = template.tokens(line)
    assert template.tokenizer.decode(prompt) == template.prompt(line)
    assert template.tokenizer.decode(answer) == learned


def test_every_turn_or_the_last_or_all(family):
    row = {"messages": turns("a", "b", "c", "d")}
    start, end = "<|im_start|>", "<|im_end|>\n"
    texts = {
        loss_on: shown(choose(family("chatml"), loss_on=loss_on), row).replace(start, "").replace(end, "/")
        for loss_on in ("answer", "assistant", "all")
    }
    assert texts == {
        "answer": "user\na/assistant\nb/user\nc/assistant\n[d/]",
        "assistant": "user\na/assistant\n[b/]user\nc/assistant\n[d/]",
        # Bridge never learns the beginning of a turn, whatever is asked for
        "all": "[user\na/][assistant\nb/][user\nc/][assistant\nd/]",
    }


def test_a_template_that_forgets_thoughts_learns_the_last_answer_alone(family):
    row = {"messages": turns("a", "b", "c", "d")}
    refused = bad(choose(family("qwen3")), row)
    assert refused.reason == "template changes earlier turns"
    assert refused.field == "messages[1]" and "data.loss_on: answer" in refused.shown
    assert shown(choose(family("qwen3"), loss_on="answer"), row).endswith("[<think>\n\n</think>\n\nd<|im_end|>\n]")


def test_a_generation_prompt_that_goes_on_otherwise(family):
    """GLM's opens a thought, and an answer without one closes it: no token of the header is learned, nor lost."""
    template = choose(family("glm"), stop="<|user|>", loss_on="assistant")
    row = {"messages": turns("a", "<b>", "c", "d")}
    assert (
        shown(template, row)
        == "[gMASK]<sop><|user|>a<|assistant|>[</think><b>]<|user|>c<|assistant|>[</think>d<|user|>]"
    )
    assert anomalies.find(template, [one for one in template.encode([row]) if isinstance(one, Encoded)], [row])[
        "generation prompt differs"
    ] == [0]
    thought = {"messages": turns("a", "b", reasoning_content="hm")}
    assert shown(template, thought) == "[gMASK]<sop><|user|>a<|assistant|><think>[hm</think>b<|user|>]"
    plain = choose(family("glm"), template_options={"enable_thinking": False})
    assert shown(plain, PAIR) == "[gMASK]<sop><|user|>17 + 25?<|assistant|></think>[It is 42.]"


def test_tools_and_calls(family):
    messages = [*turns("3?"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    messages += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "3."}]
    row = {"messages": messages, "tools": TOOLS}
    text = shown(choose(family("glm"), stop="<|user|>"), row)
    assert text.endswith(
        "3?<|assistant|>[</think><tool_call>add<a>1<b>2</tool_call>]<|observation|>3<|assistant|>[</think>3.<|user|>]"
    )
    assert text.startswith('[gMASK]<sop><|system|>\n[{"type": "function"')
    template = choose(family("tagged"))
    assert template.line(row) == row
    assert shown(template, row).count("[") - 1 == 2  # and one in the JSON of the tools


def test_several_named_chat_templates(tmp_path, family):
    folder = data_folders.make(tmp_path / "named", "plain", "{% for m in messages %}{{ m.content }} {% endfor %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} {{ messages }}")
    template = choose(tokenizer.load(folder, False))
    row = {"messages": turns("q", "a")}
    assert shown(template, row).replace("[", "").replace("]", "") == "q a "
    assert template.source(TOOLS).startswith("{{ tools")
    assert templates.from_record(json.loads(json.dumps(template.record())), template.tokenizer) == template


def test_what_a_template_refuses(family):
    template = choose(family("chatml", "{{ raise_exception('Roles must alternate') }}"))
    assert bad(template, PAIR) == Bad("template refuses it", "messages", "Roles must alternate")
    assert bad(choose(family("chatml", "{{ messages[7].content + 1 }}")), PAIR).reason == "template refuses it"
    assert (
        bad(choose(family("chatml", "{% generation %}{% endgeneration %}{{ bos_token }}x")), PAIR).reason
        == "nothing to learn"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ input }} => {{ output }}", "17 + 25? =>[ It is 42.<|endoftext|>]"),
        ("{{ input }}\n{{ output }}{{ eos_token }}", "17 + 25?\n[It is 42.<|endoftext|>]"),
        ("{{ input }}:{% generation %}{{ output }}{% endgeneration %}", "17 + 25?:[It is 42.<|endoftext|>]"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    ],
)
def test_a_file_with_a_template(text, expected, family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text(text)
    template = choose(family("plain"), template="mine.jinja")
    Path("mine.jinja").unlink()  # the record holds it
    template = templates.from_record(json.loads(json.dumps(template.record())), family("plain"))
    assert template.kind == ("jinja" if expected else "chat")
    assert shown(template, PAIR) == (expected or "user: 17 + 25?\n[assistant: It is 42.\n<|endoftext|>]")
    line = template.line(PAIR)
    assert template.prompt(line) + template.answer(line) == shown(template, PAIR).replace("[", "").replace("]", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "data.template: mine.jinja: no such file"),
        ("{{ question }}", "uses neither messages nor input and output; it uses question"),
        ("{% for %}", "mine.jinja: "),
        (b"\xff", "not UTF-8 at byte 0"),
    ],
)
def test_files_that_are_no_template(text, words, family, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.jinja").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Fault, match=words):
        choose(family("plain"), template="mine.jinja")


def test_without_a_chat_template(family):
    with pytest.raises(Fault, match=r"no chat template; use data.template: .* or a file NAME.jinja"):
        choose(family("plain"), template="chat")
    assert choose(family("plain"), template="auto").kind == "plain"
    with pytest.raises(Fault, match=r"data.template_options: tools: reserved; every template gets these"):
        choose(family("chatml"), template_options={"tools": "x"})
    with pytest.raises(Fault, match="texts without a prompt"):
        choose(family("plain"), "text", template="{input}{output}")


def test_texts_end_with_the_end_of_text(family):
    template = choose(family("plain"), "text")
    row = {"text": "a document " * 200}
    assert shown(template, row) == "[" + row["text"] + "<|endoftext|>]"
    assert template.line(row) == row


@pytest.mark.parametrize("packed", [False, True])
def test_long_pairs_under_each_policy(packed, family):
    row = {"input": "x" * 100, "output": "y" * 30}
    options: dict[str, Any] = {"seq_length": 64, "packed": packed, "template": "{input} {output}"}
    for policy in ("drop", "error"):
        refused = bad(choose(family("plain"), "pairs", too_long=policy, **options), row)
        assert refused.reason == "longer than a sequence"
        assert refused.shown.endswith("tokens, data.seq_length is 64")
    template = choose(family("plain"), "pairs", too_long="truncate", **options)
    (found,) = template.encode([row])
    assert isinstance(found, Encoded)
    assert len(found.ids) == 64 + packed and found.cut > 0
    assert template.tokenizer.decode(found.ids[found.learned]) == " " + row["output"] + "<|endoftext|>"
    assert bad(template, {"input": "x", "output": "y" * 100}).reason == "answer longer than a sequence"


def test_a_long_conversation_loses_the_end_of_its_longest_message(family):
    template = choose(family("chatml"), too_long="truncate", seq_length=80)
    row = {"messages": [{"role": "system", "content": "s" * 20}, *turns("u" * 100, "b", "c", "d" * 10)]}
    text = shown(template, row)
    assert len(template.tokenizer.encode(text.replace("[", "").replace("]", ""))) <= 80
    assert text.replace("u", "") == shown(choose(family("chatml")), row).replace("u", "")
    assert 0 < text.count("u" * 3) < 100
    assert bad(choose(family("chatml"), seq_length=80), row).reason == "longer than a sequence"
    assert bad(template, {"messages": turns("a", "b" * 200)}).reason == "answer longer than a sequence"
    (found,) = template.encode([row])
    assert isinstance(found, Encoded) and len(found.ids) == 80 and found.cut
    assert template.tokenizer.decode(found.ids[found.start :]).startswith("d" * 10)


def test_a_record_belongs_to_its_tokenizer(family, tmp_path):
    record = json.loads(json.dumps(choose(family("chatml")).record()))
    assert len(record["sha256"]) == 64
    assert templates.from_record(record, family("chatml")).record() == record
    with pytest.raises(
        Fault, match=r"tokenizer.json is not the file with which the data were prepared: SHA-256 \w{12}, not"
    ):
        templates.from_record(record, family("llama3"))
    with pytest.raises(Fault, match="its chat template is not the one"):
        templates.from_record(record, family("chatml", "{{ messages }}"))
    folder = data_folders.make(tmp_path / "renamed", "chatml")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|pad|>"}))
    with pytest.raises(Fault, match="special tokens are"):
        templates.from_record(record, tokenizer.load(folder, False))


def test_what_is_odd_about_rows(family):
    template = choose(family("llama3"), loss_on="assistant")
    rows = [
        {"messages": turns("a", "b")},
        {"messages": turns("a <|eot_id|> b", "c")},
        {"messages": turns("a", "b <|start_header_id|>")},
    ]
    encoded = [one for one in template.encode(rows) if isinstance(one, Encoded)]
    found = anomalies.find(template, encoded, rows)
    assert found["special token in a row's text"] == [1, 2]
    assert [name for name, at in found.items() if at] == ["special token in a row's text"]
    endless = choose(family("glm"))
    odd = anomalies.find(endless, [one for one in endless.encode(rows) if isinstance(one, Encoded)], rows)
    assert odd["answer without an end"] == [0, 1, 2]
    twice = choose(
        family("llama3", "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
        loss_on="all",
    )
    assert anomalies.find(twice, [one for one in twice.encode(rows[:1]) if isinstance(one, Encoded)], rows[:1])[
        "two beginnings of text"
    ] == [0]


def test_turns_that_transformers_loses(family):
    """Llama 3's tokenizer takes spaces out of the characters of a token, and transformers' mask is then empty.

    It also leaves out what is behind the first token of a last character that is several.
    """
    tags = "{{ messages[0].content }}:{% generation %}{{ messages[1].content }}{% endgeneration %}/"
    tokens = family("llama3", tags)
    assert shown(choose(tokens), {"messages": turns("q", " a")}) == "q:[ a]/"
    (found,) = choose(tokens).encode([{"messages": turns("q", "a😀")}])
    assert isinstance(found, Encoded)
    assert tokens.decode(found.ids[found.learned]) == "a😀"
    theirs = {
        answer: tokens.apply_chat_template(turns("q", answer), return_dict=True, return_assistant_tokens_mask=True)
        for answer in (" a", "a😀")
    }
    assert not any(theirs[" a"]["assistant_masks"])
    assert sum(theirs["a😀"]["assistant_masks"]) < found.learned.sum()


def test_a_tokenizer_in_python_does_for_plain_templates(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    tokens = tokenizer.load(tmp_path, False)
    assert not tokens.is_fast
    (found,) = choose(tokens, "pairs", template="{input} {output}", stop="!").encode([PAIR])
    assert isinstance(found, Encoded)
    assert "".join(map(chr, found.ids[found.learned])) == " It is 42.!"
    tokens.chat_template = "{{ messages }}"
    with pytest.raises(Fault, match="cannot locate answers"):
        choose(tokens, template="chat")


def test_loading_needs_no_torch_and_says_nothing(tmp_path):
    folder = data_folders.make(tmp_path / "plain", "plain")
    code = f"""
import sys
from pathlib import Path
from trainer.data.tokens import anomalies, tokenizer
tokenizer.load(Path({str(folder)!r}), False)
assert "torch" not in sys.modules
import torch
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(Fault, match="no such folder"):
        tokenizer.load(tmp_path / "nowhere", False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Fault, match="no tokenizer that can be loaded") as fault:
        tokenizer.load(tmp_path, False)
    assert "\n" not in str(fault.value)


TEXT = st.text(min_size=1, max_size=20).filter(str.strip)


@pytest.mark.parametrize("name", ["chatml", "llama3", "tagged", "glm"])
@given(contents=st.lists(TEXT, min_size=2, max_size=6).filter(lambda found: len(found) % 2 == 0))
def test_prompt_and_answer_make_up_the_whole(name, family, contents):
    template = choose(family(name), loss_on="answer")
    row = {"messages": turns(*contents)}
    (found,) = template.encode([row])
    if isinstance(found, Bad):
        assert found.reason == "template changes earlier turns"
        return
    assert template.prompt(row) + template.answer(row) in template.tokenizer.apply_chat_template(
        row["messages"], tokenize=False
    )
    assert found.learned[found.start]
    assert not found.learned[: found.start].any()
    assert contents[-1].strip() in template.answer(row)
