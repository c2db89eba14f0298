"""A run with a pruned draft vocabulary: what drafts before the first rollout chose its tokens, and from then on."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from tiny_trainer import (
    CONFIG,
    FACTS,
    HIDDEN,
    VOCABULARY,
    first_of,
    make_trainer,
    publish,
    same,
    session,
    texts,
    verifier_arrays,
)

from verl_tlt.drafter import build_drafter, check_drafter, save_drafter
from verl_tlt.messages.training import VerifierArrays

SIZE = 8
CHOSEN = np.array([1, 2, 5, 7, 11, 13, 20, 23])
PRUNED = replace(CONFIG, drafter=replace(CONFIG.drafter, vocab=SIZE))


@pytest.fixture
def policy(tmp_path):
    """Directory of a policy with weights: each row of its head is of ones."""
    first_of(tmp_path / "policy")
    embed = torch.full((VOCABULARY, HIDDEN), 0.5)
    parts = {"model.embed_tokens.weight": embed, "lm_head.weight": embed * 2, "model.norm.weight": torch.ones(HIDDEN)}
    save_file(parts, tmp_path / "policy" / "model.safetensors")
    return tmp_path / "policy"


@pytest.fixture
def trainer(policy):
    return make_trainer(policy, config=PRUNED)


def drafted(trainer):
    """The tokens that its drafter drafts."""
    return trainer.model.t2d.nonzero()[:, 0].tolist()


def assert_cut(trainer, arrays):
    """Teacher and drafter have the rows of the policy's head that belong to the chosen tokens, to the bit."""
    rows = torch.from_numpy(arrays.lm_head[CHOSEN]).float()
    assert torch.equal(trainer.model.lm_head.weight, rows)
    assert torch.equal(trainer.model.verifier_lm_head.weight, rows)


def test_before_the_first_rollout_low_ids_stand_for_the_tokens_it_will_choose(policy):
    first = first_of(policy, PRUNED)
    assert (first.draft_vocab, first.chosen) == (SIZE, False)
    tensors = load(first.served.weights)
    assert not tensors["d2t"].any() and tensors["t2d"].nonzero()[:, 0].tolist() == list(range(SIZE))
    assert tensors["lm_head.weight"].shape == (SIZE, HIDDEN) and tensors["lm_head.weight"].isfinite().all()
    whole = first_of(policy)
    assert (whole.draft_vocab, whole.chosen) == (VOCABULARY, True) and "d2t" not in load(whole.served.weights)


def test_of_the_policys_weights_the_head_alone_is_kept_twice(trainer):
    """Embedding and head of a policy are gigabytes."""
    drawn = np.random.default_rng(0)
    embed, head = (drawn.normal(size=(VOCABULARY, HIDDEN)).astype(np.float16) for _ in range(2))
    alive = [weakref.ref(embed), weakref.ref(head)]
    trainer.add(1, texts(3), VerifierArrays(embed, head, np.ones(HIDDEN, np.float16)), CHOSEN)
    del embed, head
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True]


def test_on_an_accelerator_every_head_takes_the_place_of_the_one_before(policy):
    """Which is page-locked once: locking takes longer than copying."""
    trainer, places = make_trainer(policy, config=PRUNED, device="cuda"), set()
    for seed in range(3):
        arrays = verifier_arrays(seed=seed)
        trainer.add(1, texts(3), arrays, CHOSEN)
        places.add(trainer.whole_head.data_ptr())
        assert torch.equal(trainer.whole_head, torch.from_numpy(arrays.lm_head))
        arrays.lm_head[:] = 0.0  # the store's, which may be gone by then
        assert trainer.whole_head.any()
    assert len(places) == 1


def test_the_chosen_tokens_head_is_cut_from_every_newer_policy(trainer):
    """The trained parameters know nothing of the vocabulary, so they stay."""
    weights = verifier_arrays()
    before = {name: value.clone() for name, value in trainer.candidate.items()}
    trainer.add(1, texts(3), weights, CHOSEN)
    assert drafted(trainer) == CHOSEN.tolist()
    assert_cut(trainer, weights)
    newer = verifier_arrays(seed=1)
    trainer.add(2, texts(3), newer, CHOSEN)
    assert_cut(trainer, newer)
    assert same(trainer.trainer.cloned_parameters(), before)


