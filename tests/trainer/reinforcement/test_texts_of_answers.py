"""Answers become text as they read behind their prompts."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.reinforcement.vllm_process import Rollout

WORDS = ["<end>", "▁a", "▁billing", "▁desk", "s"]


@pytest.fixture
def rollout():
    """A rollout whose tokenizer takes the space off the first word of a text, as Llama 2's does."""
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = Rollout.__new__(Rollout)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    made.llm = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    return made


def test_a_space_between_prompt_and_answer_is_the_answer_s(rollout):
    assert rollout._text([1], [2, 3, 4]) == " billing desks"


def test_the_end_of_text_is_no_part_of_it(rollout):
    assert rollout._text([1], [2, 0]) == " billing"


def test_an_answer_has_a_log_probability_for_each_token(rollout):
    output = SimpleNamespace(token_ids=[2], logprobs=SimpleNamespace(logprobs=[-0.5]), text="", finish_reason="length")
    assert rollout._answer([1], output) == ([2], [-0.5], " billing", False)
    output.logprobs.logprobs = []
    with pytest.raises(AssertionError):
        rollout._answer([1], output)
