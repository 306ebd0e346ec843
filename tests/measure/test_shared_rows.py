"""How responses that share prompts are shared out among rows."""

import torch

from moe_rl.measure import share_prompts
from moe_rl.measure.shared_prompts import _parts


def test_rows_are_nearly_equal_where_that_fits_and_as_few_as_can_be():
    assert _parts([4, 3, 3, 2], 8) == [[0, 3], [1, 2]], "6 and 6, not 7 and 5"
    assert _parts([5, 4, 3, 3, 3], 9) == [[0, 1], [2, 3, 4]], "each into the emptier would make 8 and 10"
    assert _parts([2, 10, 2], 5) == [[1], [0, 2]]
    ids = torch.arange(1, 6).expand(9, 5).clone()
    whole = torch.ones_like(ids)
    assert share_prompts(ids, whole, whole * (ids > 1)).input_ids.shape == (3, 10), "twice the longest sequence"
