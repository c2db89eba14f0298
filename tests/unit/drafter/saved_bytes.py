"""What a training step keeps for its backward pass, counted: as on CUDA, but for where it is."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from verl_tlt.drafter import DrafterTrainer, TrainingSequence, pack
from verl_tlt.drafter.train import run_passes


class FusedLoss(torch.autograd.Function):
    """Keeps what the fused losses of `speculators` keep of the logits, whose kernels no CPU has."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        return (logits - targets).float().square().mean(-1)

    @staticmethod
    def backward(ctx, gradient):
        logits, targets = ctx.saved_tensors
        return (logits - targets) * gradient[..., None], None


def kept_bytes(model, rows, passes):
    """Bytes that one step's passes over so many rows keep besides the model and the batch; each storage once."""
    draws, hidden = torch.Generator().manual_seed(0), model.hidden_size

    def states(width):
        return torch.randn(rows + 1, width, generator=draws).bfloat16()

    tokens = torch.randint(model.verifier_vocab_size, (rows + 1,), generator=draws)
    text = TrainingSequence(tokens, 1, states(len(model.target_layer_ids) * hidden), states(hidden))
    batch = DrafterTrainer(model, ttt_steps=passes).feed()(pack([text])).arrived()
    held = [*model.parameters(), *model.buffers(), *vars(batch).values()]
    known, kept = {t.untyped_storage().data_ptr() for t in held}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(note, lambda tensor: tensor):
        run_passes(model, batch, passes, {"fused": (FusedLoss.apply, 1.0)})
    return sum(kept.values())


def planned_bytes(model, rows, passes):
    """The same as a session plans it: activations, autocast's copies of what is trained, and logits in 16 bits."""
    from verl_tlt.drafter.memory import activation_bytes

    copies = sum(2 * p.numel() for p in model.parameters() if p.requires_grad)
    return activation_bytes(model, rows, passes) + copies + 2 * rows * model.draft_vocab_size * (passes + 1)
