"""trainer/objectives/dpo.py, beside the published formula of TRL."""

import pytest
import torch
from torch.nn import functional

from trainer.objectives.dpo import answer_log_probs, preference


def of_trl(logits, labels, mask, reference, beta: float, label_smoothing: float) -> tuple[torch.Tensor, ...]:
    """TRL 0.19's DPOTrainer.concatenated_forward (sums over completion tokens) and dpo_loss of "sigmoid".

    Written down from its source, with its names. Rows are chosen answers, then rejected ones.
    """
    shift_logits, shift_labels, loss_mask = logits[:, :-1], labels[:, 1:], mask[:, 1:].bool()
    per_token_logps = torch.gather(shift_logits.log_softmax(-1), 2, shift_labels.unsqueeze(2)).squeeze(2)
    per_token_logps[~loss_mask] = 0
    all_logps = per_token_logps.sum(-1)
    num_examples = len(logits) // 2
    chosen_logps, rejected_logps = all_logps[:num_examples], all_logps[num_examples:]
    ref_chosen_logps, ref_rejected_logps = reference[:num_examples], reference[num_examples:]
    logratios = chosen_logps - rejected_logps
    ref_logratios = ref_chosen_logps - ref_rejected_logps
    logits = logratios - ref_logratios
    losses = (
        -functional.logsigmoid(beta * logits) * (1 - label_smoothing)
        - functional.logsigmoid(-beta * logits) * label_smoothing
    )
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps).detach()
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps).detach()
    return losses, chosen_rewards, rejected_rewards


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.1)])
def test_loss_rewards_and_gradients_are_those_of_trl_on_the_same_batch(beta, smoothing):
    torch.manual_seed(0)
    logits = torch.randn(8, 12, 40, requires_grad=True)
    labels, mask = torch.randint(40, (8, 12)), (torch.rand(8, 12) < 0.6).float()
    reference = torch.randn(8) * 3 - 30
    theirs, *rewards = of_trl(logits, labels, mask, reference, beta, smoothing)
    (expected,) = torch.autograd.grad(theirs.mean(), logits)

    # Megatron's loss of a token stands at the one before it, and so does its mask.
    log_probs = -functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    answers = answer_log_probs(log_probs, mask[:, 1:])
    chosen, rejected = answers.chunk(2)
    losses, figures = preference(beta, smoothing, chosen, rejected, reference.view(2, 4))
    (found,) = torch.autograd.grad(losses.mean(), logits)
    assert torch.allclose(losses, theirs, atol=1e-5) and torch.allclose(found, expected, atol=1e-6)
    for name, reward in zip(("chosen", "rejected"), rewards, strict=True):
        assert torch.allclose(figures[f"rewards/{name}"], reward, atol=1e-5)
    assert torch.equal(figures["rewards/accuracy"], (rewards[0] > rewards[1]).float())
