"""Which responses belong to one prompt: its tokens decide, and its images, which have the same tokens."""

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_tlt.actor.hidden_states import images_of
from verl_tlt.drafter.held_out import digest_of, mark_of


def test_a_prompt_is_known_by_its_tokens_and_images():
    cat, dog = torch.zeros(9000, 3), torch.ones(9000, 3)
    assert digest_of([1, 2]) == digest_of(torch.tensor([1, 2], dtype=torch.int32).tolist()) != digest_of([1, 2, 3])
    assert len({digest_of([1, 2]), digest_of([1, 2], [cat]), digest_of([1, 2], [dog])}) == 3
    assert digest_of([1, 2], [cat.bfloat16()]) == digest_of([1, 2], [cat.clone()])
    assert 0.0 <= mark_of(digest_of([1])) < 1.0


def test_a_rows_images_are_found_as_verl_packs_them():
    image, grid = torch.ones(4, 2), torch.tensor([[1, 2, 2]])
    rows = [NonTensorData({"pixel_values": image, "image_grid_thw": grid}), NonTensorData(None)]
    batch = TensorDict({"input_ids": torch.zeros(2, 3)}, [2])
    assert images_of(batch, 0) == []
    batch["multi_modal_inputs"] = NonTensorStack(*rows)
    assert [value.shape for value in images_of(batch, 0)] == [grid.shape, image.shape]
    assert images_of(batch, 1) == [] == images_of(batch, 0, [(3, 5)]), "a tool's images are no part of the prompt"
