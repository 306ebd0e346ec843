"""What token files say in words: the text of tokens and prompts."""

import torch

from moe_rl.policy.tiny import char_tokenizer
from moe_rl.training.batch import Batch
from moe_rl.training.token_tables import prompt_texts, token_pieces


class Spaced:
    """Decodes as sentencepiece does: the first word of a text loses its leading space."""

    def batch_decode(self, rows, **options):
        return ["".join([" the", "re", "$"][i] for i in row).removeprefix(" ") for row in rows]


def test_pieces_are_the_text_of_tokens_inside_a_text():
    tokenizer = char_tokenizer("01=^$")  # <pad> $ 0 1 = ^
    assert token_pieces(tokenizer, [2, 3, 3, 1]) == {1: "$", 2: "0", 3: "1"}
    assert token_pieces(Spaced(), [1, 0, 2]) == {0: " the", 1: "re", 2: "$"}


def test_prompts_are_told_without_padding_and_with_where_the_response_begins():
    tokenizer = char_tokenizer("01=^$")
    ids = torch.tensor([[0, 5, 2, 4, 2, 1], [5, 2, 3, 4, 3, 0]])  # ·^0=|0$  and  ^01=|1·
    completion = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0]]).bool()
    batch = Batch.__new__(Batch)  # only what a token view needs of it
    for name, value in (("input_ids", ids), ("attention_mask", ids != 0), ("completion_mask", completion)):
        object.__setattr__(batch, name, value)
    about = prompt_texts(tokenizer, batch, torch.tensor([4, 9]))
    assert about == {"seq": [4, 9], "prompt": ["^0=", "^01="], "first": [4, 4]}
