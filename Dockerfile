# verl-tlt for NVIDIA GPUs, on verl's own image for vLLM:
#
#   docker build -t verl-tlt . && docker run --gpus all --shm-size=10g -v /data:/data -it verl-tlt
#
# Written from verl's docker/README.md and docker/Dockerfile.stable.vllm; it was not built or run where verl-tlt is
# developed, which has no container runtime. The image holds vLLM 0.24 with torch 2.11 and what verl needs, but not verl.
# Engine tests and a GRPO run passed with vLLM 0.24's CPU build, torch 2.11 and Python 3.11 (docs/compatibility.md); on a
# GPU nothing ran.
ARG IMAGE=verlai/verl:vllm024.latest
FROM ${IMAGE}

ARG VERL_VERSION=0.9.1
WORKDIR /opt/verl-tlt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY verl_tlt verl_tlt
COPY recipes /workspace/recipes
COPY examples /workspace/examples

# What was compiled together stays as it is; pip says so in one line where that cannot be.
RUN python3 -m pip freeze | grep -iE '^(torch|torchvision|torchaudio|vllm|flash[-_]attn|transformer[-_]engine)==' > held.txt \
 && python3 -m pip install --no-cache-dir --constraint held.txt "verl[verl-core]==${VERL_VERSION}" ".[report]" \
 && verl-tlt --version \
 && verl-tlt doctor

WORKDIR /workspace
