"""Makes a real language model into a policy, with prompts and a reward: SmolLM2-135M-Instruct and Collatz chains.

    python -m benchmarks.real_policy [FOLDER] [--steps 80]

It downloads 93 MB. Without bfloat16 it takes two cores about an hour; `FOLDER` (`.cache/real`) keeps what was made.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.real_policy.job import PLACE, real_assets
from benchmarks.real_policy.policy import STEPS, fine_tuned, make_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=PLACE)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the fine-tuning")
    options = parser.parse_args()
    policy = make_policy(options.folder.resolve(), options.steps)
    if (found := fine_tuned(policy)) != options.steps:
        raise SystemExit(f"{policy} was made with {found} steps of fine-tuning: remove it for other ones.")
    assets = real_assets(options.folder)
    print(json.dumps(dataclasses.asdict(assets), default=str, indent=2))


if __name__ == "__main__":
    main()
