"""Put a trained MTP head back into its policy's folder, where vLLM looks for it."""

import json
import os
from pathlib import Path

from safetensors.torch import save

from verl_tlt.drafter.model_files import Model
from verl_tlt.drafter.mtp_tensors import mtp_layout, read_head
from verl_tlt.drafter.policy import policy_shape
from verl_tlt.drafter.tensor_file import INDEX, opened, tensor_files
from verl_tlt.drafter.verifier import locate_parts
from verl_tlt.errors import DrafterError, TLTError
from verl_tlt.files.disk import CONFIG, check_writable, expanded, replacing
from verl_tlt.files.json_files import read_json

SHARD = "model-mtp.safetensors"
"""The file that `write_back` adds to a policy."""


def write_back(head: Model, policy: str | os.PathLike[str]) -> Path:
    """Put a head into a policy's folder, where vLLM drafts with it by the method `mtp`; returns the file it is in.

    The policy's other tensors stay as they are; an older head is taken out. The head gets the dtype of the policy's
    embedding. Experts are written in one tensor, whatever they were in: vLLM reads both, transformers no head at all.
    A `DrafterError` where the head is not one of this policy's shape, or holds numbers that are not finite; or the
    folder is not one to write to.
    """
    directory = expanded(policy)
    if not (directory / CONFIG).is_file():
        raise DrafterError(f"{directory} is no folder of a policy: it has no {CONFIG}.")
    check_writable(directory, "the policy's folder")
    shape = policy_shape(directory)
    layout, tensors = mtp_layout(shape), read_head(head, shape)
    _, owners = tensor_files(directory)
    embedding = locate_parts(directory)["embed"]
    with opened(embedding.file) as reader:
        dtype = reader.get_slice(embedding.name)[:1].dtype
    head_tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    others = {name: file for name, file in owners.items() if not name.startswith(layout.prefix)}
    if SHARD in others.values():
        raise DrafterError(f"{directory / SHARD}, where the head would be written, holds other tensors of the policy.")
    config = read_json(directory / CONFIG)
    # verl sets the count to 0 (`model.mtp.enable=False`) before it saves a policy, and vLLM then divides by it.
    (config.get("text_config") or config)[layout.count] = 1
    texts = {INDEX: {"metadata": {}, "weight_map": {**others, **dict.fromkeys(tensors, SHARD)}}, CONFIG: config}
    contents = {SHARD: save(head_tensors, metadata={"format": "pt"})}
    contents |= {file: (json.dumps(fields, indent=1) + "\n").encode() for file, fields in texts.items()}
    for file in {*owners.values()} - {SHARD}:  # an older head goes last, so that a kill at any time leaves a whole one
        with opened(directory / file) as reader:
            kept = [name for name in reader.keys() if not name.startswith(layout.prefix)]  # noqa: SIM118
            if len(kept) < len(reader.keys()):
                contents[file] = save({n: reader.get_tensor(n) for n in kept}, metadata={"format": "pt"})
    for file, content in contents.items():
        try:
            with replacing(directory / file) as stream:
                stream.write(content)
        except OSError as error:
            raise TLTError(f"{directory / file} could not be written: {error.strerror or error}.") from error
    return directory / SHARD
