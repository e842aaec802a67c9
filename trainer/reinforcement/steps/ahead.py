"""Sampling beside training: while Megatron takes a step, vLLM answers the prompts of those behind it.

    take(number)        the step, once it is there; None where nobody has begun it
    wants(version)      whether weights of this version are wanted: nobody samples, and there is a step for them
    begin(version)      vLLM has them now: go on sampling

The bound is hard. With weights of a version, a step is only begun that will be trained on when the policy has taken
reinforce.staleness steps more at most. What is older, as in a journal of somebody else's, is sampled again. vLLM's
weights change between steps alone, so that all answers of a step are of one version.
"""

from threading import Condition, Thread

from conf.schema.reinforcement import Reinforce
from contract.faults import Fault
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.samples import Step
from trainer.reinforcement.steps.sampler import Sampled, Sampler
from trainer.startup.console import say


class Ahead:
    """A thread of rank 0 that samples, and the steps that it has made and nobody has trained on."""

    def __init__(self, sampler: Sampler, journal: Journal, asked: Reinforce):
        self.sampler, self.journal, self.asked = sampler, journal, asked
        self.changed = Condition()
        self.made: dict[int, Sampled] = {}
        self.next = self.limit = self.version = self.anew = 0
        self.working = False
        self.error: BaseException | None = None
        # The processes of rewards die with the thread that has started them: this one stays until the end.
        Thread(target=self._work, name="sampling", daemon=True).start()

    def take(self, number: int) -> Sampled | None:
        with self.changed:
            self.changed.wait_for(lambda: number in self.made or not self.working)
            if self.error:
                raise self.error
            if number not in self.made:
                self.next = number
                self._read_on(self.next)
            return self.made.pop(number, None)

    def wants(self, version: int) -> bool:
        with self.changed:
            if self.working:
                return False
            self._read_on(self._last(version))
            return self.next <= self._last(version)

    def begin(self, version: int) -> None:
        with self.changed:
            self.version, self.limit, self.working = version, self._last(version), True
            self.changed.notify_all()

    def _last(self, version: int) -> int:
        """The last step that weights of this version may answer."""
        return min(self.asked.steps, version // self.asked.updates + self.asked.staleness + 1)

    def _read_on(self, last: int) -> None:
        """Take steps from the journal that were sampled before this process began."""
        while self.next <= last and self.next != self.anew and (found := self.journal.read(self.next)):
            if (behind := lag(found, self.asked)) > self.asked.staleness:
                say(
                    f"step {found.number}: answers in {self.journal.folder} are {behind:g} steps old, and "
                    f"reinforce.staleness is {self.asked.staleness}: sampled again"
                )
                self.anew = self.next
                return
            say(f"step {found.number}: trained on the answers in {self.journal.folder}")
            self.made[self.next] = Sampled(found, {})
            self.next += 1

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.working)
                number, version = self.next, self.version
            try:
                found = self.sampler.step(number, version)
                self.journal.write(found.step)
            except BaseException as error:  # is raised where the step is waited for
                with self.changed:
                    self.error, self.working = error, False
                    self.changed.notify_all()
                return
            with self.changed:
                self.made[number] = found
                self.next += 1
                self.working = self.next <= self.limit
                self.changed.notify_all()


def lag(step: Step, asked: Reinforce) -> float:
    """Steps that the policy has taken, when the step is trained on, since the weights that answered."""
    versions = [step.version if answer.version is None else answer.version for answer in step.answers]
    return max(0, (step.number - 1) * asked.updates - min(versions)) / asked.updates


def require_fresh(step: Step, asked: Reinforce) -> float:
    """The lag of a step that is about to be trained on. Raises a Fault where it is above the bound."""
    if (behind := lag(step, asked)) > asked.staleness:
        raise Fault(
            f"step {step.number}: its answers are {behind:g} steps older than the policy, and reinforce.staleness is "
            f"{asked.staleness}"
        )
    return behind