def test_what_is_trained_is_exported_with_its_tokens_and_resumed(policy, trainer, tmp_path):
    weights, sequences = verifier_arrays(), texts(60)
    stats = trainer.add(1, sequences, weights, CHOSEN)
    said = torch.cat([s.tokens[s.prompt_len :] for s in sequences])
    assert (stats.responses, stats.draftable) == (len(said), int(np.isin(said, CHOSEN).sum()))
    assert 0 < stats.draftable < stats.responses
    session(trainer)
    assert np.isfinite(session(trainer).verdict.tau["candidate"])
    exported = load(publish(trainer).weights)
    assert (exported["d2t"] + torch.arange(SIZE)).tolist() == CHOSEN.tolist()
    assert torch.equal(exported["lm_head.weight"], torch.from_numpy(weights.lm_head[CHOSEN]).bfloat16())
    directory = tmp_path / "global_step_3" / "tlt_drafter"
    trainer.save(str(directory), FACTS)
    check_drafter(directory, policy)
    again = first_of(policy, PRUNED, directory.parent)
    assert (again.draft_vocab, again.chosen) == (SIZE, True), "nothing is counted anew"
    other = make_trainer(policy, config=PRUNED, resume_from=directory.parent)
    assert other.trainer.steps == trainer.trainer.steps and drafted(other) == CHOSEN.tolist()


def test_a_run_that_ended_before_it_chose_chooses_when_it_is_resumed(policy, trainer, tmp_path):
    directory = tmp_path / "global_step_1" / "tlt_drafter"
    trainer.add(1, texts(3), verifier_arrays())
    trainer.save(str(directory), FACTS)
    assert not first_of(policy, PRUNED, directory.parent).chosen


def test_one_that_replaces_another_drafts_the_runs_tokens_at_once(policy, trainer, tmp_path):
    """It has no head of the policy before the next hand-over: what it saves until then is the run's first policy's."""
    weights = verifier_arrays()
    trainer.add(1, texts(60), weights, CHOSEN)
    new = make_trainer(policy, config=PRUNED, published=publish(trainer), draft_ids=CHOSEN)
    assert drafted(new) == drafted(trainer) == CHOSEN.tolist()
    new.save(str(tmp_path / "saved"), FACTS)
    assert (load_file(tmp_path / "saved" / "model.safetensors")["lm_head.weight"] == 1.0).all()
    new.add(2, texts(60, seed=1), weights, CHOSEN)
    assert_cut(new, weights)
    assert session(new).steps > 0


def test_under_lora_the_policys_head_comes_from_its_files(policy):
    """No weight sync brings it, and it never changes."""
    trainer = make_trainer(policy, config=PRUNED)
    trainer.add(1, texts(60), None, CHOSEN)
    assert (trainer.whole_head == 1.0).all() and (trainer.model.lm_head.weight == 1.0).all()
    assert session(trainer).steps > 0


def test_tokens_and_trained_head_of_a_file_are_kept_by_training_judging_and_saving(policy, tmp_path):
    model = build_drafter(policy, draft_ids=torch.from_numpy(CHOSEN))
    head = torch.randn(SIZE, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    theirs = save_drafter(model, tmp_path / "theirs", {})
    (theirs / "provenance.json").unlink()
    config = replace(PRUNED, drafter=replace(PRUNED.drafter, path=str(theirs), vocab=5))
    start, trainer = first_of(policy, config), make_trainer(policy, 60, config=config)
    assert (start.draft_vocab, start.chosen, drafted(trainer)) == (SIZE, True, CHOSEN.tolist())
    session(trainer)
    assert session(trainer).verdict is not None
    trainer.save(str(tmp_path / "saved"), FACTS)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for tensors in (saved, load(publish(trainer).weights)):
        assert torch.equal(tensors["lm_head.weight"].bfloat16(), head.bfloat16())
    teacher = torch.from_numpy(verifier_arrays().lm_head[CHOSEN]).float()
    assert torch.equal(trainer.model.verifier_lm_head.weight, teacher)
