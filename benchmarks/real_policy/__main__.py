"""Makes a real language model into a policy, with prompts and a reward: SmolLM2-135M-Instruct and Collatz chains.

python -m benchmarks.real_policy    # downloads 93 MB; takes two cores an hour without bfloat16; .cache/real keeps it
"""

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.real_policy.job import PLACE, real_assets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=PLACE)
    assets = real_assets(parser.parse_args().folder)
    print(json.dumps(dataclasses.asdict(assets), default=str, indent=2))


if __name__ == "__main__":
    main()
