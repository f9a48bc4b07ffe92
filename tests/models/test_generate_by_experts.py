"""`sl.generate` in processes that hold half of the experts each: what they hold, and the bytes that they send."""

import torch
from helpers.decoders import SIZES, decoder
from helpers.measure import count_payload

import shardlib as sl

PROMPTS, NEW = [[1, 5, 9], [7], [4, 4, 2, 30]], 4


def _generated(mesh):
    made = decoder("mixtral").eval()
    sharded = sl.shard(sl.from_module(made)[1], mesh, sl.chain(sl.experts(), sl.zero(0)))
    held = [leaf.nbytes for layer in sharded.tree["model"]["layers"] for leaf in layer["mlp"]["experts"].values()]
    sent = count_payload(mesh)
    texts = sl.generate(made, sharded, PROMPTS, NEW, temperature=0)
    return [text.tolist() for text in texts], sum(held), sent(), sharded.plan.step.tokens


def choices(made, text):
    """The experts that transformers' own model chooses for each token, ``[layers, tokens, k]``."""
    with torch.no_grad():
        logits = made(torch.tensor([text]), output_router_logits=True, use_cache=False).router_logits
    return torch.stack([layer.topk(made.config.num_experts_per_tok).indices for layer in logits])


def test_each_process_holds_half_the_experts_and_sends_what_the_exchange_says(pool):
    mesh = {"data": 1, "expert": 2}
    found = pool.run(_generated, mesh=mesh)
    made = decoder("mixtral").eval()
    whole = sl.generate(made, sl.from_module(made)[1], PROMPTS, NEW, temperature=0)
    texts = [[*prompt, *new.tolist()] for prompt, new in zip(PROMPTS, whole)]
    chosen = [choices(made, text[:-1]) for text in texts]  # the last token is drawn and not read
    own = [(0,), (1, 2)]  # each rank's prompts
    experts = made.config.num_local_experts
    bytes_of_experts = sum(p.nbytes for name, p in made.named_parameters() if ".experts." in name)
    for rank, (new, held, sent, exchange) in enumerate(found):
        assert new == [text.tolist() for text in whole]
        assert held == bytes_of_experts // 2
        wanted = 0
        for step in range(NEW):
            for layer in range(SIZES["num_hidden_layers"]):
                tables = []
                for prompts in own:
                    parts = []
                    for prompt in prompts:
                        length = len(PROMPTS[prompt])
                        tokens = slice(0, length) if step == 0 else slice(length + step - 1, length + step)
                        parts.append(chosen[prompt][layer, tokens].flatten())
                    tables.append(torch.bincount(torch.cat(parts), minlength=experts))
                coords = {"data": 0, "expert": rank}
                wanted += exchange.payload(
                    mesh, coords, torch.stack(tables), SIZES["hidden_size"], torch.float32
                ).forward["expert"]
        assert sent == {"expert": wanted}
