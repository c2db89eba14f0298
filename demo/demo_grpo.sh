#!/usr/bin/env bash
# GRPO on the toy task with two replicas, on a machine without an accelerator: the recipe behind `make demo`.
#
# Hardware: 2 cores, 18 GB of memory.  Data: `python -m tests.toy.assets ASSETS` makes policy and prompts.
# Two responses to a prompt, so that a step has more prompts: a drafter is published only after a test on seven held-out
# prompts.
#
#   OUT=demo-out STEPS=8 SEED=1 TLT=1 DRAFTER= DTYPE= demo/demo_grpo.sh [more verl overrides]
#
# TLT=0       the same recipe without the flag
# DEVICE=cuda on GPUs, TP of them to a replica
# DTYPE       of rollout and of the update's products: bfloat16 or float32; unset: the faster one on this processor
# EXECUTOR=mp an engine's worker has a process of its own, as verl does it; uni (here) starts one process less
# REPLICAS    2
# ASSETS      policy and prompts: OUT/assets
# SAVE_FREQ, RESUME are verl's
set -euo pipefail

# Reward, sampler and agent loops are in `tests.toy` of this clone: every process of the run imports them.
export PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}"

OUT=${OUT:-demo-out}
STEPS=${STEPS:-8}
SEED=${SEED:-1}
TLT=${TLT:-1}
DRAFTER=${DRAFTER:-}
ASSETS=${ASSETS:-$OUT/assets}
REPLICAS=${REPLICAS:-2}
TP=${TP:-1}
DEVICES=$((REPLICAS * TP))
DEVICE=${DEVICE:-cpu}
EXECUTOR=${EXECUTOR:-uni}
DTYPE=${DTYPE:-$(python -c 'from verl_cpu.dtype import find_dtype; print(find_dtype())')}
case $DTYPE in bfloat16) WIDTH=wide ;; *) WIDTH=half ;; esac # both policies read the same number of bytes per token

mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
case $ASSETS in /*) ;; *) ASSETS=$PWD/$ASSETS ;; esac
POLICY=${POLICY:-$ASSETS/policy-$WIDTH}

# The CPU stands in for the accelerator; each process computes on one thread, since threads that spin against each
# other cost far more than they bring. vLLM would compile its sampler with g++ while the first tokens wait.
# verl_cpu/environment.py says what each variable is for.
if [ "$DEVICE" = cpu ]; then
  export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 OMP_NUM_THREADS=1
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCH_COMPILE_DISABLE=1
fi
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled
# vLLM on a CPU makes `mp` of `uni` unless this says otherwise; OpenMP, its reason, has one thread here.
if [ "$EXECUTOR" = uni ]; then export VLLM_ENABLE_V1_MULTIPROCESSING=0; fi
# Workers that Ray starts in advance are never used: verl's actors have an environment of their own.
export RAY_prestart_worker_first_driver=0
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$OUT/metrics.jsonl}
export TENSORBOARD_DIR=${TENSORBOARD_DIR:-$OUT/tensorboard}

tlt=()
if [ "$TLT" = 1 ]; then
  tlt=(+trainer.plugin=tlt tlt.trace.dir="$OUT/trace" tlt.drafter.learning_rate=2e-3 tlt.drafter.path="${DRAFTER:-null}"
       tlt.spot.max_epochs=5 tlt.drafter.save_dir="$OUT/drafter")
fi

exec python -m verl.trainer.main_ppo hydra.run.dir="$OUT/hydra" \
  algorithm.adv_estimator=grpo \
  data.train_files="${TRAIN:-$ASSETS/train.parquet}" data.val_files="${VAL:-$ASSETS/val.parquet}" data.seed="$SEED" \
  data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=1400 data.dataloader_num_workers=0 \
  actor_rollout_ref.model.path="$POLICY" actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.use_torch_compile=False \
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$DTYPE" \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32 \
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1536 \
  actor_rollout_ref.actor.optim.lr=1e-5 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.dtype="$DTYPE" \
  actor_rollout_ref.rollout.tensor_model_parallel_size="$TP" actor_rollout_ref.rollout.n_gpus_per_node="$DEVICES" \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1536 actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.enforce_eager=True \
  actor_rollout_ref.rollout.max_model_len=1536 actor_rollout_ref.rollout.max_num_seqs=32 \
  actor_rollout_ref.rollout.max_num_batched_tokens=2048 actor_rollout_ref.rollout.gpu_memory_utilization=0.1 \
  ++actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend="$EXECUTOR" \
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64 \
  actor_rollout_ref.rollout.agent.num_workers=1 \
  reward.num_workers=1 reward.custom_reward_function.path=pkg://tests.toy.reward \
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
  trainer.logger='["console","file","tensorboard"]' trainer.project_name=verl-tlt trainer.experiment_name=demo \
  trainer.n_gpus_per_node="$DEVICES" trainer.nnodes=1 trainer.device="$DEVICE" \
  trainer.v1.sampler.custom_sampler.path=pkg://tests.toy.sampler trainer.v1.sampler.custom_sampler.name=FastPollReplayBuffer \
  trainer.total_training_steps="$STEPS" trainer.total_epochs=1000 trainer.val_before_train=False \
  trainer.save_freq="${SAVE_FREQ:-$STEPS}" trainer.test_freq=-1 trainer.resume_mode="${RESUME:-disable}" \
  trainer.default_local_dir="$OUT/checkpoints" \
  ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus="$DEVICES" \
  +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=2000000000 \
  "${tlt[@]}" "$@"
