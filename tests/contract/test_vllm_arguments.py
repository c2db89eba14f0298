"""vLLM's parser takes the beginning of an argument's name for the argument: none gets past what verl-tlt refuses."""

import pytest

from verl_tlt.config import TLTConfig
from verl_tlt.server import engine_arguments
from verl_tlt.server.engine_arguments import OWN_ARGUMENTS, WITHOUT_A_DRAFTER, problems

NAMES = (*OWN_ARGUMENTS, *WITHOUT_A_DRAFTER, "async_scheduling", "data_parallel_size", "enforce_eager", "max_num_seqs")


@pytest.fixture(scope="module")
def parser():
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def hidden(keys):
    """Those of the keys that are refused because they may stand for an argument of another name."""
    found = "\n".join(problems(TLTConfig(), dict.fromkeys(keys), enforce_eager=True))
    return {key for key in keys if f"vllm.{key} hides arguments from verl-tlt" in found}


def taken_for(parser, key):
    """The full name of the argument that the parser takes a key for; None: it refuses it, or is in doubt."""
    option = "--" + key.replace("_", "-")
    names = {option} & parser._option_string_actions.keys() or {o for _, o, *_ in parser._get_option_tuples(option)}
    return names.pop() if len(names) == 1 else None


@pytest.mark.parametrize("name", NAMES)
def test_no_beginning_of_a_name_that_the_parser_understands_gets_past_the_refusals(parser, name):
    full = "--" + name.replace("_", "-")
    if full not in parser._option_string_actions:
        pytest.skip("runs where vLLM has this argument")
    short = [name[:end] for end in range(1, len(name)) if taken_for(parser, name[:end]) == full]
    assert hidden([*short, name]) == set(short)
    assert short or name in ("data_parallel_size", "reasoning_parser"), "others begin with the whole of these"


def test_the_parser_does_read_an_abbreviation(parser):
    read = parser.parse_args(["--speculative-conf", '{"method": "ngram"}', "--no-async-sched"])
    assert read.speculative_config == {"method": "ngram"} and read.async_scheduling is False
    assert len(hidden(["speculative_conf", "no_async_sched", "no_async_scheduling"])) == 3


def test_no_argument_that_is_written_in_full_is_taken_for_an_abbreviation(parser):
    full = {option[2:].replace("-", "_") for option in parser._option_string_actions if option.startswith("--")}
    wrong = {name for name in hidden(full) if not name.startswith("no_")}
    assert len(full) > 200 and wrong <= {"config"} and set(engine_arguments._IN_FULL) - full <= {"worker_extension_cls"}
