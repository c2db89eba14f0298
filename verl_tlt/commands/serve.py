"""The shell command that serves a policy with a drafter in stock vLLM."""

import json
import os
import shlex

from verl_tlt.drafter.model_files import is_name
from verl_tlt.drafter.policy import MTP

DRAFT_LENGTH = 3


def serve_command(method: str, drafter: str, policy: str) -> str:
    """The command for a drafter of this method, which drafts `DRAFT_LENGTH` tokens.

    Drafts are sampled, because greedy ones are accepted less often at temperature 1. vLLM looks for an MTP head in the
    policy's own directory, so such a head is written there first.
    """
    config: dict[str, object] = {"method": method}
    if method != MTP:
        config["model"] = drafter
    config |= {"num_speculative_tokens": DRAFT_LENGTH, "draft_sample_method": "probabilistic"}
    speculative = shlex.quote(json.dumps(config))
    if method != MTP:
        return f"vllm serve {shlex.quote(policy)} --speculative-config {speculative}"
    folder = shlex.quote(os.path.basename(policy) if is_name(policy) else policy)
    fetch = f"hf download {shlex.quote(policy)} --local-dir {folder} && " if is_name(policy) else ""
    write = f"verl-tlt write-back {shlex.quote(drafter)} {folder}"
    return f"{fetch}{write} && vllm serve {folder} --speculative-config {speculative}"
