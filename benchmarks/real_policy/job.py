"""What runs of the real policy share: policy and prompts on the disk, and the demo's recipe in their sizes."""

from functools import partial
from pathlib import Path

from benchmarks.real_policy import collatz
from benchmarks.real_policy.collatz import Side, prompt_row
from benchmarks.real_policy.policy import make_policy
from tests.toy.assets import Assets, ensure, write_rows

PLACE = Path(__file__).parents[2] / ".cache" / "real"
LONGEST_PROMPT, LONGEST_RESPONSE = 48, 1000
ROWS = {"train": 2048, "val": 64}


def real_assets(folder: Path, side: Side = "run") -> Assets:
    """Policy and prompts of this side below `folder`, made unless they are there."""
    folder = folder.resolve()
    policy, source = make_policy(folder), Path(collatz.__file__).read_text()
    files = {split: folder / f"{side}-{split}.parquet" for split in ROWS}
    for split, count in ROWS.items():
        write = partial(write_rows, split=split, count=count, row=partial(prompt_row, side=side))
        ensure(files[split], f"{source} {count}", write)
    return Assets(policy, files["train"], files["val"], reward=f"pkg://{collatz.__name__}")


def real_overrides(assets: Assets) -> tuple[str, ...]:
    """What is changed in the demo's recipe.

    A row of a rank has 49,152 logits, so no more rows are computed at once than the longest sequence has. verl sends
    weights through a piece of memory into which the embedding, 113 MB in float32, must fit.
    """
    actor, rollout, longest = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", LONGEST_PROMPT + LONGEST_RESPONSE
    return (
        f"data.train_files={assets.train}",
        f"data.val_files={assets.val}",
        f"data.max_prompt_length={LONGEST_PROMPT}",
        f"data.max_response_length={LONGEST_RESPONSE}",
        f"{rollout}.max_model_len={longest}",
        f"{rollout}.max_num_batched_tokens=1024",
        f"{rollout}.log_prob_max_token_len_per_gpu={longest}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=256",
        f"{actor}.ppo_max_token_len_per_gpu={longest}",
        f"reward.custom_reward_function.path={assets.reward}",
    )
