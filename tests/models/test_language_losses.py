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


@pytest.mark.parametrize("masked", [False, True])
def test_a_rank_without_rows_of_the_last_batch_takes_part(masked):
    """Five rows in batches of four: the first of two ranks has none of the last."""
    kind = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    rows = sl.data.packed([*DOCUMENTS, DOCUMENTS[0]], 16, together=False)

    def evaluated(mesh):
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model("bert" if masked else "llama", **SIZES)
        apply, params = sl.from_module(kind.from_config(config).eval())
        fn = huggingface.masked_loss(apply, 63, 64, [0], 1.0) if masked else huggingface.causal_loss(apply)
        given = {"rng": sl.Key(0)} if masked else {}
        sharded = sl.shard(params, mesh, stage=3)
        evaluate = sl.make_eval_step(lambda params, batch: {"loss": fn(params, batch, **given)}, sharded)
        batches = sl.data.loader(rows, sharded, 4, epochs=1, shuffle=False)
        seen = [len(batch["tokens"]) for batch in batches]
        return seen, float(evaluate.over(sharded, batches.seek(0))["loss"])

    (first, one), (second, other) = sl.simulate(evaluated, mesh={"data": 2})
    assert (first, second) == ([2, 0], [2, 1]) and one == other
    if not masked:  # whose draws follow the rows of a rank
        ((_, alone),) = sl.simulate(evaluated, mesh={"data": 1})
        assert one == pytest.approx(alone, rel=1e-6)
