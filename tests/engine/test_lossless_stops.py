"""What looks at text or tokens behind a step ends and shapes responses as without drafts, where a step brings several.

Deterministic requests, so that every output is compared with stock vLLM's: tokens, text, reasons, log-probabilities and
counts. A stop string here begins and ends within tokens, and lies anywhere in a step.
"""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import Engine, prompts
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import detokenizer
from vllm.v1.engine.output_processor import RequestOutputCollector

from benchmarks.lossless.tiny_policy import V, spell

pytestmark = pytest.mark.engine

REQUESTS, TOKENS, TOLERANCE = 8, 48, 1e-3
OURS = {"policy": "policies:longest", "speculation": {"max_draft_length": 6}}
STREAMED = {"delta": RequestOutputKind.DELTA, "cumulative": RequestOutputKind.CUMULATIVE}


def asked(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2, **more})


def rows(logprobs) -> list[dict[int, float]]:
    return [{token: one.logprob for token, one in row.items()} for row in logprobs or []]


def compared(output) -> list[dict[str, Any]]:
    """All that a request's output says, by completion."""
    return [
        {
            "tokens": list(one.token_ids),
            "text": one.text,
            "reasons": (one.finish_reason, one.stop_reason),
            "logprobs": rows(one.logprobs),
            "sum": one.cumulative_logprob,
            "prompt": rows(row for row in output.prompt_logprobs or () if row),
            "counted": output.metrics.num_generation_tokens if len(output.outputs) == 1 else None,
        }
        for one in output.outputs
    ]


def near(value: Any) -> Any:
    """What equals a value whose log-probabilities come from steps of another shape."""
    if isinstance(value, dict):
        return {key: near(one) for key, one in value.items()}
    if isinstance(value, list):
        return [near(one) for one in value]
    return pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value


def final(engine: Engine, params: SamplingParams) -> list[Any]:
    return [compared(output) for output in engine.llm.generate(prompts(REQUESTS), params, use_tqdm=False)]


def streamed(engine: Engine, params: SamplingParams, abort_after: int | None = None) -> dict[str, list[Any]]:
    """Every output that a request's queue was given, in order; with `abort_after`, all are aborted at that many tokens.

    verl's server reads such queues.
    """
    vllm_engine = engine.llm.llm_engine
    processor, queues, seen = vllm_engine.output_processor, {}, {}
    for i, prompt in enumerate(prompts(REQUESTS)):
        vllm_engine.add_request(f"{params.output_kind}-{i}", prompt, params)
    for state in processor.request_states.values():
        state.queue = queues[state.external_req_id] = RequestOutputCollector(params.output_kind, state.request_id)
        seen[state.external_req_id] = []

    def read() -> None:
        for name, queue in queues.items():
            if (output := queue.get_nowait()) is not None:
                seen[name].append(compared(output)[0])

    while vllm_engine.has_unfinished_requests():
        vllm_engine.step()
        read()
        enough = [name for name, got in seen.items() if abort_after and len(got[-1]["tokens"]) >= abort_after]
        vllm_engine.abort_request(enough, internal=False)
        read()
    return seen


@pytest.fixture(scope="module")
def stops(engine_of) -> list[str]:
    """Strings of three letters, each within one of the texts that stock vLLM decodes, some early, some late."""
    with engine_of(drafter=None) as engine:
        texts = [one[0]["text"] for one in final(engine, asked())]
    return [text[15 + 9 * i : 18 + 9 * i] for i, text in enumerate(texts)]


