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


def request(*answers: list[int], text: str = "") -> SimpleNamespace:
    """What vLLM returns for a prompt of one token."""
    outputs = [
        SimpleNamespace(
            token_ids=tokens,
            routed_experts=None,
            logprobs=SimpleNamespace(logprobs=[-0.5] * len(tokens)),
            text=text,
            finish_reason="stop" if tokens[-1] == 0 else "length",
        )
        for tokens in answers
    ]
    return SimpleNamespace(prompt_token_ids=[1], outputs=outputs)


def test_a_space_between_prompt_and_answer_is_the_answer_s_and_the_end_of_text_is_no_part_of_it(rollout):
    assert rollout._answers(request([2, 3, 4], [2, 0])) == [
        ([2, 3, 4], [-0.5] * 3, " billing desks", False, None),
        ([2, 0], [-0.5] * 2, " billing", True, None),
    ]


def test_a_text_that_vllm_has_looked_at_stays(rollout):
    ((_, _, text, *_),) = rollout._answers(request([2, 3], text=" billing"))
    assert text == " billing"


def test_an_answer_has_a_log_probability_for_each_token(rollout):
    asked = request([2])
    asked.outputs[0].logprobs.logprobs = []
    with pytest.raises(AssertionError):
        rollout._answers(asked)
