"""How much an engine has to do at once: the recipe's few responses, or many."""

from dataclasses import dataclass

from benchmarks.toy_job import SAMPLES


@dataclass(frozen=True)
class Load:
    prompts: int
    """Of a step, each with `SAMPLES` responses; two replicas share them."""
    requests: int
    """Most that an engine decodes at once: `max_num_seqs`."""

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * SAMPLES

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the recipe: one update a step, whatever its size."""
        return (
            f"data.train_batch_size={self.prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            f"actor_rollout_ref.rollout.max_num_seqs={self.requests}",
        )


LOADS = {
    "small": Load(prompts=6, requests=32),
    "large": Load(prompts=24, requests=64),
}
"""`small` begins with 12 responses an engine, `large` with 48, where drafts pay less."""
