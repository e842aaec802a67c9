"""The training's template as the server's chat template: it turns a question in a chat into the trained prompt.

chat     the tokenizer's own template needs nothing; a Jinja file is used unchanged
plain    the text around {input}, for one message
jinja    the text that a file with `input` and `output` writes before the answer, for one message
"""

import json

from trainer.data.tokens import templates
from trainer.data.tokens.template_text import split
from trainer.data.tokens.templates import Template

MARK = "\ue000"  # placeholder for the answer; a character for private use
ONE = (
    "{%- if messages|length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model was trained on single questions: send one message, of the user') }}"
    "{%- endif -%}"
)
QUESTION = "messages[0]['content']"


def of(template: Template) -> str | None:
    """Jinja text; None if the tokenizer's own chat template is used, or the data have no prompts."""
    if template.kind == "plain":
        before, after, _ = split(template.text)
        return f"{ONE}{{{{ {_text(before)} + {QUESTION}.strip(' ') + {_text(after)} }}}}"
    if template.kind == "jinja":
        variables = f"{{%- set input = {QUESTION} -%}}{{%- set output = {_text(MARK)} -%}}"
        options = "".join(f"{{%- set {name} = {_text(value)} -%}}" for name, value in template.options.items())
        whole = f"{{% set whole %}}\n{template.text}{{% endset %}}"  # transformers drops a line break after a block
        return f"{ONE}{variables}{options}{whole}{{{{- whole.split({_text(MARK)})[0].removesuffix(' ') }}}}"
    if template.kind == "chat" and template.origin != templates.CHAT:
        return template.text
    return None


def _text(value: object) -> str:
    """A value as a Jinja literal. Jinja accepts JSON's escapes, true and false."""
    return json.dumps(value, ensure_ascii=False)
