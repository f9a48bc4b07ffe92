"""The loss of causal models over packed rows is that of the documents alone, or is refused."""

import pytest
import torch
import transformers

import shardlib as sl
from shardlib.errors import TreeError
from shardlib.models import huggingface
from shardlib.models.huggingface.losses import _APART

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "rotary_dim": 4,
}  # fmt: skip
DRAWN = torch.Generator().manual_seed(2)
DOCUMENTS = [torch.randint(64, (length,), generator=DRAWN).tolist() for length in (9, 14, 5, 11)]


def losses(kind):
    """Of the documents in one row and in rows of their own."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    apply, params = sl.from_module(transformers.AutoModelForCausalLM.from_config(config).eval())
    fn, found = huggingface.causal_loss(apply), []
    for together in (False, True):
        rows = sl.data.packed(DOCUMENTS, 40, together=together)
        assert len(rows) == (1 if together else 4)
        with torch.no_grad():
            found.append(fn(params, next(iter(sl.data.loader(rows, sl.make_mesh(), len(rows), shuffle=False)))))
    return found


@pytest.mark.parametrize("kind", sorted(_APART))
def test_documents_of_a_row_do_not_see_each_other(kind):
    alone, packed = losses(kind)
    assert int(alone.weight) == int(packed.weight) == sum(map(len, DOCUMENTS)) - 4
    assert float(packed.total) == pytest.approx(float(alone.total), rel=2e-6)


@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_models_that_would_mix_them_are_refused(kind):
    with pytest.raises(TreeError, match=f"{kind} is not known to keep documents of one row apart"):
        losses(kind)