def cases(stops: list[str]) -> dict[str, SamplingParams]:
    tokens = [(7 * i) % V for i in range(40)]
    grammar = StructuredOutputsParams(regex="([a-m]{2}[n-z]{4}){1,6}")
    certain = {"temperature": 1.0, "top_k": 1}
    return {
        "stop strings": asked(stop=stops, prompt_logprobs=1),
        "with the string": asked(stop=stops, include_stop_str_in_output=True),
        "least length": asked(stop=stops, min_tokens=13),
        "several outputs": asked(stop=stops, n=3, **certain),
        "strings and tokens": asked(stop=stops, stop_token_ids=tokens),
        "stop tokens": asked(stop_token_ids=tokens),
        "stop tokens in the text": asked(stop_token_ids=tokens, include_stop_str_in_output=True),
        "most tokens": asked(max_tokens=29),
        "bad words": asked(bad_words=[spell(t) for t in tokens]),
        "structured": asked(structured_outputs=grammar, ignore_eos=False),
        "structured, with a string": asked(structured_outputs=grammar, stop=["z"], ignore_eos=False),
    }


@pytest.fixture(scope="module")
def stock(engine_of, stops) -> dict[str, Any]:
    """What stock vLLM without drafts makes of each case; streamed by kind."""
    with engine_of(drafter=None) as engine:
        found: dict[str, Any] = {name: final(engine, params) for name, params in cases(stops).items()}
        for name, kind in STREAMED.items():
            found[name] = streamed(engine, asked(stop=stops, output_kind=kind))
    return found


@pytest.fixture
def ours(engine_of):
    with engine_of("good", **OURS) as engine:
        yield engine


@pytest.mark.parametrize("case", cases(["x"]))
def test_a_response_is_stocks(ours, stock, stops, case):
    ours.end_at_stop_strings()
    assert final(ours, cases(stops)[case]) == near(stock[case])
    accepted = sum(ours.scheduler.tlt.stats().num_accepted_tokens_per_pos)
    if case.startswith("structured"):
        assert accepted == 0, "nothing is drafted beside a grammar"
    else:
        assert accepted > 10, "steps of several tokens are what this is about"


def test_the_slow_detokenizer_too(ours, stock, stops):
    ours.patch.setattr(detokenizer, "USE_FAST_DETOKENIZER", False)
    ours.end_at_stop_strings()
    assert final(ours, cases(stops)["stop strings"]) == near(stock["stop strings"])


@pytest.mark.parametrize("kind", STREAMED)
def test_a_streamed_response_is_stocks(ours, stock, stops, kind):
    """One that is read while it grows: what is read ends where stock's does, and all of it together is the same."""
    ours.end_at_stop_strings()
    found = streamed(ours, asked(stop=stops, output_kind=STREAMED[kind]))
    for name, expected in stock[kind].items():
        assert found[name][-1]["reasons"] == expected[-1]["reasons"]
        if kind == "cumulative":
            assert found[name][-1] == near(expected[-1])
            continue
        for part in ("tokens", "text", "logprobs"):
            assert joined(found[name], part) == near(joined(expected, part))


def joined(outputs: list[dict[str, Any]], part: str) -> list[Any]:
    """Tokens, letters or log-probabilities of all outputs."""
    return [item for one in outputs for item in one[part]]


def test_an_aborted_response_has_the_tokens_it_had(ours, stock):
    """verl resumes from them; its strings have not come yet."""
    ours.end_at_stop_strings()
    found = streamed(ours, asked(stop=["aaaaaaa"], output_kind=STREAMED["cumulative"]), abort_after=9)
    plain = [one[0] for one in stock["most tokens"]]
    assert len(found) == REQUESTS
    for outputs, whole in zip(found.values(), plain, strict=True):
        last = outputs[-1]
        assert last["reasons"] == ("abort", None) and 9 <= len(last["tokens"]) < 29
        assert last["tokens"] == whole["tokens"][: len(last["tokens"])]
        assert last["logprobs"] == near(whole["logprobs"][: len(last["tokens"])])


def test_without_the_change_tokens_follow_the_string(ours, stock, stops):
    found, theirs = final(ours, cases(stops)["stop strings"]), stock["stop strings"]
    pairs = [(a, b) for one, other in zip(found, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    assert all(a["text"] == b["text"] for a, b in pairs)
    longer = [a["tokens"] for a, b in pairs if len(a["tokens"]) > len(b["tokens"])]
    assert longer, "vLLM ends at the string itself now: the change is not needed any more"
