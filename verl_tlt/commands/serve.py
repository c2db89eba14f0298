"""The shell command that serves a policy with a drafter in stock vLLM."""

import json
import shlex

from verl_tlt.drafter.policy import MTP


def serve_command(method: str, drafter: str, policy: str, draft_length: int = 3) -> str:
    """The command for a drafter of this method, drafting `draft_length` tokens.

    Drafts are sampled, because greedy ones are accepted less often at temperature 1. vLLM looks for an MTP head in the
    policy's own directory, so such a head is written there first.
    """
    config: dict[str, object] = {"method": method}
    if method != MTP:
        config["model"] = drafter
    config |= {"num_speculative_tokens": draft_length, "draft_sample_method": "probabilistic"}
    serve = f"vllm serve {shlex.quote(policy)} --speculative-config {shlex.quote(json.dumps(config))}"
    if method != MTP:
        return serve
    return f"verl-tlt write-back {shlex.quote(drafter)} {shlex.quote(policy)} && {serve}"
