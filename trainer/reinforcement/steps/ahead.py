"""Sampling ahead: while Megatron trains on a step, vLLM answers the prompts of later steps.

    take(number)        waits for the step; None if its sampling has not been started
    needs(version)      whether to send weights of this version: the thread is idle, and may sample a step with them
    begin(version)      vLLM has these weights: continue sampling

The limit is hard. With weights of a version, a step is only sampled if it will be trained on after at most
reinforce.staleness more steps of the policy. Older answers, for example in a copied journal, are sampled again. vLLM's
weights only change between steps: all answers of a step are of one version.
"""

from threading import Condition, Thread

from conf.schema.reinforcement import Reinforce
from contract.faults import Fault
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.samples import Step
from trainer.reinforcement.steps.sampler import Sampled, Sampler
from trainer.startup.console import say


class Ahead:
    """A thread of rank 0 that samples, and its steps that have not been trained on."""

    def __init__(self, sampler: Sampler, journal: Journal, reinforce: Reinforce):
        self.sampler, self.journal, self.reinforce = sampler, journal, reinforce
        self.changed = Condition()
        self.steps: dict[int, Sampled] = {}
        self.next = self.limit = self.version = self.outdated = 0
        self.working = False
        self.error: BaseException | None = None
        # Processes for rewards end with the thread that has started them: this thread runs until the end.
        Thread(target=self._work, name="sampling", daemon=True).start()

    def take(self, number: int) -> Sampled | None:
        with self.changed:
            self.changed.wait_for(lambda: number in self.steps or not self.working)
            if self.error:
                raise self.error
            if number not in self.steps:
                self.next = number
                self._read_journal(self.next)
            return self.steps.pop(number, None)

    def needs(self, version: int) -> bool:
        with self.changed:
            if self.working:
                return False
            self._read_journal(self._last(version))
            return self.next <= self._last(version)

    def begin(self, version: int) -> None:
        with self.changed:
            self.version, self.limit, self.working = version, self._last(version), True
            self.changed.notify_all()

    def _last(self, version: int) -> int:
        """The last step that may be sampled with weights of this version."""
        return min(self.reinforce.steps, version // self.reinforce.updates + self.reinforce.staleness + 1)

    def _read_journal(self, last: int) -> None:
        """Take steps from the journal that were sampled before this process started."""
        while self.next <= last and self.next != self.outdated and (step := self.journal.read(self.next)):
            if (age := lag(step, self.reinforce)) > self.reinforce.staleness:
                say(
                    f"step {step.number}: answers in {self.journal.folder} are {age:g} steps old, but "
                    f"reinforce.staleness is {self.reinforce.staleness}: sampled again"
                )
                self.outdated = self.next
                return
            say(f"step {step.number}: trained on the answers in {self.journal.folder}")
            self.steps[self.next] = Sampled(step, {})
            self.next += 1

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.working)
                number, version = self.next, self.version
            try:
                sampled = self.sampler.step(number, version)
                self.journal.write(sampled.step)
            except BaseException as error:  # take() raises it
                with self.changed:
                    self.error, self.working = error, False
                    self.changed.notify_all()
                return
            with self.changed:
                self.steps[number] = sampled
                self.next += 1
                self.working = self.next <= self.limit
                self.changed.notify_all()


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
