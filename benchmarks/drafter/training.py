"""How a drafter is trained, by seed: the loss, momentum over merges, the learning rate by width.

    python -m benchmarks.drafter.training loss   --work DIR --corpus prose --seeds 0 1 2 3 4
    python -m benchmarks.drafter.training merge  --work DIR --corpus prose --workers 2 4 8 --outer plain 0.5/1.0 twice
    python -m benchmarks.drafter.training width  --work DIR --corpus prose --widths 128 256 512 1024 --seeds 0 1 2
    python -m benchmarks.drafter.training report --work DIR --out benchmarks/results/drafter_training.json

Heads are new ones of a run (`build_drafter`) or `trained` ones: the average that `TRAINED_STEPS` steps of the default
recipe left behind, which a fresh trainer continues. Each run is a file in the work folder and is left out where that is
there. Accept length is the gate's, at temperature 1 on 32 held-out responses, of the average of recent weights.

Two texts: `toy`, what the demo's policy wrote at temperature 1, nearly certain; `prose`, what a Qwen3 of 1M parameters
wrote that is trained here on Python's language reference in 512 byte pairs, where each token is open.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.drafter.study_report import spread
from benchmarks.drafter.trajectory import MAX_DIGITS, load_model, prompts_of, sample
from benchmarks.stored import store
from demo.toy import task
from demo.toy.assets import SHIPPED_POLICY
from verl_tlt import drafter
from verl_tlt.drafter.train import DrafterTrainer as Trainer
from verl_tlt.messages.training import Parameters
from verl_tlt.spot_worker.buffer import Buffer
from verl_tlt.spot_worker.merge import added, average_slice, hand_in, session_facts
from verl_tlt.spot_worker.scoring import counts

Draw = Callable[[], drafter.Batch]
Found = dict[str, Any]
ROWS, DRAFT = 512, 5
"""Rows of a micro-batch, draft length of the score."""
TRAINED_STEPS, NEW_STEPS, MORE_STEPS, WIDTH_STEPS = 300, 150, 120, 100
"""Optimizer steps of a trained head, of a new one in `loss`, of a trained one there, and of a new one in `width`."""
LOSSES = ("kl_div", "late", "lk_hybrid")
"""`late`: `kl_div` until the third position is unrolled, then `lk_hybrid`."""
SESSIONS, SESSION_STEPS, MIN_STEPS = 6, 12, 8
"""Sessions of `merge`, micro-batches of each, and `tlt.spot.min_merge_steps`."""
STARTS = ("new", "trained")
COMPARED = ("kl_div", "plain", "alone", "0.001")
"""Arms that those beside them are compared with."""
HELD_OUT, TOY = 32, 736
"""Responses to score by, and those of the toy to train on."""
VOCABULARY, PROMPT, RESPONSE, CONTEXT = 512, 16, 112, 128
"""Of prose, in tokens; the last is what its policies are trained on at a time."""
POLICIES = {
    128: (1600, 4, 700, 12, 2e-3),
    256: (1600, 4, 400, 12, 1e-3),
    512: (800, 3, 300, 6, 7e-4),
    1024: (800, 3, 200, 4, 4e-4),
}
"""Of prose by width: responses to train a head on; the policy's layers (a head reads from three), optimizer steps,
sequences a step, AdamW's highest rate."""


# ---------------------------------------------------------------------- texts


class Corpus:
    """What a policy wrote, with its hidden states; made in `work` by the first call."""

    def __init__(self, work: Path, name: str, width: int = 128) -> None:
        self.work, self.name = work, name if width == 128 else f"{name}-{width}"
        self.policy = SHIPPED_POLICY if name == "toy" else work / f"prose-policy-{width}"
        file = work / f"{self.name}.pt"
        if not file.exists():
            texts = toy_texts() if name == "toy" else prose_texts(self.policy, width)
            model = drafter.load_policy(self.policy, "cpu")
            states = drafter.PolicyStates(model, drafter.aux_layers_for(model.config.num_hidden_layers))
            found = drafter.Library(states, texts, max_bytes=0).get(range(len(texts)))
            torch.save([(s.tokens, s.prompt_len, s.aux.bfloat16(), s.last.bfloat16()) for s in found], file)
        sequences = [drafter.TrainingSequence(*parts) for parts in torch.load(file, weights_only=True, mmap=True)]
        self.train, self.held_out = sequences[HELD_OUT:], sequences[:HELD_OUT]


