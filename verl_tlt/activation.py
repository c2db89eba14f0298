"""What the flag does to a run: check its config, then rewrite it so that the run cannot train without TLT.

Called in the driver by the wrapped `validate_config` (see `verl_tlt.plugin`), before Ray starts. The trainer
mode becomes `tlt_<mode>`, a name that only an installed plugin registers: the process that builds the trainer,
which may be on another node, then either finds TLT or stops. Settings travel in
`actor_rollout_ref.rollout.custom.tlt`, because verl hands workers and servers that node and nothing of `trainer`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, open_dict

import verl_tlt
from verl_tlt import MODE_PREFIX
from verl_tlt.checks import rules
from verl_tlt.checks.models import located
from verl_tlt.checks.recipe import engine_dtype, ray_address, read_mapping, read_settings, save_dir, trace_dir
from verl_tlt.config import TLTConfig, TLTConfigError
from verl_tlt.errors import printable


def check(config: DictConfig) -> TLTConfig:
    """Run the doctor on a composed verl config and return the validated settings; warnings go to stderr.

    Where TLT cannot run, `SystemExit` says why: one sentence per reason, naming the key or file.
    """
    try:
        settings = read_settings(config)
        findings = [*rules.examine_packages(), *rules.examine(config, settings)]
    except TLTConfigError as error:
        raise SystemExit(printable(f"verl-tlt: {error}")) from None
    # If the driver joins a cluster, other machines may have what this one lacks. Otherwise it is missing.
    told = {"warn", "if"} if ray_address(config) else {"warn"}
    for finding in findings:
        if finding.level in told:
            print(printable(f"verl-tlt: {finding.sentence}"), file=sys.stderr, flush=True)
    wrong = {"refuse", "if"} - told
    refusals = [f"verl-tlt: {finding.sentence}" for finding in findings if finding.level in wrong]
    if refusals:
        raise SystemExit(printable("\n".join(refusals)))
    return settings


def apply(config: DictConfig, settings: TLTConfig) -> None:
    """Rewrite `config` in place; doing it twice is the same as once."""
    rollout = config.actor_rollout_ref.rollout
    custom = read_mapping(config, "actor_rollout_ref.rollout.custom")
    given = read_mapping(config, "actor_rollout_ref.rollout.custom.tlt")
    final = _merged(resolve(config, settings), given)
    with open_dict(config):
        rollout.custom = {**custom, "tlt": final}
        rollout.dtype = engine_dtype(config)  # drafters are published in it
        mode = str(config.trainer.v1.trainer_mode).removeprefix(MODE_PREFIX)
        config.trainer.v1.trainer_mode = MODE_PREFIX + mode
    print(f"[verl-tlt {verl_tlt.__version__}] on: trainer mode {MODE_PREFIX}{mode}", flush=True)


def resolve(config: DictConfig, settings: TLTConfig) -> TLTConfig:
    """Settings as the workers need them: absolute paths, and spot training only if it is fed and its drafter served."""
    # Ray workers start in another directory.
    path, trace = settings.drafter.path, replace(settings.trace, dir=trace_dir(config, settings))
    drafter = replace(settings.drafter, path=located(path) if path else None, save_dir=save_dir(config, settings))
    # Calibration decodes random prompts, in which no n-gram matches: it would find drafts to be free.
    calibrate = settings.speculation.calibrate and settings.speculation.source != "ngram"
    speculation = replace(settings.speculation, calibrate=calibrate)
    spot = replace(settings.spot, enable=rules.trains(config, settings))
    return replace(settings, trace=trace, drafter=drafter, spot=spot, speculation=speculation)


def _merged(settings: TLTConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what is in the place they travel in already: constants that a test or benchmark changes."""
    merged = {section: {**values, **given.get(section, {})} for section, values in settings.to_dict().items()}
    return TLTConfig.from_dict(merged).to_dict()
