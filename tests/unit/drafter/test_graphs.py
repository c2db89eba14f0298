"""Where CUDA is, speculators compiles the drafter's forward: a stop would wait for every graph that is traced."""

import pytest
import torch
from tiny_policy import drafter_of
from torch._dynamo.utils import counters

from verl_tlt.drafter import DrafterTrainer, acceptance, default_attention, pack


@pytest.fixture
def compiled(monkeypatch):
    """The library as it is where CUDA is, but for the backend."""
    from speculators.models.eagle3 import Eagle3DraftModel

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(Eagle3DraftModel, "forward", torch.compile(Eagle3DraftModel.forward, backend="eager"))
    with torch._dynamo.config.patch(disable=False):  # the tests' environment disables it
        yield Eagle3DraftModel.forward
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def test_no_row_count_and_no_scoring_traces_a_graph_after_the_first_step(compiled, policy, sequences):
    model = drafter_of(policy, seed=3, attention=default_attention("cuda"))
    trainer = DrafterTrainer(model, ttt_steps=3)
    trainer.rehearse()
    trainer.step(pack(sequences))
    first = graphs()
    for some in (sequences[:1], sequences[1:3], sequences[3:], sequences):
        trainer.step(pack(some))
        trainer.step(pack(some).padded(16))
    for some in (sequences[:2], sequences[2:]):
        acceptance(model, some, max_draft=3)
    assert graphs() == first == 0
    batch = trainer.feed()(pack(sequences)).arrived()
    with torch.no_grad():
        compiled(model, batch.hidden_states, batch.input_ids, batch.document_ids, ttt_steps=1)
    assert graphs() > 0, "the library's own forward would have been compiled"
