"""OFF on vLLM's V2 model runner: what the wrapper relies on, in each release's own text.

The part of `sample_tokens` in which the drafter is asked is taken out of the text and run around the wrapper, with a
speculator whose `propose` is the release's own. The installed release and the newest, all with `make contract`.
"""

import ast
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from releases import releases
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from verl_tlt.checks.rules import ROUTES_NEED_V2
from verl_tlt.speculation.graph_rules import V2_DRAFTS_FROM
from verl_tlt.vllm_worker.drafter_pass import set_drafting

V2 = "vllm/v1/worker/gpu"
RUNNER = f"{V2}/model_runner.py"
STEPS, REQUESTS, SLOTS = 3, 2, 5
release, any_k = releases(), releases(V2_DRAFTS_FROM)


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def method(release, name):
    return release.definitions(RUNNER, name)[name]


def speculator(release):
    """The file of the class under Eagle's speculator, which drafts; it was renamed in 0.32."""
    (eagle,) = (n for n in release.tree(f"{V2}/spec_decode/eagle/speculator.py").body if isinstance(n, ast.ClassDef))
    assert [n.name for n in functions(eagle)] == ["load_draft_model"]
    folder = {"AutoRegressiveSpeculator": "autoregressive", "TargetDependentARSpeculator": "target_dependent_ar"}
    return f"{V2}/spec_decode/{folder[ast.unparse(eagle.bases[0])]}/speculator.py"


def proposing(release):
    return release.definitions(speculator(release), "propose")["propose"]


def said(node, kind):
    return [ast.unparse(n) for n in ast.walk(node) if isinstance(n, kind)]


def calls_of(node, function):
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == function]


def keywords(call):
    return {k.arg: ast.unparse(k.value) for k in call.keywords}


def drafts_what_is_asked(release):
    return "num_speculative_tokens" in said(proposing(release).args, ast.arg)[-1]


# ---------------------------------------------------------------------- where the drafter is asked


def test_the_drafter_is_asked_in_two_places_and_a_dummy_run_says_so(release):
    everywhere = [
        (path, call)
        for path in sorted((release.root / V2).rglob("*.py"))
        for call in calls_of(ast.parse(path.read_text()), "self.speculator.propose")
    ]
    assert {path.name for path, _ in everywhere} == {"model_runner.py"} and len(everywhere) == 2
    (sampled,) = calls_of(method(release, "sample_tokens"), "self.speculator.propose")
    (dummy,) = calls_of(method(release, "_dummy_run"), "self.speculator.propose")
    assert ast.unparse(sampled.args[0]) == "input_batch" and "dummy_run" not in keywords(sampled)
    assert not dummy.args and keywords(dummy)["input_batch"] == "input_batch" and keywords(dummy)["dummy_run"] == "True"


def test_the_step_says_how_many_tokens_to_draft(release):
    runs = method(release, "execute_model")
    assert runs.args.args[1].arg == "scheduler_output"
    output = release.tree("vllm/v1/core/sched/output.py")
    assert "num_spec_tokens_to_schedule: int = 0" in said(output, ast.AnnAssign)
    # One step at a time: what it leaves is taken by the `sample_tokens` that belongs to it.
    assert "self.execute_model_state = None" in said(method(release, "sample_tokens"), ast.Assign)
    assert drafts_what_is_asked(release) == (release.version >= V2_DRAFTS_FROM)


def test_drafts_are_read_by_what_the_scheduler_asks_to_verify(release):
    conditions = [ast.unparse(n.test) for n in ast.walk(method(release, "sample")) if isinstance(n, ast.If)]
    assert "input_batch.num_draft_tokens == 0 or self.rejection_sampler is None" in conditions
    prepared = ast.unparse(release.tree(RUNNER))
    assert "draft_tokens = scheduler_output.scheduled_spec_decode_tokens" in prepared
    kernel = release.text(f"{V2}/input_batch.py")
    assert "num_draft_tokens = num_logits - NUM_NEW_SAMPLED_TOKENS" in kernel and "if num_draft_tokens > 0:" in kernel


def test_they_are_verified_with_the_logits_of_their_slot_and_step(any_k):
    """A buffer of all slots, which the kernels index by slot and step."""
    buffers = said(any_k.tree(f"{V2}/spec_decode/speculator.py"), ast.Assign)
    shape = "(self.max_num_reqs, self.num_speculative_steps, self.vocab_size)"
    assert any(line.startswith("self.draft_logits = ") and shape in line for line in buffers)
    kernels = ast.unparse(any_k.tree(f"{V2}/spec_decode/rejection_sampler_utils.py"))
    row = "draft_logits_ptr + req_state_idx * draft_logits_stride_0 + {} * draft_logits_stride_1"
    assert row.format("draft_step_idx") in kernels and row.format("resample_idx") in kernels


def test_routes_of_experts_come_from_it_alone_where_the_doctor_says_so_and_rejected_drafts_have_none(release):
    alone = "AuxOutput Connector requires Model Runner V2" in release.text("vllm/config/vllm.py")
    assert alone == (release.version >= ROUTES_NEED_V2)
    path, cut = "vllm/v1/core/sched/scheduler.py", "req_offset : req_offset + len(new_token_ids)"
    if alone:
        path, cut = "vllm/distributed/aux_output_connector/worker.py", "rows = routed_experts[start : end - rejected]"
    assert cut in release.text(path)


# ---------------------------------------------------------------------- what it returns


