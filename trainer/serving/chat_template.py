"""The template of a training as the chat template of a server: a question in a chat is the prompt that was trained.

chat     the tokenizer's own needs nothing; a Jinja file is taken as it is
plain    the text around {input}, for one message
jinja    all that a file with `input` and `output` writes in front of the answer, for one message
"""

import json

from trainer.data.tokens import templates
from trainer.data.tokens.template_text import split
from trainer.data.tokens.templates import Template

MARK = "\ue000"  # stands for the answer; a character for private use
ONE = (
    "{%- if messages|length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model was trained on single questions: send one message, of the user') }}"
    "{%- endif -%}"
)
QUESTION = "messages[0]['content']"


def of(template: Template) -> str | None:
    """Jinja text; None where the tokenizer's own chat template is the one, or there is no prompt at all."""
    if template.kind == "plain":
        before, after, _ = split(template.text)
        return f"{ONE}{{{{ {_text(before)} + {QUESTION}.strip(' ') + {_text(after)} }}}}"
    if template.kind == "jinja":
        given = f"{{%- set input = {QUESTION} -%}}{{%- set output = {_text(MARK)} -%}}"
        options = "".join(f"{{%- set {name} = {_text(value)} -%}}" for name, value in template.options.items())
        whole = f"{{% set whole %}}\n{template.text}{{% endset %}}"  # transformers drops a line break behind a block
        return f"{ONE}{given}{options}{whole}{{{{- whole.split({_text(MARK)})[0].removesuffix(' ') }}}}"
    if template.kind == "chat" and template.origin != templates.CHAT:
        return template.text
    return None


def _text(value: object) -> str:
    """A value as Jinja writes it. Its texts have JSON's escapes; its true and false too."""
    return json.dumps(value, ensure_ascii=False)