def toy_texts() -> list[drafter.Text]:
    rng, model = random.Random("a drafter's comparison"), load_model(SHIPPED_POLICY)
    prompts = prompts_of([task.sample_problem(rng, MAX_DIGITS) for _ in range(HELD_OUT + TOY)])
    return [text for at in range(0, len(prompts), 256) for text in sample(model, prompts[at : at + 256], 1, at)]


def prose_texts(policy: Path, width: int) -> list[drafter.Text]:
    """Prompts are excerpts; the held-out ones are of pages that the policy was not trained on."""
    pages = [topics[name] for name in sorted(topics)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(pages, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet))
    rng = random.Random("a drafter's comparison")
    rng.shuffle(pages)
    tokens = [tokenizer.encode(page).ids for page in pages]
    unseen, seen = tokens[: len(pages) // 10], tokens[len(pages) // 10 :]
    if not policy.exists():
        trained_policy(torch.tensor([i for page in seen for i in page]), width).save_pretrained(policy)
    prompts = [excerpt(unseen, rng) for _ in range(HELD_OUT)] + [excerpt(seen, rng) for _ in range(POLICIES[width][0])]
    model = load_model(policy)
    return [text for at in range(0, len(prompts), 256) for text in written(model, prompts[at : at + 256], at)]


def excerpt(pages: list[list[int]], rng: random.Random) -> list[int]:
    page = rng.choice([p for p in pages if len(p) > PROMPT])
    begin = rng.randrange(len(page) - PROMPT)
    return page[begin : begin + PROMPT]


def trained_policy(tokens: torch.Tensor, width: int) -> Qwen3ForCausalLM:
    """Next-token training on random windows of int64 [N]; prints its loss."""
    _, layers, steps, rows, rate = POLICIES[width]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 32, num_key_value_heads=width // 32, head_dim=32, max_position_embeddings=512,
            rope_theta=10000.0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        at = torch.randint(len(tokens) - CONTEXT - 1, (rows, 1)) + torch.arange(CONTEXT + 1)  # [B, T + 1]
        logits = model(tokens[at[:, :-1]]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[at[:, 1:]].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50, 0.02 + 2 * (1 - step / steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            print(f"policy {width}: step {step + 1}, loss {loss.item():.3f}, {time.process_time():.0f} s", flush=True)
    return model


@torch.no_grad()
def written(model: Any, prompts: list[list[int]], seed: int) -> list[drafter.Text]:
    """Responses of `RESPONSE` tokens at temperature 1 to prompts of one length."""
    torch.manual_seed(seed)
    ids = torch.tensor(prompts)  # [B, PROMPT]
    limits = {"max_new_tokens": RESPONSE, "min_new_tokens": RESPONSE, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **limits)
    return [drafter.Text(tuple(row), PROMPT) for row in found.tolist()]


# ---------------------------------------------------------------------- training and scoring


def trainer_of(corpus: Corpus, seed: int, start: str, **settings: Any) -> Trainer:
    """A fresh trainer of a new head or of the trained one of this seed."""
    model = drafter.build_drafter(corpus.policy, seed=seed, max_position_embeddings=512)
    drafter.refresh_verifier_weights(model, drafter.VerifierWeights.from_policy_dir(corpus.policy))
    made = drafter.DrafterTrainer(model, trained=start == "trained", **settings)
    if start == "trained":
        made.load_parameters(dict(np.load(head_file(corpus, seed))))
    return made


def drawn(sequences: Sequence[drafter.TrainingSequence], seed: str) -> Draw:
    """Micro-batches as a session draws them."""
    buffer, rng = Buffer(max_bytes=2**40, keep_steps=1, held_out=0.0), random.Random(seed)
    for i, sequence in enumerate(sequences):
        buffer.add(0, i, sequence)
    buffer.begin_session(max_epochs=1e9)
    return lambda: drafter.pack(buffer.sample_batch(rng, ROWS))


def average_of(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: average.numpy().copy() for name, average in trainer.averages().items()}


def scored(trainer: Trainer, corpus: Corpus, weights: Parameters) -> Found:
    """Accept length of these weights with drafts of `DRAFT` tokens, and of their first three alone."""
    with trainer.holding(weights):
        scores = drafter.acceptance(trainer.model, corpus.held_out, max_draft=DRAFT)
    total = counts(scores, DRAFT).sum(axis=0)  # [1 + K]
    return {str(k): round(float(total[: k + 1].sum() / total[0]), 4) for k in (3, DRAFT)}


def trained(trainer: Trainer, draw: Draw, corpus: Corpus, until: int, late: bool = False) -> Found:
    """Train up to this optimizer step; the scores, and the step after which each number of positions was unrolled."""
    unrolled: dict[str, int] = {}
    while trainer.steps < until:
        if late and trainer.passes == trainer.ttt_steps:
            trainer._loss = "lk_hybrid"
        trainer.step(draw())
        unrolled.setdefault(str(trainer.passes), trainer.steps)
    return {"unrolled": unrolled} | scored(trainer, corpus, average_of(trainer))


def merged(team: list[Trainer], draws: list[Draw], corpus: Corpus, momentum: float, rate: float) -> Found:
    """Sessions of several workers, and a merge as in a run after each; Nesterov's momentum and rate over its change.

    That is v = momentum v + change, and the candidate moves by rate (change + momentum v).
    """
    candidate = average_of(team[0])
    speed = {name: np.zeros_like(value) for name, value in candidate.items()}
    for _ in range(SESSIONS):
        parts = []
        for i, (trainer, draw) in enumerate(zip(team, draws, strict=True)):
            steps = [trainer.step(draw()) for _ in range(SESSION_STEPS)]
            facts = session_facts(f"{i}", math.ceil(sum(s.rate * s.tokens for s in steps)), SESSION_STEPS, MIN_STEPS)
            parts += hand_in(facts, average_of(trainer), candidate, 1)
        after = dict(added(candidate, [average_slice(parts, last=True)]))
        for name, value in candidate.items():
            change = after[name] - value
            speed[name] = momentum * speed[name] + change
            after[name] = value + rate * (change + momentum * speed[name])
        candidate = after
        for trainer in team:
            trainer.move_average(candidate)
    return {"positions": [trainer.passes for trainer in team]} | scored(team[0], corpus, candidate)


# ---------------------------------------------------------------------- the parts


def file_of(corpus: Corpus, part: str, seed: int, arm: str) -> Path:
    return corpus.work / part / f"{corpus.name}-{seed}-{arm.replace(' ', '-').replace('/', '_')}.json"


def head_file(corpus: Corpus, seed: int) -> Path:
    return file_of(corpus, "heads", seed, "trained").with_suffix(".npz")


def once(corpus: Corpus, part: str, seed: int, arm: str, measure: Callable[[], Found]) -> None:
    """Write down what `measure` finds, and its CPU seconds, unless that was done before."""
    file = file_of(corpus, part, seed, arm)
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        begun = time.process_time()
        found = {"corpus": corpus.name, "arm": arm, "seed": seed} | measure()
        file.write_text(json.dumps(found | {"cpu_s": round(time.process_time() - begun, 1)}))
        print(part, file.read_text(), flush=True)


def train_head(corpus: Corpus, seed: int) -> None:
    """The trained head of a seed, and on the way to it the new one that learns by `kl_div`."""
    if not head_file(corpus, seed).exists():
        trainer, draw = trainer_of(corpus, seed, "new"), drawn(corpus.train, f"{seed}")
        once(corpus, "loss", seed, "new kl_div", lambda: trained(trainer, draw, corpus, NEW_STEPS))
        once(corpus, "heads", seed, "trained", lambda: trained(trainer, draw, corpus, TRAINED_STEPS))
        np.savez(head_file(corpus, seed), **dict[str, Any](average_of(trainer)))


def run_loss(corpus: Corpus, seed: int, start: str, loss: str) -> Found:
    steps, order = (NEW_STEPS, f"{seed}") if start == "new" else (MORE_STEPS, f"{seed} more")
    if loss == "late":  # the same as kl_div where the third position is not unrolled in time
        plain = json.loads(file_of(corpus, "loss", seed, f"{start} kl_div").read_text())
        if plain["unrolled"].get("3", steps) == steps:
            return {key: plain[key] for key in ("unrolled", "3", str(DRAFT))}
    trainer = trainer_of(corpus, seed, start, loss="kl_div" if loss == "late" else loss)
    return trained(trainer, drawn(corpus.train, order), corpus, steps, late=loss == "late")


def run_merge(corpus: Corpus, seed: int, start: str, workers: int, outer: str) -> Found:
    """`outer`: `plain`, `twice` (plain, at twice the learning rate of each worker), or MOMENTUM/RATE."""
    own = {"learning_rate": 2e-3} if outer == "twice" else {}
    team = [trainer_of(corpus, seed, start, **own) for _ in range(workers)]
    draws = [drawn(corpus.train[i::workers], f"{seed} worker {i}") for i in range(workers)]
    momentum, rate = (0.0, 1.0) if outer in ("plain", "twice") else map(float, outer.split("/"))
    return merged(team, draws, corpus, momentum, rate)


def run_alone(corpus: Corpus, seed: int, start: str, workers: Sequence[int]) -> None:
    """One worker with all texts that takes the steps of so many."""
    one, draw = trainer_of(corpus, seed, start), drawn(corpus.train, f"{seed} alone")
    for steps, count in ((SESSIONS * SESSION_STEPS * count, count) for count in sorted(workers)):
        once(corpus, "merge", seed, f"{start} x{count} alone", partial(trained, one, draw, corpus, steps))


def run_width(corpus: Corpus, seed: int, rate: float) -> Found:
    trainer = trainer_of(corpus, seed, "new", learning_rate=rate)
    return trained(trainer, drawn(corpus.train, f"{seed}"), corpus, WIDTH_STEPS)


# ---------------------------------------------------------------------- the report


def report(work: Path, out: Path | None) -> None:
    """By corpus and arm: accept lengths by seed, and by how many per cent they are longer than others', with 95 %."""
    found: Found = {}
    for part in ("heads", "loss", "merge", "width"):
        runs = [json.loads(file.read_text()) for file in sorted((work / part).glob("*.json"))]
        arms: dict[str, dict[str, dict[int, Found]]] = {}
        for run in runs:
            arms.setdefault(run["corpus"], {}).setdefault(run["arm"], {})[run["seed"]] = run
        found[part] = {"cpu_s": round(sum(run["cpu_s"] for run in runs))}
        found[part] |= {corpus: {arm: pooled(arm, of) for arm in of} for corpus, of in arms.items()}
    print(json.dumps(found, indent=1))
    if out is not None:
        store(out, {"rows": ROWS, "held_out": HELD_OUT, **found})


def pooled(arm: str, of: dict[str, dict[int, Found]]) -> Found:
    """One arm, and against those that `COMPARED` makes of its last word."""
    mine = of[arm]
    row: Found = {"seeds": sorted(mine)}
    for key in ("3", str(DRAFT), "unrolled", "positions"):
        row |= {key: [mine[seed][key] for seed in sorted(mine)]} if key in mine[min(mine)] else {}
    for other in (" ".join([*arm.split()[:-1], last]) for last in COMPARED):
        both = sorted(set(mine) & set(of.get(other, ()))) if other != arm else []
        for k in ("3", str(DRAFT)) if len(both) > 1 else ():
            mean, half = spread([100 * (mine[seed][k] / of[other][seed][k] - 1) for seed in both])
            row[f"K={k}, % longer than {other}"] = {"seeds": both, "mean": round(mean, 2), "within": round(half, 2)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("loss", "merge", "width", "report"))
    parser.add_argument("--work", type=Path, required=True, help="keeps texts and results")
    parser.add_argument("--corpus", choices=("toy", "prose"), default="prose")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--starts", choices=STARTS, nargs="+", default=STARTS)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--outer", nargs="+", default=["plain", "0.5/1.0", "0.9/0.7", "alone"])
    parser.add_argument("--widths", type=int, nargs="+", default=list(POLICIES))
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.part == "report":
        report(given.work, given.out)
    elif given.part == "width":
        for width in given.widths:
            corpus = Corpus(given.work, given.corpus, width)
            for seed, rate in product(given.seeds, given.rates):
                once(corpus, "width", seed, f"{rate:g}", partial(run_width, corpus, seed, rate))
    else:
        corpus = Corpus(given.work, given.corpus)
        for seed, start in product(given.seeds, given.starts):
            train_head(corpus, seed)
            if given.part == "loss":
                for loss in LOSSES:
                    once(corpus, "loss", seed, f"{start} {loss}", partial(run_loss, corpus, seed, start, loss))
            elif "alone" in given.outer:
                run_alone(corpus, seed, start, given.workers)
            for workers, outer in product(given.workers, given.outer) if given.part == "merge" else ():
                if outer != "alone":
                    measure = partial(run_merge, corpus, seed, start, workers, outer)
                    once(corpus, "merge", seed, f"{start} x{workers} {outer}", measure)


if __name__ == "__main__":
    main()
