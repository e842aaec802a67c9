"""Answers of several turns: an environment replies to the model's answer, and the model continues from there.

A reply is text that is appended to the model's tokens. It must include the marks of turns. The policy reads the reply,
but is not trained on it. A conversation ends if the environment returns None, or after reinforce.turns answers. It also
ends if an answer or the next reply would exceed reinforce.max_tokens, the limit for all tokens after the prompt.
"""

from collections.abc import Callable, Sequence
from random import Random

from conf.schema.run import Run
from trainer.data.tokens.templates import Template
from trainer.reinforcement.guarded.worker import ENVIRONMENT, Conversation, Worker
from trainer.reinforcement.samples import Answer, Group

# Takes prompts, seeds and limits of tokens; returns one answer to each prompt.
Ask = Callable[[list[list[int]], list[int], list[int]], list[Answer]]


class Environment:
    """The environment of a run, and the conversations with it."""

    def __init__(self, run: Run, template: Template):
        self.turns, self.room = run.reinforce.turns, run.reinforce.max_tokens
        self.template, self.worker = template, _worker(run)

    def play(
        self, groups: Sequence[Group], texts_of: Callable[[Group], tuple[str, str]], ask: Ask, draw: Random
    ) -> None:
        """Play the turns after each first answer. texts_of() returns the text of a prompt, and its reference."""
        running = [
            (group, answer, [self.template.without_end(answer.text)]) for group in groups for answer in group.answers
        ]
        for _ in range(1, self.turns):
            running = [conversation for conversation in running if conversation[1].ended]
            questions = [(texts_of(group), texts) for group, _, texts in running]
            replies = self.worker.replies(
                [Conversation(prompt, [*texts], reference) for (prompt, reference), texts in questions]
            )
            pairs = zip(running, replies, strict=True)
            running = [conversation for conversation, reply in pairs if self._append(conversation[1], reply)]
            if not running:
                return
            prompts = [group.prompt + answer.tokens for group, answer, _ in running]
            limits = [self.room - len(answer.tokens) for _, answer, _ in running]
            answers = ask(prompts, [draw.randrange(2**40) for _ in running], limits)
            for (_, answer, texts), more in zip(running, answers, strict=True):
                answer.tokens, answer.log_probs = answer.tokens + more.tokens, answer.log_probs + more.log_probs
                answer.text, answer.ended, answer.routes = more.text, more.ended, more.routes
                texts.append(self.template.without_end(more.text))

    def _append(self, answer: Answer, reply: str | None) -> bool:
        """Append the reply to the answer. Returns whether the model continues from there."""
        if reply is None:
            return False
        tokens = self.template.tokenizer.encode(reply, add_special_tokens=False)
        if len(answer.tokens) + len(tokens) >= self.room:
            answer.ended = False
            return False
        answer.tokens, answer.log_probs = answer.tokens + tokens, answer.log_probs + [None] * len(tokens)
        return True


def check(run: Run) -> None:
    """Raise a Fault if the environment cannot be loaded."""
    if run.reinforce.environment:
        _worker(run).close()


def _worker(run: Run) -> Worker:
    reinforce = run.reinforce
    return Worker(ENVIRONMENT, reinforce.environment, reinforce.reward_seconds, reinforce.reward_memory_gb)
