"""Sampling ahead: while Megatron trains on a step, vLLM answers the prompts of later steps.

    take(number)        waits for the step; None if its sampling has not been started
    needs(version)      whether to send weights of this version: the thread is idle, and may sample a step with them
    begin(version)      continue sampling, because vLLM now has these weights

The limit is strict. The thread samples a step with weights of a version only if at most reinforce.staleness steps of
the policy lie between this version and the training on the step. Older answers, for example in a copied journal, are
sampled again. vLLM's weights change only between steps, so all answers of a step are from one version.
"""

from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from conf.schema.reinforcement import Reinforce
from contract.faults import Fault
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.samples import Step
from trainer.reinforcement.steps.sampler import Sampled, Sampler
from trainer.startup.console import say


class Ahead:
    """A thread of rank 0 that samples, and the steps that it has or will have sampled."""

    def __init__(self, sampler: Sampler, journal: Journal, reinforce: Reinforce):
        self.sampler, self.journal, self.reinforce = sampler, journal, reinforce
        self.steps: dict[int, Future[Sampled]] = {}  # not trained on yet
        self.orders: SimpleQueue[tuple[int, int, Future[Sampled]]] = SimpleQueue()  # step, version, and its result
        self.next = self.outdated = 0
        # Processes for rewards end with the thread that has started them: this thread runs until the end.
        Thread(target=self._work, name="sampling", daemon=True).start()

    def take(self, number: int) -> Sampled | None:
        if number not in self.steps:
            self.next = number
            self._read_journal(number)
        step = self.steps.pop(number, None)
        return step.result() if step else None

    def needs(self, version: int) -> bool:
        if not all(step.done() for step in self.steps.values()):
            return False
        self._read_journal(self._last(version))
        return self.next <= self._last(version)

    def begin(self, version: int) -> None:
        for number in range(self.next, self._last(version) + 1):
            self.steps[number] = Future()
            self.orders.put((number, version, self.steps[number]))
        self.next = self._last(version) + 1

    def _last(self, version: int) -> int:
        """The last step that may be sampled with weights of this version."""
        return min(self.reinforce.steps, version // self.reinforce.updates + self.reinforce.staleness + 1)

    def _read_journal(self, last: int) -> None:
        """Take the steps that an earlier process sampled from the journal."""
        while self.next <= last and self.next != self.outdated and (step := self.journal.read(self.next)):
            if (age := lag(step, self.reinforce)) > self.reinforce.staleness:
                say(
                    f"step {step.number}: answers in {self.journal.folder} are {age:g} steps old, but "
                    f"reinforce.staleness is {self.reinforce.staleness}: sampled again"
                )
                self.outdated = self.next
                return
            say(f"step {step.number}: trained on the answers in {self.journal.folder}")
            self.steps[self.next] = Future()
            self.steps[self.next].set_result(Sampled(step, {}))
            self.next += 1

    def _work(self) -> None:
        while True:
            number, version, step = self.orders.get()
            try:
                sampled = self.sampler.step(number, version)
                self.journal.write(sampled.step)
            except BaseException as error:  # take() raises it
                step.set_exception(error)
                return
            step.set_result(sampled)


def lag(step: Step, reinforce: Reinforce) -> float:
    """Steps between the weights that sampled the step and the policy that is trained on it."""
    versions = [step.version if answer.version is None else answer.version for answer in step.answers]
    return max(0, (step.number - 1) * reinforce.updates - min(versions)) / reinforce.updates


def require_fresh(step: Step, reinforce: Reinforce) -> float:
    """The lag of a step before training on it. Raises a Fault if it exceeds reinforce.staleness."""
    if (age := lag(step, reinforce)) > reinforce.staleness:
        raise Fault(
            f"step {step.number}: its answers are {age:g} steps older than the policy, but reinforce.staleness is "
            f"{reinforce.staleness}"
        )
    return age