def test_rows_of_one_buffer_are_returned(release):
    returned = set(said(proposing(release), ast.Return))
    assert returned <= {"return self.draft_tokens[:num_reqs]", "return self.draft_tokens[:num_reqs, :1]"}
    if "return self.draft_tokens[:num_reqs, :1]" in returned:  # the same rows where the buffer has one column
        assert "if self.num_speculative_steps == 1:" in ast.unparse(proposing(release))
    assert "num_reqs = input_batch.num_reqs" in said(proposing(release), ast.Assign)
    shape = "self.max_num_reqs, self.num_speculative_steps"
    zeros = f"self.draft_tokens = torch.zeros({shape}, dtype=torch.int64, device=device)"
    for path in ("spec_decode/speculator.py", "states.py"):
        assert zeros in said(release.tree(f"{V2}/{path}"), ast.Assign), path


def test_graphs_are_captured_without_it(release):
    folder = release.root / V2 / "spec_decode"
    parsed = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    captures = [n for tree in parsed for n in functions(tree) if n.name == "capture"]
    assert captures and not any(calls_of(n, "self.propose") for n in captures)


# ---------------------------------------------------------------------- the wrapper, in that text


class Speculator:
    """What the text asks of one; `propose` says what was drafted."""

    def __init__(self):
        self.draft_tokens = torch.zeros(SLOTS, STEPS, dtype=torch.int64)
        self.num_speculative_steps, self.asked = STEPS, []

    def propose(self, input_batch, *_args, num_speculative_tokens=None, **_kwargs):
        self.asked.append(num_speculative_tokens)
        self.draft_tokens[: input_batch.num_reqs] = 7
        return self.draft_tokens[: input_batch.num_reqs]


def runner_of(release):
    """A runner that executes the release's own text of asking the drafter, and its speculator."""
    body = method(release, "sample_tokens").body
    (asking,) = (n for n in body if isinstance(n, ast.If) and calls_of(n, "self.speculator.propose"))
    code = compile(ast.Module([asking], []), "<vllm>", "exec")
    batch = SimpleNamespace(num_reqs=REQUESTS, idx_mapping=torch.tensor([3, 1]))

    class Runner:
        def __init__(self):
            self.speculator, self.model, self.adaptive_verification = Speculator(), None, None
            on_gpu = SimpleNamespace(gpu=None)
            self.sampler = SimpleNamespace(sampling_states=SimpleNamespace(temperature=on_gpu, seeds=on_gpu))
            self.req_states = SimpleNamespace(
                draft_tokens=torch.full((SLOTS, STEPS), 9), last_sampled_tokens=None, next_prefill_tokens=None
            )
            self.num_speculative_steps, self._draft_workspace_lane = STEPS, 0

        def execute_model(self, scheduler_output, intermediate_tensors=None, **_):
            self.output = scheduler_output

        def sample_tokens(self):
            given = dict.fromkeys(
                (
                    "attn_metadata", "slot_mappings_by_layer", "hidden_states", "draft_hidden_states", "mm_inputs",
                    "aux_hidden_states", "num_sampled", "num_rejected", "dp_sync", "dp_sync_state",
                )
            )  # fmt: skip
            around = {
                "use_workspace_lane": lambda _: nullcontext(), "get_drafter_hidden_states": lambda *_: None,
                "DraftModelSpeculator": type(None), "GPUWatermarkSampler": type(None),
            }  # fmt: skip
            asked = {"num_spec_tokens": self.output.num_spec_tokens_to_schedule}
            exec(code, {**given, **around, **asked, "self": self, "input_batch": batch})

        def step(self, draft_length):
            self.execute_model(SimpleNamespace(num_spec_tokens_to_schedule=draft_length))
            self.sample_tokens()
            return self.req_states.draft_tokens[batch.idx_mapping].tolist()

        def dummy(self):
            self.execute_model(SimpleNamespace(num_spec_tokens_to_schedule=0), dummy_run=True)
            self.speculator.propose(input_batch=batch, dummy_run=True)

    return Runner()


@pytest.fixture
def runner(release):
    return runner_of(release)


def test_off_asks_no_drafter_and_stores_rows_of_the_same_shape(release, runner):
    nothing = -1 if drafts_what_is_asked(release) else 0  # the runner itself marks what was not asked for
    runner.step(STEPS)
    set_drafting(runner, False)
    runner.speculator.asked.clear()
    assert runner.step(0) == [[nothing] * STEPS] * REQUESTS and not runner.speculator.asked
    assert runner.req_states.draft_tokens[[0, 2, 4]].eq(9).all(), "no other request's drafts"
    runner.dummy()
    assert len(runner.speculator.asked) == 1
    set_drafting(runner, True)
    set_drafting(runner, True)
    runner.step(0)
    runner.step(STEPS)
    assert len(runner.speculator.asked) == 3, "on again it is asked in every step, and wrapped once"


def test_whatever_the_switch_says_a_step_that_drafts_asks_the_drafter(release, runner):
    """As where the workers heard of OFF and the scheduler did not."""
    set_drafting(runner, False)
    assert runner.step(STEPS) == [[7] * STEPS] * REQUESTS and len(runner.speculator.asked) == 1
    runner.dummy()
    assert runner.step(1)[0][0] == 7 and len(runner.speculator.asked) == 3


@pytest.fixture
def installed():
    """vLLM's own objects, as far as they go without a device."""
    runner = object.__new__(model_runner.GPUModelRunner)
    runner.speculator = object.__new__(EagleSpeculator)
    runner.speculator.draft_tokens = torch.full((SLOTS, STEPS), 7)
    return runner


def test_the_installed_runner_is_switched(installed):
    set_drafting(installed, False)
    rows = installed.speculator.propose(SimpleNamespace(num_reqs=REQUESTS), None)
    assert rows.dtype == torch.int64 and rows.tolist() == [[0] * STEPS] * REQUESTS
    with pytest.raises(TypeError, match="last_hidden_states"):  # vLLM's own propose
        installed.speculator.propose(input_batch=None, dummy_run=True)
