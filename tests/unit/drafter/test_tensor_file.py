"""Where a model's tensors are, and files that hold none: one sentence each, and nobody ends with the file."""

import json

import pytest
import torch
from drafter_folders import INDEX, WEIGHTS, sharded
from safetensors.torch import save_file

from verl_tlt.drafter.tensor_file import check_weights, read_file, read_headers, read_parts, tensor_files
from verl_tlt.errors import DrafterError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3).bfloat16(), "c": torch.tensor([True, False])}


@pytest.fixture
def model(tmp_path):
    save_file(TENSORS, tmp_path / WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_headers_and_tensors_are_those_of_the_file_and_outlive_it(model):
    """A mapped file that becomes shorter ends whoever reads it."""
    file = model / WEIGHTS
    headers = read_headers(file)
    assert {n: (h.shape, h.kind) for n, h in headers.items()} == {
        "a": ([2, 3], "F32"),
        "b": ([3], "BF16"),
        "c": ([2], "BOOL"),
    }
    kept = read_file(file), read_parts(headers)
    file.write_bytes(b"")
    for found in kept:
        assert found.keys() == TENSORS.keys() and all(torch.equal(found[n], t) for n, t in TENSORS.items())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 pickled", "half"])
def test_a_file_that_is_not_whole_is_one_sentence(model, content):
    file = model / WEIGHTS
    file.write_bytes(file.read_bytes()[:-4] if content == "half" else content)
    for read in (read_file, read_headers):
        with pytest.raises(DrafterError, match=f"^{file} is not a complete safetensors file: .+") as error:
            read(file)
        assert "\n" not in str(error.value)


def test_a_pointer_of_git_lfs_is_named(model):
    (model / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    with pytest.raises(DrafterError, match=r"is a pointer of Git LFS: run `git lfs pull`"):
        read_headers(model / WEIGHTS)


def test_a_file_that_cannot_be_read_says_why(model):
    for read in (read_file, read_headers):
        with pytest.raises(DrafterError, match=f"^{model} cannot be read: Is a directory"):
            read(model)
        with pytest.raises(DrafterError, match=f"^{model / 'nowhere'} does not exist"):
            read(model / "nowhere")


def test_a_folder_with_all_its_weights_is_fine(model):
    check_weights(model)
    check_weights(sharded(model))
    check_weights("some/name-on-the-hub")


def test_a_single_file_comes_before_a_stale_index(model):
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert tensor_files(model) == (model / WEIGHTS, dict.fromkeys(TENSORS, WEIGHTS))


@pytest.mark.parametrize("table", [{}, {"weight_map": {}}, {"weight_map": {"a": 3}}])
def test_an_index_of_another_kind_is_a_sentence(model, table):
    (sharded(model) / INDEX).write_text(json.dumps(table))
    with pytest.raises(DrafterError, match=f"^{model / INDEX}: weight_map must say"):
        tensor_files(model)


def dangle(file):
    file.unlink(missing_ok=True)
    file.symlink_to("gone")


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "model-1.safetensors").unlink(), "model-1.safetensors does not exist, and .*index"),
        (lambda folder: dangle(folder / "model-1.safetensors"), "is a link to gone, which does not"),
        (lambda folder: [f.unlink() for f in folder.glob("*.saf*")], "holds no weights: there is neither"),
        (lambda folder: ((folder / INDEX).unlink(), dangle(folder / WEIGHTS)), f"{WEIGHTS} is a link to gone, which"),
        (lambda folder: dangle(folder / INDEX), "index.json is a link to"),
        (lambda folder: ((file := folder / "model-1.safetensors").unlink(), file.mkdir()), "is a folder, and"),
    ],
)
def test_a_folder_without_some_of_its_weights_is_one_sentence(model, break_it, said):
    break_it(sharded(model))
    with pytest.raises(DrafterError, match=f"^{model}.*{said}"):
        check_weights(model)


def test_what_verl_saves_beside_its_shards_says_how_to_get_the_weights(model):
    folder = model / "actor" / "huggingface"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(DrafterError, match=f"verl.model_merger merge .* --local_dir {folder.parent} "):
        check_weights(folder)
